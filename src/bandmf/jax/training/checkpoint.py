"""Checkpoints through Orbax, on any mesh and number of processes, and on another one later.

How the folder of a checkpoint appears, whole or not at all, and is sealed: see bandmf.ledger.checkpoints.

Guarantees: a run that is killed at any moment and restored releases the same sums and ends with the same weights as one
that was not (on the CPU and the same devices bit for bit); the key is not in a checkpoint, the noise only encrypted;
nothing of a checkpoint is read before its digest is verified; only its owner can read it.
"""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from bandmf import _check
from bandmf._files import create_secret, sync_folder
from bandmf.jax.privatize import PrivateState
from bandmf.jax.random_keys import as_keys_like, as_words
from bandmf.jax.training import host_values
from bandmf.ledger import checkpoints, seal
from bandmf.ledger.run_folder import CHECKPOINTS
from bandmf.noise import sealing
from bandmf.noise.provenance import Provenance
from bandmf.noise.region import Region
from bandmf.randomness.key import Key

if TYPE_CHECKING:
    from bandmf.jax.training.run import Run

ARRAYS, HOST, CONTENTS = "arrays", "host", "contents.json"
_PREFIX = "history of "


def save(run: Run, tree: Any) -> Path:
    """Write a checkpoint."""
    folder, first = _folder(run), run._processes.on_first
    name_of_step = run._on_ledger(lambda ledger: f"{ledger.number:010d}")
    target, draft = folder / name_of_step, folder / f".writing-{name_of_step}"
    if first(target.exists):
        _check_same(run, tree, name_of_step)
        return target  # nothing was released since
    first(lambda: checkpoints.prepare(folder, draft))
    salt = first(sealing.fresh_salt)
    leaves, state = _parts(tree)
    arrays, history = _on_devices(leaves), _history(state)
    packed = {name: host_values.packed(leaf, name) for name, leaf in leaves.items() if name not in arrays}
    weak = [
        name for name in arrays if getattr(leaves[name], "weak_type", False) and leaves[name].dtype != bool
    ]
    for name in weak:
        host_values.check_weak(leaves[name], name)
    written = [*arrays.values(), *(_xor(state, name, run._key, salt) for name in history)]
    if numbered := {f"{k:05d}": leaf for k, leaf in enumerate(written) if leaf.size}:
        with _orbax() as orbax:
            orbax.save((draft / ARRAYS).absolute(), numbered)
            orbax.wait_until_finished()
    contents = {
        "salt": salt, "noise": state.noise.provenance.dumps(), "weak": weak,
        "shapes": {name: list(leaf.shape) for name, leaf in (arrays | history).items()},
        "kinds": {name: str(leaf.dtype) for name, leaf in arrays.items()},
        "host": {name: each.description for name, each in packed.items()},
    }  # fmt: skip
    first(lambda: create_secret(draft / HOST, b"".join(each.content for each in packed.values())))
    first(lambda: create_secret(draft / CONTENTS, json.dumps(contents).encode()))
    names = first(lambda: _on_disk(draft))
    checkpoints.add_seal(draft, names, run.steps_taken, run.ledger, run._key, run._processes)
    remembered = _remembered(run, tree)
    first(lambda: checkpoints.publish(draft, target))
    run._saved = name_of_step, remembered
    return target


def _remembered(run: Run, tree: Any) -> tuple[Any, ...]:
    """What is in a tree, to compare another with."""
    leaves, _ = _parts(tree)
    known = {
        name: host_values.fingerprint(leaf, name) if host_values.is_on_host(leaf) else as_words(leaf)
        for name, leaf in leaves.items()
    }
    arrays = {name: value for name, value in known.items() if hasattr(value, "dtype")}
    kinds = {name: (value.shape, str(value.dtype)) for name, value in arrays.items()}
    others = {name: value for name, value in known.items() if name not in arrays}
    return kinds, others, run._secrets.digests(arrays)


def _check_same(run: Run, tree: Any, name: str) -> None:
    """Refuse a second checkpoint of the same step, if another tree is known to be in the first."""
    if run._saved is None or run._saved[0] != name:
        return
    if run._saved[1] != _remembered(run, tree):
        raise RuntimeError(
            f"step={run.steps_taken}: was saved already, with another tree; a step has one checkpoint: put all into "
            "one tree, such as (weights, average, state), and save what was changed since after the next step"
        )


