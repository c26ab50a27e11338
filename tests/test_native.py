"""The native kernel against the oracles: the cipher's words, u, t, z, and steps of every kind on any region."""

from __future__ import annotations

import ctypes
import multiprocessing

import numpy as np
import pytest

from bandmf import Key
from bandmf.noise import NumpyEngine, native, normals
from bandmf.noise.native import Kernels, Memory, Part
from bandmf.noise.normals import GROUP, PAIRS
from bandmf.noise.region import Region
from bandmf.noise.schedule import Step
from bandmf.randomness import chacha
from native_builds import build, needs_compiler, needs_library
from noise_families import FAMILIES, largest_difference, numpy_noise, options, toeplitz
from sweeps import spread
from test_noise_words import PLACES, RFC_KEY, oracle_words

pytestmark = needs_library
BOUND = 2e-7  # of the radius sqrt(-2 ln u): what docs/noise.md states
SECRET = bytes(range(32))
# At step 7 of tensor 9, the high word of this coordinate is 2: only there, once in billions, does the low word show.
RARE = 39188 * GROUP + 222


def pointer(array: np.ndarray) -> ctypes.c_void_p:
    return ctypes.c_void_p(array.ctypes.data)


def words(found, place, rounds: int = 20, width: int = 0) -> np.ndarray:
    step, tensor, group = place
    key, out = np.array(chacha.key_words(RFC_KEY), np.uint32), np.empty((2, 3, PAIRS), np.uint32)
    for k in range(2):
        code = found.bandmf_words(
            pointer(key), rounds, ctypes.c_uint64(step), ctypes.c_uint32(tensor),
            ctypes.c_int64(group + k), width, pointer(out[k]),
        )  # fmt: skip
        assert code == 0
    return out


