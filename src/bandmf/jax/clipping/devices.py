"""Inside shard_map and on explicit meshes: every device clips examples of its own, by weights of its own."""

from __future__ import annotations

from typing import Any

import jax
from jax import lax

from bandmf import _check
from bandmf.jax.noise.sharding import axes_of


def own_weights(weights: Any, examples: Any) -> Any:
    """The weights, of which every device has its own copy where examples differ between devices.

    The gradient of weights that devices share is a sum over all of them, and would be clipped as one.
    """
    axes = _varying(examples)

    def own(leaf: Any) -> Any:
        if beyond := _varying(leaf) - axes:
            raise _check.fail(
                "weights", f"cut over the mesh axes {sorted(beyond)}", "a device would clip its own part of a gradient "
                "by itself", "inside shard_map, cut examples only; weights can be cut by jit, without shard_map",
            )  # fmt: skip
        if cut := sorted(name for place in _explicit(leaf) for name in place):
            raise _check.fail(
                "weights", f"cut over the explicit mesh axes {cut}", "the compiler must be free to cut gradients",
                "make the mesh with axis_types=(jax.sharding.AxisType.Auto,) for each axis, or keep the weights whole",
            )  # fmt: skip
        missing = tuple(sorted(axes - _varying(leaf)))
        return _made_varying(leaf, missing) if missing else leaf

    return jax.tree.map(own, weights)


def _varying(tree: Any) -> frozenset[str]:
    """The mesh axes of a shard_map over which arrays differ from device to device."""
    found: frozenset[str] = frozenset()
    for leaf in jax.tree.leaves(tree):
        kind = leaf if isinstance(leaf, jax.ShapeDtypeStruct) else jax.typeof(leaf)
        axes = getattr(kind, "vma", None)
        if axes is None and hasattr(kind, "manual_axis_type"):  # as later versions of JAX call it
            axes = getattr(kind.manual_axis_type, "varying", None) or frozenset()
        if axes is None and jax.sharding.get_abstract_mesh().manual_axes:
            raise RuntimeError(
                f"jax {jax.__version__}: does not say which arrays differ between devices; use clipped_gradient "
                "outside of shard_map"
            )
        found |= axes or frozenset()
    return found


def _made_varying(leaf: Any, axes: tuple[str, ...]) -> Any:
    cast = getattr(lax, "pcast", None)
    if cast is not None:
        return cast(leaf, axes, to="varying")
    return getattr(lax, "pvary")(leaf, axes)  # noqa: B009 (in older versions of JAX)


def zeros(like: jax.ShapeDtypeStruct) -> Any:
    """Zeros of the same type: cut over an explicit mesh, and different between devices, where the others are."""
    mesh = jax.sharding.get_abstract_mesh()
    sharding = like.sharding if getattr(mesh, "explicit_axes", ()) else None
    made, axes = lax.full(like.shape, 0, like.dtype, sharding=sharding), tuple(sorted(_varying(like)))
    return _made_varying(made, axes) if axes else made


def _explicit(leaf: Any) -> list[tuple[str, ...]]:
    """The explicit mesh axes that each dimension of an array is cut over."""
    sharding = getattr(jax.typeof(leaf), "sharding", None)
    explicit = getattr(getattr(sharding, "mesh", None), "explicit_axes", ())
    spec = getattr(sharding, "spec", None) or ()
    return [tuple(name for name in axes if name in explicit) for axes in axes_of(spec)]
