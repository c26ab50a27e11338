"""The native kernel inside XLA: layouts, versions, in place, one program, and the same noise as XLA's operations."""

from __future__ import annotations

import logging
import subprocess
from dataclasses import replace

import numpy as np
import pytest

from bandmf import Key
from bandmf.native.sources import FOLDER
from bandmf.strategies import BandedToeplitz, Identity
from native_builds import COMPILER, build, needs_compiler, needs_library
from noise_families import FAMILIES, jax_noise, largest_difference, options, oracle_noise, toeplitz
from sweeps import spread

jax = pytest.importorskip("jax")
jnp = jax.numpy
pytestmark = needs_library
LARGE = {"w": (100_000,)}

# Our struct: XLA's, and {our field: XLA's field} where names differ or only some fields are declared.
LAYOUTS = {
    "xla_extension": ("XLA_FFI_Extension_Base", ["type", "next"]),
    "xla_version": ("XLA_FFI_Api_Version", ["major_version", "minor_version"]),
    "xla_metadata": ("XLA_FFI_Metadata", ["api_version", "traits"]),
    "xla_metadata_extension": ("XLA_FFI_Metadata_Extension", ["extension_base", "metadata"]),
    "xla_error_create": ("XLA_FFI_Error_Create_Args", ["message", "errc"]),
    "xla_api": ("XLA_FFI_Api", ["api_version", "internal_api", "error_create XLA_FFI_Error_Create"]),
    "xla_buffer": ("XLA_FFI_Buffer", ["dtype", "data", "rank", "dims"]),
    "xla_values": ("XLA_FFI_Args", ["size", "types", "values args"]),
    "xla_attributes": ("XLA_FFI_Attrs", ["size", "types", "names", "values attrs"]),
    "xla_array": ("XLA_FFI_Array", ["dtype", "size", "data"]),
    "xla_call": (
        "XLA_FFI_CallFrame",
        ["api", "context ctx", "stage", "arguments args", "results rets", "attributes attrs"],
    ),
}
CONSTANTS = {
    "XLA_MAJOR": "XLA_FFI_API_MAJOR", "XLA_MINOR": "XLA_FFI_API_MINOR",
    "XLA_METADATA": "XLA_FFI_Extension_Metadata", "XLA_EXECUTE": "XLA_FFI_ExecutionStage_EXECUTE",
    "XLA_ARRAY": "XLA_FFI_AttrType_ARRAY", "XLA_INVALID_ARGUMENT": "XLA_FFI_Error_Code_INVALID_ARGUMENT",
    "XLA_RESOURCE_EXHAUSTED": "XLA_FFI_Error_Code_RESOURCE_EXHAUSTED",
    **{f"XLA_{name}": f"XLA_FFI_DataType_{name}" for name in ("S32", "S64", "U32", "F16", "F32", "F64", "BF16")},
}  # fmt: skip


def comparison() -> str:
    """A program that does not compile unless the layouts that XLA's header declares are those of xla.h."""
    lines = ['#include "xla/ffi/api/c_api.h"', '#include "xla.h"']
    for ours, (theirs, fields) in LAYOUTS.items():
        for field in fields:
            mine, other = (field.split() * 2)[:2]
            same = f"offsetof(struct {ours}, {mine}) == offsetof({theirs}, {other})"
            size = f"sizeof(((struct {ours} *)0)->{mine}) == sizeof((({theirs} *)0)->{other})"
            lines += [f'_Static_assert({same}, "{ours} {mine}");', f'_Static_assert({size}, "{ours} {mine}");']
    for ours, theirs in CONSTANTS.items():
        # Minor versions only add; XLA judges how old a handler may be.
        relation = "<=" if ours == "XLA_MINOR" else "=="
        lines.append(f'_Static_assert((int){ours} {relation} (int){theirs}, "{ours}");')
    return "\n".join(lines)


