"""Checkpoints through Orbax, on any mesh and number of processes, and on another one later.

How the folder of a checkpoint appears, whole or not at all, and is sealed: see bandmf.ledger.checkpoints.

Guarantees: a run that is killed at any moment and goes on releases the same sums and ends with the same weights as one
that was not (on the CPU and the same devices bit for bit); the key is not in a checkpoint, the noise only encrypted;
nothing of a checkpoint is read before its digest is verified; only its owner can read it.
"""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bandmf import _check
from bandmf._files import create_secret, sync_folder
from bandmf._interrupts import uninterrupted
from bandmf.jax.noise.engine import State as Noise
from bandmf.jax.random_keys import as_keys_like, as_words
from bandmf.jax.training.state import Held
from bandmf.ledger import checkpoints, seal
from bandmf.ledger.run_folder import CHECKPOINTS, Opened
from bandmf.noise import sealing
from bandmf.noise.provenance import Provenance
from bandmf.noise.region import Region

ARRAYS, CONTENTS = "arrays", "contents.json"
_HISTORY = "history of "


class Checkpoints:
    """Those of one run."""

    def __init__(self, folder: Path, opened: Opened) -> None:
        self._folder, self._opened = folder / CHECKPOINTS, opened

    def save(self, held: Held) -> Path:
        """Write a checkpoint of what is held; where nothing was released since the last one, that is it.

        Ctrl-C waits for its end: threads of Orbax would go on in a folder that the next one has.
        """
        with uninterrupted():
            return self._save(held)

    def _save(self, held: Held) -> Path:
        folder, first = self._folder, self._opened.ranks.on_first
        name = self._opened.on_ledger(lambda ledger: f"{ledger.number:010d}")
        target, draft = folder / name, folder / f".writing-{name}"
        if first(target.exists):
            return target
        first(lambda: checkpoints.prepare(folder, draft))
        salt, step = first(sealing.fresh_salt), int(held.noise.step)
        arrays, history = _arrays(held), _history(held.noise)
        secret = sealing.secret_of(self._opened.run_key, step, salt)
        sealed = {each: _xor(held.noise, each, secret) for each in history}
        written = {f"{k:05d}": leaf for k, leaf in enumerate((arrays | sealed).values()) if leaf.size}
        with _orbax() as orbax:
            orbax.save((draft / ARRAYS).absolute(), written)
            orbax.wait_until_finished()
        contents = {
            "salt": salt, "noise": held.noise.provenance.dumps(),
            "shapes": {each: list(leaf.shape) for each, leaf in (arrays | history).items()},
            "kinds": {each: str(leaf.dtype) for each, leaf in arrays.items()},
        }  # fmt: skip
        first(lambda: create_secret(draft / CONTENTS, json.dumps(contents).encode()))
        names = first(lambda: _on_disk(draft))
        checkpoints.add_seal(draft, names, step, self._opened)
        first(lambda: checkpoints.publish(draft, target))
        return target

    def restore(self, held: Held) -> Held | None:
        """What was held at the last checkpoint, laid out like `held`; None if there is no checkpoint.

        Of a copied run only the weights and the state of the optimizer are taken: its noise and steps are new.
        """
        found = self._opened.ranks.on_first(lambda: seal.checkpoints(self._folder))
        if not found:
            return None
        opened = self._opened
        known = checkpoints.verify(found[-1], opened)
        contents = json.loads((found[-1] / CONTENTS).read_bytes())
        arrays, history = _arrays(held), _history(held.noise)
        _check_same(contents, arrays, history)
        read = _read(found[-1], list(contents["shapes"]), arrays | history)
        noise = held.noise
        if known.run_id == opened.run_id:
            noise.provenance.expect(Provenance.loads(contents["noise"]), shapes=True)
            # In the place of the old ones, on every device; what was prepared is computed again.
            step, refreshed = noise.step * 0 + known.step, jnp.asarray(noise.refreshed) * 0 - 1
            sealed = {name: read[_HISTORY + name] for name in noise.history}
            noise = replace(noise, history=sealed, step=step, refreshed=refreshed)
            secret = sealing.secret_of(opened.run_key, known.step, contents["salt"])
            plain = {name: _xor(noise, _HISTORY + name, secret) for name in noise.history}
            noise = replace(noise, history=plain)
        trained, optimizer = _with_arrays(held, read)
        return Held(trained, optimizer, noise)


