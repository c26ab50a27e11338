"""What tests/test_noise_triton.py runs in Triton's interpreter:  triton_kernels.py [sweep]

A draw of 2048 numbers takes the interpreter a quarter of a second, so there are few of them.
"""

from __future__ import annotations

import importlib.util
import sys
import tempfile
from pathlib import Path

import numpy as np

from bandmf import Key
from bandmf.strategies import BandedInverse, BufferedToeplitz, Identity, Scaled, tree_aggregation
from noise_families import FAMILIES, largest_difference, options, oracle_noise, toeplitz, torch_noise

KEY = Key(bytes([5] * 32))
NAME = "bandmf.native.triton_kernels"
CIPHER_ROUNDS = 8  # the fewest there are
ONE, TWO = {"w": (3, 50)}, {"w": (17, 30), "b": (5,)}
GROUPS = {"w": (3, 700), "b": (5,)}  # w reaches into a second group of 2048 coordinates

# Name: (strategy, shapes, options).
CASES = {
    "identity": (Identity(1), GROUPS, {}),
    # A pass before step 8, which also begins to overwrite the ring; step 4 adds to the sums of the next three.
    "look-ahead with an inner level": (toeplitz(10, 9), ONE, {"lookahead": 8}),
    "look-ahead with an inner level for two": (toeplitz(10, 9), TWO, {"lookahead": 8}),
    "toeplitz": (toeplitz(4, 3), ONE, {}),
    "banded inverse": (BandedInverse([1, -0.5, 0.2], 3), ONE, {}),
    "banded inverse, kept": (BandedInverse([1.5, -0.5, 0.2], 4), GROUPS, {"kept_inputs": None}),
    # From step 2 on one is read, whose slot is replaced, and one is drawn again.
    "banded inverse, partly kept": (BandedInverse([1.5, -0.5, 0.2], 4), TWO, {"kept_inputs": 1}),
    "tree": (tree_aggregation(4), ONE, {}),
    "buffered": (Scaled(BufferedToeplitz([0.3, 0.1], [0.9, 0.5], 3), [2.0, 0.7, 0.4]), ONE, {}),
}

INVERSE = BandedInverse([1.5, -0.5, 0.2], 3)

# Name: (what the kernels say, what they are made to say, strategy, shapes, options). Sines are the upper half of a
# group.
PLANTED = {
    "nothing": ("", "", toeplitz(2, 2), {"w": (1100,)}, {}),
    "cipher": ("_rotate(b ^ c, 12)", "_rotate(b ^ c, 7)", Identity(1), ONE, {}),
    "Box-Muller": ("radius * sine", "-radius * sine", Identity(1), {"w": (1100,)}, {}),
    "combination": ("y += weight * tl.load", "y -= weight * tl.load", toeplitz(2, 2), ONE, {}),
    "kept input": ("place, z, mask=inside)", "place, y, mask=inside)", INVERSE, ONE, {"kept_inputs": None}),
    "redraw": ("step - ago", "step - k", BandedInverse([1.5, 0, 0.2], 3), ONE, {}),
}


def difference(strategy, shapes, cipher_rounds: int = CIPHER_ROUNDS, **options) -> float:
    """The largest between the kernels' noise and the oracle's."""
    got = torch_noise(strategy, KEY, shapes, kernels="triton", cipher_rounds=cipher_rounds, **options)
    return largest_difference(got, oracle_noise(strategy, KEY, shapes, cipher_rounds=cipher_rounds))


class Interpreted:
    """Stands for jax_triton, which launches on GPUs: the same calls, eagerly and in Triton's interpreter."""

    @staticmethod
    def triton_call(*given, kernel, out_shape, grid, input_output_aliases, num_warps, num_stages=3, **constants):
        import jax
        import jax.numpy as jnp
        import torch

        def tensor(value):
            if not isinstance(value, jax.Array):
                return value
            plain = np.array(value)
            return torch.from_numpy(plain.view(np.int32) if plain.dtype == np.uint32 else plain)

        arguments = [tensor(value) for value in given]
        results = [torch.full(one.shape, torch.nan) for one in out_shape]
        for place, result in input_output_aliases.items():
            results[result] = arguments[place]
        kernel[grid](*arguments, *results, **constants)
        return [jnp.asarray(result.numpy()) for result in results]


def xla_difference(strategy, shapes, small: int = 0, **options) -> float:
    """The same for the kernels that XLA launches; tensors look ahead whose history has more numbers than `small`."""
    import jax

    from bandmf.jax.noise import triton_executor
    from bandmf.native import triton_xla_kernels
    from noise_families import jax_noise

    triton_executor.available, triton_executor.SMALL = lambda: True, small
    triton_executor._triton = lambda: (Interpreted, triton_xla_kernels)
    with jax.disable_jit():
        got = jax_noise(strategy, KEY, shapes, kernels="triton", cipher_rounds=CIPHER_ROUNDS, **options)
    return largest_difference(got, oracle_noise(strategy, KEY, shapes, cipher_rounds=CIPHER_ROUNDS))


