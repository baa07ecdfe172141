"""Averages the gradients of prepared models over all ranks, after backward has run.

Gradients stay ordinary tensors in the program's own memory. One call of the runtime is
given the pointers of all `.grad`; it averages them in place, also where some ranks have
none (they count as zero, and get the average). Where no rank has one, nothing happens.

Three kinds of parameters take other ways: those of embeddings made with sparse=True,
whose rows are gathered; those in memory the runtime cannot reach, which go through
World.reduce_(); and, for a single backward, gradients whose layout in memory is not the
parameter's, which are copied.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain
from operator import attrgetter, is_
from typing import Any

import torch
import torch.autograd
from torch import Tensor, nn

from . import _lib
from .dtypes import CODES
from .errors import MismatchError
from .world import World

_grad_of = attrgetter("grad")
_dtype_of = attrgetter("dtype")

# Gradients that go through World.reduce_() travel together up to this size.
_BUCKET_BYTES = 25 << 20

# The address of a gradient without elements.
_nothing = ctypes.c_double()
_NOTHING = ctypes.addressof(_nothing)


# ---- how often backward has run ----------------------------------------------


class _Runs:
    """Counts calls of torch.autograd.backward(), once watch() was called."""

    def __init__(self) -> None:
        self.count = 0
        self._original: Any = None

    def watch(self) -> None:
        if self._original is not None:
            return
        original = self._original = torch.autograd.backward

        @functools.wraps(original)
        def backward(*args: Any, **kwargs: Any) -> None:
            # Before, so that gradients of a backward that raises halfway count as well.
            self.count += 1
            return original(*args, **kwargs)

        torch.autograd.backward = backward


runs = _Runs()


# ---- what is averaged ----------------------------------------------------------


class _Entry:
    """A prepared model: its parameters, and whether they changed since the last look."""

    def __init__(self, world: World, model: nn.Module, broadcast_buffers: bool) -> None:
        self.model = model
        self.broadcast_buffers = broadcast_buffers
        self.share_buffers = BufferShare(world)
        self.held = 0  # by so many no_sync()
        self.averaged_at = runs.count
        self._parameters: list[Any] = []
        self.ignored = frozenset(getattr(model, "_ddp_params_and_buffers_to_ignore", ()))
        self.look()

    def look(self) -> list[nn.Parameter]:
        """Walk the model anew. Returns the parameters that the last walk did not find."""
        known = {id(p): p for p in self._parameters}
        modules = list(self.model.modules())
        self._parameter_dicts = [m._parameters for m in modules]
        self._module_dicts = [m._modules for m in modules]
        self._buffer_dicts = [m._buffers for m in modules if m._buffers]
        self._parameters = list(_values(self._parameter_dicts))
        self._modules = list(_values(self._module_dicts))
        self.sparse = {
            id(m._parameters.get("weight")) for m in modules if getattr(m, "sparse", False) is True
        }
        return [p for p in self._parameters if p is not None and id(p) not in known]

    def changed(self) -> bool:
        """Whether a module or parameter was added, replaced or removed."""
        return not (
            _same(_values(self._parameter_dicts), self._parameters)
            and _same(_values(self._module_dicts), self._modules)
        )

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        for name, parameter in self.model.named_parameters():
            if name not in self.ignored:
                yield name, parameter

    def buffers(self) -> list[Tensor]:
        """What rank 0 tells the others before the next forward."""
        if not self._buffer_dicts or not self.broadcast_buffers:
            return []
        if self.ignored:
            return [b for n, b in self.model.named_buffers() if n not in self.ignored]
        found = {id(b): b for b in _values(self._buffer_dicts) if b is not None}
        return list(found.values())


def _values(dicts: list[dict[str, Any]]) -> Iterator[Any]:
    return chain.from_iterable(map(dict.values, dicts))


def _same(now: Iterator[Any], before: list[Any]) -> bool:
    found = list(now)
    return len(found) == len(before) and all(map(is_, found, before))


@dataclass(slots=True)
class _Slot:
    """A parameter in the plan."""

    entry: _Entry
    name: str
    parameter: nn.Parameter
    shape: torch.Size
    dtype: torch.dtype
    order: tuple[int, ...]  # its dimensions, the one with the largest stride first
    strides: tuple[int, ...]  # that a gradient needs to be averaged where it is
    way: str  # "runtime", "world" or "sparse"

    @property
    def is_row_major(self) -> bool:
        return self.order == tuple(range(len(self.shape)))


class _StaleError(Exception):
    """A gradient that does not fit the plan: its parameter has changed."""


def memory_order(tensor: Tensor) -> tuple[int, ...] | None:
    """The dimensions of a dense tensor, the one with the largest stride first; None where
    its elements overlap or leave gaps."""
    if tensor.is_contiguous():
        return tuple(range(tensor.dim()))
    order = sorted(range(tensor.dim()), key=lambda d: (-tensor.stride(d), -tensor.shape[d]))
    expected = 1
    for d in reversed(order):
        if tensor.shape[d] != 1 and tensor.stride(d) != expected:
            return None
        expected *= tensor.shape[d]
    return tuple(order)


# ---- the reducer ---------------------------------------------------------------


class Reducer:
    """The averaging of all models that one Accelerator has prepared.

    Its methods are collective where gradients are averaged: all ranks make the same
    models known in the same order, and average at the same moments.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self._entries: list[_Entry] = []
        self._slots: list[_Slot] = []
        self._native: _Native | None = None
        self._is_planned = False
        self.n_averaged = 0  # how often
        runs.watch()

    # ---- models ------------------------------------------------------------

    def add(self, model: nn.Module, broadcast_buffers: bool = True) -> None:
        """Average the gradients of this model from now on."""
        self._entries.append(_Entry(self._world, model, broadcast_buffers))
        self._is_planned = False

    def remove(self, models: Iterable[nn.Module]) -> None:
        gone = {id(m) for m in models}
        self._entries = [e for e in self._entries if id(e.model) not in gone]
        self._forget_plan()

    def clear(self) -> None:
        self._entries.clear()
        self._forget_plan()

    def _forget_plan(self) -> None:
        self._slots, self._native, self._is_planned = [], None, False

    def has(self, parameter: Tensor) -> bool:
        """Whether a prepared model has this parameter."""
        return any(p is parameter for entry in self._entries for _, p in entry.named_parameters())

    def parameter_ids(self) -> set[int]:
        return {id(p) for entry in self._entries for _, p in entry.named_parameters()}

    def hold(self, model: nn.Module, change: int) -> None:
        """Leave the model's gradients alone while held: +1 in, -1 out."""
        for entry in self._entries:
            if entry.model is model:
                entry.held += change

    # ---- averaging ---------------------------------------------------------

    def is_pending(self) -> bool:
        """Whether backward has run since the gradients were averaged."""
        now = runs.count
        return any(e.averaged_at != now and not e.held for e in self._entries)

    def average(self) -> None:
        """Average all gradients of models that are not held, and give the other ranks
        the buffers of rank 0.

        Raises MismatchError on all ranks when their models differ, or when they are not
        in the same call.
        """
        if all(e.held for e in self._entries):
            return
        try:
            self._average_as_planned()
        except MismatchError:
            self._is_planned = False  # all ranks have this error, and plan anew
            raise
        for entry in self._entries:
            if not entry.held:
                entry.averaged_at = runs.count
                buffers = entry.buffers()
                if buffers:
                    entry.share_buffers(buffers)
        self.n_averaged += 1

    def _average_as_planned(self) -> None:
        if not self._is_planned or any(e.changed() for e in self._entries):
            self._plan()
        try:
            self._average()
        except _StaleError:
            self._plan()
            try:
                self._average()
            except _StaleError as error:
                raise ValueError(str(error)) from None

    def _average(self) -> None:
        native = self._native
        others = [s for s in self._slots if s.way != "runtime" and not s.entry.held]
        # What is found stale is found before anything was sent.
        if native is not None:
            native.run()
        if others:
            average_through_world(self._world, [s for s in others if s.way == "world"])
            average_sparse(self._world, [s for s in others if s.way == "sparse"])

    # ---- planning ----------------------------------------------------------

    def _plan(self) -> None:
        new = [p for entry in self._entries for p in entry.look()]
        self._native = None
        self._slots = list(self._describe())
        self._compare()
        # Each rank may have made them with random numbers of its own.
        for parameter in new:
            self._world.broadcast_(parameter.data)
        natives = [s for s in self._slots if s.way == "runtime"]
        if natives:
            self._native = _Native(self._world, natives)
        self._is_planned = True

    def _describe(self) -> Iterator[_Slot]:
        seen: set[int] = set()
        for number, entry in enumerate(self._entries):
            for name, p in entry.named_parameters():
                if id(p) in seen or not (p.is_floating_point() or p.is_complex()):
                    continue
                seen.add(id(p))
                order = memory_order(p)
                if order is None:  # torch makes its gradients row-major then
                    order = tuple(range(p.dim()))
                prefix = f"model {number}, " if len(self._entries) > 1 else ""
                yield _Slot(
                    entry=entry,
                    name=prefix + name,
                    parameter=p,
                    shape=p.shape,
                    dtype=p.dtype,
                    order=order,
                    strides=_strides(p.shape, order),
                    way=self._way(p, id(p) in entry.sparse),
                )

    def _way(self, p: nn.Parameter, is_sparse: bool) -> str:
        if is_sparse:
            return "sparse"
        world = self._world
        reachable = world.device is None or world.device.type == "cpu"
        if world.handle is None or not reachable or p.device.type != "cpu":
            return "world"
        return "runtime" if p.dtype in CODES or p.dtype.is_complex else "world"

    def _compare(self) -> None:
        """Raises MismatchError on all ranks unless their parameters are alike."""
        mine = [f"{s.name}: {s.dtype} {tuple(s.shape)} {s.order} {s.way}" for s in self._slots]
        digest = hashlib.sha256("\n".join(mine).encode()).digest()
        try:
            digests = self._world.all_gather_object(digest)
        except MismatchError as error:
            raise _changed_alone(error) from error
        if len(set(digests)) > 1:
            raise MismatchError(_difference(self._world.all_gather_object(mine)))