@needs_compiler
def test_layouts_are_those_of_the_header(tmp_path):
    program = comparison()
    assert compiles(program, tmp_path) == ""
    for planted in ("xla_call, stage", "xla_buffer, rank"):
        ours, field = planted.split(", ")
        wrong = program.replace(f"offsetof(struct {ours}, {field})", f"8 + offsetof(struct {ours}, {field})")
        assert f"{ours} {field}" in compiles(wrong, tmp_path)


def compiles(program: str, folder) -> str:
    (folder / "layouts.c").write_text(program)
    include = [f"-I{jax.ffi.include_dir()}", f"-I{FOLDER}"]
    command = [str(COMPILER), "-std=gnu11", "-fsyntax-only", *include, str(folder / "layouts.c")]
    return subprocess.run(command, capture_output=True, text=True, timeout=60).stderr


@needs_compiler
def test_a_handler_of_another_version_is_refused_and_xla_takes_over(tmp_path, monkeypatch, caplog):
    from bandmf.jax import Engine
    from bandmf.jax.noise import native_executor

    other = build(tmp_path / "other", "xla.h", "XLA_MAJOR = 0", "XLA_MAJOR = 7")
    monkeypatch.setattr(native_executor, "TARGET", "bandmf_of_another_version")
    monkeypatch.setattr(native_executor, "library", lambda: other)
    native_executor.registered.cache_clear()
    try:
        with caplog.at_level(logging.INFO, "bandmf"):
            engine, key = Engine(Identity(2), Key(bytes(32))), Key(bytes(32))
            noise, _ = engine.add(engine.init({"w": (9,)}), {"w": jnp.zeros(9)}, 1.0)
        with pytest.raises(RuntimeError, match="kernels='native'"):
            Engine(Identity(2), kernels="native")
    finally:
        native_executor.registered.cache_clear()
    assert len(caplog.records) == 1
    assert "native library is not used in JAX" in caplog.text
    expected = oracle_noise(Identity(2), key, {"w": (9,)})[0]
    assert largest_difference([{"w": np.asarray(noise["w"])}], [expected]) < 1e-5


@pytest.mark.parametrize(
    "family", spread(["normalized", "banded_inverse", "inverse_partly_kept", "buffered", "identity", "scaled"], 3)
)
def test_operations_of_xla_add_the_same_noise(family):
    strategy, key = FAMILIES[family], Key()
    noise = jax_noise(strategy, key, kernels="xla", **options(family))
    assert largest_difference(noise, oracle_noise(strategy, key)) < 1e-5


def running(bands: int = 20, shapes=LARGE, **options):
    """A jitted step with everything donated, its arguments, and the engine."""
    from bandmf.jax import Engine

    engine = Engine(toeplitz(60, bands), Key(bytes(32)), **options)
    add = jax.jit(lambda g, s, key: engine.add(s, g, 1.0, key), donate_argnums=(0, 1))
    return engine, add, {n: jnp.zeros(shape) for n, shape in shapes.items()}, engine.init(shapes)


def test_a_step_is_one_program_in_place_without_a_vector_of_temporary_memory():
    engine, add, gradients, state = running()
    assert engine.schedule.lookahead > 1
    compiled = add.lower(gradients, state, engine.noise_key()).compile()
    memory, vector = compiled.memory_analysis(), 4 * LARGE["w"][0]
    assert memory.temp_size_in_bytes < 10_000
    assert memory.alias_size_in_bytes >= vector * (1 + engine.schedule.vectors)
    for _ in range(engine.schedule.lookahead + 3):
        gradients, state = add(gradients, state, engine.noise_key())
    assert add._cache_size() == 1
    held = sum(leaf.size for leaf in jax.tree.leaves((state.history, state.prepared)))
    assert held == engine.schedule.vectors * LARGE["w"][0]


def test_coefficients_are_no_constants_of_the_program():
    """A strategy with a row of its own for every step: as constants they would be a megabyte of text."""
    from bandmf.jax import Engine

    engine = Engine(FAMILIES["banded"])
    many = Engine(BandedToeplitz(1 / np.sqrt(np.arange(1, 401)), 2000))
    texts = []
    for one in (engine, many):
        state = one.init(LARGE)
        add = jax.jit(lambda s, g, key, one=one: one.add(s, g, 1.0, key))
        texts.append(add.lower(state, {"w": jnp.zeros(LARGE["w"])}, one.noise_key()).as_text())
    assert abs(len(texts[0]) - len(texts[1])) < 1000


