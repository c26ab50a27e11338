"""Forks and crashes, for tests/attacks/test_forks.py, which runs them in a process of their own.

Where other tests have left threads behind (JAX's, OpenMP's), a fork may wait forever.
"""

from __future__ import annotations

import json
import os
import shutil
import traceback
from functools import partial

import pytest
from releases import Watch, open_run
from test_noise_used_twice import begun


def in_a_fork(action):
    """What `action` raises in a child process, as text."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            action()
            found = "nothing was raised"
        except BaseException:
            found = traceback.format_exc()
        os.write(writer, found.encode()[-4000:])
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        found = pipe.read()
    os.waitpid(child, 0)
    return found


@pytest.mark.parametrize("where", ["none", "folder"])
def test_a_fork_of_a_run_releases_nothing(tmp_path, where):
    watch = Watch(open_run(tmp_path if where == "folder" else None)).train(3)
    assert "a fork of it: both would use the same noise" in in_a_fork(lambda: watch.train(4))
    lose = watch.training._opened.ledger.lose
    assert "a fork of it" in in_a_fork(lambda: lose(0))
    watch.train(5)


# --- beginning a run ------------------------------------------------------------------------------------


WRITES = ("open", "write", "fsync", "link", "unlink", "replace", "mkdir", "chmod")


def die_after(calls):
    """Let this process end, as if by kill -9, after so many calls that write."""
    left = [calls]

    def planted(original):
        def call(*arguments, **named):
            result = original(*arguments, **named)
            left[0] -= 1
            if left[0] == 0:
                os._exit(9)
            return result

        return call

    for name in WRITES:
        setattr(os, name, planted(getattr(os, name)))


def dies(calls, action):
    child = os.fork()
    if child == 0:
        die_after(calls)
        try:
            action()
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9


def test_a_crash_while_a_run_begins_bricks_nothing(tmp_path):
    interrupted = 0
    while dies(interrupted + 1, partial(open_run, folder := tmp_path / str(interrupted))):
        interrupted += 1
        Watch(open_run(folder)).train(1).training.close()
        assert open_run(folder).steps_taken == 1
        assert sorted(path.name for path in folder.iterdir()) == ["checkpoints", "key", "ledger.jsonl", "plan.json"]
    assert interrupted >= 8


def test_a_crash_while_a_copy_begins_bricks_nothing(tmp_path):
    begun(tmp_path / "one")
    original = json.loads((tmp_path / "one" / "ledger.jsonl").read_text().splitlines()[0])["run_id"]
    for interrupted in range(100):
        folder = tmp_path / str(interrupted)
        shutil.copytree(tmp_path / "one", folder)
        if not dies(interrupted + 1, partial(open_run, folder, moved="copied")):
            break
        began = json.loads((folder / "ledger.jsonl").read_text().splitlines()[0])["run_id"] != original
        training = open_run(folder, moved=None if began else "copied")
        assert training.steps_taken == 0
        assert training._opened.run_id != original
        training._let_go()
    assert interrupted >= 4
