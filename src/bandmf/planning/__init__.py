"""Plans: from (epsilon, delta, data, steps) to the mechanism of least error."""

from bandmf.planning.candidate import Candidate
from bandmf.planning.plan import Plan
from bandmf.planning.planner import plan

__all__ = ["Candidate", "Plan", "plan"]
