"""Every engine with every family: the oracle's noise, the right covariance, restarts, and guards."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache

import numpy as np
import pytest

from bandmf import Key
from bandmf.noise import NumpyEngine
from bandmf.noise.schedule import MAX_LOOKAHEAD, Schedule
from bandmf.strategies import Identity
from noise_families import (
    ENGINES,
    FAMILIES,
    PLAIN,
    SHAPES,
    largest_difference,
    numpy_noise,
    options,
    oracle_noise,
    toeplitz,
)
from sweeps import in_turn, some_long, spread

ALL = [(engine, family) for engine in ENGINES for family in FAMILIES]


@cache
def truth(family, scale=1.0):
    """A key and the noise of the oracle, which takes longer than that of engines: found once for all of them."""
    key = Key()
    return key, oracle_noise(FAMILIES[family], key, scale=scale)


def check_covariance(noise: np.ndarray, C_inverse: np.ndarray) -> None:
    """Fail unless the columns of `noise` (steps x draws) may have the covariance (C'C)^-1 and mean zero.

    C noise must be white: every entry of its sample covariance lies within 5.5 standard errors of the
    identity's, and their squares add up to what chance allows.
    """
    white = np.linalg.solve(C_inverse, noise)
    steps, draws = white.shape
    deviation = (white @ white.T / draws - np.eye(steps)) * np.sqrt(draws / (1 + np.eye(steps)))
    lower = deviation[np.tril_indices(steps)]
    assert np.abs(lower).max() < 5.5, f"an entry is {np.abs(lower).max():.1f} standard errors off"
    excess = (np.sum(lower**2) - lower.size) / np.sqrt(2 * lower.size)
    assert abs(excess) < 5.5, f"the squared deviations are {excess:.1f} standard errors off"
    assert np.abs(white.mean(1)).max() * np.sqrt(draws) < 5.5


def is_caught(noise: np.ndarray, C_inverse: np.ndarray) -> bool:
    try:
        check_covariance(noise, C_inverse)
    except AssertionError:
        return True
    return False


def draws_of(engine: str, family: str, draws: int = 20_000) -> tuple[np.ndarray, np.ndarray]:
    strategy = FAMILIES[family]
    noise = ENGINES[engine](strategy, Key(bytes([7] * 32)), {"w": (draws,)}, **options(family))
    return np.array([step["w"] for step in noise], np.float64), strategy.inverse().materialize(strategy.steps)


@pytest.mark.parametrize(("engine", "family"), ALL)
def test_the_noise_is_the_oracles(engine, family):
    key, expected = truth(family, 1.5)
    got = ENGINES[engine](FAMILIES[family], key, scale=1.5, **options(family))
    size = max(float(np.abs(step["weight"]).max()) for step in expected)
    assert largest_difference(got, expected) < 2e-6 * size


@pytest.mark.parametrize(("engine", "family"), in_turn(list(ENGINES), list(FAMILIES)))
def test_the_covariance_is_that_of_the_strategy(engine, family):
    check_covariance(*draws_of(engine, family))


def test_a_dense_inverse_gives_the_same_covariance():
    """(C'C)^-1 from the matrix itself, independent of any streaming code."""
    noise, _ = draws_of("numpy", "normalized")
    C = FAMILIES["normalized"].materialize()
    check_covariance(noise, np.linalg.inv(C))


def test_the_covariance_check_catches_planted_errors():
    noise, C_inverse = draws_of("numpy", "normalized")
    check_covariance(noise, C_inverse)
    swapped = FAMILIES["normalized"].materialize()
    swapped[3, 2] *= -1
    planted = {
        "five percent too little": 0.95 * noise,
        "five percent too little at one step": np.where(np.arange(len(noise))[:, None] == 9, 0.95, 1) * noise,
        "one swapped sign": np.linalg.inv(swapped) @ np.linalg.solve(C_inverse, noise),
        "white instead of correlated": np.linalg.solve(C_inverse, noise),
        "one step's noise used again": np.concatenate([noise[:1], noise[:-1]]),
        "off by one step": np.roll(noise, 1, axis=0),
    }
    for name, wrong in planted.items():
        assert is_caught(wrong, C_inverse), f"not caught: {name}"


def test_a_reused_key_repeats_the_noise_and_a_fresh_one_does_not():
    strategy, key = FAMILIES["normalized"], Key()
    first = numpy_noise(strategy, key)
    assert largest_difference(first, numpy_noise(strategy, key)) == 0
    assert largest_difference(first, numpy_noise(strategy, Key())) > 1


@pytest.mark.parametrize("bands", [2, 5, 12, 17, 33])
@pytest.mark.parametrize("inner", [None, 2, 4])
def test_look_ahead_is_algorithm_1_regrouped(bands, inner):
    """For every T that fits the ring, with and without the inner level, and past the end of the steps."""
    strategy, key, shapes = toeplitz(3 * bands + 1, bands), Key(), {"w": (40,)}
    expected = numpy_noise(strategy, key, shapes, lookahead=1)
    for T in {1, 2, 3, 4, 7, 11, 16} & set(range(1, bands)):
        engine = NumpyEngine(strategy, key, lookahead=T)
        engine.schedule = Schedule(strategy, T, inner)
        state, got = engine.init(shapes), []
        for _ in range(strategy.steps):
            got.append({"w": np.zeros(40, np.float32)})
            state = engine.add(state, got[-1], 1.0)
        assert largest_difference(got, expected) < 1e-5


def test_look_ahead_never_passes_the_ring():
    for bands in range(1, 60):
        schedule = Schedule(toeplitz(100, bands))
        assert 1 <= schedule.lookahead <= max(1, min(bands - 1, MAX_LOOKAHEAD))
        assert schedule.vectors <= bands - 1 + schedule.lookahead
    with pytest.raises(ValueError, match=r"lookahead=16: must be a whole number between 1 and 15"):
        Schedule(toeplitz(100, 16), lookahead=16)


def test_memory_is_bands_minus_one_plus_lookahead_vectors():
    for bands, lookahead in [(1, None), (8, None), (16, None), (64, None), (64, 1)]:
        engine = NumpyEngine(toeplitz(100, bands), lookahead=lookahead)
        state = engine.init({"w": (1000,)})
        T = engine.schedule.lookahead
        kept = state.history["w"].size + state.prepared["w"].size
        assert kept == 1000 * (bands - 1 + (T if T > 1 else 0))


class Driver:
    """One engine behind the calls the guard tests make."""

    def __init__(self, name: str, strategy=None, key: Key | None = None, **options) -> None:
        self.name, self.key = name.split(",")[0], key or Key()
        options = {**PLAIN.get(name, {}), **options}
        strategy = FAMILIES["normalized"] if strategy is None else strategy
        if self.name == "numpy":
            self.engine = NumpyEngine(strategy, self.key, **options)
        elif self.name == "torch":
            from bandmf.torch import Engine

            self.engine = Engine(strategy, self.key, **options)
        else:
            from bandmf.jax import Engine as JaxEngine

            self.engine = JaxEngine(strategy, self.key, **options)

    def array(self, values, dtype: str = "float32"):
        if self.name == "torch":
            import torch

            return torch.tensor(values, dtype=getattr(torch, dtype))
        if self.name == "jax":
            import jax.numpy as jnp

            return jnp.asarray(values, dtype)
        return np.array(values, dtype)

    def gradients(self, dtype: str = "float32", **changed):
        values = {name: self.array(np.zeros(shape), dtype) for name, shape in SHAPES.items()}
        return {**values, **changed}

    def add(self, state, gradients, scale=1.0):
        """(state, noisy gradients as NumPy float64)."""
        if self.name == "jax":
            gradients, state = self.engine.add(state, gradients, scale)
        else:
            state = self.engine.add(state, gradients, scale)
        if self.name == "torch":
            return state, {name: value.double().numpy() for name, value in gradients.items()}
        return state, {name: np.asarray(value, np.float64) for name, value in gradients.items()}


@pytest.fixture(params=list(ENGINES))
def name(request):
    return request.param


def test_an_error_leaves_the_state_usable(name):
    """Wrong shapes, dtypes, names, values and scales are refused, and the next noise is as if nothing was."""
    key = Key()
    driver = Driver(name, key=key)
    state = driver.engine.init(SHAPES)
    state, first = driver.add(state, driver.gradients())
    missing = driver.gradients()
    del missing["bias"]
    nan, infinite = np.zeros(SHAPES["weight"]), np.zeros(SHAPES["weight"])
    nan[49, 60], infinite[0, 0] = math.nan, -math.inf
    for gradients, scale, message in [
        (driver.gradients(bias=driver.array(np.zeros(8))), 1.0, r"gradients\['bias'\].shape=\(8,\): must be \(7,\)"),
        (driver.gradients(dtype="float16"), 1.0, "was .*float32 at earlier steps"),
        (driver.gradients(bias=driver.array(np.zeros(7), "int32")), 1.0, "dtype='.*int32': must be one of"),
        (driver.gradients(weight=driver.array(nan)), 1.0, "'weight'.*must be finite"),
        (driver.gradients(weight=driver.array(infinite)), 1.0, "'weight'.*must be finite"),
        (driver.gradients(extra=driver.array(np.zeros(3))), 1.0, "'extra' is unknown"),
        (missing, 1.0, "'bias' is missing"),
        (driver.gradients(), math.nan, "scale=nan"),
        (driver.gradients(), -1.0, r"scale=-1.0: must be a finite number in \[0"),
    ]:
        with pytest.raises(ValueError, match=message):
            driver.add(state, gradients, scale)
    state, second = driver.add(state, driver.gradients())
    expected = oracle_noise(FAMILIES["normalized"], key)
    assert largest_difference([first, second], expected[:2]) < 1e-5


def test_past_the_last_planned_step_is_refused(name):
    driver = Driver(name, Identity(2))
    state = driver.engine.init(SHAPES)
    for _ in range(2):
        state, _ = driver.add(state, driver.gradients())
    with pytest.raises(ValueError, match=r"step=2: the plan ends after steps=2; make a new plan"):
        driver.add(state, driver.gradients())


def test_a_state_of_another_plan_or_key_is_refused(name):
    key = Key()
    mine = Driver(name, key=key)
    for other, message in [
        (Driver(name), "key=.*made with another key"),
        (Driver(name, FAMILIES["long"], key), "strategy=.*another plan"),
        (Driver(name, key=key, cipher_rounds=12), "cipher_rounds=12: must be 20"),
    ]:
        state = other.engine.init(SHAPES)
        with pytest.raises(ValueError, match=message):
            mine.add(state, mine.gradients())
        with pytest.raises(ValueError, match=message):
            mine.engine.load_state_dict(mine.engine.init(SHAPES), other.engine.state_dict(state))
    wrong = mine.engine.state_dict(mine.engine.init({"weight": (3,)}))
    with pytest.raises(ValueError, match=r"shapes=.*another model"):
        mine.engine.load_state_dict(mine.engine.init(SHAPES), wrong)


@pytest.mark.parametrize(
    "family",
    some_long(
        ["normalized", "long", "banded_inverse", "inverse_partly_kept", "buffered", "scaled", "scaled_buffered"],
        lambda family: family in ("long", "inverse_partly_kept", "buffered", "scaled"),
    ),
)
def test_a_restarted_run_equals_the_uninterrupted_one(name, family):
    """At every kind of place: before the first step, inside a look-ahead period, and at its start."""
    strategy, key = FAMILIES[family], Key()
    expected = ENGINES[name](strategy, key, **options(family))
    driver = Driver(name, strategy, key, **options(family))
    state, saved = driver.engine.init(SHAPES), {}
    for i in range(strategy.steps):
        if i in (0, 1, 5, 6, 9, 11):
            saved[i] = driver.engine.state_dict(state)
        state, _ = driver.add(state, driver.gradients())
    again = Driver(name, strategy, key, **options(family))
    for i, checkpoint in saved.items():
        state = again.engine.load_state_dict(again.engine.init(SHAPES), checkpoint)
        for step in range(i, min(i + 20, strategy.steps)):
            state, noise = again.add(state, again.gradients())
            difference = largest_difference([noise], [expected[step]])
            assert difference == 0 if name.startswith("numpy") else difference < 1e-5


def test_a_checkpoint_holds_the_fingerprint_and_not_the_key(name):
    key = Key()
    driver = Driver(name, key=key)
    state = driver.engine.init(SHAPES)
    text = repr(driver.engine.state_dict(state)) + repr(state)
    jax = driver.name == "jax"
    raw = bytes(np.asarray(driver.engine.state_dict(state)["provenance"])) if jax else text.encode()
    assert key.fingerprint.encode() in raw
    for secret in (key.secret, key.derive("noise").secret):
        assert secret.hex() not in text
        assert secret not in raw


# NumPy has no bfloat16, and JAX no float64 outside of its 64-bit mode.
DTYPES = {"numpy": ["float16", "float64"], "torch": ["float16", "bfloat16", "float64"], "jax": ["float16", "bfloat16"]}
DTYPES |= {name: DTYPES[name.split(",")[0]] for name in PLAIN}


@pytest.mark.parametrize(("name", "dtype"), [(name, dtype) for name in DTYPES for dtype in DTYPES[name]])
def test_other_dtypes_get_the_same_noise_rounded_once(name, dtype):
    key, expected = truth("normalized")
    driver = Driver(name, key=key)
    state = driver.engine.init(SHAPES)
    rounding = {"float16": 2**-11, "bfloat16": 2**-8, "float64": 1e-6}[dtype]
    for step in expected[:4]:
        state, noise = driver.add(state, driver.gradients(dtype))
        for tensor in SHAPES:
            np.testing.assert_allclose(noise[tensor], step[tensor], rtol=rounding, atol=1e-5)


def unaligned(values):
    """An array whose numbers begin between those of the machine."""
    return np.empty(values.nbytes + 1, np.uint8)[1:].view(values.dtype).reshape(values.shape)


VIEWS = {
    "column": ((16, 4), lambda memory: memory[:, 0]),
    "every other": ((33,), lambda memory: memory[::2]),
    "backwards": ((20,), lambda memory: memory[::-1]),
    "narrow": ((16, 8), lambda memory: memory[:, :1]),
    "turned": ((5, 7), lambda memory: memory.T),
    "unaligned": ((17,), unaligned),
    "number": ((3,), lambda memory: memory[1:2].reshape(())),
}


@pytest.mark.parametrize("view", list(VIEWS))
@pytest.mark.parametrize("kernels", ["native", "numpy"])
def test_a_gradient_that_is_a_view_gets_its_noise_and_what_is_around_it_none(kernels, view):
    """Once the native kernel took views with gaps for contiguous: three of four entries of a column had no noise."""
    shape, seen = VIEWS[view]
    memory = np.zeros(shape, np.float32)
    gradient, key = seen(memory), Key()
    gradient[...] = 0
    engine, oracle = (NumpyEngine(toeplitz(6, 3), key, kernels=each) for each in (kernels, "numpy"))
    states = [each.init({"w": gradient.shape}) for each in (engine, oracle)]
    plain = np.zeros(gradient.shape, np.float32)
    for _ in range(6):
        states = [
            each.add(state, {"w": place}, 1.0)
            for each, state, place in zip((engine, oracle), states, (gradient, plain), strict=True)
        ]
        np.testing.assert_allclose(gradient, plain, atol=2e-6)
    gradient[...] = 0
    assert not memory.any()


def test_noise_is_added_to_the_gradient_in_place():
    import torch

    key, expected = Key(), None
    for name in ("numpy", "torch"):
        driver = Driver(name, key=key)
        state, gradients = driver.engine.init(SHAPES), driver.gradients()
        before = {tensor: id(value) for tensor, value in gradients.items()}
        gradients["weight"] += 3
        strided = driver.array(np.zeros((61, 50))).T
        gradients["weight"], strided = strided, gradients["weight"]
        state, noisy = driver.add(state, gradients, 0.5)
        assert gradients["weight"].shape == SHAPES["weight"]
        assert {tensor: id(value) for tensor, value in gradients.items() if tensor != "weight"} == {
            tensor: place for tensor, place in before.items() if tensor != "weight"
        }
        if expected is not None:
            assert largest_difference([noisy], [expected]) < 1e-5
        expected = noisy
    assert isinstance(strided, torch.Tensor)


def test_tensor_ids_follow_the_sorted_names(name):
    """The order of the dict does not matter."""
    key, expected = truth("normalized")
    driver = Driver(name, key=key)
    backwards = dict(reversed(SHAPES.items()))
    _, noise = driver.add(driver.engine.init(backwards), dict(reversed(driver.gradients().items())))
    assert largest_difference([noise], [{tensor: expected[0][tensor] for tensor in noise}]) < 1e-5


def test_jax_past_the_end_in_compiled_code_is_nan_never_noiseless():
    import jax

    driver = Driver("jax", Identity(2))
    state, add = driver.engine.init(SHAPES), jax.jit(driver.engine.add)
    for _ in range(2):
        gradients, state = add(state, driver.gradients(), 1.0)
        assert np.isfinite(gradients["weight"]).all()
    gradients, state = add(state, driver.gradients(), 1.0)
    assert np.isnan(gradients["weight"]).all()


def test_jax_key_can_stay_out_of_the_compiled_program():
    import jax

    driver = Driver("jax")
    state, gradients = driver.engine.init(SHAPES), driver.gradients()
    word = str(int(driver.engine.noise_key()[0]))
    inside = str(jax.jit(driver.engine.add).lower(state, gradients, 1.0).as_text())
    outside = str(jax.jit(driver.engine.add).lower(state, gradients, 1.0, driver.engine.noise_key()).as_text())
    assert word not in outside
    assert len(outside) > 1000
    assert word in inside or "dense<" in inside


def test_shapes_that_no_nonce_can_cover_are_refused(name):
    with pytest.raises(ValueError, match="at most 458"):
        Driver(name).engine.init({"huge": (2**20, 2**20)})


def test_identity_names_the_first_difference():
    engine = NumpyEngine(Identity(3))
    state = engine.init({"w": (3,)})
    state.provenance = replace(state.provenance, specification=99)
    with pytest.raises(ValueError, match="specification=99: must be 1"):
        engine.add(state, {"w": np.zeros(3, np.float32)}, 1.0)


def test_torch_noise_does_not_depend_on_the_users_threads_and_precision():
    torch = pytest.importorskip("torch")
    from noise_families import torch_noise

    threads, precision = torch.get_num_threads(), torch.get_float32_matmul_precision()
    strategy, key, shapes = toeplitz(20, 13), Key(), {"w": (300_001,)}
    expected = torch_noise(strategy, key, shapes)
    try:
        torch.set_num_threads(max(1, threads - 1))
        torch.set_float32_matmul_precision("medium")
        torch.set_default_dtype(torch.bfloat16)
        settings = torch.get_num_threads(), torch.get_float32_matmul_precision()
        engine_noise = torch_noise(strategy, key, shapes, dtype=torch.float32)
        assert (torch.get_num_threads(), torch.get_float32_matmul_precision()) == settings
    finally:
        torch.set_default_dtype(torch.float32)
        torch.set_num_threads(threads)
        torch.set_float32_matmul_precision(precision)
    assert largest_difference(engine_noise, expected) < 2e-6


@pytest.mark.parametrize("family", spread(FAMILIES, 6))
def test_the_path_of_other_devices_gives_the_same_noise(family, monkeypatch):
    """What runs on CUDA without Triton, here on the CPU: z drawn by torch, and no arrays of NumPy."""
    torch = pytest.importorskip("torch")
    from bandmf.torch.noise import normals, torch_executor
    from noise_families import torch_noise

    drawn = []

    def source(secret, cipher_rounds):
        drawn.append(normals.TorchSource(secret, cipher_rounds, torch.device("cpu")))
        return drawn[-1]

    monkeypatch.setattr(normals, "Source", source)
    monkeypatch.setattr(torch_executor, "_arrays", lambda tensor: tensor)
    key, expected = truth(family)
    noise = torch_noise(FAMILIES[family], key, kernels="torch", **options(family))
    assert largest_difference(noise, expected) < 1e-5
    assert drawn


def test_history_is_read_in_at_most_two_long_operations(monkeypatch):
    torch = pytest.importorskip("torch")
    from bandmf.torch import Engine

    calls = []
    original = torch.Tensor.addmv_
    monkeypatch.setattr(torch.Tensor, "addmv_", lambda *given: calls.append(len(given[2])) or original(*given))
    engine = Engine(toeplitz(120, 40), kernels="torch")
    state, reads = engine.init({"w": (100,), "v": (3, 5)}), []
    for _ in range(120):
        calls.clear()
        engine.add(state, {"w": torch.zeros(100), "v": torch.zeros(3, 5)}, 1.0)
        assert len(calls) <= 2
        reads.append(sum(calls))
    assert max(reads) == engine.schedule.lookahead - 1


def test_an_interrupted_step_is_not_taken_again_with_other_noise(monkeypatch):
    torch = pytest.importorskip("torch")
    from bandmf.torch import Engine
    from bandmf.torch.noise import normals

    engine = Engine(toeplitz(60, 40), kernels="torch")
    state = engine.init({"w": (100,)})
    for _ in range(14):
        engine.add(state, {"w": torch.zeros(100)}, 1.0)
    saved = engine.state_dict(state)

    def interrupt(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(normals.Drawer, "white", interrupt)
        with pytest.raises(KeyboardInterrupt):
            engine.add(state, {"w": torch.zeros(100)}, 1.0)
    for refused in (lambda: engine.add(state, {"w": torch.zeros(100)}, 1.0), lambda: engine.state_dict(state)):
        with pytest.raises(RuntimeError, match="step=14 was interrupted"):
            refused()
    again, clean = {"w": torch.zeros(100)}, {"w": torch.zeros(100)}
    engine.add(engine.load_state_dict(state, saved), again, 1.0)
    engine.add(engine.load_state_dict(engine.init({"w": (100,)}), saved), clean, 1.0)
    assert torch.equal(again["w"], clean["w"])


def test_a_gradient_whose_entries_share_memory_is_refused():
    torch = pytest.importorskip("torch")
    from bandmf.torch import Engine

    engine = Engine(toeplitz(60, 40))
    state = engine.init({"w": (10, 10)})
    with pytest.raises(ValueError, match="share memory"):
        engine.add(state, {"w": torch.zeros(10, 1).expand(10, 10)}, 1.0)
    engine.add(state, {"w": torch.zeros(10, 10)}, 1.0)


def test_an_empty_gradient_of_torch_is_taken_whatever_its_strides():
    import torch

    from bandmf.torch import Engine

    engine = Engine(toeplitz(6, 3), Key())
    empty = {"w": torch.from_numpy(np.zeros((2, 0), np.float32)).as_strided((2, 0), (0, 1))}
    assert engine.add(engine.init({"w": (2, 0)}), empty, 1.0).step == 1
