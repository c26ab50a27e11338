"""Plans: from (epsilon, delta, data, steps) to the mechanism of least error."""

from bandmf.planning.plans import Candidate, Plan
from bandmf.planning.search import plan

__all__ = ["Candidate", "Plan", "plan"]
