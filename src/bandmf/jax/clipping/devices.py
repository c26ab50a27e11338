"""Inside of shard_map and on explicit meshes: every device clips examples of its own, by weights of its own."""

from __future__ import annotations

import math
from typing import Any

import jax
from jax import lax

from bandmf import _check


def own_weights(arguments: tuple[Any, ...], chosen: tuple[int, ...], examples: Any) -> tuple[Any, ...]:
    """The arguments, with weights of which every device has its own copy where examples differ between devices.

    The gradient of weights that devices share is a sum over all of them, and would be clipped as one.
    """
    axes = _varying(examples)

    def own(leaf: Any) -> Any:
        if beyond := _varying(leaf) - axes:
            raise _check.fail(
                "weights", f"cut over the mesh axes {sorted(beyond)}", "a device would clip its own part of a gradient "
                "by itself", "inside of shard_map, cut examples only; weights can be cut by jit, without shard_map",
            )  # fmt: skip
        missing = tuple(sorted(axes - _varying(leaf)))
        return _made_varying(leaf, missing) if missing else leaf

    return tuple(
        jax.tree.map(own, given) if place in chosen else given for place, given in enumerate(arguments)
    )


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


def shares(leaf: Any) -> int:
    """Into how many shares the rows of an array are cut on an explicit mesh."""
    sharding = getattr(jax.typeof(leaf), "sharding", None)
    mesh, spec = getattr(sharding, "mesh", None), getattr(sharding, "spec", None)
    explicit = getattr(mesh, "explicit_axes", ())
    axes = spec[0] if spec else None
    names = () if axes is None else (axes,) if isinstance(axes, str) else tuple(axes)
    return math.prod(mesh.shape[name] for name in names if name in explicit) if mesh is not None else 1