def test_a_scan_over_steps_is_the_same_and_copies_no_history():
    engine, add, _, state = running()
    key, noise = engine.noise_key(), []

    def body(state, _):
        noisy, state = engine.add(state, {"w": jnp.zeros(LARGE["w"])}, 1.0, key)
        return state, noisy["w"][:50]

    scan = jax.jit(lambda state: jax.lax.scan(body, state, None, length=30), donate_argnums=0)
    fresh = engine.init(LARGE)
    temporary = scan.lower(fresh).compile().memory_analysis().temp_size_in_bytes
    assert temporary < 3 * 4 * LARGE["w"][0]  # the zeros and the noisy gradient
    _, together = scan(fresh)
    for _ in range(30):
        noisy, state = add({"w": jnp.zeros(LARGE["w"])}, state, key)
        noise.append(np.asarray(noisy["w"][:50]))
    assert np.array_equal(together, np.stack(noise))


def test_history_and_step_alone_bring_a_state_back():
    """Whoever puts them into a fresh state, at any place in a look-ahead period: sums are prepared again."""
    engine, add, _, state = running(shapes={"w": (3000,)})
    key, zeros = engine.noise_key(), {"w": (3000,)}
    kept, noise = [], []
    for _ in range(25):
        kept.append(jax.tree.map(np.asarray, (state.step, state.history)))
        noisy, state = add({"w": jnp.zeros(3000)}, state, key)
        noise.append(np.asarray(noisy["w"]))
    for i in (0, 1, 5, engine.schedule.lookahead, 19, 24):
        step, history = jax.tree.map(jnp.array, kept[i])
        again = replace(engine.init(zeros), step=step, history=history)
        noisy, _ = add({"w": jnp.zeros(3000)}, again, key)
        assert np.array_equal(noisy["w"], noise[i])


def test_a_state_of_an_engine_that_looks_less_far_is_refused():
    from bandmf.jax import Engine

    key = Key()
    far, near = (Engine(toeplitz(60, 20), key, lookahead=T) for T in (4, 1))
    with pytest.raises(ValueError, match="no prepared sums for this engine"):
        far.add(near.init(LARGE), {"w": jnp.zeros(LARGE["w"])}, 1.0)
    with pytest.raises(ValueError, match="lookahead=4"):
        Engine(toeplitz(60, 20), kernels="xla", lookahead=4)


def test_wrong_arguments_are_an_error_and_not_a_crash():
    from bandmf.jax.noise import native_executor

    assert native_executor.registered()
    numbers = jnp.int32(0), jnp.int32(-1), jnp.zeros(8, jnp.uint32), jnp.float32(1)
    table = jnp.zeros(1, jnp.int32), jnp.ones((1, 1)), jnp.zeros((1, 0))
    places = jnp.zeros(100), jnp.zeros((0, 100)), jnp.zeros((0, 100))
    settings = np.array([100, 0, 20, 0, 5, 1], np.int64)

    def call(arguments, settings):
        made = jax.ffi.ffi_call(native_executor.TARGET, [jax.ShapeDtypeStruct(p.shape, p.dtype) for p in places])
        return jax.block_until_ready(made(*arguments, settings=settings))

    good = *numbers, *table, jnp.zeros(0), jnp.zeros((2, 1), jnp.uint32), *places
    assert np.abs(call(good, settings)[0]).max() > 0
    for at, wrong in {2: jnp.zeros(7, jnp.uint32), 3: jnp.int32(1), 8: jnp.zeros((2, 2), jnp.uint32)}.items():
        with pytest.raises(Exception, match="bandmf: "):
            call((*good[:at], wrong, *good[at + 1 :]), settings)
    for wrong in (settings[:3], settings.astype(np.int32), settings * [2, 1, 1, 1, 1, 1]):
        with pytest.raises(Exception, match="bandmf: "):
            call(good, wrong)
