"""The attacks of this folder on two ranks: every rank refuses them, and none waits for the other."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from rank_attacks import DIFFERENT

import children

SENTENCES = {
    "copied": "was moved, copied or restored",
    "tag": "its tag does not fit",
    "changed": "__1_0.distcp: was changed after it was written",
    "fork": "a fork of it",
}


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    result = children.run(Path(__file__).with_name("rank_attacks.py"), folder)
    assert result.returncode == 0, result.stderr[-3000:]
    return [json.loads((folder / f"found-{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
@pytest.mark.parametrize("attack", SENTENCES)
def test_every_rank_refuses(kind, attack, found):
    for rank in found:
        assert SENTENCES[attack] in rank[f"{kind} {attack}"]


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_a_copy_on_two_ranks_is_a_run_of_its_own(kind, found):
    assert found[0][f"{kind} copy"] == found[1][f"{kind} copy"] == [0, "77" * 16]


@pytest.mark.parametrize("name", DIFFERENT)
def test_ranks_with_different_settings_do_not_train_together(name, found):
    """With another clip norm than rank 0 a rank would add more than the noise was planned for."""
    ours, theirs = DIFFERENT[name]
    for rank in found:
        assert rank[f"different {name}"] == (
            f"{name}={theirs!r}: rank 1 has this, rank 0 has {ours!r}; give all ranks the same"
        )
