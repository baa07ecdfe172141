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

import hashlib
from collections.abc import Iterator
from itertools import chain
from operator import is_
from typing import Any

import torch
from torch import Tensor, nn

from .averaging import Native, average_sparse, average_through_world
from .dtypes import CODES
from .errors import MismatchError
from .group import LeftToOthersError
from .model import uncompiled
from .plan import Hold, Slot, StaleError, memory_order, strides_of
from .runs import runs
from .world import World

# ---- what is averaged ----------------------------------------------------------


class _Entry(Hold):
    """A prepared model: its parameters, and whether they changed since the last look."""

    def __init__(self, world: World, model: nn.Module, broadcast_buffers: bool) -> None:
        super().__init__()
        self.model = model
        self.broadcast_buffers = broadcast_buffers
        self.share_buffers = BufferShare(world)
        self.is_pending = False  # backward has run since the gradients were averaged
        self.new: list[nn.Parameter] = []  # which rank 0 has not given to the others
        self._parameters: list[Any] = []
        self.ignored = frozenset(getattr(model, "_ddp_params_and_buffers_to_ignore", ()))
        self.look()
        self.new.clear()  # prepare() did

    def look(self) -> None:
        """Walk the model anew."""
        known = {id(p) for p in self._parameters} - {id(p) for p in self.new}
        modules = list(self.model.modules())
        self._parameter_dicts = [m._parameters for m in modules]
        self._module_dicts = [m._modules for m in modules]
        self._buffer_dicts = [m._buffers for m in modules if m._buffers]
        self._parameters = list(_values(self._parameter_dicts))
        self._modules = list(_values(self._module_dicts))
        self.sparse = {
            id(m._parameters.get("weight")) for m in modules if getattr(m, "sparse", False) is True
        }
        self.new = [p for p in self._parameters if p is not None and id(p) not in known]

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


# ---- the reducer ---------------------------------------------------------------