# --- arrays by name -------------------------------------------------------------------------------------


def _tree(held: Held) -> dict[str, Any]:
    return {"weights": held.trained, "optimizer": held.optimizer}


def _arrays(held: Held) -> dict[str, Any]:
    """Weights and the state of the optimizer."""
    leaves = jax.tree_util.tree_leaves_with_path(_tree(held))
    return {jax.tree_util.keystr(path): as_words(leaf) for path, leaf in leaves}


def _with_arrays(held: Held, found: dict[str, Any]) -> tuple[Any, Any]:
    """The same, with other numbers."""
    tree = jax.tree_util.tree_map_with_path(
        lambda path, leaf: as_keys_like(found[jax.tree_util.keystr(path)], leaf), _tree(held)
    )
    return tree["weights"], tree["optimizer"]


def _history(noise: Noise) -> dict[str, Any]:
    return {_HISTORY + name: vectors for name, vectors in noise.history.items()}


def _check_same(contents: dict[str, Any], arrays: dict[str, Any], history: dict[str, Any]) -> None:
    """Refuse what was saved of another model or optimizer."""
    shapes, kinds = contents["shapes"], contents["kinds"]
    others = {*shapes} ^ {*arrays, *history}
    if others:
        name = min(others)
        where = "is in the checkpoint but not in this run" if name in shapes else "is not in the checkpoint"
        raise _check.fail(
            "weights or optimizer", name, where, "give init weights of the same structure, and Training the same "
            "optimizer and trainable=, as when the run began",
        )  # fmt: skip
    for name, leaf in (arrays | history).items():
        saved = tuple(shapes[name])
        # A history that lies flat may have another padding, on another mesh.
        if len(saved) != leaf.ndim or (name in arrays and saved != leaf.shape):
            raise _check.fail(
                f"shape of {name}", leaf.shape, f"the checkpoint has {saved}", "give init weights of these shapes"
            )
        if name in arrays and kinds[name] != str(leaf.dtype):
            raise _check.fail(
                f"dtype of {name}",
                str(leaf.dtype),
                f"the checkpoint has {kinds[name]}",
                "give init weights of these types",
            )


# --- the disk -------------------------------------------------------------------------------------------


def check_installed() -> None:
    """Before a run begins that could not be saved."""
    _orbax().close()


def _orbax() -> Any:
    try:
        import orbax.checkpoint as ocp
    except ImportError:
        raise ImportError("checkpoints need orbax-checkpoint: pip install 'bandmf[jax]'") from None
    return ocp.StandardCheckpointer()


def _read(folder: Path, names: list[str], wanted: dict[str, Any]) -> dict[str, Any]:
    """These arrays, each laid out as it is given here."""
    places = {name: f"{k:05d}" for k, name in enumerate(names)}
    like = {
        places[name]: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding)
        for name, leaf in wanted.items()
        if leaf.size
    }
    with _orbax() as orbax:
        found = orbax.restore((folder / ARRAYS).absolute(), like, strict=False)
    return {name: _as_free(found.get(places[name], leaf), leaf) for name, leaf in wanted.items()}


def _as_free(found: Any, like: Any) -> Any:
    """An array that is bound to its device only where the other is: a program is another one for arrays that are."""
    return found if like.committed else jnp.asarray(np.asarray(found))


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


def _xor(noise: Noise, name: str, secret: bytes) -> Any:
    """The history of one tensor encrypted, or decrypted, each device's part by its own process."""
    own = name.removeprefix(_HISTORY)
    vectors, tensor = noise.history[own], noise.provenance.tensors[own]
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
