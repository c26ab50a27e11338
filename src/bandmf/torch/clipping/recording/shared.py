"""Parameters that act on every example without a layer: cls_token, pos_embed, log_vars, the scale of a residual.

In a private pass a module hands them out as `Shared` tensors. A Shared value is a function of parameters and constants
alone; operations with such values give further ones, with the recipe to compute them again. Where one meets a tensor of
the examples, it is given out with one row for each of them, so that the backward pass finds a gradient for each; the
recipe takes that back to the parameters.

Guarantee: which row belongs to which example follows from how the dimensions of an operation are aligned, never from
comparing lengths. An operation that is not known raises an error that names the parameter.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.func import functional_call
from torch.nn import functional
from torch.utils import _pytree as pytree

from bandmf.torch.clipping.recording.fallback import drawn, random_state
from bandmf.torch.clipping.recording.sources import Node, Recipe, Source, Values, described, expanded
from bandmf.torch.clipping.rows import owners

if TYPE_CHECKING:
    from bandmf.torch.clipping.recording.recorder import Layer, Recorder

_POINTWISE = {
    *("add", "sub", "subtract", "mul", "multiply", "div", "divide", "true_divide", "pow", "where", "lerp", "addcmul"),
    *("rsub", "radd", "rmul", "rdiv", "rtruediv", "truediv", "rpow", "maximum", "minimum", "masked_fill"),
    *("addcdiv", "logaddexp", "atan2", "hypot", "fmod", "copysign", "iadd", "isub", "imul", "itruediv"),
    *("to", "type_as", "float", "double", "half", "bfloat16", "contiguous", "clone", "neg", "exp", "tanh", "sigmoid"),
    "broadcast_tensors",
}  # fmt: skip
_CAT = {"cat", "concat", "concatenate", "stack", "hstack"}
_REPEATS = {"expand", "expand_as", "repeat", "tile", "broadcast_to"}
_NORMALIZING: dict[str, Callable[..., Tensor]] = {
    each.__name__: each for each in (functional.layer_norm, functional.group_norm, functional.rms_norm)
}
_BY_ROW = {"baddbmm", "cdist", "pairwise_distance", "mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss"}
_DROPOUT = {"dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_dropout"}
_NOT_ROWS = (
    "meets tensors whose first dimension does not count the examples (say whose their rows are, with "
    "bandmf.torch.rows, or, if it is time, give them the examples first: batch_first=True, or transpose)"
)


class Shared(Tensor):
    """A function of parameters and constants."""

    node: Node

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _Operation(func, args, kwargs or {}).result()


def shared(node: Node) -> Shared:
    made = node.value.detach().as_subclass(Shared)
    made.node = node
    return made


def of_source(source: Source, recorder: Recorder) -> Shared:
    return shared(Node(source.value, (source,), lambda given: given[source], recorder))


def of_parameter(name: str, parameter: Tensor, recorder: Recorder) -> Shared:
    return of_source(Source(name, parameter.detach(), lambda gradients: {name: gradients}), recorder)


class _Operation:
    """A function of torch, some of whose arguments are Shared."""

    def __init__(self, func: Any, args: Any, kwargs: Any) -> None:
        self.func, self.name = func, _name(func)
        self.leaves, self.spec = pytree.tree_flatten((args, kwargs))
        self.shared = [leaf for leaf in self.leaves if isinstance(leaf, Shared)]
        self.node = self.shared[0].node
        if self.name in ("to", "type_as"):  # of the other tensor only type and device count
            others = self.leaves[1:]
            self.leaves[1:] = [_plain(leaf).new_empty(()) if isinstance(leaf, Tensor) else leaf for leaf in others]
        self.others = [leaf for leaf in self.leaves if isinstance(leaf, Tensor) and not isinstance(leaf, Shared)]

    def result(self) -> Any:
        if self.name == "requires_grad":
            return True
        if self.name in ("to", "type_as") and not isinstance(self.leaves[0], Shared):
            return self.call(self.leaves)
        if self.name == "requires_grad_" and self.leaves[1:] in ([], [True]):  # it does
            return self.leaves[0]
        if self.name in ("detach", "data") or not torch.is_grad_enabled():
            return self.call([_plain(leaf) for leaf in self.leaves])
        if self.name in _REPEATS:
            return self.repeated()
        if any(other.requires_grad for other in self.others):
            return self.with_examples()
        return self.derived()

    def call(self, leaves: Sequence[Any]) -> Any:
        args, kwargs = pytree.tree_unflatten(list(leaves), self.spec)
        return self.func(*args, **kwargs)

    def derived(self) -> Any:
        """Of Shared values and constants alone: such values again."""
        if self.name in _DROPOUT:  # what is dropped is a constant
            return self.shared[0] * self.call([_ones(leaf) for leaf in self.leaves])
        if (self.name.endswith("_") and not self.name.endswith("__")) or self.name == "setitem":
            raise self.node.fail(f"is changed in place by {self.name}")
        if (once := self._once()) is not None:
            return once
        return derive(self.call, self.leaves)

    def _once(self) -> Shared | None:
        """Where all rows of all arguments are the same: so are those of the result."""
        if self.name not in _POINTWISE | _CAT or not any(each.node.once is not None for each in self.shared):
            return None
        ndim = max(leaf.ndim for leaf in self.leaves if isinstance(leaf, Tensor))
        if self.name in _CAT and self._dimension() == 0:
            return None
        leaves, rows = [], 1
        for leaf in self.leaves:
            if isinstance(leaf, Shared) and leaf.node.once is not None and leaf.ndim == ndim:
                rows, leaf = max(rows, len(leaf)), leaf.node.once
            elif isinstance(leaf, Tensor) and leaf.ndim == ndim and len(leaf) != 1:
                return None
            leaves.append(leaf)
        once = derive(self.call, leaves)
        value = _plain(once).expand(rows, *once.shape[1:])
        return shared(Node(value, once.node.sources, expanded(once.node.recipe, rows), self.node.recorder, once))

    def repeated(self) -> Any:
        """A new first dimension, or one of length 1, that is repeated."""
        given = self.leaves[0]
        if not isinstance(given, Shared):  # only the shape of what is Shared counts
            return self.call([_plain(leaf) for leaf in self.leaves])
        leaves = [
            leaf.detach() if isinstance(leaf, Tensor) and not isinstance(leaf, Shared) else leaf for leaf in self.leaves
        ]
        made = derive(self.call, leaves)
        if not isinstance(made, Shared) or made.ndim == 0:
            return made
        if made.ndim > given.ndim or (given.ndim and len(given) == 1):
            once = derive(lambda leaves: self.call(leaves).narrow(0, 0, 1), leaves) if len(made) else None
            return shared(Node(made.node.value, made.node.sources, made.node.recipe, made.node.recorder, once))
        return made

    def with_examples(self) -> Any:
        """With tensors of the examples: one row for each."""
        made = self._with_examples()
        if isinstance(made, Tensor):
            as_torch = self.call([_without_numbers(leaf) for leaf in self.leaves])
            if made.shape != as_torch.shape:
                raise self.node.fail(f"meets examples in {self.name}")
        return made

    def _with_examples(self) -> Any:
        if (
            self.name in _POINTWISE
            or self.name.rstrip("_") in _POINTWISE
            or self.name == "scaled_dot_product_attention"
        ):
            if isinstance(self.leaves[0], Shared) and self.name.endswith("_"):
                raise self.node.fail(f"is changed in place by {self.name}")
            ndim = max(leaf.ndim for leaf in self.leaves if isinstance(leaf, Tensor))
            self._check_rows(ndim, self.others)
            return self.call([_rows(leaf, ndim) for leaf in self.leaves])
        if self.name in _CAT:
            ndim = self.shared[0].ndim
            if self._dimension() == 0:
                raise self.node.fail(f"is joined to examples by {self.name} along their own dimension")
            self._check_rows(ndim, self.others)
            return self.call([_rows(leaf, ndim) for leaf in self.leaves])
        if self.name in ("matmul", "rmatmul", "bmm"):
            left, right = (self.leaves[1], self.leaves[0]) if self.name == "rmatmul" else self.leaves[:2]
            return self._matmul(left, right)
        if self.name == "linear":
            x, weight, *bias = (*self.leaves, None)[:3]
            output = self._matmul(x, weight.mT)
            return output if bias[0] is None else output + bias[0]
        if self.name == "einsum":
            return self._einsum()
        if self.name in _NORMALIZING and not isinstance(self.leaves[0], Shared):
            return self._normalized()
        if self.name in _BY_ROW:
            ndim = self.shared[0].ndim
            self._check_rows(ndim, self.others)
            if all(leaf.ndim == ndim for leaf in (*self.shared, *self.others)):
                return self.call([_rows(leaf, ndim) for leaf in self.leaves])
        raise self.node.fail(f"meets examples in {self.name}")

    def _einsum(self) -> Any:
        """What is Shared gets the letter of the examples, which comes first in all that is theirs and in the result."""
        equation, *operands = self.leaves
        inputs, _, output = equation.replace(" ", "").partition("->")
        letters = inputs.split(",")
        theirs = [n for n, operand in enumerate(operands) if of_examples(operand)]
        first = output[:1]
        if not first.isalpha() or "." in inputs or any(letters[n][0] != first for n in theirs):
            raise self.node.fail("meets examples in an einsum whose result does not begin with them")
        for n in theirs:
            self._check_rows(operands[n].ndim, [operands[n]])
        for n, operand in enumerate(operands):
            if isinstance(operand, Shared):
                if first in letters[n][1:]:
                    raise self.node.fail("meets examples in an einsum")
                letters[n] = first + letters[n].removeprefix(first)
                operands[n] = _rows(operand, len(letters[n]))
        return self.func(f"{','.join(letters)}->{output}", *operands)

    def _normalized(self) -> Any:
        """Normalized without weights, which are multiplied and added afterwards."""
        args, kwargs = pytree.tree_unflatten(self.leaves, self.spec)
        given = inspect.signature(_NORMALIZING[self.name]).bind(*args, **kwargs)
        weight, bias = (given.arguments.pop(name, None) for name in ("weight", "bias"))
        output = self.func(*given.args, **given.kwargs)
        if self.name == "group_norm":
            places = [1] * (output.ndim - 2)
            weight, bias = (None if each is None else each.view(-1, *places) for each in (weight, bias))
        output = output if weight is None else output * weight
        return output if bias is None else output + bias

    def _matmul(self, left: Tensor, right: Tensor) -> Tensor:
        """x @ W: for each example a matrix of its own."""
        if isinstance(left, Shared) and (right.ndim < 3 or left.ndim < 2) and not isinstance(right, Shared):
            raise self.node.fail("is multiplied from the left with a matrix of all examples")
        vector, column = left.ndim == 2, right.ndim == 1
        left = left[:, None] if vector and not isinstance(left, Shared) else left
        right = right[:, None] if column else right
        ndim = max(left.ndim, right.ndim, 3)
        self._check_rows(ndim, [left, right])
        product = torch.matmul(_rows(left, ndim), _rows(right, ndim))
        product = product[:, 0] if vector and not isinstance(self.leaves[0], Shared) else product
        return product[..., 0] if column else product

    def _check_rows(self, ndim: int, given: Sequence[Any]) -> None:
        """Fail unless examples take part in such an operation, and its first dimension counts them."""
        count = self.node.recorder.count(owners())
        lengths = {len(leaf) for leaf in given if of_examples(leaf) and leaf.ndim == ndim}
        if lengths != {count}:
            raise self.node.fail(_NOT_ROWS)

    def _dimension(self) -> int:
        """Along which tensors are joined."""
        if self.name == "hstack":
            return min(1, self.shared[0].ndim - 1)
        args, kwargs = pytree.tree_unflatten(self.leaves, self.spec)
        dim = kwargs.get("dim", kwargs.get("axis", args[1] if len(args) > 1 else 0))
        return dim if dim >= 0 else dim + self.shared[0].ndim + (self.name == "stack")


def derive(call: Callable[[list[Any]], Any], leaves: Sequence[Any]) -> Any:
    """call(leaves), whose tensors are Shared where some of the leaves are."""
    nodes = {n: leaf.node for n, leaf in enumerate(leaves) if isinstance(leaf, Shared)}
    first = next(iter(nodes.values()))
    sources = tuple(dict.fromkeys(source for node in nodes.values() for source in node.sources))
    before = random_state(first.value)
    output, spec = pytree.tree_flatten(call([_plain(leaf) for leaf in leaves]))
    if not torch.equal(before, random_state(first.value)):
        raise first.fail("is used by an operation that draws random numbers")
    constants = [None if n in nodes else _finite(leaf) for n, leaf in enumerate(leaves)]

    kind = first.value.device.type
    autocast = torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind)

    def again(given: Values) -> list[Any]:
        if again not in given.computed:
            now = [nodes[n].recipe(given) if n in nodes else constant for n, constant in enumerate(constants)]
            with torch.autocast(kind, *autocast):
                given.computed[again] = pytree.tree_leaves(call(now))
        return given.computed[again]

    def recipe(number: int) -> Recipe:
        return lambda given: again(given)[number]

    if any(isinstance(each, Tensor) and each.is_complex() for each in output):
        raise first.fail("becomes complex")
    made = [
        shared(Node(each, sources, recipe(number), first.recorder))
        if isinstance(each, Tensor) and each.is_floating_point()
        else each
        for number, each in enumerate(output)
    ]
    return pytree.tree_unflatten(made, spec)


def _finite(leaf: Any) -> Any:
    """What is not finite in a row of one example would be so in the gradients of all: 0 * inf is NaN."""
    if not isinstance(leaf, Tensor) or not leaf.is_floating_point():
        return leaf
    large = torch.finfo(leaf.dtype).max ** 0.75  # sums and products with weights stay finite, masks are masks
    return torch.nan_to_num(leaf, nan=0.0, posinf=large, neginf=-large)


def by_layer(layer: Layer, recorder: Recorder, args: Any, kwargs: Any) -> Any:
    """The output of a layer that is given Shared values, or nothing of the examples: Shared too."""
    if recorder.calls.draws(layer):
        raise drawn(layer)
    names = list(layer.inside)
    handed = [of_parameter(layer.inside[name], layer.module.get_parameter(name), recorder) for name in names]
    leaves, spec = pytree.tree_flatten((args, kwargs))

    def call(given: list[Any]) -> Any:
        args, kwargs = pytree.tree_unflatten(given[len(names) :], spec)
        with recorder.silent():
            return functional_call(layer.module, dict(zip(names, given, strict=False)), args, kwargs)

    return derive(call, [*handed, *leaves])


def _rows(leaf: Any, ndim: int) -> Any:
    """A Shared value with one row for each example, in an operation of so many dimensions; others as they are."""
    if not isinstance(leaf, Shared):
        return leaf
    node, count = leaf.node, leaf.node.recorder.count(owners())
    if node.once is not None and leaf.ndim == ndim:
        if len(leaf) not in (1, count):
            raise node.fail(_NOT_ROWS)
        node = node.once.node
    value = node.value.reshape(*[1] * (ndim - node.value.ndim), *node.value.shape)
    if ndim == 0 or (len(value) != 1 and len(value) != count):
        raise node.fail(_NOT_ROWS)
    every = len(value) == 1
    return node.recorder.note_shared(
        node.sources[0].name, value.expand(count, *value.shape[1:]), lambda gradients: described(node, gradients, every)
    )


def rows_of(leaf: Any) -> Any:
    """A Shared value whose first dimension counts the examples, as an ordinary tensor."""
    return _rows(leaf, leaf.ndim) if isinstance(leaf, Shared) else leaf


def of_examples(leaf: Any) -> bool:
    """Whether a tensor is computed from the examples."""
    return isinstance(leaf, Tensor) and not isinstance(leaf, Shared) and leaf.requires_grad


def _plain(leaf: Any) -> Any:
    return leaf.node.value if isinstance(leaf, Shared) else leaf


def _without_numbers(leaf: Any) -> Any:
    return _plain(leaf).detach().to("meta") if isinstance(leaf, Tensor) else leaf


def _ones(leaf: Any) -> Any:
    return torch.ones_like(leaf.node.value) if isinstance(leaf, Shared) else leaf


def _name(func: Any) -> str:
    """Of a function, an operator (__add__ is add) or an attribute."""
    name = getattr(func, "__name__", str(func))
    if name == "__get__":
        return str(getattr(func.__self__, "__name__", name))
    return name.removeprefix("__").removesuffix("__")
