"""Linear algebra on small matrices has no threads of its own, which on a busy machine wait for each other."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from threadpoolctl import threadpool_info, threadpool_limits

from bandmf import error, optimize
from bandmf.error import band_covariance
from bandmf.error.threads import one_thread
from bandmf.workloads import prefix


def threads():
    return {library["num_threads"] for library in threadpool_info() if library["user_api"] == "blas"}


@pytest.fixture(autouse=True)
def two_threads():
    """Set by a thread that is over, so that any other may change it."""
    before = threadpool_info()
    on_the_side(lambda: threadpool_limits(2, user_api="blas"))
    yield
    on_the_side(lambda: threadpool_limits(max(library["num_threads"] for library in before), user_api="blas"))


def on_the_side(work):
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()


def seen(monkeypatch, owner, name):
    """Threads at every call of a function, which is called all the same."""
    counts, original = [], getattr(owner, name)

    def counted(*arguments):
        counts.append(threads())
        return original(*arguments)

    monkeypatch.setattr(owner, name, counted)
    return counts


def test_small_matrices_are_computed_in_one_thread(monkeypatch):
    counts = seen(monkeypatch, band_covariance, "lower_inverse")
    optimize.banded(40, 4, max_iterations=3)
    error.per_step_error(optimize.banded(40, 4, max_iterations=3).strategy, workload=prefix(40))
    assert len(counts) > 4
    assert all(count == {1} for count in counts)
    assert threads() == {2}


def test_large_matrices_keep_their_threads():
    with one_thread(2048):
        assert threads() == {2}


def test_an_error_gives_the_threads_back():
    with pytest.raises(ZeroDivisionError), one_thread():
        np.float64(1 / 0)
    assert threads() == {2}


def test_blocks_that_overlap_in_two_threads_give_the_threads_back():
    first_is_in, first_may_leave = threading.Event(), threading.Event()

    def first():
        with one_thread():
            assert threads() == {1}
            first_is_in.set()
            first_may_leave.wait(10)

    thread = threading.Thread(target=first)
    thread.start()
    first_is_in.wait(10)
    with one_thread():
        first_may_leave.set()
        thread.join()
    assert threads() == {2}