def normals_of(found, given: np.ndarray, width: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    u, t, z = np.empty(PAIRS, np.float32), np.empty(PAIRS, np.float32), np.empty((2, PAIRS), np.float32)
    assert found.bandmf_normals(pointer(given), width, pointer(u), pointer(t), pointer(z)) == 0
    return u, t, z


def oracle_normals(given: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """u and t in float32 as the specification says; z and the radius in double precision."""
    high, low, angle = given
    odd = low | np.uint32(1)
    u = high.astype(np.float32) * np.float32(2.0**-32) + odd.astype(np.float32) * np.float32(2.0**-64)
    t = angle.view(np.int32).astype(np.float32) * np.float32(2.0**-31)
    radius, theta = np.sqrt(-2 * np.log(u.astype(np.float64))), np.pi * t.astype(np.float64)
    return u, t, radius * np.stack([np.cos(theta), np.sin(theta)]), radius


def extreme_words(kind: int) -> np.ndarray:
    """Words of one group: any; tiny u; u of the low word alone; u next to 1; angles next to the eighths of a turn."""
    chance = np.random.default_rng(kind)
    given = chance.integers(0, 2**32, (3, PAIRS), dtype=np.uint32)
    shift = chance.integers(0, 32, PAIRS).astype(np.uint32)
    if kind % 5 == 1:
        given[0] >>= shift
    elif kind % 5 == 2:
        given[0], given[1] = 0, given[1] >> shift
        given[1, :4] = 0, 1, 2, 0xFFFFFFFF
    elif kind % 5 == 3:
        given[0] = ~(given[0] >> shift)
    elif kind % 5 == 4:
        given[2] = (given[2] >> 29 << 29) + (given[2] & 0xFF) - 128
    return given


def widths() -> list[int]:
    found, out = native.library(), np.empty(3 * PAIRS, np.uint32)
    key = np.zeros(8, np.uint32)
    tried = {
        w: found.bandmf_words(pointer(key), 20, ctypes.c_uint64(0), 0, ctypes.c_int64(0), w, pointer(out))
        for w in (4, 8, 16)
    }
    return [width for width, code in tried.items() if code == 0]


def check_words(found, width: int = 0) -> None:
    for place in PLACES:  # past 2^31 coordinates and 2^32 steps among them
        for rounds in chacha.CIPHER_ROUNDS:
            expected = oracle_words(RFC_KEY, *place, rounds)
            assert np.array_equal(words(found, place, rounds, width), expected), "words"


def check_normals(found, width: int = 0) -> None:
    for kind in range(100):
        given = extreme_words(kind)
        u, t, z = normals_of(found, given, width)
        expected_u, expected_t, expected, radius = oracle_normals(given)
        assert np.array_equal(u, expected_u), "u"
        assert np.array_equal(t, expected_t), "t"
        assert np.all(np.abs(z - expected) <= BOUND * radius), "z"


def check_draws(found) -> None:
    """z of a step: planes, order and nonce, which the parts on their own do not show."""
    for region in (Region.span(100, 5000), Region.span(RARE - 1, RARE + 1)):
        got, expected = taken(found, Step(((7, 1.0),), ()), region)
        np.testing.assert_allclose(got["gradient"], expected["gradient"], rtol=0, atol=2e-6)


def test_every_width_draws_the_oracles_words():
    assert widths()[0] == 4
    for width in widths():
        check_words(native.library(), width)


def test_u_and_t_are_the_specifications_and_z_within_the_stated_bound():
    for width in widths():
        check_normals(native.library(), width)


def test_a_width_that_this_machine_lacks_is_refused():
    with pytest.raises(RuntimeError, match="no vectors of that width"):
        taken(native.library(), Step(((0, 1.0),), ()), Region.span(0, 5), width=32)


def some_step(chance: np.random.Generator, slots: int, kind: str) -> Step:
    def numbers(count: int) -> list[float]:
        return chance.normal(size=count).tolist()

    reads = tuple(zip(chance.permutation(slots)[: slots - 1].tolist(), numbers(slots - 1), strict=True))
    draws = ((2**33 + 5, 0.7),)
    if kind == "output":
        return Step(draws, reads, store=1)
    if kind == "ahead":
        return Step(draws, reads, prepared=1, store=0, forward=tuple(tuple(numbers(slots - 1)) for _ in range(2)))
    if kind == "input":
        return Step((*draws, (2**33 + 2, -0.4), (3, 0.2)), reads, store=reads[0][0], stores_input=True)
    return Step(draws, reads, decays=tuple(numbers(slots)))


def taken(found, step: Step, region: Region, slots: int = 6, threads: int = 2, width: int = 0, dtype="float32"):
    """All memory after a step of the kernel, and after the same step in double precision."""
    chance = np.random.default_rng(1)
    memory = {
        "history": chance.normal(size=(slots, region.size + 3)).astype(np.float32)[:, :-3],
        "prepared": chance.normal(size=(4, region.size + 1)).astype(np.float32)[:, 1:],
        "gradient": chance.normal(size=region.size).astype(dtype),
    }
    exact = {name: np.array(value, np.float64) for name, value in memory.items()}
    part = Part(9, region, Memory.of(memory["history"]), Memory.of(memory["prepared"]))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(native, "library", lambda: found)
        Kernels(SECRET, 20, [part], width).step(step, [(memory["gradient"].ctypes.data, dtype)], 0.5, threads)
    z = {drawn: coordinates_z(drawn, region) for drawn, _ in step.draws}
    y = sum(feed * z[drawn] for drawn, feed in step.draws)
    y = y + sum(weight * exact["history"][slot] for slot, weight in step.reads)
    if step.prepared is not None:
        y = y + exact["prepared"][step.prepared]
        for k, weights in enumerate(step.forward, start=1):
            for (slot, _), weight in zip(step.reads, weights, strict=True):
                exact["prepared"][step.prepared + k] += weight * exact["history"][slot]
    if step.store is not None:
        exact["history"][step.store] = z[step.draws[0][0]] if step.stores_input else y
    for slot, decay in enumerate(step.decays):
        exact["history"][slot] = decay * exact["history"][slot] + y
    exact["gradient"] += 0.5 * y
    return memory, exact


def coordinates_z(step: int, region: Region) -> np.ndarray:
    spans = [normals.reference(SECRET, step, 9, start, start + region.length) for start in region.starts.tolist()]
    return np.concatenate(spans) if spans else np.empty(0)


REGIONS = {
    "whole groups": Region.span(0, 2 * GROUP),
    "one number": Region.span(GROUP - 1, GROUP),
    "odd": Region.span(1000, 1000 + 3 * GROUP + 7),
    "inside a group": Region.span(900, 1100),
    "far": Region.span(2**33 + 100, 2**33 + 9000),
    "the last": Region.span(normals.MAX_SIZE - 3000, normals.MAX_SIZE),
    "columns": Region.box((40, 130), (3, 50), (30, 33)),
    "long columns": Region.box((3, 9000), (0, 4000), (3, 4100)),
    "nothing": Region.span(5, 5),
}


@pytest.mark.parametrize("kind", ["output", "ahead", "input", "buffer"])
@pytest.mark.parametrize("region", REGIONS)
def test_a_step_is_the_oracles_on_any_region(region, kind):
    step = some_step(np.random.default_rng(len(region)), 6, kind)
    got, expected = taken(native.library(), step, REGIONS[region])
    for name, value in got.items():
        np.testing.assert_allclose(value, expected[name], rtol=0, atol=1e-5, err_msg=name)


@pytest.mark.parametrize(("rows", "columns", "size"), [(1, 1, 1), (6, 15, 1000), (11, 63, 5000), (16, 200, 777)])
def test_the_pass_is_a_product_of_matrices(rows, columns, size):
    chance = np.random.default_rng(3)
    matrix = chance.normal(size=(rows, columns)).astype(np.float32)
    history = chance.normal(size=(columns, size + 5)).astype(np.float32)
    kernels, results = Kernels(SECRET, 20, []), []
    for threads in (1, 2, 3):
        prepared = np.full((rows, size), np.nan, np.float32)
        kernels.prepare(matrix, Memory.of(history), Memory.of(prepared), size, threads)
        results.append(prepared)
    exact = matrix.astype(np.float64) @ history[:, :size].astype(np.float64)
    np.testing.assert_allclose(results[0], exact, rtol=0, atol=1e-4)
    assert all(np.array_equal(one, results[0]) for one in results)


@pytest.mark.parametrize("kind", ["ahead", "input"])
def test_any_number_of_threads_gives_the_same_bits_and_any_width_the_same_numbers(kind):
    step, region = some_step(np.random.default_rng(2), 6, kind), Region.span(77, 400_000)
    first, _ = taken(native.library(), step, region, threads=1)
    for threads in (2, 3, 50):
        again, _ = taken(native.library(), step, region, threads=threads)
        assert all(np.array_equal(again[name], first[name]) for name in first)
    for width in widths():
        other, _ = taken(native.library(), step, region, width=width)
        assert all(np.abs(other[name] - first[name]).max() < 1e-5 for name in first)


def test_splitting_a_region_changes_no_bit():
    step, noise = Step(((3, 0.7), (1, -0.2)), ()), []
    for spans in ([(1000, 9000)], [(1000, 1001), (1001, GROUP), (GROUP, 5000), (5000, 9000)]):
        pieces = [np.zeros(end - begin, np.float32) for begin, end in spans]
        parts = [Part(9, Region.span(*span), Memory(0, 0), Memory(0, 0)) for span in spans]
        places = [(piece.ctypes.data, "float32") for piece in pieces]
        Kernels(SECRET, 20, parts).step(step, places, 0.5, 2)
        noise.append(np.concatenate(pieces))
    assert np.array_equal(*noise)


@pytest.mark.parametrize("scale", [1e-7, 1e-3, 1.0, 3e4])
def test_float16_and_bfloat16_are_rounded_once_to_nearest_even(scale):
    torch = pytest.importorskip("torch")
    size = 70_000
    patterns = np.arange(size).astype(np.uint16)
    noise = np.zeros(size, np.float32)
    part = Part(9, Region.span(0, size), Memory(0, 0), Memory(0, 0))
    kernels = Kernels(SECRET, 20, [part])
    kernels.step(Step(((0, 1.0),), ()), [(noise.ctypes.data, "float32")], scale, 2)
    for dtype in (torch.float16, torch.bfloat16):
        before = torch.from_numpy(patterns.view(np.int16).copy()).view(dtype)
        after = before.clone()
        kernels.step(Step(((0, 1.0),), ()), [(after.data_ptr(), str(dtype).removeprefix("torch."))], scale, 2)
        # The kernel adds scale * z in one operation, so its sum may differ in the last bit before it is rounded.
        expected = (before.double() + torch.from_numpy(noise).double()).float().to(dtype)
        finite = torch.isfinite(expected)
        assert torch.equal(torch.isnan(after), torch.isnan(expected))
        near = (after.view(torch.int16).int() - expected.view(torch.int16).int()).abs()[finite & torch.isfinite(after)]
        assert near.max() <= 1
        assert (near != 0).float().mean() < 1e-3


def test_numbers_that_are_not_finite_are_found_wherever_they_are():
    torch = pytest.importorskip("torch")
    for dtype in (torch.float32, torch.float64, torch.float16, torch.bfloat16):
        largest = torch.finfo(dtype).max
        values = torch.full((200_003,), -largest, dtype=dtype)
        place = values.data_ptr(), str(dtype).removeprefix("torch."), values.numel(), 3
        assert native.finite(*place)
        for bad in (float("nan"), float("inf"), -float("inf")):
            for at in (0, 65_536, 200_002):
                values[at] = bad
                assert not native.finite(*place)
                values[at] = 0


# What: file, text, its replacement, and the check that must see it.
PLANTED = {
    "a wrong rotation": ("vector.h", "ROTATE(x, 7)", "ROTATE(x, 9)", 0),
    "a constant of the cipher": ("chacha.h", "0x79622d32", "0x79622d33", 0),
    "a swapped diagonal": ("chacha.h", "x[3], x[4], x[9], x[14]", "x[3], x[4], x[14], x[9]", 0),
    "low words of another plane": ("normals.h", "counter + PLANE, step", "counter + 2 * PLANE, step", 2),
    "angles of another plane": ("normals.h", "counter + 2 * PLANE, step", "counter + PLANE, step", 2),
    "a pair twice": ("normals.h", "store_transposed(second, z", "store_transposed(first, z", 2),
    "u can be zero": ("normals.h", "to_real(low | 1)", "to_real(low)", 1),
    "an angle without a sign": ("normals.h", "convertvector((ints)angle", "convertvector(angle", 1),
    "a coefficient in its fifth place": ("normals.h", "0.50001642f", "0.50006642f", 1),
    "a turned quadrant": ("normals.h", "((q + 1) & 2) << 30", "((q + 2) & 2) << 30", 1),
}  # fmt: skip
CHECKS = check_words, check_normals, check_draws


@needs_compiler
@pytest.mark.parametrize("name", spread(PLANTED, 5))
def test_a_planted_error_fails_the_check_that_guards_it(name, tmp_path):
    *change, check = PLANTED[name]
    with pytest.raises(AssertionError):
        CHECKS[check](build(tmp_path / "planted", *change))


@needs_compiler
def test_the_checks_pass_a_library_without_planted_errors(tmp_path):
    found = build(tmp_path / "as it is")
    for check in CHECKS:
        check(found)


@pytest.mark.parametrize("family", FAMILIES)
def test_native_and_plain_engines_add_the_same_noise(family):
    key, shapes = Key(), {"weight": (50, 61), "bias": (7,)}
    chosen = [
        numpy_noise(FAMILIES[family], key, shapes, kernels=kernels, **options(family))
        for kernels in ("native", "numpy")
    ]
    assert largest_difference(*chosen) < 1e-5


def in_child(queue, engine: NumpyEngine, state, size: int) -> None:
    gradient = {"w": np.zeros(size, np.float32)}
    engine.add(state, gradient, 1.0)
    queue.put(gradient["w"][:: size // 100])


def test_a_forked_process_draws_the_same_noise_after_its_parent_used_threads(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    size, engine = 300_000, NumpyEngine(toeplitz(20, 9), kernels="native")
    state, gradient = engine.init({"w": (size,)}), {"w": np.zeros(size, np.float32)}
    engine.add(state, gradient, 1.0)
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    child = context.Process(target=in_child, args=(queue, engine, state, size))
    child.start()
    received = queue.get(timeout=60)
    child.join(60)
    gradient["w"][:] = 0
    engine.add(state, gradient, 1.0)
    assert np.array_equal(received, gradient["w"][:: size // 100])
