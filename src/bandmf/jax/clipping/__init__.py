"""Sums of clipped gradients: what one example may contribute.

Guarantees:
- an example contributes at most clip_norm, in float32 whatever the model's precision: norms are never below the true
  ones, by a bound on all rounding errors of their sums;
- norm and sum come from the same numbers: gradients are computed once, as the result of a conditional;
- what it contributes does not depend on other examples: `loss` sees one example at a time, and inside shard_map the
  gradients of different devices are not added before they are clipped;
- rows that a mask leaves out, and examples whose gradient is not finite or longer than 10^19 clip norms, contribute
  exactly zero.
"""

from bandmf.jax.clipping.gradient import Clipped, clipped_gradient
from bandmf.jax.clipping.sums import Sums, added, together

__all__ = ["Clipped", "Sums", "added", "clipped_gradient", "together"]
