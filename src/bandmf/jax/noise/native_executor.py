"""A step in the native library, which XLA calls on the CPU (typed FFI; native/xla.c): one call for each tensor."""

from __future__ import annotations

import logging
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np

from bandmf.jax.noise.kernel_executor import Buffers, KernelExecutor, Numbers
from bandmf.jax.noise.sharding import Layout
from bandmf.jax.noise.tables import Table
from bandmf.native.loading import library
from bandmf.strategies.base import BufferRecurrence, InputRecurrence, OutputRecurrence

TARGET = "bandmf_noise_step"
KINDS = {OutputRecurrence: 0, InputRecurrence: 1, BufferRecurrence: 2}
GRADIENT, HISTORY, PREPARED = 9, 10, 11  # places among the arguments; results 0, 1, 2 take their memory
logger = logging.getLogger("bandmf")


@cache
def registered() -> bool:
    """Whether XLA accepts the library's handler; says so once where it does not."""
    found = library()
    if found is None:
        return False
    try:
        jax.devices("cpu")  # before there are devices, XLA takes any handler, and refuses it later
        jax.ffi.register_ffi_target(TARGET, jax.ffi.pycapsule(found.bandmf_xla_step), platform="cpu")
    except Exception as error:  # whatever this version of XLA raises for a handler that does not fit
        logger.warning("bandmf's native library is not used in JAX, noise on the CPU takes longer: %s", error)
        return False
    return True


class NativeExecutor(KernelExecutor):
    """Takes steps on CPU devices."""

    def _call(self, tensor: int, layout: Layout, numbers: Numbers, table: Table, buffers: Buffers) -> Buffers:
        """One call of the library, for what this device holds of a tensor."""
        spans = layout.spans(tensor)
        starts = jnp.stack([jnp.asarray(part, jnp.uint32).reshape(-1) for part in spans.starts])
        schedule, recurrence = self._schedule, self._schedule.recurrence
        decays = jnp.zeros(0, jnp.float32)
        if isinstance(recurrence, BufferRecurrence):
            decays = jnp.asarray(recurrence.decays, jnp.float32)
        kind = KINDS[type(recurrence)]
        settings = spans.length, tensor, self._cipher_rounds, kind, schedule.steps, schedule.lookahead
        call = jax.ffi.ffi_call(
            TARGET,
            [jax.ShapeDtypeStruct(value.shape, value.dtype) for value in buffers],
            input_output_aliases={GRADIENT: 0, HISTORY: 1, PREPARED: 2},
        )
        given = *numbers, table.starts, table.feeds, table.weights, decays, starts, *buffers
        target, history, prepared = call(*given, settings=np.array(settings, np.int64))
        return target, history, prepared
