"""Plans: from (epsilon, delta, data, steps) to the mechanism of least error."""

from bandmf.planning.candidate import Candidate
from bandmf.planning.plan import Plan
from bandmf.planning.planner import checked_plan, plan

__all__ = ["Candidate", "Plan", "checked_plan", "plan"]
