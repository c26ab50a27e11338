"""The search for what to plan: strategies of each kind of sampling, with their noise and error."""
