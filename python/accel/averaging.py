"""The ways in which gradients are averaged: by the runtime where it can reach them, through
World.reduce_() elsewhere, and row by row where they are sparse."""

from __future__ import annotations

import ctypes
import struct
from operator import attrgetter

import torch
from torch import Tensor

from . import _lib
from .dtypes import CODES
from .errors import MismatchError
from .plan import Slot, as_planned, dense, is_plain, put_back, zeros_for
from .world import World

_grad_of = attrgetter("grad")
_dtype_of = attrgetter("dtype")

# Gradients that go through World.reduce_() travel together up to this size.
_BUCKET_BYTES = 25 << 20

# The address of a gradient without elements.
_nothing = ctypes.c_double()
_NOTHING = ctypes.addressof(_nothing)


# ---- through the runtime -------------------------------------------------------


class Native:
    """Parameters in this process' memory: one call of libaccel averages their gradients."""

    def __init__(self, world: World, slots: list[Slot]) -> None:
        self._world = world
        self._library = _lib.load()
        self._slots = slots
        self._parameters = [s.parameter for s in slots]
        self._dtypes = [s.dtype for s in slots]
        self._numels = [s.shape.numel() for s in slots]
        self._entries = list({id(s.entry): s.entry for s in slots}.values())
        # What the quick look below covers; most models are all that.
        self._plain = all(
            s.is_row_major and not s.dtype.is_complex and s.shape.numel() > 0 for s in slots
        )
        self._pointers = (ctypes.c_void_p * len(slots))()
        self._pack = struct.Struct(f"{len(slots)}P").pack_into
        self._model = self._prepare()

    def _prepare(self) -> ctypes.c_void_p:
        arrays = (_lib.Array * len(self._slots))(*map(_array, self._slots))
        model = ctypes.c_void_p()
        code = self._library.accel_prepare(
            self._world.handle, arrays, len(arrays), _lib.KEEP, ctypes.byref(model)
        )
        if code < 0:
            _lib.check(code)
        return model

    def __del__(self) -> None:
        # The world takes its models along when it is left.
        if getattr(self, "_model", None) and self._world.handle is not None:
            self._library.accel_model_free(self._model)

    def run(self) -> None:
        staged: list[tuple[int, Tensor]] = []
        self._pack(self._pointers, 0, *(self._quick() or self._careful(staged)))
        code = self._library.accel_backward(self._model, self._pointers)
        if code > 0:
            self._add_missing(code)
            code = self._library.accel_backward(self._model, self._pointers)
        if code < 0:
            _lib.check(code)
        for i, gradient in staged:
            put_back(self._parameters[i], gradient)

    def _quick(self) -> list[int] | None:
        """The addresses of all gradients, where each is there and lies in memory as planned.
        This is what every step pays: a third of a microsecond for each parameter."""
        if not self._plain or any(e.held for e in self._entries):
            return None
        gradients = list(map(_grad_of, self._parameters))
        try:
            if (
                list(map(_dtype_of, gradients)) == self._dtypes
                and list(map(Tensor.numel, gradients)) == self._numels
                and all(map(Tensor.is_contiguous, gradients))
            ):
                return list(map(Tensor.data_ptr, gradients))
        except (AttributeError, TypeError, RuntimeError):
            pass  # a None, or a tensor that has no memory
        return None

    def _careful(self, staged: list[tuple[int, Tensor]]) -> list[int]:
        addresses = []
        for i, slot in enumerate(self._slots):
            gradient = slot.parameter.grad
            if gradient is None or slot.entry.held:
                addresses.append(0)
                continue
            lying = as_planned(slot, gradient)
            if lying is not gradient:
                staged.append((i, lying))
            addresses.append(lying.data_ptr() or _NOTHING)
        return addresses

    def _add_missing(self, n: int) -> None:
        """Zeros for parameters that only other ranks have a gradient of."""
        for i in self._library.accel_missing(self._model)[:n]:
            parameter = self._parameters[i]
            if self._slots[i].entry.held:
                raise MismatchError("the ranks are not under the same no_sync()")
            gradient = zeros_for(self._slots[i])
            parameter.grad = gradient
            self._pointers[i] = gradient.data_ptr() or _NOTHING


