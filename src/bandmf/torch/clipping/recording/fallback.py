"""Layers without a rule: the gradients of single examples by torch.func, for that layer alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.func import functional_call, grad, vjp, vmap
from torch.utils import _pytree as pytree

from bandmf.torch.clipping.products import wide
from bandmf.torch.clipping.refusals import UnsupportedError
from bandmf.torch.noise.precision import precision

if TYPE_CHECKING:
    from bandmf.torch.clipping.recording.recorder import Layer

_ROUNDING = 1e-3  # relative difference of sums that rounding explains
_HALF = 5e-2  # the same in less than float32
_HEAVIEST = 100.0  # times what an ordinary example counts in a sum that is checked
_MOST = 4  # tensors in doubt: 16 guesses
_REMEDY = "give what all examples share a first dimension of 1, or register a rule for this layer"


class Call:
    """One call of a layer: what is needed to make it again, an example at a time.

    Of its inputs, tensors with a row for each example are cut; everything else is shared. Which are, `known` says.
    Where nobody knows, it is guessed from the shapes of this very call: a mask may have one row in a batch without
    padding, and one for each example in the next. Wherever that leaves a doubt, the gradients found must add up to that
    of the batch, so that no example is differentiated with the rows of others.
    """

    def __init__(
        self, layer: Layer, args: Any, kwargs: Any, rows: int, known: Sequence[bool | None], is_one: bool
    ) -> None:
        self.layer, self._rows, self.is_one = layer, rows, is_one  # whether all rows are one example's
        self._leaves, self._shape = pytree.tree_flatten((args, kwargs))
        self._places = [n for n, leaf in enumerate(self._leaves) if isinstance(leaf, Tensor)]
        self.given: list[Tensor] = [self._leaves[n] for n in self._places]
        self.tensors = [tensor.detach() for tensor in self.given]
        self._versions = [tensor._version for tensor in self.tensors]
        self._cut = [self._is_cut(*each) for each in zip(known, self.tensors, strict=True)]
        self._sure = self._agrees(known) or self._is_sure()
        if any(isinstance(leaf, Iterator) for leaf in self._leaves):
            raise self._refusal("is given an iterator, which cannot be read a second time; give it a list")
        for place in self._places:
            self._leaves[place] = None  # saved by autograd, which may free or recompute it
        device = self.tensors[0].device.type if self.tensors else "cpu"
        self._autocast: tuple[str, torch.dtype, bool] = (
            device, torch.get_autocast_dtype(device), torch.is_autocast_enabled(device),
        )  # fmt: skip

    def _is_cut(self, known: bool | None, tensor: Tensor) -> bool:
        return self._length(tensor) == self._rows and known is not False

    def _agrees(self, known: Sequence[bool | None]) -> bool:
        """Whether the shapes are as in the calls that it is known from: a mask may be rows once, and a table later."""
        lengths = [self._length(tensor) for tensor in self.tensors]
        return None not in known and all(
            length == 1 or has_rows == (length == self._rows) for length, has_rows in zip(lengths, known, strict=True)
        )

    def _length(self, tensor: Tensor) -> int:
        """Along the dimension that counts the examples; 0 where there is none."""
        return tensor.shape[self.layer.batch] if tensor.ndim > self.layer.batch else 0

    def _is_sure(self) -> bool:
        """Whether the shapes leave no doubt: all but single rows are cut, and nothing else is as long by chance."""
        others = {size for t in self.tensors for n, size in enumerate(t.shape) if n != self.layer.batch}
        told_apart = all(
            cut or t.numel() == 1 or self._length(t) == 1 for t, cut in zip(self.tensors, self._cut, strict=True)
        )
        return self._rows == 1 or (told_apart and sum(self._cut) == 1 and self._rows not in others)

    def _refusal(self, what: str) -> UnsupportedError:
        return UnsupportedError(f"{self.layer.path!r} {what}")

    def check_unchanged(self) -> None:
        """After the call: what was changed in it cannot be given to it again."""
        if [tensor._version for tensor in self.tensors] != self._versions:
            raise changed(self.layer)

    def gradients(self, saved: tuple[Tensor, ...], gradient: Tensor, number: int) -> dict[str, Tensor]:
        """(examples, *shape) for each parameter of the layer, from the gradient of one of its outputs."""
        if not any(self._cut) and not self.is_one:  # a part of the output is no example, even if there are as many
            raise self._refusal(
                "is given nothing that has one row for each example; weight_norm and other parametrizations are like "
                "that, leave them out"
            )
        module = self.layer.module
        parameters = {name: module.get_parameter(name).detach() for name in self.layer.names}
        back = _Backward(parameters, saved, gradient, number)
        device, dtype, enabled = self._autocast
        with torch.autocast(device, dtype=dtype, enabled=enabled):
            if self.is_one:
                found = {name: each[None] for name, each in self._whole(back, back.saved, back.gradient).items()}
            else:
                found = self._each(self._cut, back) if self._sure else self._told_apart(back)
        return {name: each.to(wide(each.dtype)) for name, each in found.items()}

    def _told_apart(self, back: _Backward) -> dict[str, Tensor]:
        """By the first guess whose gradients add up."""
        refusal: Exception | None = None
        for cut in self._guesses():
            try:
                found = self._each(cut, back)
                self._check_sum(cut, back, found)
            except Exception as error:  # whatever a layer says to inputs that do not fit each other
                refusal = refusal or error
                continue
            return found
        assert refusal is not None
        raise refusal

    def _guesses(self) -> Iterator[list[bool]]:
        """Which tensors are cut, the likeliest first."""
        yield self._cut
        in_doubt = [n for n, t in enumerate(self.tensors) if self._length(t) == self._rows][:_MOST]
        for chosen in product((True, False), repeat=len(in_doubt)):
            cut = list(self._cut)
            for n, single in zip(in_doubt, chosen, strict=True):
                cut[n] = single
            if any(cut) and cut != self._cut:
                yield cut

    def _output(self, parameters: dict[str, Tensor], inputs: Sequence[Tensor], number: int) -> Tensor:
        leaves = list(self._leaves)
        for place, given in zip(self._places, inputs, strict=True):
            leaves[place] = given
        args, kwargs = pytree.tree_unflatten(leaves, self._shape)
        output = functional_call(self.layer.module, parameters, args, kwargs)
        return pytree.tree_flatten(output)[0][number]

    def _each(self, cut: list[bool], back: _Backward) -> dict[str, Tensor]:
        batch = self.layer.batch

        def loss(parameters: dict[str, Tensor], inputs: list[Tensor], gradient: Tensor) -> Tensor:
            alone = [t.unsqueeze(batch) if single else t for t, single in zip(inputs, cut, strict=True)]
            output, wanted = self._output(parameters, alone, back.number), gradient.unsqueeze(batch)
            if output.shape != wanted.shape:  # it would be repeated to fit
                raise self._refusal(
                    f"gives another shape for one example than for its row in a batch: it has something of the whole "
                    f"batch; {_REMEDY}"
                )
            return (output * wanted).sum()

        dims = [batch if single else None for single in cut]
        try:
            each = vmap(grad(loss), in_dims=(None, dims, batch))
            return each(back.parameters, list(back.saved), back.gradient)
        except RuntimeError:  # a layer whose way depends on the data, say: it takes one example at a time
            return _one_by_one(grad(loss), back, dims, batch)

    def _whole(self, back: _Backward, inputs: Sequence[Tensor], gradient: Tensor) -> dict[str, Tensor]:
        """The gradient of a call as it was made."""
        _, pull_back, *_ = vjp(lambda chosen: self._output(chosen, inputs, back.number), back.parameters)
        return dict(pull_back(gradient)[0])

    def _check_sum(self, cut: list[bool], back: _Backward, found: dict[str, Tensor]) -> None:
        """Fail unless the gradients of the examples add up to that of the batch, where nothing is cut.

        Each counts about as much, so that a large one hides nothing of the others; and none as much as another, so
        that it shows what is attributed to the wrong one.
        """
        batch, norms = self.layer.batch, _norms(found)
        kept = norms.isfinite().nonzero().flatten()  # the rest is left out
        if not len(kept):
            return
        weights = _weights(norms[kept])
        inputs = [
            t.index_select(batch, kept) if single and len(kept) < len(norms) else t
            for t, single in zip(back.saved, cut, strict=True)
        ]
        gradient = back.gradient.index_select(batch, kept).movedim(batch, -1)
        gradient = (gradient * weights.to(gradient.dtype)).movedim(-1, batch)
        whole = self._whole(back, inputs, gradient)
        off = {
            name: torch.einsum("i,i...->...", weights.to(each.dtype), each[kept]) - whole[name]
            for name, each in found.items()
        }
        if not bool(_norms(off, 0) <= self._tolerance(gradient) * (weights.abs() * norms[kept]).sum()):
            raise self._refusal(
                "cannot be called again with one example: it is not clear which of its inputs have a row for each, or "
                f"its examples depend on each other; {_REMEDY}"
            )

    def _tolerance(self, gradient: Tensor) -> float:
        half = self._autocast[2] or torch.finfo(gradient.dtype).bits < 32
        return _HALF if half or precision() != "highest" else _ROUNDING


class _Backward(NamedTuple):
    """What is known in the backward pass of a call."""

    parameters: dict[str, Tensor]
    saved: tuple[Tensor, ...]
    gradient: Tensor  # of the output with this number
    number: int


def changed(layer: Layer) -> RuntimeError:
    """The error for a layer whose input is not what it was when the layer was called."""
    return RuntimeError(
        f"{layer.path!r} changes its input in place, so its gradients cannot be found afterwards; write x = x + y, "
        "not x += y, and leave inplace=True out"
    )


def drawn(layer: Layer) -> UnsupportedError:
    """The error for a layer that would draw other numbers for its examples, one at a time, than it has."""
    return UnsupportedError(
        f"{layer.path!r} draws random numbers and has parameters, but no rule: single examples would get others; draw "
        "them in a module without parameters (nn.Dropout, stochastic depth), or use clipping='vmap'"
    )


def _norms(gradients: dict[str, Tensor], examples: int = 1) -> Tensor:
    """Over all parameters and all dimensions but the first ones, which count examples."""
    norms = [
        torch.linalg.vector_norm(g.reshape(*g.shape[:examples], -1), dim=-1, dtype=torch.float64)
        for g in gradients.values()
    ]
    return torch.linalg.vector_norm(torch.stack(norms), dim=0)


def _weights(norms: Tensor) -> Tensor:
    """By which gradients of these norms become about equally long, each with a sign and a factor of its own."""
    positive = norms[norms > 0]
    usual = positive.median() if len(positive) else norms.new_ones(())
    even = (usual / norms).clamp(max=_HEAVIEST)  # also of no length
    own = torch.rand(len(norms), generator=torch.Generator().manual_seed(1)).to(norms)
    return even * (0.5 + own) * (2 * (own > 0.5) - 1)


def random_state(like: Tensor) -> Tensor:
    return torch.cuda.get_rng_state(like.device) if like.is_cuda else torch.get_rng_state()


def _one_by_one(gradient_of: Any, back: _Backward, dims: list[int | None], batch: int) -> dict[str, Tensor]:
    single = []
    for number in range(back.gradient.shape[batch]):
        inputs = [t if dim is None else t.select(dim, number) for t, dim in zip(back.saved, dims, strict=True)]
        single.append(gradient_of(back.parameters, inputs, back.gradient.select(batch, number)))
    return {name: torch.stack([one[name] for one in single]) for name in back.parameters}