def load(path: Path) -> None:
    """Make this file the kernels that engines import, by way of the executor."""
    sys.modules.pop("bandmf.torch.noise.triton_executor", None)
    spec = importlib.util.spec_from_file_location(NAME, path)
    sys.modules[NAME] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sys.modules[NAME])


def planted(name: str) -> float:
    """The difference that an error in the source of the kernels makes."""
    old, new, strategy, shapes, how = PLANTED[name]
    original = Path(importlib.util.find_spec(NAME).origin)
    source = original.read_text()
    assert not old or source.count(old) == 1, f"{old!r} is not there once"
    with tempfile.TemporaryDirectory() as folder:
        changed = Path(folder) / "kernels.py"
        changed.write_text(source.replace(old, new) if old else source)
        load(changed)
        found = difference(strategy, shapes, **how)
    load(original)
    return found


def check_launches_one_by_one() -> None:
    """As large tensors are: here the limit is lowered instead."""
    from bandmf.torch.noise import triton_executor

    usual, triton_executor.LARGE = triton_executor.LARGE, 0
    assert difference(toeplitz(2, 2), {"w": (1100,)}) < 1e-5
    triton_executor.LARGE = usual


def check_pass_over_many_slots() -> None:
    import torch

    from bandmf.torch.noise.executor import Vectors
    from bandmf.torch.noise.triton_executor import TritonExecutor

    dice = torch.Generator().manual_seed(0)
    matrix = torch.randn(16, 70, generator=dice).numpy()
    history = torch.randn(70, 300, generator=dice)
    prepared = torch.full((16, 300), torch.nan)
    TritonExecutor(bytes(32), CIPHER_ROUNDS, Vectors([], history, prepared)).prepare(matrix)
    np.testing.assert_allclose(prepared.numpy(), matrix @ history.numpy(), atol=1e-4)


def check_finite_numbers() -> None:
    import torch

    from bandmf.torch.noise.executor import Vectors
    from bandmf.torch.noise.triton_executor import TritonExecutor

    nothing = torch.empty(0, 0)
    executor = TritonExecutor(bytes(32), CIPHER_ROUNDS, Vectors([], nothing, nothing))
    for dtype in (torch.float32, torch.float64, torch.float16):
        values = torch.ones(5000, dtype=dtype)
        assert executor.all_finite(values)
        for bad in (torch.nan, torch.inf, -torch.inf):
            values[4999] = bad
            assert not executor.all_finite(values), (dtype, bad)


def check_fingerprints() -> None:
    """By the kernel, by torch operations, and in whole numbers."""
    import torch

    from bandmf.torch.training.sums import fingerprint

    def weight(number: int) -> int:
        number = number * 0x9E3779B97F4A7C15 % 2**64
        number = (number ^ number >> 32) * 0xBF58476D1CE4E5B9 % 2**64
        return (number ^ number >> 29) | 1

    seeds, dice = (3**38, 2**62 - 1), torch.Generator().manual_seed(0)
    for size in (1, 2048, 5000):
        words = torch.randint(-(2**31), 2**31, (size,), generator=dice).to(torch.int32)
        plain = [word % 2**32 for word in words.tolist()]
        sums = [sum(word * weight(k + seed) for k, word in enumerate(plain)) % 2**64 for seed in seeds]
        bad = sum(word & 0x7F800000 == 0x7F800000 for word in plain)
        for kernels in ("triton", "torch"):
            found = fingerprint(words, seeds, kernels)
            assert [int(total) % 2**64 for total in found] == [*sums, bad]


def check_scaled() -> None:
    """Factors times vectors, as torch rounds them."""
    import torch

    from bandmf.torch.clipping import fused

    dice = torch.Generator().manual_seed(1)
    vectors = [torch.randn(3, 70, 77, generator=dice) for _ in range(4)]
    factors = torch.rand(3, generator=dice)
    for found, given in zip(fused.scaled(vectors, factors), vectors, strict=True):
        assert torch.equal(found, (given * factors[:, None, None]).flatten(0, 1))