def _strides(shape: torch.Size, order: tuple[int, ...]) -> tuple[int, ...]:
    strides, expected = [0] * len(shape), 1
    for d in reversed(order):
        strides[d] = expected
        expected *= max(shape[d], 1)
    return tuple(strides)


def _changed_alone(error: MismatchError) -> MismatchError:
    return MismatchError(
        "the parameters of a prepared model changed on this rank and not on the others (a layer "
        "was added or replaced, or changed its type). Models change on all ranks at the same "
        f"step, or not at all.\n{error}"
    )


def _difference(models: list[list[str]]) -> str:
    """Where the models of the ranks first differ."""
    first = models[0]
    for rank, other in enumerate(models):
        for i in range(max(len(first), len(other))):
            here = first[i] if i < len(first) else "no such parameter"
            there = other[i] if i < len(other) else "no such parameter"
            if here != there:
                return (
                    f"the models of the ranks differ in parameter {i}:\n"
                    f"  rank 0: {here}\n  rank {rank}: {there}\n"
                    "Build the same model on all ranks."
                )
    return "the models of the ranks differ"


# ---- through the runtime -------------------------------------------------------


class _Native:
    """Parameters in this process' memory: one call of libaccel averages their gradients."""

    def __init__(self, world: World, slots: list[_Slot]) -> None:
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
            self._fail(code)
        for i, gradient in staged:
            _put_back(self._parameters[i], gradient)

    def _fail(self, code: int) -> None:
        error = _lib.error_of(code)
        if isinstance(error, MismatchError):
            raise MismatchError(
                "the ranks are not in the same backward: backward() was called on some of them "
                "only, or a model's parameters changed on some of them only.\n" + str(error)
            ) from error
        raise error

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