class Reducer:
    """The averaging of all models that one Accelerator has prepared.

    Its methods are collective where gradients are averaged: all ranks make the same
    models known in the same order, and average at the same moments.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self._entries: list[_Entry] = []
        self._slots: list[Slot] = []
        self._native: Native | None = None
        self._is_planned = False
        self.n_averaged = 0  # how often
        runs.watch(self)

    # ---- models ------------------------------------------------------------

    def add(self, model: nn.Module, broadcast_buffers: bool = True) -> None:
        """Average the gradients of this model from now on."""
        self._entries.append(_Entry(self._world, model, broadcast_buffers))
        self._is_planned = False

    def clear(self) -> None:
        self._entries.clear()
        self.forget_plan()

    def forget_plan(self) -> None:
        """Agree with all ranks anew at the next average."""
        self._slots, self._native, self._is_planned = [], None, False

    def parameter_ids(self) -> set[int]:
        return {id(p) for entry in self._entries for _, p in entry.named_parameters()}

    def hold(self, model: nn.Module, change: int) -> None:
        """Leave the model's gradients alone while held: +1 in, -1 out."""
        for entry in self._entries:
            if uncompiled(entry.model) is uncompiled(model):
                entry.held += change

    # ---- backward ----------------------------------------------------------

    def note(self) -> None:
        """Backward has run."""
        for entry in self._entries:
            entry.is_pending = True

    def gradients_now(self) -> list[tuple[Tensor, int]]:
        """The gradients there are, and how often each was written to."""
        found = (p.grad for e in self._entries for _, p in e.named_parameters())
        return [(g, g._version) for g in found if g is not None]

    def note_if_changed(self, before: list[tuple[Tensor, int]]) -> None:
        """Backward has run, perhaps of something else."""
        now = self.gradients_now()
        if len(now) != len(before) or any(
            g is not h or m != n for (g, m), (h, n) in zip(now, before, strict=True)
        ):
            self.note()

    def is_pending(self) -> bool:
        """Whether backward has run since the gradients were averaged."""
        return any(e.is_pending and not e.held for e in self._entries)

    # ---- averaging ---------------------------------------------------------

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
                entry.is_pending = False
                buffers = entry.buffers()
                if buffers:
                    entry.share_buffers(buffers)
        self.n_averaged += 1

    def _average_as_planned(self) -> None:
        if not self._is_planned or any(e.changed() for e in self._entries):
            self._plan()
        try:
            self._average()
        except StaleError:
            self._plan()
            try:
                self._average()
            except StaleError as error:
                raise ValueError(str(error)) from None

    def _average(self) -> None:
        native = self._native
        others = [s for s in self._slots if s.way != "runtime" and not s.entry.held]
        try:
            # What is found stale is found before anything was sent.
            if native is not None:
                native.run()
            if others:
                average_through_world(self._world, [s for s in others if s.way == "world"])
                average_sparse(self._world, [s for s in others if s.way == "sparse"])
        except MismatchError as error:
            raise MismatchError(f"{error}\n{_ALIKE}") from error

    # ---- planning ----------------------------------------------------------

    def _plan(self) -> None:
        for entry in self._entries:
            entry.look()
        self._native = None
        self._slots = list(self._describe())
        self._compare()
        # Each rank may have made them with random numbers of its own.
        for entry in self._entries:
            for parameter in entry.new:
                self._world.broadcast_(parameter.data, label="backward(), new parameters")
            entry.new.clear()
        natives = [s for s in self._slots if s.way == "runtime"]
        if natives:
            self._native = Native(self._world, natives)
        self._is_planned = True

    def _describe(self) -> Iterator[Slot]:
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
                yield Slot(
                    entry=entry,
                    name=prefix + name,
                    parameter=p,
                    shape=p.shape,
                    dtype=p.dtype,
                    order=order,
                    strides=strides_of(p.shape, order),
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
        mine = [
            f"{s.name}: {s.dtype} {tuple(s.shape)}, dimensions in memory {s.order}, by {s.way}"
            for s in self._slots
        ]
        digest = hashlib.sha256("\n".join(mine).encode()).digest()
        try:
            digests = self._world.all_gather_object(digest, _COMPARING)
        except MismatchError as error:
            raise _compared_alone(error) from error
        if any(d != digest for d in digests):
            raise MismatchError(_difference(self._world.all_gather_object(mine, _COMPARING)))


_COMPARING = "backward(), parameters of the models"


def _compared_alone(error: MismatchError) -> MismatchError:
    return MismatchError(
        f"{error}\n"
        "A rank compares its parameters with those of the others in its first backward(), and "
        "after they changed (a layer was added or replaced, or changed its type): both on all "
        f"ranks at the same step, or on none. {_ALIKE}"
    )


_ALIKE = (
    "All ranks make the same calls in the same order: call backward(), gather() and the like on "
    "all of them or on none."
)


def _difference(models: list[list[str]]) -> str:
    """Where the models of the ranks first differ."""
    first = models[0]
    for rank, other in enumerate(models):
        if not isinstance(other, list):  # a gather_object() of the program's
            break
        for i in range(max(len(first), len(other))):
            here = first[i] if i < len(first) else "no such parameter"
            there = other[i] if i < len(other) else "no such parameter"
            if here != there:
                return (
                    f"the models of the ranks differ in parameter {i}:\n"
                    f"  rank 0: {here}\n  rank {rank}: {there}\n"
                    "Build the same model on all ranks."
                )
    return "some ranks compare their models, and others are somewhere else in the program"


# ---- buffers -------------------------------------------------------------------


_BUFFERS = "backward(), buffers of a model"


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
        datas = [b.data for b in buffers]
        self._fit(datas)
        torch._foreach_copy_(self._views, datas)
        if self._take_from_another():
            torch._foreach_copy_(datas, self._views)

    def _take_from_another(self) -> bool:
        """Fill the block from rank 0, or where that has no more data and is in join(), from
        the lowest rank that has. False on the rank that gave."""
        world = self._world
        if world.handle is None:
            # Between machines, as little as possible is sent.
            try:
                world.broadcast_(self._flat, label=_BUFFERS)
                return world.rank != 0
            except LeftToOthersError:
                pass
        # In shared memory rows, of which only rank 0 has one, cost no more than a broadcast,
        # and do not fail.
        mine = self._flat[None]
        rows, counts = world.all_gather_rows(mine if world.rank == 0 else mine[:0], _BUFFERS)
        if not counts[0]:
            rows, counts = world.all_gather_rows(mine, _BUFFERS)
        if world.rank == counts.index(1):
            return False
        self._flat.copy_(rows[0])
        return True

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
