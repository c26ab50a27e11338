"""Whether a certificate is for what a plan is now; whether it is true is another question."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from bandmf import _check
from bandmf.accounting.bins import NotCertifiedError
from bandmf.accounting.min_separation import Certificate as SeparationCertificate
from bandmf.accounting.verified import CERTIFICATES
from bandmf.strategies.single_precision import MARGIN

if TYPE_CHECKING:
    from bandmf.planning.plan import Plan


def check_certificate(plan: Plan) -> None:
    """Present where it is needed, and of this budget, cycle and noise; whether it is true is another question."""
    found = plan.certificate
    kind = CERTIFICATES.get(str(plan.sampling), type(None))
    if not isinstance(found, kind):
        needed = f"{plan.sampling} needs a certificate of its own"
        if not plan.certified:
            needed = f"is not for sampling={plan.sampling!r}"
        raise _check.fail("certificate", found, needed, "make a new plan with bandmf.plan")
    if found is None:
        return
    enough = found.epsilon <= plan.epsilon < math.inf and found.delta <= plan.delta
    if not enough or found.sigma > plan.noise_multiplier:
        raise NotCertifiedError(
            f"certificate: is for epsilon={found.epsilon:g}, delta={found.delta:g} and noise of "
            f"{found.sigma:.6g} or more, not for epsilon={plan.epsilon:g}, delta={plan.delta:g} and "
            f"{plan.noise_multiplier:.6g}; make a new plan with bandmf.plan"
        )
    if plan.noise_multiplier < found.sigma * MARGIN:  # what engines make, which multiply in float32
        raise NotCertifiedError(
            f"noise_multiplier={plan.noise_multiplier!r}: float32 does not hold it exactly, so it must be at "
            f"least {MARGIN!r} times the certified {found.sigma!r}; make a new plan with bandmf.plan"
        )
    if isinstance(found, SeparationCertificate):
        probability = plan.joining_probability(plan.bands)
        alike = math.isclose(found.probability, probability, rel_tol=1e-9)
        certified = f"separation={found.separation}, probability={found.probability!r}"
        planned = f"separation={plan.bands}, probability={found.probability if alike else probability!r}"
    else:
        certified, planned = f"cycle={found.cycle}", f"cycle={plan.cycle}"
    if certified != planned:
        raise NotCertifiedError(f"certificate: is for {certified}, not for {planned}; make a new plan with bandmf.plan")
