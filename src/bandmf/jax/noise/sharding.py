"""How the history of one tensor lies on the devices: on one, like the gradient, or flat over a mesh.

Every device draws its own coordinates and combines its own history: nothing is communicated, except that
noise from a flat history moves once, to where the gradient lies.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import shard_map
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from bandmf import _check
from bandmf.jax.noise.chacha import Array
from bandmf.jax.noise.normals import Coordinate, Spans, advance, normals
from bandmf.jax.tracing import is_traced

Shape = tuple[int, ...]
REPLICATED = PartitionSpec()


@dataclass(frozen=True)
class Layout:
    """Vectors of shape `stored`, cut over `mesh` (None: not cut), which hold a tensor of shape `shape`."""

    shape: Shape
    stored: Shape
    mesh: Mesh | None = None
    spec: PartitionSpec = REPLICATED
    flat: bool = False
    replicas: Mesh | None = None  # whose devices all have the whole, where it is not cut
    home: NamedSharding | None = None  # of the tensor itself, where that is known and vectors lie flat

    @property
    def lies_on(self) -> Mesh | None:
        """The mesh that has it, cut or whole."""
        return self.replicas if self.mesh is None else self.mesh

    def place(self, slots: int) -> NamedSharding | None:
        """Where a history lies, as XLA writes it, or what comes out of a step would look like another sharding."""
        if self.lies_on is None:
            return None
        is_empty = not slots and not is_explicit(self.lies_on)
        spec = REPLICATED if is_empty else as_written(PartitionSpec(None, *self.spec), self.lies_on)
        return NamedSharding(self.lies_on, spec)

    def spans(self, tensor: int) -> Spans:
        """The coordinates that this device holds; inside shard_map where there is a mesh."""
        # Along every dimension, the number of this device's block.
        blocks = [jax.lax.axis_index(axes) if axes else 0 for axes in self._axes]
        return _box(tensor, self.stored, self.local, blocks)

    @property
    def local(self) -> Shape:
        """The shape of what one device holds."""
        sizes = self.mesh.shape if self.mesh is not None else {}
        counts = [math.prod(sizes[axis] for axis in axes) for axes in self._axes]
        return tuple(size // count for size, count in zip(self.stored, counts, strict=True))

    @property
    def _axes(self) -> list[tuple[str, ...]]:
        """The mesh axes that each dimension is cut over."""
        return [*axes_of(self.spec), *[()] * (len(self.stored) - len(self.spec))]

    @property
    def holds_gradient(self) -> bool:
        """Whether vectors have the gradient's own shape, and lie where it lies."""
        return self.stored == self.shape and (self.mesh is None or not self.flat)

    def to_gradient(self, y: Array) -> Array:
        """Noise in the gradient's shape; from a flat history this is the one move between devices."""
        if self.stored != self.shape:
            y = self._gathered(y)[: math.prod(self.shape)].reshape(self.shape)
        # Otherwise the compiler may leave the gradient, and so the weights, cut as the history is.
        return y if self.home is None else jax.lax.with_sharding_constraint(y, self.home)

    def save(self, history: Array) -> Array:
        """History for a checkpoint: (slots, *shape), without padding, whatever the mesh; always a copy."""
        if self.stored == self.shape:
            return jnp.copy(history)
        return self._gathered(history)[:, : math.prod(self.shape)].reshape(-1, *self.shape)

    def _gathered(self, value: Array) -> Array:
        """`value` where it may be cut anywhere: with explicit shardings, on every device."""
        if self.mesh is None or not is_explicit(self.mesh):
            return value
        return jax.sharding.reshard(value, NamedSharding(self.mesh, REPLICATED))

    def load(self, saved: Any, like: Array) -> Array:
        """`saved` as `save` gives it, laid out like `like`."""
        saved = jnp.array(saved, jnp.float32)  # a copy: the state may be donated, the checkpoint not
        expected = (len(like), *self.shape)
        if saved.shape != expected:
            raise _check.fail("shape of the saved history", saved.shape, f"must be {expected}")
        if self.stored != self.shape:
            flat = saved.reshape(len(like), math.prod(self.shape))
            saved = jnp.pad(flat, ((0, 0), (0, math.prod(self.stored) - flat.shape[1])))
        return jax.device_put(saved, like.sharding)