def _array(slot: _Slot) -> _lib.Array:
    dims = [slot.shape[d] for d in slot.order]
    dtype = slot.dtype
    if dtype.is_complex:
        dtype = dtype.to_real()
        dims.append(2)
    if len(dims) > _lib.MAX_DIMS:
        dims = [slot.shape.numel() * (2 if slot.dtype.is_complex else 1)]
    return _lib.Array(None, CODES[dtype], len(dims), tuple(dims))


def zeros_for(slot: _Slot) -> Tensor:
    """A gradient of zeros that lies in memory as planned."""
    gradient = torch.empty_strided(
        slot.shape, slot.strides, dtype=slot.dtype, device=slot.parameter.device
    )
    return gradient.zero_()


def as_planned(slot: _Slot, gradient: Tensor) -> Tensor:
    """The gradient where it is, or a copy that lies in memory as planned.

    Raises _StaleError when its type or shape is not the planned one.
    """
    if gradient.dtype is not slot.dtype or gradient.shape != slot.shape:
        raise _StaleError(
            f"the gradient of {slot.name} is {gradient.dtype} {tuple(gradient.shape)}, and the "
            f"parameter {slot.dtype} {tuple(slot.shape)}: drop old gradients with zero_grad() "
            "when a parameter changes"
        )
    if _is_plain(gradient) and (
        gradient.stride() == slot.strides or (slot.is_row_major and gradient.is_contiguous())
    ):
        return gradient
    return zeros_for(slot).copy_(_dense(gradient.detach()))


