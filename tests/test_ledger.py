"""The ledger: released once, replayed only the same, on the disk before anything else."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from weakref import WeakSet

import pytest

from bandmf import Key
from bandmf.ledger import Ledger, checks
from bandmf.ledger.file import LockedLines

KEY = Key(bytes(32))
RUN = {
    "plan": "p",
    "steps": 5,
    "key": KEY.fingerprint,
    "clip_norm": 1.0,
    "examples": 100,
    "sampler": {"kind": "CyclicPoisson", "parts": 4},
}


def open_ledger(path, **changes):
    return Ledger(path, KEY, {**RUN, **changes})


@pytest.fixture
def path(tmp_path):
    return tmp_path / "ledger.jsonl"


def write(path, steps):
    ledger = open_ledger(path)
    for step in range(steps):
        assert ledger.release(step, b"batch %d" % step, b"sum %d" % step) == "step"
    ledger.close()


def test_a_step_is_released_once_and_the_same_sum_again_is_a_replay(path):
    write(path, 3)
    ledger = open_ledger(path)
    assert (ledger.steps_released, ledger.replays) == (3, 0)
    assert ledger.release(1, b"batch 1", b"sum 1") == "replay"
    assert ledger.release(2, b"batch 2", b"sum 2") == "replay"
    assert ledger.release(3, b"batch 3", b"sum 3") == "step"
    ledger.close()
    again = open_ledger(path)
    assert (again.steps_released, again.replays, again.entries) == (4, 2, 7)


@pytest.mark.parametrize("change", ["removed", "renamed", "folder renamed", "replaced"])
def test_a_file_that_is_not_where_it_was_gets_no_line(path, tmp_path, change):
    """Checkpoints would go into another folder than the ledger."""
    path = tmp_path / "run" / "ledger.jsonl"
    path.parent.mkdir()
    ledger = open_ledger(path)
    ledger.release(0, b"batch", b"sum")
    if change == "folder renamed":
        path.parent.rename(tmp_path / "other")
    elif change == "renamed":
        path.rename(tmp_path / "other.jsonl")
    else:
        contents = path.read_bytes()
        path.unlink()
        if change == "replaced":
            path.write_bytes(contents)
    with pytest.raises(RuntimeError, match="was removed or moved while the run was going on"):
        ledger.release(1, b"batch", b"sum")


@pytest.mark.parametrize(
    ("batch", "total", "what"), [(b"batch 1", b"other", "sum of gradients"), (b"other", b"sum 1", "batch of examples")]
)
def test_another_sum_or_batch_is_refused(path, batch, total, what):
    write(path, 3)
    ledger = open_ledger(path)
    with pytest.raises(ValueError, match=f"step=1: was released before with another {what}; two results"):
        ledger.release(1, batch, total)
    assert ledger.entries == 4  # nothing was written


def test_digests_do_not_show_that_two_steps_are_equal(path):
    """Equal ones would be those of empty batches: the real sizes of batches must stay secret."""
    ledger = open_ledger(path)
    ledger.release(0, b"", b"")
    ledger.release(1, b"", b"")
    ledger.reserve(2, 1, b"")
    ledger.finish(2, [(b"", b"")])
    ledger.reserve(3, 2, b"")
    entries = [json.loads(line) for line in path.read_text().splitlines()]
    digests = [entry[name] for entry in entries for name in ("batch", "sum", "inputs") if name in entry]
    assert len(set(digests)) == len(digests) == 8


def test_a_ledger_of_another_version_is_refused(path):
    ledger = Ledger(None, KEY)
    first = json.dumps({"kind": "run", "run_id": ledger.run_id, **RUN}).encode()
    path.write_bytes(ledger._line(json.loads(first)) + b"\n")
    with pytest.raises(ValueError, match=r"another version of bandmf \(format 1, not 2\); finish its run"):
        open_ledger(path)


def test_steps_are_released_in_order_and_not_past_the_plan(path):
    write(path, 3)
    ledger = open_ledger(path)
    with pytest.raises(ValueError, match="step=4: must be at most 3"):
        ledger.release(4, b"", b"")
    for step in (3, 4):
        ledger.release(step, b"", b"")
    with pytest.raises(ValueError, match="the plan ends after steps=5"):
        ledger.release(5, b"", b"")


@pytest.mark.parametrize(
    ("name", "value"),
    [("plan", "q"), ("clip_norm", 2.0), ("examples", 99), ("sampler", {"kind": "x"}), ("key", "0"), ("steps", 6)],
)
def test_a_run_goes_on_only_as_it_began(path, name, value):
    write(path, 1)
    with pytest.raises(ValueError, match=f"{name}=.*: the run in .* began with"):
        open_ledger(path, **{name: value})


@pytest.mark.parametrize("torn", [1, 20, 100])
def test_a_torn_last_line_is_dropped(path, torn):
    write(path, 3)
    whole = path.read_bytes()
    last = whole.splitlines(keepends=True)[-1]
    path.write_bytes(whole[: -min(torn, len(last) - 1)])
    ledger = open_ledger(path)
    assert ledger.steps_released == 2
    assert ledger.release(2, b"batch 2", b"sum 2") == "step"
    assert path.read_bytes() == whole


def test_a_file_without_a_first_line_is_refused(path):
    """It appears with its first line or not at all, so a crash cannot have done this."""
    write(path, 0)
    path.write_bytes(path.read_bytes()[:10])
    with pytest.raises(ValueError, match="has no first line, so it was damaged"):
        open_ledger(path)


def planted(lines, damage):
    if damage == "changed":
        entry = json.loads(lines[2])
        lines[2] = json.dumps({**entry, "sum": "00" * 16}).encode()
    elif damage == "removed":
        del lines[2]
    elif damage == "swapped":
        lines[2], lines[3] = lines[3], lines[2]
    elif damage == "garbage":
        lines[2] = b"{"
    return lines


@pytest.mark.parametrize("damage", ["changed", "removed", "swapped", "garbage"])
def test_any_other_damage_is_refused(path, damage):
    write(path, 4)
    path.write_bytes(b"\n".join(planted(path.read_bytes().splitlines(), damage)) + b"\n")
    with pytest.raises(ValueError, match="was changed after it was written"):
        open_ledger(path)


def test_one_process_at_a_time(path, monkeypatch):
    first = open_ledger(path)
    with pytest.raises(RuntimeError, match="this process has it open already"):
        open_ledger(path)
    with monkeypatch.context() as elsewhere:
        elsewhere.setattr("bandmf.ledger.file._every", WeakSet())  # as in another process
        with pytest.raises(RuntimeError, match="another process is running this run"):
            open_ledger(path)
    first.close()
    open_ledger(path)


def test_a_line_is_on_the_disk_before_release_returns(path, monkeypatch):
    ledger = open_ledger(path)
    synced = []
    monkeypatch.setattr(os, "fsync", lambda descriptor: synced.append(path.read_bytes().count(b"\n")))
    ledger.release(0, b"", b"")
    assert synced == [2]


def test_a_full_disk_releases_nothing(path, monkeypatch):
    write(path, 2)
    ledger, write_whole = open_ledger(path), os.write
    monkeypatch.setattr(os, "write", lambda file, line: write_whole(file, line[:30]))
    with pytest.raises(OSError, match="full"):
        ledger.release(2, b"batch 2", b"sum 2")
    monkeypatch.undo()
    assert ledger.release(2, b"batch 2", b"sum 2") == "step"
    ledger.close()
    assert open_ledger(path).steps_released == 3


def test_the_digests_are_keyed(path):
    write(path, 1)
    other = Ledger(path.with_name("other"), Key(), RUN)
    other.release(0, b"batch 0", b"sum 0")
    mine, theirs = (json.loads(file.read_text().splitlines()[1]) for file in (path, path.with_name("other")))
    assert mine["sum"] != theirs["sum"]
    assert mine["batch"] != theirs["batch"]
    assert KEY.secret.hex() not in path.read_text()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


# --- steps taken at once ----------------------------------------------------------------------------------


def a_run(path, **more):
    return Ledger(path, Key(bytes(32)), {"plan": "p", "steps": 20, **more})


SUMS = [(b"batch %d" % i, b"sum %d" % i) for i in range(20)]


def test_a_chunk_is_reserved_before_and_recorded_after(tmp_path):
    ledger = a_run(tmp_path / "ledger")
    ledger.release(0, *SUMS[0])
    ledger.reserve(1, 4, b"inputs")
    assert (ledger.steps_released, ledger.steps_spent) == (1, 5)  # what may have been seen counts
    ledger.finish(1, SUMS[1:5])
    assert (ledger.steps_released, ledger.steps_spent) == (5, 5)
    ledger.release(5, *SUMS[5])
    ledger.close()
    assert a_run(tmp_path / "ledger").steps_released == 6


def test_an_unfinished_chunk_may_only_be_taken_again_as_it_was(tmp_path):
    ledger = a_run(tmp_path / "ledger")
    for step in range(3):
        ledger.release(step, *SUMS[step])
    ledger.reserve(3, 4, b"inputs")
    ledger.close()  # the process died
    ledger = a_run(tmp_path / "ledger")
    assert ledger.steps_spent == 7
    for attempt in (
        lambda: ledger.release(3, *SUMS[3]),
        lambda: ledger.reserve(3, 4, b"other inputs"),
        lambda: ledger.reserve(3, 5, b"inputs"),
        lambda: ledger.reserve(2, 4, b"inputs"),
    ):
        with pytest.raises(ValueError, match="steps 3 to 6 were begun as one chunk"):
            attempt()
    assert ledger.release(2, *SUMS[2]) == "replay"  # what is on record is not concerned
    entries = ledger.entries
    ledger.reserve(3, 4, b"inputs")
    assert ledger.entries == entries  # it is on record already
    ledger.finish(3, SUMS[3:7])
    assert ledger.release(7, *SUMS[7]) == "step"


def test_a_chunk_whose_recording_was_interrupted_is_compared_and_completed(tmp_path):
    ledger = a_run(tmp_path / "ledger")
    ledger.reserve(0, 4, b"inputs")
    ledger._release(0, *SUMS[0])  # and then the process died
    ledger.close()
    ledger = a_run(tmp_path / "ledger")
    ledger.reserve(0, 4, b"inputs")
    with pytest.raises(ValueError, match="another sum"):
        ledger.finish(0, [(SUMS[0][0], b"other"), *SUMS[1:4]])
    ledger.finish(0, SUMS[:4])
    assert (ledger.steps_released, ledger.replays) == (4, 1)


def test_a_chunk_that_was_released_may_be_replayed(tmp_path):
    ledger = a_run(None)
    ledger.reserve(0, 4, b"inputs")
    ledger.finish(0, SUMS[:4])
    ledger.reserve(0, 4, b"inputs")
    ledger.finish(0, SUMS[:4])
    assert ledger.replays == 4
    with pytest.raises(ValueError, match="only the steps before 4 were reserved"):
        ledger.finish(2, SUMS[2:6])


def test_a_chunk_that_cannot_be_taken_again_is_spent_and_lost(tmp_path):
    ledger = a_run(tmp_path / "ledger")
    ledger.release(0, *SUMS[0])
    ledger.reserve(1, 2, b"inputs")
    ledger.finish(1, SUMS[1:3])
    ledger.reserve(3, 4, b"inputs")
    ledger.lose(0)
    for _ in range(2):  # also when it is read again
        assert (ledger.steps_released, ledger.steps_spent) == (7, 7)
        assert [ledger.recorded(step) for step in (1, 3)] == [(2, False, False), (4, False, False)]
        for step in range(3, 7):
            with pytest.raises(ValueError, match="was released before with another"):
                ledger.release(step, *SUMS[step])
        with pytest.raises(ValueError, match="not by this chunk"):
            ledger.reserve(1, 2, b"inputs")
        ledger.close()
        ledger = a_run(tmp_path / "ledger")
    assert ledger.release(1, *SUMS[1]) == "replay"
    assert ledger.release(7, *SUMS[7]) == "step"


def test_a_line_that_memory_may_lack_is_read_again(tmp_path, monkeypatch):
    """An alarm, say, whose handler raises after the line was written: another sum might follow it."""
    ledger = a_run(tmp_path / "ledger")
    ledger.release(0, *SUMS[0])

    def alarm(*_):
        raise TimeoutError

    with monkeypatch.context() as planted:
        planted.setattr(Ledger, "_apply", alarm)
        with pytest.raises(TimeoutError):
            ledger.release(1, *SUMS[1])
    with pytest.raises(RuntimeError, match="open the run again"):
        ledger.release(1, *SUMS[2])
    ledger.close()
    again = a_run(tmp_path / "ledger")
    assert again.steps_released == 2
    assert again.release(1, *SUMS[1]) == "replay"


def test_a_chunk_does_not_reach_past_the_plan():
    with pytest.raises(ValueError, match="count"):
        a_run(None).reserve(0, 21, b"inputs")


def test_threads_that_begin_one_run_at_once_write_one_first_line(path, monkeypatch):
    ledger, inside, most = Ledger(path, KEY), [0], [0]
    create = LockedLines.create

    def slow(self, *given):
        inside[0] += 1
        most[0] = max(most[0], inside[0])
        time.sleep(0.05)  # the others arrive meanwhile
        try:
            return create(self, *given)
        finally:
            inside[0] -= 1

    monkeypatch.setattr(LockedLines, "create", slow)
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(ledger.begin, [RUN] * 4))
    assert (most, ledger.entries) == ([1], 1)
    ledger.close()
    assert len(path.read_text().splitlines()) == 1


def test_a_run_that_is_open_when_python_ends_says_nothing(path):
    """When the interpreter exits, the names of modules can be gone before the objects that use them."""
    program = (
        "import sys, os, bandmf.ledger.file as file\n"
        "from pathlib import Path\n"
        "lines = file.LockedLines(Path(sys.argv[1]))\n"
        "lines.create(lambda place: b'{}')\n"
        "file.os = file.contextlib = os.close = None\n"
        "del lines\n"
        "never = file.LockedLines.__new__(file.LockedLines)\n"
        "del never\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", program, str(path)], capture_output=True, text=True, check=True, timeout=60
    )
    assert result.stderr == ""


def test_messages_fit_torch_and_jax_alike(path):
    write(path, 1)
    with pytest.raises(ValueError, match="which is saved beside the ledger"):
        open_ledger(path, plan="other")
    for sentence in checks._REMEDY.values():
        assert "torch" not in sentence
        assert "jax" not in sentence