def restore(run: Run, tree: Any, check: Callable[[Any], Any]) -> Any:
    """The last checkpoint, laid out like `tree`; `tree` itself if there is none, and it passes the check."""
    found = run._processes.on_first(lambda: seal.checkpoints(_folder(run)))
    if not found:
        given = int(_parts(tree)[1].step)
        if given != run.steps_taken:
            raise _check.fail(
                "state.step", given, f"nothing was saved yet, and this run has taken {run.steps_taken} steps",
                "go on with what run.release returned last, or open the run again and begin as it began",
            )  # fmt: skip
        if run.steps_taken:
            check(tree)  # it would be remembered as noise that is right
        return tree
    known = checkpoints.verify(found[-1], run.run_id, run.ledger, run._processes)
    contents = {"host": {}, "weak": []} | json.loads((found[-1] / CONTENTS).read_bytes())
    leaves, state = _parts(tree)
    own, history = known.run_id == run.run_id, _history(state)
    _check_names(contents, leaves, history)
    # What was saved decides what comes back, and the tree where it lies.
    arrays = {name: as_words(jnp.asarray(leaves[name])) for name in contents["kinds"]}
    _check_shapes(contents["shapes"], arrays, history)
    _check_kinds(contents["kinds"], arrays)
    read = _read(found[-1], contents["shapes"], arrays | history)
    restored = _from_host(found[-1], contents["host"], leaves) | {
        name: _as_saved(read[name], leaves[name], name in contents["weak"]) for name in arrays
    }
    if own:
        provenance = Provenance.loads(contents["noise"])
        state.noise.provenance.expect(provenance, shapes=True)
        noise = replace(state.noise, history={name: read[_PREFIX + name] for name in state.noise.history})
        # In the place of the old ones, on every device; what was prepared is computed again.
        step, refreshed = noise.step * 0 + known.step, jnp.asarray(noise.refreshed) * 0 - 1
        noise = replace(noise, step=step, refreshed=refreshed)
        own_run = state.run * 0 + run._secrets.run if known.step else state.run
        state = replace(state, noise=noise, run=own_run)
        plain = {
            name: _xor(state, _PREFIX + name, run._key, contents["salt"]) for name in state.noise.history
        }
        state = replace(state, noise=replace(state.noise, history=plain))
        run.steps_taken = known.step
    # Otherwise this is a copy, which begins a run of its own: weights are a start like any other, noise and steps new.
    result = _put_together(tree, restored, state)
    run._saved = (found[-1].name, _remembered(run, result)) if own else None
    return result


def warn_if_forgotten(run: Run) -> None:
    """Say that a run begins again, where it could go on."""
    if run.folder is None or run.steps_taken:
        return
    if found := run._processes.on_first(lambda: seal.checkpoints(_folder(run))):
        warnings.warn(
            f"{run.folder}: has a checkpoint ({found[-1].name}), and run.restore was not called, so the run repeats "
            "all steps from the first one; call weights, state = run.restore((weights, state)) before",
            stacklevel=4,
        )


# --- a tree and its leaves ------------------------------------------------------------------------------


def _is_state(node: Any) -> bool:
    return isinstance(node, PrivateState)


def _parts(tree: Any) -> tuple[dict[str, Any], PrivateState]:
    """All leaves by name, but for those of the noise; and its state."""
    leaves, states = {}, []
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree, is_leaf=_is_state):
        if _is_state(leaf):
            states.append(leaf)
        else:
            leaves[jax.tree_util.keystr(path)] = leaf
    (state,) = states
    return leaves, state


