"""Steps of a schedule in the native library: one call for all slices of a device (native/noise.h)."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from bandmf.native.loading import library
from bandmf.noise.region import Region
from bandmf.noise.schedule import Step
from bandmf.randomness import chacha

DTYPES = {"float32": 0, "float64": 1, "float16": 2, "bfloat16": 3}
_ERRORS = {1: "this machine has no vectors of that width", 2: "out of memory"}
_pointer, _long, _int = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32


class CSlice(ctypes.Structure):
    """struct bandmf_slice."""

    _fields_ = (
        ("gradient", _pointer), ("history", _pointer), ("prepared", _pointer), ("starts", _pointer),
        ("spans", _long), ("length", _long), ("tensor", ctypes.c_uint32), ("dtype", _int),
    )  # fmt: skip


class CStep(ctypes.Structure):
    """struct bandmf_step."""

    _fields_ = (
        ("key", ctypes.c_uint32 * 8), ("cipher_rounds", _int), ("draws", _int), ("reads", _int),
        ("forward", _int), ("decays", _int), ("prepared", _int), ("store", _int), ("stores_input", _int),
        ("scale", ctypes.c_float), ("unused", _int), ("history_stride", _long), ("prepared_stride", _long),
        ("drawn", _pointer), ("feeds", _pointer), ("slots", _pointer), ("weights", _pointer),
        ("decay", _pointer), ("forward_weights", _pointer),
    )  # fmt: skip


class CPass(ctypes.Structure):
    """struct bandmf_pass."""

    _fields_ = (
        ("matrix", _pointer), ("history", _pointer), ("prepared", _pointer), ("rows", _long), ("columns", _long),
        ("history_stride", _long), ("prepared_stride", _long), ("size", _long),
    )  # fmt: skip


@dataclass(frozen=True)
class Memory:
    """Where rows of numbers are: the address of the first, and the distance from row to row, in numbers."""

    address: int
    stride: int

    @staticmethod
    def of(array: np.ndarray) -> Memory:
        return Memory(array.ctypes.data, array.strides[0] // array.itemsize if array.ndim > 1 else 0)


@dataclass(frozen=True, eq=False)
class Part:
    """One slice of a tensor: which coordinates, and where its columns of history and prepared sums are."""

    tensor: int
    region: Region
    history: Memory
    prepared: Memory


class Kernels:
    """Takes the steps of some slices. `width` is for tests: the lanes of a vector, 0 for the most there are."""

    def __init__(self, secret: bytes, cipher_rounds: int, parts: Sequence[Part], width: int = 0) -> None:
        found = library()
        assert found is not None  # engines ask first
        self._library, self._width = found, width
        self._key = chacha.key_words(secret)
        self._cipher_rounds = cipher_rounds
        self._parts = list(parts)
        self._starts = [np.ascontiguousarray(part.region.starts) for part in parts]
        self._slices = (CSlice * len(parts))(
            *(
                CSlice(
                    0, part.history.address, part.prepared.address, starts.ctypes.data,
                    len(starts), part.region.length, part.tensor, 0,
                )
                for part, starts in zip(parts, self._starts, strict=True)
            )
        )  # fmt: skip

    def step(self, step: Step, gradients: Sequence[tuple[int, str]], scale: float, threads: int) -> None:
        """One step of all slices; gradients by address and name of the dtype, in the order of the slices."""
        if not self._parts:
            return
        for one, (address, dtype) in zip(self._slices, gradients, strict=True):
            one.gradient, one.dtype = address, DTYPES[dtype]
        made, kept = self._packed(step, scale)
        code = self._library.bandmf_noise_step(
            ctypes.byref(made), self._slices, _long(len(self._parts)), threads, self._width
        )
        del kept
        _raise(code)

    def _packed(self, step: Step, scale: float) -> tuple[CStep, Any]:
        """A step as C reads it, and the arrays that it points to."""
        arrays = (
            np.array([drawn for drawn, _ in step.draws], np.uint64),
            np.array([feed for _, feed in step.draws], np.float32),
            np.array([slot for slot, _ in step.reads], np.int32),
            np.array([weight for _, weight in step.reads], np.float32),
            np.array(step.decays, np.float32),
            np.array(step.forward, np.float32),
        )
        counts = len(step.draws), len(step.reads), len(step.forward), len(step.decays)
        rows = [-1 if row is None else row for row in (step.prepared, step.store)]
        strides = self._parts[0].history.stride, self._parts[0].prepared.stride
        made = CStep(
            (ctypes.c_uint32 * 8)(*self._key), self._cipher_rounds, *counts, *rows, step.stores_input, scale, 0,
            *strides, *(array.ctypes.data for array in arrays),
        )  # fmt: skip
        return made, arrays

    def prepare(self, matrix: np.ndarray, history: Memory, prepared: Memory, size: int, threads: int) -> None:
        """prepared = matrix @ history, for the first `size` numbers of the rows: the look-ahead pass."""
        matrix = np.ascontiguousarray(matrix, np.float32)
        made = CPass(
            matrix.ctypes.data, history.address, prepared.address, *matrix.shape, history.stride, prepared.stride, size
        )
        _raise(self._library.bandmf_noise_pass(ctypes.byref(made), threads, self._width))


def finite(address: int, dtype: str, size: int, threads: int) -> bool:
    """Whether every one of these numbers is finite, in one read."""
    found = library()
    assert found is not None
    return bool(found.bandmf_finite(_pointer(address), DTYPES[dtype], _long(size), threads))


def _raise(code: int) -> None:
    if code:
        raise RuntimeError(f"the native library: {_ERRORS.get(code, code)}")