def layout_of(leaf: Any, shape: Shape) -> Layout:
    """The layout of an array: its own sharding, where that is over a mesh."""
    sharding = getattr(leaf, "sharding", None)
    if not isinstance(sharding, NamedSharding) or not isinstance(sharding.mesh, Mesh):
        return Layout(shape, shape)
    if sharding.is_fully_replicated:
        return Layout(shape, shape, replicas=None if is_explicit(sharding.mesh) else sharding.mesh)
    return Layout(shape, shape, sharding.mesh, as_written(sharding.spec, sharding.mesh))


def axes_of(spec: Iterable[Any]) -> list[tuple[str, ...]]:
    """The mesh axes that each dimension is cut over."""
    return [() if axes is None else (axes,) if isinstance(axes, str) else tuple(axes) for axes in spec]


def as_written(spec: PartitionSpec, mesh: Mesh) -> PartitionSpec:
    """As XLA writes it: nothing behind the last dimension that is cut, and no axes of one device.

    These stay where the user keeps track of shardings, who may have written them.
    """
    least = 0 if is_explicit(mesh) else 1
    cut = [tuple(name for name in axes if mesh.shape[name] > least) for axes in axes_of(spec)]
    while cut and not cut[-1]:
        cut.pop()
    return PartitionSpec(*[None if not several else several[0] if len(several) == 1 else several for several in cut])