def padded(examples: int, places: int, p: int, q: int, dice) -> tuple:
    """Vectors of texts of several lengths: zeros on the left, anything on the right; some are zero in the middle."""
    import torch

    left, right = (torch.randn(examples, places, n, generator=dice) for n in (p, q))
    for example in range(examples):
        left[example, places - example * places // examples :] = 0
        right[example, example] = 0
    left[0, 3] = 0
    left[0, 3, -1] = 1e-44  # not zero, though its square is
    return left, right


def check_live_places() -> None:
    """As torch finds them, whatever is not finite included."""
    import torch

    from bandmf.torch.clipping import fused
    from bandmf.torch.clipping.products import live_places

    dice = torch.Generator().manual_seed(2)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        some = [padded(3, 45, p, 150, dice) for p in (7, 7)]
        lefts, rights = ([pair[n].to(dtype) for pair in some] for n in (0, 1))
        rights[0][2, 44, 149], rights[0][1, 44, 0], rights[1][2, 40, 3] = torch.nan, torch.inf, -torch.inf
        lefts[1][2, 5] = -0.0
        pairs = list(zip(lefts, rights, strict=True))
        for found, pair in zip(fused.live([*pairs, padded(3, 20, 9, 8, dice)]), pairs, strict=False):
            assert torch.equal(found, live_places(*pair))
            assert 0 < int(found.sum()) < found.numel()


def check_grams_and_totals() -> None:
    """The fused kernels of clipping; the interpreter's products are right in float32 only."""
    import torch

    from bandmf.torch.clipping import fused
    from bandmf.torch.clipping.contributions.totals import Totals
    from bandmf.torch.clipping.norms.outers import gram
    from bandmf.torch.clipping.products import live_places

    dice = torch.Generator().manual_seed(0)
    groups = [[padded(2, *sizes, dice) for _ in range(2)] for sizes in ((5, 7, 9), (70, 33, 600), (70, 8, 32))]
    pairs = [pair for group in groups for pair in group]
    for found, (left, right) in zip(fused.gram_numbers(groups), pairs, strict=True):
        live = live_places(left, right)
        k, j = (gram(x.double().where(live[:, :, None], 0)) for x in (left, right))
        sums = [(k * j).sum((1, 2)), k.diagonal(0, 1, 2).sum(1), j.diagonal(0, 1, 2).sum(1)]
        sums += [k.square().sum((1, 2)), j.square().sum((1, 2)), live.sum(1)]
        torch.testing.assert_close(found.double(), torch.stack(sums, 1), rtol=1e-5, atol=0)
    for lefts, rights in ([*zip(*group, strict=True)] for group in groups[:2]):
        for inputs, centered in ((None, True), (rights, True), (rights, False)):
            found = fused.totals(lefts if inputs is None else rights, inputs, 1e-5, centered)
            for k, one in enumerate(found):
                given = (lefts if inputs is None else rights)[k].double()
                expected = Totals(given, None if inputs is None else inputs[k].double(), 1e-5, centered).now()
                torch.testing.assert_close(one.double(), expected, rtol=1e-5, atol=1e-5)


CHECKS = {
    "live places": check_live_places,
    "grams and totals": check_grams_and_totals,
    "fingerprints": check_fingerprints,
    "scaled": check_scaled,
    "launches one by one": check_launches_one_by_one,
    "pass over many slots": check_pass_over_many_slots,
    "finite numbers": check_finite_numbers,
}


# Slow ones, whose parts the others have: left to the sweep.
SLOW = (
    "toeplitz", "banded inverse", "banded inverse, kept", "tree", "look-ahead in XLA",
    "look-ahead with an inner level for two", "banded inverse, partly kept, for two in XLA",
)  # fmt: skip


# As CASES, for the kernels that XLA launches; its look-ahead has no inner level.
XLA_CASES = {
    "look-ahead in XLA": (toeplitz(7, 6), ONE, {"lookahead": 3}),
    # The history of w looks ahead, that of b is read whole.
    "large and small in XLA": (toeplitz(4, 4), TWO, {"lookahead": 2, "small": 100}),
    "banded inverse, partly kept, in XLA": (
        Scaled(BandedInverse([1.5, -0.5, 0.2], 4), [0.7, 3.0, 0.4, 1.0]),
        ONE,
        {"kept_inputs": 1},
    ),
    "banded inverse, partly kept, for two in XLA": (BandedInverse([1.5, -0.5, 0.2], 4), TWO, {"kept_inputs": 1}),
}


def check_cases(names) -> None:
    for name in names:
        if name in CASES:
            strategy, shapes, how = CASES[name]
            found = difference(strategy, shapes, **how)
        else:
            strategy, shapes, how = XLA_CASES[name]
            found = xla_difference(strategy, shapes, **how)
        assert found < 1e-5, (name, found)
        print(f"{name} holds", flush=True)


def sweep() -> None:
    """Every case, every family of the conformance list, and the full cipher."""
    check_cases(CASES | XLA_CASES)
    for name, strategy in FAMILIES.items():
        assert difference(strategy, GROUPS, **options(name)) < 1e-5, name
        assert xla_difference(strategy, GROUPS, **options(name)) < 1e-5, name
    assert difference(toeplitz(18, 17), GROUPS, lookahead=7) < 1e-5
    assert difference(Identity(2), GROUPS, cipher_rounds=20) < 1e-5


def main() -> None:
    if sys.argv[1:] == ["sweep"]:
        sweep()
        return
    check_cases(name for name in CASES | XLA_CASES if name not in SLOW)
    for name, check in CHECKS.items():
        check()
        print(f"{name} holds", flush=True)
    for name in PLANTED:
        print(f"planted {name}: {planted(name)}", flush=True)


if __name__ == "__main__":
    main()