def check_arrays(tree: Any) -> None:
    """Refuse a tree of shapes, or with texts or functions in it, before anything is done with it."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        if host_values.is_on_host(leaf):
            host_values.check(leaf, jax.tree_util.keystr(path))


def _put_together(tree: Any, leaves: dict[str, Any], state: PrivateState) -> Any:
    """A tree like this one."""

    def new(path: Any, leaf: Any) -> Any:
        return state if _is_state(leaf) else leaves[jax.tree_util.keystr(path)]

    return jax.tree_util.tree_map_with_path(new, tree, is_leaf=_is_state)


def _history(state: PrivateState) -> dict[str, Any]:
    for vectors in state.noise.history.values():
        if not isinstance(vectors, jax.Array):
            raise _check.fail(
                "tree", f"noise as {type(vectors).__name__}", "must be the state as it is on its devices",
                "give run.save the state that run.release returned, without jax.device_get",
            )  # fmt: skip
    return {_PREFIX + name: vectors for name, vectors in state.noise.history.items()}


def _on_devices(leaves: dict[str, Any]) -> dict[str, Any]:
    """The arrays of JAX among them."""
    return {name: as_words(leaf) for name, leaf in leaves.items() if not host_values.is_on_host(leaf)}


def _as_saved(found: Any, like: Any, is_weak: bool) -> Any:
    return host_values.weakened(found) if is_weak else as_keys_like(found, like)


# --- the disk -------------------------------------------------------------------------------------------


def _folder(run: Run) -> Path:
    if run.folder is None:
        raise ValueError("folder=None: give Run a folder to save and restore")
    return run.folder / CHECKPOINTS


def _orbax() -> Any:
    try:
        import orbax.checkpoint as ocp
    except ImportError:
        raise ImportError("checkpoints need orbax-checkpoint: pip install 'bandmf[jax]'") from None
    return ocp.StandardCheckpointer()


def _read(folder: Path, shapes: dict[str, Any], wanted: dict[str, Any]) -> dict[str, Any]:
    """These arrays, each laid out as it is given here."""
    places = {name: f"{k:05d}" for k, name in enumerate(shapes)}
    like = {
        places[name]: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding)
        for name, leaf in wanted.items()
        if leaf.size
    }
    if not like:
        return wanted
    with _orbax() as orbax:
        found = orbax.restore((folder / ARRAYS).absolute(), like, strict=False)
    return {name: _as_free(found.get(places[name], leaf), leaf) for name, leaf in wanted.items()}


def _as_free(found: Any, like: Any) -> Any:
    """An array that is bound to its device only where the other is: a program is another one for arrays that are."""
    return found if like.committed else jnp.asarray(np.asarray(found))


def _from_host(folder: Path, descriptions: dict[str, Any], leaves: dict[str, Any]) -> dict[str, Any]:
    """The values of the host, of the types that they had."""
    content, begin, values = (folder / HOST).read_bytes() if descriptions else b"", 0, {}
    for name, description in descriptions.items():
        end = begin + host_values.size(description)
        values[name] = host_values.as_given(
            host_values.unpacked(description, content[begin:end]), leaves[name], name
        )
        begin = end
    return values


def _check_names(contents: dict[str, Any], leaves: dict[str, Any], history: dict[str, Any]) -> None:
    saved, given = {*contents["shapes"], *contents["host"]}, leaves.keys() | history.keys()
    if missing := sorted(given - saved):
        raise _check.fail(
            "tree", missing[0], "is not in the checkpoint, which is of another model or optimizer"
        )
    if beyond := sorted(saved - given):
        raise _check.fail(
            "tree", beyond[0], f"is in the checkpoint but not in the tree ({len(beyond)} such leaves)",
            "give a tree of the same structure and optimizer as the one that was saved",
        )  # fmt: skip


def _check_shapes(saved: dict[str, Any], arrays: dict[str, Any], history: dict[str, Any]) -> None:
    """Refuse what is of another model; a history that lies flat may have another padding, on another mesh."""
    for name, leaf in (arrays | history).items():
        fits = len(saved[name]) == leaf.ndim and (name in history or tuple(saved[name]) == leaf.shape)
        if not fits:
            raise _check.fail(
                f"shape of {name}", leaf.shape, f"the checkpoint has {tuple(saved[name])}",
                "give a model of the same shapes, and privatize a mesh= where it had one (the history lies flat then)",
            )  # fmt: skip


def _check_kinds(saved: dict[str, str], leaves: dict[str, Any]) -> None:
    """Refuse to make other numbers of those that were saved."""
    for name, leaf in leaves.items():
        if saved[name] != str(leaf.dtype):
            raise _check.fail(
                f"dtype of {name}", str(leaf.dtype), f"the checkpoint has {saved[name]}",
                "give a tree of that type, and convert it after run.restore",
            )  # fmt: skip


def _on_disk(draft: Path) -> list[str]:
    """The files of a checkpoint, after they are written for good."""
    files = [path for path in draft.rglob("*") if path.is_file()]
    for path in files:
        with open(path, "rb") as file:
            os.fsync(file.fileno())
    for folder in {path.parent for path in files}:
        sync_folder(folder)
    return sorted(str(path.relative_to(draft)) for path in files)


# --- the noise ------------------------------------------------------------------------------------------


def _xor(state: PrivateState, name: str, key: Key, salt: str) -> Any:
    """The history of one tensor encrypted, or decrypted, each device's part by its own process."""
    own = name.removeprefix(_PREFIX)
    vectors, tensor = state.noise.history[own], state.noise.provenance.tensors[own]
    secret = sealing.secret_of(key, int(state.step), salt)
    parts: dict[Any, Any] = {}
    for shard in vectors.addressable_shards:
        spans = [part.indices(size) for part, size in zip(shard.index, vectors.shape, strict=True)]
        if tuple(spans) not in parts:
            part = np.array(shard.data)
            region = Region.box(vectors.shape[1:], [begin for begin, _, _ in spans[1:]], part.shape[1:])
            sealing.encrypt(part, region, tensor, secret)
            parts[tuple(spans)] = part

    def part_at(index: tuple[slice, ...] | None) -> Any:
        assert index is not None
        return parts[tuple(one.indices(size) for one, size in zip(index, vectors.shape, strict=True))]

    return _as_free(jax.make_array_from_callback(vectors.shape, vectors.sharding, part_at), vectors)
