"""Sweeps over many cases, of which `make test` takes a few and `make test-long` the others."""

from __future__ import annotations

import pytest


def some_long(cases, ordinary):
    """The cases, marked long where `ordinary(case)` does not hold."""
    return [case if ordinary(case) else _long(case) for case in cases]


def _long(case):
    return pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.long)
