"""nn.RNN, nn.GRU and nn.LSTM, computed with maps of input and state that are recorded.

Torch computes them in one function, where nothing can be recorded. Here the steps are written out. The places of an
example are its times t: with the gradients g_t of the gates, the map of the input has the gradient sum_t g_t x_t', and
the map of the state sum_t g_t h_(t-1)'.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

from bandmf.torch.clipping.contributions import Outer
from bandmf.torch.clipping.recording.calls import argument
from bandmf.torch.clipping.recording.recorded import Recorded
from bandmf.torch.clipping.refusals import other_rows
from bandmf.torch.clipping.rules import Described, Rule, total

State = tuple[Tensor, Tensor]  # output and, of an LSTM, cell; of others the output twice


def describes(module: nn.Module) -> bool:
    """Whether this file knows the module."""
    kinds = (nn.RNN, nn.GRU, nn.LSTM)
    return isinstance(module, kinds) and any(type(module).forward is kind.forward for kind in kinds)


class Recurrent(Recorded):
    """The `forward` of a recurrent module, which records its maps."""

    module: nn.RNNBase

    def rows_at(self, args: Any, kwargs: Any) -> tuple[Tensor, str, int] | None:
        given, path = argument(args, kwargs, 0, "input")
        return (given, path, 0 if self.module.batch_first else 1) if isinstance(given, Tensor) else None

    def with_rows(self, args: Any, kwargs: Any) -> Any:
        """The examples are the second dimension of a state: it is cut into layers before."""
        states = args[1:], {name: each for name, each in kwargs.items() if name == "hx"}
        input, named = super().with_rows(args[:1], {n: each for n, each in kwargs.items() if n != "hx"})
        return (*input, *states[0]), {**named, **states[1]}

    def record(self, args: Any, kwargs: Any) -> Any:
        return self._forward(*args, **kwargs)

    def _forward(self, input: Tensor | PackedSequence, hx: Any = None) -> Any:
        packed = input if isinstance(input, PackedSequence) else None
        lengths = None
        if packed is not None:
            x, lengths = pad_packed_sequence(packed, batch_first=True)
        else:
            assert isinstance(input, Tensor)
            if input.ndim != 3:
                raise other_rows(self.layer.path)
            x = input if self.module.batch_first else input.transpose(0, 1)
        states = self._initial(x, hx)
        there = None if lengths is None else torch.arange(x.shape[1]) < lengths[:, None]
        output, last = self._stack(x, states, None if there is None else there.to(x.device))
        final = tuple(torch.stack(each) for each in zip(*last, strict=True))
        state = final if isinstance(self.module, nn.LSTM) else final[0]
        if packed is not None:
            assert lengths is not None
            return _repacked(output, lengths, packed), state
        return output if self.module.batch_first else output.transpose(0, 1), state

    def _initial(self, x: Tensor, hx: Any) -> list[State]:
        module, cells = self.module, isinstance(self.module, nn.LSTM)
        count = module.num_layers * (2 if module.bidirectional else 1)
        if hx is None:
            width = module.proj_size or module.hidden_size
            empty = x.new_zeros(count, len(x), width), x.new_zeros(count, len(x), module.hidden_size)
            return list(zip(*empty, strict=True))
        return list(zip(*(hx if cells else (hx, hx)), strict=True))

    def _stack(self, x: Tensor, states: list[State], there: Tensor | None) -> tuple[Tensor, list[State]]:
        """All layers, each in one or two directions."""
        module, last, directions = self.module, [], 2 if self.module.bidirectional else 1
        for number in range(module.num_layers):
            outputs = []
            for direction in range(directions):
                suffix = f"_l{number}" + ("_reverse" if direction else "")
                output, state = self._direction(x, states[directions * number + direction], suffix, there)
                outputs.append(output)
                last.append(state)
            x = torch.cat(outputs, -1) if directions > 1 else outputs[0]
            if number < module.num_layers - 1:
                x = functional.dropout(x, module.dropout, module.training)
        return x, last

    def _direction(self, x: Tensor, state: State, suffix: str, there: Tensor | None) -> tuple[Tensor, State]:
        weights = {
            name: getattr(self.module, f"{name}{suffix}").detach()
            for name in ("weight_ih", "weight_hh", "bias_ih", "bias_hh", "weight_hr")
            if hasattr(self.module, f"{name}{suffix}")
        }
        gates = functional.linear(x, weights["weight_ih"], weights.get("bias_ih"))
        gates = self.recorder.note(self.layer, _map("weight_ih", "bias_ih", suffix), x, gates)
        states: list[Tensor] = [x] * x.shape[1]
        inner: list[Tensor] = [x] * x.shape[1]  # what an LSTM projects
        outputs: list[Tensor] = [x] * x.shape[1]
        bias = weights["bias_hh"] if "bias_hh" in weights else gates.new_zeros(gates.shape[-1])
        by_state = self._taps(bias, x, _map("weight_hh", "bias_hh", suffix), states)
        projected = None
        if "weight_hr" in weights:
            zero = gates.new_zeros(len(weights["weight_hr"]))
            projected = self._taps(zero, x, _map("weight_hr", None, suffix), inner)
        times: Iterable[int] = range(x.shape[1])
        by_input = gates.unbind(1)
        for t in reversed(range(x.shape[1])) if suffix.endswith("_reverse") else times:
            states[t] = state[0].detach()
            of_state = by_state[t] + functional.linear(state[0], weights["weight_hh"])
            h, c = self._cell(by_input[t], of_state, state)
            if projected is not None:
                inner[t] = h.detach()
                h = projected[t] + functional.linear(h, weights["weight_hr"])
            outputs[t] = h
            if there is not None:
                outputs[t] = torch.where(there[:, t, None], h, 0.0)
                h, c = (torch.where(there[:, t, None], new, old) for new, old in zip((h, c), state, strict=True))
            state = h, c
        return torch.stack(outputs, 1), state

    def _taps(self, value: Tensor, x: Tensor, rule: Rule, given: list[Tensor]) -> tuple[Tensor, ...]:
        """`value` for each example and time: what it is added to has its gradient; `given` is filled in later."""
        tap = value.expand(*x.shape[:2], -1)
        return self.recorder.note_late(self.layer, rule, given, tap).unbind(1)

    def _cell(self, by_input: Tensor, by_state: Tensor, state: State) -> State:
        """One step."""
        module = self.module
        if isinstance(module, nn.LSTM):
            i, f, g, o = (by_input + by_state).chunk(4, 1)
            c = f.sigmoid() * state[1] + i.sigmoid() * g.tanh()
            return o.sigmoid() * c.tanh(), c
        if isinstance(module, nn.GRU):
            (r, z, n), (r_h, z_h, n_h) = by_input.chunk(3, 1), by_state.chunk(3, 1)
            update = (z + z_h).sigmoid()
            h = (1 - update) * (n + (r + r_h).sigmoid() * n_h).tanh() + update * state[0]
            return h, h
        h = by_input + by_state
        h = h.relu() if module.mode == "RNN_RELU" else h.tanh()
        return h, h


def _map(weight: str, bias: str | None, suffix: str) -> Rule:
    """The rule of y_t = W a_t + b."""

    def rule(layer: Any, a: Tensor, g: Tensor) -> Described:
        added = {} if bias is None or not layer.bias else {bias + suffix: total(g)}
        return {weight + suffix: Outer(g, a), **added}

    return rule


def _repacked(output: Tensor, lengths: Tensor, like: PackedSequence) -> PackedSequence:
    """In the order of the one that was given."""
    if like.sorted_indices is not None:
        output, lengths = output[like.sorted_indices], lengths[like.sorted_indices.to(lengths.device)]
    packed = pack_padded_sequence(output, lengths, batch_first=True)
    return PackedSequence(packed.data, like.batch_sizes, like.sorted_indices, like.unsorted_indices)
