"""Collectives on CPU tensors through libaccel: shapes travel in struct accel_array, data
through memory that the ranks share. Nothing is pickled.

All functions take dense tensors (see dtypes.dense) and raise AccelError.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from . import _lib
from .dtypes import CODES
from .labels import encoded


class Ring:
    """The collectives of one world handle. `label` says what a call is about."""

    def __init__(self, handle: ctypes.c_void_p, size: int) -> None:
        self.handle = handle
        self._library = _lib.load()
        self._rows = (ctypes.c_uint64 * size)()

    def barrier(self, label: str = "") -> None:
        if label:
            self._library.accel_label(self.handle, encoded(label))
        code = self._library.accel_barrier(self.handle)
        if code < 0:
            _lib.check(code)

    def gather_rows(self, tensor: Tensor, label: str = "") -> tuple[Tensor, list[int]]:
        """The rows of all ranks behind each other, and how many each had."""
        library, rows = self._library, self._rows
        if label:
            library.accel_label(self.handle, encoded(label))
        code = library.accel_gather(self.handle, _array(tensor), rows)
        if code < 0:
            _lib.check(code)
        counts = rows[:]
        try:
            out = torch.empty((sum(counts), *tensor.shape[1:]), dtype=tensor.dtype)
        except BaseException:
            # The others wait for the second half of the call.
            library.accel_gather_into(self.handle, None)
            raise
        code = library.accel_gather_into(self.handle, out.data_ptr())
        if code < 0:
            _lib.check(code)
        return out, counts

    def reduce_(self, tensor: Tensor, op: int, label: str = "") -> None:
        if label:
            self._library.accel_label(self.handle, encoded(label))
        code = self._library.accel_reduce(self.handle, _array(tensor), op)
        if code < 0:
            _lib.check(code)

    def broadcast_(self, tensor: Tensor, root: int, label: str = "") -> None:
        if label:
            self._library.accel_label(self.handle, encoded(label))
        code = self._library.accel_broadcast(self.handle, _array(tensor), root)
        if code < 0:
            _lib.check(code)

    def join(self) -> None:
        _lib.check(self._library.accel_join(self.handle))


def _array(tensor: Tensor) -> _lib.Array:
    shape = tensor.shape
    return _lib.Array(tensor.data_ptr(), CODES[tensor.dtype], len(shape), shape)
