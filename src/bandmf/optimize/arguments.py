"""What all optimizers check: sizes, workload and participation. What a family cannot honor is refused."""

from __future__ import annotations

from bandmf import _check
from bandmf.participation import Participation, Single, checked_participation
from bandmf.workloads import Workload


def sizes(steps: int, bands: int, most_steps: int | None = None) -> tuple[int, int]:
    """Steps and bands as whole numbers that fit each other."""
    steps = _check.whole("steps", steps, 1, most_steps)
    return steps, _check.whole("bands", bands, 1, steps, f"steps={steps}")


def require_single(participation: Participation | None, remedy: str) -> None:
    """Refuse several participations where the family is only optimized for one."""
    if participation is not None and not isinstance(participation, Single):
        raise _check.fail("participation", participation, "must be Single() for this family", remedy)


def require_toeplitz(workload: Workload, normalized: bool) -> None:
    """Refuse workloads whose error a Toeplitz strategy has no closed form for."""
    if workload.coefficients is None:
        raise ValueError(
            f"workload={workload.name!r}: must be Toeplitz for a Toeplitz strategy; use optimize.banded, "
            "or constant learning rates"
        )
    if normalized and workload.inverse_columns is None:
        raise ValueError(
            f"normalize_columns: needs a workload with a banded inverse, which {workload.name!r} does not "
            "have; normalize after the search, or not at all"
        )


def disjoint_count(participation: Participation | None, steps: int, bands: int, equal_norms: bool) -> int:
    """How often an example takes part, where its participations share no row of C.

    The sensitivity is then sqrt(count) times the column norm, and the best strategy that for one
    participation. Columns that are cut off at the end must not be among the worst ones, unless they are
    scaled to the norm of the others.
    """
    count, separation = checked_participation(participation).spacing(steps)
    if count == 1:
        return 1
    if separation < bands:
        raise _check.fail(
            "participation",
            participation,
            f"its participations are separation={separation} steps apart, less than bands={bands}, so they interact",
            "use at most as many bands as the separation, or optimize.buffered_toeplitz or banded_inverse",
        )
    if not equal_norms and (count - 1) * separation + bands > steps:
        raise _check.fail(
            "participation",
            participation,
            "its last participation is cut off by the end, where columns have a smaller norm",
            "normalize the columns",
        )
    return count