def _array(slot: Slot) -> _lib.Array:
    dims = [slot.shape[d] for d in slot.order]
    dtype = slot.dtype
    if dtype.is_complex:
        dtype = dtype.to_real()
        dims.append(2)
    if len(dims) > _lib.MAX_DIMS:
        dims = [slot.shape.numel() * (2 if slot.dtype.is_complex else 1)]
    return _lib.Array(None, CODES[dtype], len(dims), tuple(dims))


# ---- through World.reduce_() ---------------------------------------------------


def average_through_world(world: World, slots: list[Slot]) -> None:
    """Average gradients that the runtime cannot reach: several machines, other devices,
    types it cannot add. Some 25 MB travel at once; 16-bit types are added in float32."""
    if not slots:
        return
    have = torch.tensor([s.parameter.grad is not None for s in slots], dtype=torch.uint8)
    world.reduce_(have, "max", "backward(), who has gradients")
    bucket: list[Tensor] = []
    n_bytes = 0
    for slot, anybody in zip(slots, have.tolist(), strict=True):
        if not anybody:
            continue
        bucket.append(_own_gradient(slot))
        n_bytes += bucket[-1].nbytes
        if n_bytes >= _BUCKET_BYTES:
            _reduce_bucket(world, bucket)
            bucket, n_bytes = [], 0
    _reduce_bucket(world, bucket)


def _own_gradient(slot: Slot) -> Tensor:
    """The parameter's gradient as real numbers that can be written to."""
    gradient = slot.parameter.grad
    if gradient is None:
        gradient = slot.parameter.grad = zeros_for(slot)
    elif not is_plain(gradient):
        gradient = slot.parameter.grad = zeros_for(slot).copy_(dense(gradient.detach()))
    return torch.view_as_real(gradient.data) if gradient.is_complex() else gradient.data


def _reduce_bucket(world: World, gradients: list[Tensor]) -> None:
    kinds: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for gradient in gradients:
        kinds.setdefault((gradient.device, _accumulated(gradient.dtype)), []).append(gradient)
    for (_, dtype), members in kinds.items():
        flat = torch.cat([g.to(dtype).reshape(-1) for g in members])
        # A rank in join() counts as zero, as in the runtime: not World's mean.
        world.reduce_(flat, "sum", "backward(), gradients")
        flat /= world.size
        for gradient, part in zip(members, flat.split([g.numel() for g in members]), strict=True):
            gradient.copy_(part.view(gradient.shape))


def _accumulated(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype.itemsize < 4 else dtype


# ---- embeddings with sparse gradients ------------------------------------------


_SPARSE = "backward(), sparse gradients"


def average_sparse(world: World, slots: list[Slot]) -> None:
    """Average sparse gradients: the rows of all ranks together, divided by their number.
    Where a rank has a dense one, e.g. since a layer shares the weight, all become dense."""
    if not slots:
        return
    kinds = torch.zeros(2, len(slots), dtype=torch.uint8)
    for i, slot in enumerate(slots):
        gradient = slot.parameter.grad
        if gradient is not None:
            kinds[int(gradient.is_sparse), i] = gradient.sparse_dim() if gradient.is_sparse else 1
    world.reduce_(kinds, "max", _SPARSE)
    dense, sparse = kinds.tolist()
    average_through_world(world, [s for s, is_dense in zip(slots, dense, strict=True) if is_dense])
    for slot, is_dense, n_dims in zip(slots, dense, sparse, strict=True):
        if n_dims and not is_dense:
            _gather_sparse(world, slot, n_dims)


def _gather_sparse(world: World, slot: Slot, n_dims: int) -> None:
    shape = slot.shape
    if slot.parameter.grad is None:
        indices = torch.empty((0, n_dims), dtype=torch.int64)
        values = torch.empty((0, *shape[n_dims:]), dtype=slot.dtype)
    else:
        gradient = slot.parameter.grad.detach().coalesce()
        indices, values = gradient.indices().t(), gradient.values()
    device = slot.parameter.device
    indices = world.all_gather(indices.to(device).contiguous(), _SPARSE)
    values = world.all_gather(values.to(device), _SPARSE)
    values = values.to(_accumulated_or_complex(slot.dtype))
    summed = torch.sparse_coo_tensor(
        indices.t(), values / world.size, shape, check_invariants=False
    ).coalesce()
    slot.parameter.grad = summed.to(slot.dtype)


def _accumulated_or_complex(dtype: torch.dtype) -> torch.dtype:
    return dtype if dtype.is_complex else _accumulated(dtype)