def _put_back(parameter: nn.Parameter, averaged: Tensor) -> None:
    """An averaged copy into the gradient it was made from, or in its place."""
    gradient = parameter.grad
    if gradient is not None and _is_plain(gradient):
        gradient.data.copy_(averaged)
    else:
        parameter.grad = averaged


# ---- through World.reduce_() ---------------------------------------------------


def average_through_world(world: World, slots: list[_Slot]) -> None:
    """Average gradients that the runtime cannot reach: several machines, other devices,
    types it cannot add. Some 25 MB travel at once; 16-bit types are added in float32."""
    if not slots:
        return
    have = torch.tensor([s.parameter.grad is not None for s in slots], dtype=torch.uint8)
    world.reduce_(have, "max")
    bucket: list[Tensor] = []
    for slot, anybody in zip(slots, have.tolist(), strict=True):
        if not anybody:
            continue
        bucket.append(_own_gradient(slot))
        if sum(g.nbytes for g in bucket) >= _BUCKET_BYTES:
            _reduce_bucket(world, bucket)
            bucket = []
    _reduce_bucket(world, bucket)


def _own_gradient(slot: _Slot) -> Tensor:
    """The parameter's gradient as real numbers that can be written to."""
    gradient = slot.parameter.grad
    if gradient is None:
        gradient = slot.parameter.grad = zeros_for(slot)
    elif not _is_plain(gradient):
        gradient = slot.parameter.grad = zeros_for(slot).copy_(_dense(gradient.detach()))
    return torch.view_as_real(gradient.data) if gradient.is_complex() else gradient.data


def _is_plain(gradient: Tensor) -> bool:
    """Whether each element has a place of its own, and is there as it is."""
    return (
        gradient.layout is torch.strided
        and not gradient.is_conj()
        and not gradient.is_neg()
        and not any(
            stride == 0 and n > 1
            for stride, n in zip(gradient.stride(), gradient.shape, strict=True)
        )
    )


def _dense(gradient: Tensor) -> Tensor:
    return gradient if gradient.layout is torch.strided else gradient.to_dense()