def flat_layout(leaf: Any, shape: Shape, mesh: Mesh) -> Layout:
    """One flat vector cut evenly over all devices of a mesh, padded so that the cut is even."""
    each = -(-math.prod(shape) // mesh.size)
    own = getattr(leaf, "sharding", None)
    home = own if isinstance(own, NamedSharding) and own.mesh == mesh and not is_explicit(mesh) else None
    axes = PartitionSpec(tuple(mesh.axis_names))
    return Layout(shape, (each * mesh.size,), mesh, axes, flat=True, home=home)


def everywhere(tree: Any, layouts: Iterable[Layout]) -> Any:
    """Small arrays on every device of the mesh that vectors lie on; as they are, where there is none.

    Nor with explicit shardings: those would spread from them to vectors that lie elsewhere.
    """
    meshes = {layout.lies_on for layout in layouts if layout.lies_on is not None}
    if is_traced(tree) or len(meshes) != 1 or is_explicit(mesh := meshes.pop()):
        return tree
    return jax.tree.map(lambda array: replicated(array, mesh), tree)


def replicated(array: Any, mesh: Mesh) -> Array:
    """It on all devices of a mesh: every process has the whole, and puts it on its own devices."""
    whole = np.asarray(array)
    place = NamedSharding(mesh, REPLICATED)
    return jax.make_array_from_callback(whole.shape, place, lambda index: whole[index])


def is_explicit(mesh: Mesh) -> bool:
    """Whether the user keeps track of shardings ("sharding in types"), instead of leaving them to XLA."""
    return any(str(kind).endswith("Explicit") for kind in getattr(mesh, "axis_types", ()))


def on_each_device(function: Callable[..., Any], mesh: Mesh, in_specs: Any, out_specs: Any) -> Callable[..., Any]:
    """shard_map, but that empty arrays are made inside: jaxlib 0.11 ends the process where one is an input."""

    def mapped(*given: Any) -> Any:
        leaves, structure = jax.tree.flatten(given)
        specs = jax.tree.leaves(jax.tree.broadcast(in_specs, given, is_leaf=_is_spec), is_leaf=_is_spec)

        def here(*parts: Array) -> Any:
            rest = iter(parts)
            own = [
                next(rest) if leaf.size else _empty(leaf, mesh, spec) for leaf, spec in zip(leaves, specs, strict=True)
            ]
            return function(*jax.tree.unflatten(structure, own))

        full = [(leaf, spec) for leaf, spec in zip(leaves, specs, strict=True) if leaf.size]
        chosen = tuple(spec for _, spec in full)
        cut = shard_map(here, mesh=mesh, in_specs=chosen, out_specs=out_specs, check_vma=False)
        return cut(*(leaf for leaf, _ in full))

    return mapped


def _empty(leaf: Array, mesh: Mesh, spec: PartitionSpec) -> Array:
    return jnp.zeros(NamedSharding(mesh, spec).shard_shape(leaf.shape), leaf.dtype)


def _is_spec(node: Any) -> bool:
    return isinstance(node, PartitionSpec)


def zeros(layouts: Mapping[str, Layout], slots: int) -> dict[str, Array]:
    """Empty histories, made where they will lie: in one program, as each takes long to compile."""
    places = {name: layout.place(slots) for name, layout in layouts.items()}
    shapes = {name: (slots, *layout.stored) for name, layout in layouts.items()}
    if not slots:
        return {name: jax.device_put(np.zeros(shape, np.float32), places[name]) for name, shape in shapes.items()}
    made: dict[str, Array] = {}
    for mesh in {layout.lies_on for layout in layouts.values()}:
        here = {name: shapes[name] for name, layout in layouts.items() if layout.lies_on == mesh}
        own = None if mesh is None else {name: places[name] for name in here}
        made |= jax.jit(partial(_filled, here), out_shardings=own)()
    return {name: made[name] for name in layouts}


def _filled(shapes: Mapping[str, Shape]) -> dict[str, Array]:
    return {name: jnp.zeros(shape, jnp.float32) for name, shape in shapes.items()}


def white(layouts: Mapping[str, Layout], key: Array, step: Array, cipher_rounds: int) -> dict[str, Array]:
    """z of all tensors (ids in the order of the mapping), every device drawing its own part."""
    ids = {name: tensor for tensor, name in enumerate(layouts)}
    result: dict[str, Array] = {}
    for mesh in {layout.mesh for layout in layouts.values()}:
        names = [name for name, layout in layouts.items() if layout.mesh == mesh and 0 not in layout.local]

        def here(key: Array, step: Array, names: list[str] = names) -> dict[str, Array]:
            drawn = normals(key, step, [layouts[name].spans(ids[name]) for name in names], cipher_rounds)
            return {name: z.reshape(layouts[name].local) for name, z in zip(names, drawn, strict=True)}

        specs = {name: layouts[name].spec for name in names}
        if mesh is not None:
            here = on_each_device(here, mesh, (REPLICATED,) * 2, specs)
        result |= here(key, step)
    empty = {name: jnp.zeros(layouts[name].stored, jnp.float32) for name in layouts if name not in result}
    return result | empty


def _box(tensor: int, whole: Shape, local: Shape, blocks: list[Any]) -> Spans:
    """The box of shape `local` with these block numbers, as spans of consecutive coordinates."""
    strides = [math.prod(whole[k + 1 :]) for k in range(len(whole))]
    cut = max((k for k in range(len(whole)) if local[k] != whole[k]), default=0)
    start: Coordinate = (np.uint32(0), np.uint32(0))
    for block, size, stride in zip(blocks, local, strides, strict=True):
        start = advance(start, block, size * stride)
    # Spans begin at start + sum_k index_k stride_k, over the dimensions before the last one that is cut.
    starts: Coordinate = (jnp.full(1, start[0], jnp.uint32), jnp.full(1, start[1], jnp.uint32))
    for k in range(cut):
        index = jnp.arange(local[k], dtype=jnp.uint32)
        moved = advance((starts[0][:, None], starts[1][:, None]), index[None, :], strides[k])
        starts = moved[0].reshape(-1), moved[1].reshape(-1)
    return Spans(tensor, starts, math.prod(local[cut:]), whole=local == whole)