def _reduce_bucket(world: World, gradients: list[Tensor]) -> None:
    kinds: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for gradient in gradients:
        kinds.setdefault((gradient.device, _accumulated(gradient.dtype)), []).append(gradient)
    for (_, dtype), members in kinds.items():
        flat = torch.cat([g.to(dtype).reshape(-1) for g in members])
        # A rank in join() counts as zero, as in the runtime: not World's mean.
        world.reduce_(flat, "sum")
        flat /= world.size
        for gradient, part in zip(members, flat.split([g.numel() for g in members]), strict=True):
            gradient.copy_(part.view(gradient.shape))


def _accumulated(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype.itemsize < 4 else dtype


# ---- embeddings with sparse gradients ------------------------------------------


def average_sparse(world: World, slots: list[_Slot]) -> None:
    """Average sparse gradients: the rows of all ranks together, divided by their number.
    Where a rank has a dense one, e.g. since a layer shares the weight, all become dense."""
    if not slots:
        return
    kinds = torch.zeros(2, len(slots), dtype=torch.uint8)
    for i, slot in enumerate(slots):
        gradient = slot.parameter.grad
        if gradient is not None:
            kinds[int(gradient.is_sparse), i] = gradient.sparse_dim() if gradient.is_sparse else 1
    world.reduce_(kinds, "max")
    dense, sparse = kinds.tolist()
    average_through_world(world, [s for s, is_dense in zip(slots, dense, strict=True) if is_dense])
    for slot, is_dense, n_dims in zip(slots, dense, sparse, strict=True):
        if n_dims and not is_dense:
            _gather_sparse(world, slot, n_dims)


def _gather_sparse(world: World, slot: _Slot, n_dims: int) -> None:
    shape = slot.shape
    if slot.parameter.grad is None:
        indices = torch.empty((0, n_dims), dtype=torch.int64)
        values = torch.empty((0, *shape[n_dims:]), dtype=slot.dtype)
    else:
        gradient = slot.parameter.grad.detach().coalesce()
        indices, values = gradient.indices().t(), gradient.values()
    device = slot.parameter.device
    indices = world.all_gather(indices.to(device).contiguous())
    values = world.all_gather(values.to(device)).to(_accumulated_or_complex(slot.dtype))
    summed = torch.sparse_coo_tensor(
        indices.t(), values / world.size, shape, check_invariants=False
    ).coalesce()
    slot.parameter.grad = summed.to(slot.dtype)


def _accumulated_or_complex(dtype: torch.dtype) -> torch.dtype:
    return dtype if dtype.is_complex else _accumulated(dtype)


# ---- buffers -------------------------------------------------------------------


class BufferShare:
    """Gives all ranks the buffers of rank 0, e.g. the running means of BatchNorm."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._layout: list[tuple[torch.Size, torch.dtype]] = []
        self._flat = torch.empty(0, dtype=torch.uint8)
        self._views: list[Tensor] = []

    def __call__(self, buffers: list[Tensor]) -> None:
        """Collective. Written through `.data`: a graph that is kept for a second backward
        stays valid."""
        world = self._world
        datas = [b.data for b in buffers]
        self._fit(datas)
        torch._foreach_copy_(self._views, datas)
        # Rows, of which only one rank has one, and not a broadcast: that would fail where
        # rank 0 has no more data and is in join().
        mine = self._flat[None]
        rows, counts = world.all_gather_rows(mine if world.rank == 0 else mine[:0])
        if not counts[0]:
            rows, counts = world.all_gather_rows(mine)
        if world.rank != counts.index(1):
            self._flat.copy_(rows[0])
            torch._foreach_copy_(datas, self._views)

    def _fit(self, datas: list[Tensor]) -> None:
        layout = [(d.shape, d.dtype) for d in datas]
        if layout == self._layout:
            return
        starts, n = [], 0
        for data in datas:
            starts.append(n)
            n += -(-data.nbytes // 16) * 16  # so that any type is aligned
        self._flat = torch.zeros(n, dtype=torch.uint8)
        self._views = [
            self._flat[start : start + d.nbytes].view(d.dtype).view(d.shape)
            for start, d in zip(starts, datas, strict=True)
        ]
        self._layout = layout
