"""How a loader is read: whole, by indices, by elements, or by rank 0 for all.

A way makes passes over the user's DataLoader. It does not change that loader: where
something else is to be read it uses a twin of it, with workers of its own.
"""

from __future__ import annotations

import random
import warnings
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from itertools import chain, count
from typing import Any, Protocol

import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    get_worker_info,
)

from . import sampling, shuffling
from .dispatch import Follower, Leader, Samples, Units
from .passes import Described, DispatchedPass, IndexedPass, Note, Pass, ReadingPass, rows_of
from .rng import RNGType
from .sampling import Plan
from .shuffling import Apart, Compared, Shuffle, WorkerSeeds, mixed
from .world import World

# ---- the user's loader, reading other things ---------------------------------

# What a twin may have another value of than the user's loader.
_OWN = (
    "_iterator",
    "batch_sampler",
    "collate_fn",
    "dataset",
    "generator",
    "in_order",
    "sampler",
    "worker_init_fn",
)


@cache
def _twin_type(kind: type) -> type:
    return type(f"Prepared{kind.__name__}", (kind,), {"__slots__": _OWN})


def _twin(loader: DataLoader[Any]) -> DataLoader[Any]:
    """A loader of the same type and with the same attributes as `loader`, now and later,
    except those of _OWN. (Slots win over the instance's dictionary, which both share.)"""
    twin = object.__new__(_twin_type(type(loader)))
    object.__setattr__(twin, "__dict__", loader.__dict__)
    object.__setattr__(twin, "_iterator", None)
    return twin


def _refresh(twin: DataLoader[Any], loader: DataLoader[Any], own: dict[str, Any]) -> None:
    """Give the twin what it has of its own; of the rest, what the loader has now."""
    for name in _OWN:
        if name == "_iterator":
            continue
        if name in own or hasattr(loader, name):
            value = own[name] if name in own else getattr(loader, name)
            object.__setattr__(twin, name, value)


def _iterates_itself(loader: DataLoader[Any]) -> bool:
    kind = type(loader)
    return (
        kind.__iter__ is not DataLoader.__iter__
        or kind._get_iterator is not DataLoader._get_iterator
    )


class _Shares:
    """Stands in for a (batch) sampler: yields this rank's share of its batches, and notes
    what each is. Everything else is the user's sampler's.

    `single`: the sampler yields indices one by one, each of which is a batch.
    """

    def __init__(self, sampler: Any, plan: Plan, single: bool) -> None:
        self.whole, self.plan, self.single = sampler, plan, single
        self.notes: deque[Note] = deque()
        self.consulted = False
        # Where ranks share: begins to read the batches so that all read the same ones.
        self.steering: _Steering | None = None

    def __iter__(self) -> Iterator[Any]:
        self.notes = deque()
        return self._share(self.notes)

    def _share(self, notes: deque[Note]) -> Iterator[Any]:
        self.consulted = True
        batches = self._begin() if self.steering is None else self.steering.begin(self._begin)
        for share in sampling.share_batches(batches, self.plan):
            notes.append((share.size, share.real, share.last))
            yield share.batch[0] if self.single else share.batch

    def _begin(self) -> Iterator[Any]:
        batches = iter(self.whole)
        return ([index] for index in batches) if self.single else batches

    def __len__(self) -> int:
        samples = _length(getattr(self.whole, "sampler", None)) if self.plan.ragged else None
        return sampling.steps_of_batches(self.plan, len(self.whole), samples)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "whole":
            raise AttributeError(name)
        return getattr(self.whole, name)


# ---- iterable data sets ------------------------------------------------------


_NOTHING = object()


class _SharedElements(IterableDataset[Any]):
    """This rank's elements of an iterable data set, as (element, is it real, digest)."""

    def __init__(self, dataset: IterableDataset[Any], plan: Plan) -> None:
        self.dataset, self.plan = dataset, plan
        self.seed = 0
        self._passes = 0

    def __iter__(self) -> Iterator[tuple[Any, bool, int]]:
        # Persistent workers keep the seed of their first pass.
        self._passes += 1
        worker = get_worker_info()
        seed = mixed(self.seed, worker.id if worker else 0, self._passes)
        width = self.plan.width or 1
        # All ranks read the same elements, so what the data set draws is the same too;
        # what collate_fn and the program draw is their own.
        elements = Apart(lambda: iter(self.dataset), seed, width * self.plan.size)
        first = next(elements, _NOTHING)
        if first is _NOTHING:
            return
        digest = shuffling.digest_of_content(first)
        for element, real in sampling.share_elements(chain([first], elements), self.plan):
            yield element, real, digest


class _Collate:
    """The user's collate_fn, on elements of _SharedElements: (batch, size, real, digest).
    Without batches size is None, and real None or 0."""

    def __init__(self, collate_fn: Callable[[Any], Any], batched: bool) -> None:
        self.collate_fn, self.batched = collate_fn, batched

    def __call__(self, data: Any) -> tuple[Any, int | None, int | None, int]:
        if not self.batched:
            element, real, digest = data
            return self.collate_fn(element), None, None if real else 0, digest
        elements = [element for element, _, _ in data]
        real = sum(is_real for _, is_real, _ in data)
        return self.collate_fn(elements), len(elements), real, data[0][2]


class _WorkerStart:
    """Runs in each worker, before the user's worker_init_fn: which finds its own data set,
    and random numbers that differ from rank to rank. The base seed of the workers is the
    same on all ranks, so that a data set may take its order from it."""

    def __init__(self, user: Callable[[int], None] | None, rank: int) -> None:
        self.user, self.rank = user, rank

    def __call__(self, worker_id: int) -> None:
        worker = get_worker_info()
        assert worker is not None
        # A frozen object, but nobody has seen it yet.
        object.__setattr__(worker, "dataset", worker.dataset.dataset)
        seed = mixed(worker.seed, self.rank)
        random.seed(seed)
        torch.manual_seed(seed)
        try:
            import numpy
        except ImportError:
            pass
        else:
            numpy.random.seed(seed % 2**32)
        if self.user is not None:
            self.user(worker_id)


# ---- ways to read a loader ---------------------------------------------------


@dataclass(frozen=True)
class Options:
    """The arguments of prepare_data_loader() but for the loader and the world."""

    device: torch.device | str | int | None = None
    split_batches: bool = False
    rng_types: tuple[RNGType, ...] = ()
    dispatch_batches: bool | None = None
    even_batches: bool = True
    non_blocking: bool = False


class Way(Protocol):
    def begin(self, passes: int) -> Pass:
        """Begin pass number `passes`, from 1. Collective, except in a world of one."""

    def steps(self) -> int:
        """Steps of this rank in a pass. Raises TypeError where nobody knows."""


@dataclass(frozen=True)
class _Job:
    """A loader, and how it is to be read.

    `plan.size` is 1 where nothing is shared out: in a world of one, and where the user's
    sampler did it already. `source` yields what is shared out: batches of indices or, when
    `single`, what is a batch each. `number` tells the loaders of a program apart.
    """

    loader: DataLoader[Any]
    world: World
    plan: Plan
    source: Any
    single: bool
    number: int

    def facts(self, generators: int) -> dict[str, int]:
        """What must be the same on all ranks."""
        plan, dataset = self.plan, self.loader.dataset
        batches, samples = _length(self.loader), _length(dataset)
        return {
            "batch size (-1: none)": plan.batch_size or -1,
            "drop_last": int(plan.drop_last),
            "split_batches": int(plan.split),
            "even_batches": int(plan.even),
            "generators of samplers": generators,
            "number of batches (-1: unknown)": -1 if batches is None else batches,
            "number of samples (-1: unknown)": -1 if samples is None else samples,
            "indices of its Subset (random_split() without the same seed on all ranks?)": (
                shuffling.digest_of_subset(dataset)
            ),
        }


class _Whole:
    """An iterable data set of which nothing is shared out: the user's loader, as it is."""

    def __init__(self, job: _Job) -> None:
        self._loader = job.loader

    def begin(self, passes: int) -> Pass:
        return ReadingPass(iter(self._loader), lambda batch: (batch, *[rows_of(batch)] * 2))

    def steps(self) -> int:
        return len(self._loader)


class _Steering:
    """What makes all ranks read the same batches, or tells them that they would not."""

    def __init__(self, job: _Job) -> None:
        self._job = job
        self._shuffle = Shuffle(job.loader, job.world, job.number)
        self._seed, self._first = 0, False

    def begin_pass(self, passes: int) -> None:
        """Collective, where the loader is shuffled."""
        self._seed = self._shuffle.begin(seed_needed=not self._shuffle.settled)
        self._first = passes == 1

    def begin(self, begin: Callable[[], Iterator[Any]]) -> Iterator[Any]:
        job, shuffle = self._job, self._shuffle
        size = job.plan.size
        batches = begin() if shuffle.settled else Apart(begin, self._seed, size)
        if shuffle.settled and not self._first:
            return batches
        facts = job.facts(shuffle.generators) if self._first else {}
        return Compared(batches, size, job.world, shuffle.samplers[-1], facts)


class _Indexed:
    """A map-style data set: each rank reads its share of the batch sampler's batches."""

    def __init__(self, job: _Job) -> None:
        self._job = job
        self._shares = _Shares(job.source, job.plan, job.single)
        if job.plan.size > 1:
            self._shares.steering = _Steering(job)
        self._worker_seeds = WorkerSeeds(job.world.rank, job.number)
        self._twin = _twin(job.loader)
        self._refresh()

    def begin(self, passes: int) -> Pass:
        if self._shares.steering is not None:
            self._shares.steering.begin_pass(passes)
        self._refresh()
        if _iterates_itself(self._job.loader):
            return ReadingPass(iter(self._twin), self._describe)
        shares = self._shares
        return IndexedPass(iter(self._twin), lambda: shares.notes, self._job.single)

    def _refresh(self) -> None:
        job = self._job
        own: dict[str, Any] = {}
        own["sampler" if job.loader.batch_sampler is None else "batch_sampler"] = self._shares
        if job.world.size > 1:
            # Random augmentation in workers is not to be the same on all ranks.
            own["generator"] = self._worker_seeds.next(job.loader.generator)
        if job.plan.size > 1:
            own["in_order"] = True
        _refresh(self._twin, job.loader, own)

    def _describe(self, batch: Any) -> Described:
        if self._job.plan.size > 1 and not self._shares.consulted:
            raise ValueError(
                f"{type(self._job.loader).__name__} yields batches without asking its "
                "batch_sampler, so they cannot be shared out to the ranks: pass "
                "dispatch_batches=True, or an ordinary DataLoader"
            )
        notes = self._shares.notes
        if not notes or self._job.single:
            rows = rows_of(batch)
            return batch, rows, rows if not notes or notes.popleft()[1] else 0
        size, real, _ = notes.popleft()
        return batch, size, real

    def steps(self) -> int:
        return len(self._twin)


class _Elements:
    """An iterable data set that each rank reads whole, keeping its share of the elements."""

    def __init__(self, job: _Job) -> None:
        self._job, loader = job, job.loader
        if _iterates_itself(loader):
            raise ValueError(
                f"{type(loader).__name__} has an __iter__ of its own, which leaves no way to share "
                "out an IterableDataset element by element: pass dispatch_batches=True, or an "
                "ordinary DataLoader"
            )
        self._shuffle = Shuffle(loader, job.world, job.number)
        self._elements = _SharedElements(loader.dataset, job.plan)
        self._seeds = torch.Generator()
        self._twin = _twin(loader)

    def begin(self, passes: int) -> Pass:
        job, loader = self._job, self._job.loader
        if passes == 1:
            shuffling.compare(job.world, job.facts(self._shuffle.generators))
        self._elements.seed = seed = self._shuffle.begin(seed_needed=True)
        own = {
            "dataset": self._elements,
            "collate_fn": _Collate(loader.collate_fn, not job.single),
            "worker_init_fn": _WorkerStart(loader.worker_init_fn, job.world.rank),
            "generator": self._seeds.manual_seed(seed),
            "in_order": True,
        }
        if not job.single:
            own["batch_sampler"] = BatchSampler(loader.sampler, job.plan.width or 1, False)
        _refresh(self._twin, job.loader, own)
        source = iter(self._twin)
        return ReadingPass(self._compared(source) if passes == 1 else source, _described)

    def _compared(self, source: Iterator[Any]) -> Iterator[Any]:
        first = next(source, None)
        digest = torch.tensor([0 if first is None else first[3]])
        # Nothing for a rank says nothing of the others.
        if len({*self._job.world.all_gather(digest, shuffling.START).tolist()} - {0}) > 1:
            warnings.warn(
                f"{type(self._job.loader.dataset).__name__} does not begin with the same sample on "
                "all ranks. With dispatch_batches=False accel picks each rank's share of the "
                "samples that all ranks read: where they are not the same, in the same order, some "
                "are read twice and some never. Let rank 0 read for all (dispatch_batches=True), "
                "or do not prepare a loader whose data set shares itself out",
                stacklevel=2,
            )
        if first is not None:
            yield first
            del first
            yield from source

    def steps(self) -> int:
        return sampling.steps_of_elements(self._job.plan, len(self._job.loader.dataset))  # type: ignore[arg-type]


def _described(item: tuple[Any, int | None, int | None, int]) -> Described:
    batch, size, real, _ = item
    if size is None:
        size = rows_of(batch)
    return batch, size, size if real is None else real


class _Dispatched:
    """Rank 0 reads, and gives out."""

    def __init__(self, job: _Job) -> None:
        self._job = job

    def begin(self, passes: int) -> Pass:
        job = self._job
        if job.world.rank:
            return DispatchedPass(Follower(job.world))
        kind = Units() if job.single else Samples()
        rounds = sampling.share_data(_read(job.loader), job.plan, kind)
        return DispatchedPass(Leader(job.world, rounds))

    def steps(self) -> int:
        loader, plan = self._job.loader, self._job.plan
        samples = None
        if plan.ragged:
            counted = loader.dataset
            if not isinstance(counted, IterableDataset):
                counted = getattr(loader.batch_sampler, "sampler", None)
            samples = _length(counted)
        return sampling.steps_of_data(plan, len(loader), samples)


def _read(loader: DataLoader[Any]) -> Iterator[Any]:
    """Starts reading with the first batch, so that what fails then fails as any other."""
    yield from loader


def _length(of: Any) -> int | None:
    try:
        return len(of)
    except (TypeError, NotImplementedError):
        return None


# ---- which way ---------------------------------------------------------------

_numbers = count()

# Where torch still has them.
_PIPES = tuple(
    getattr(torch.utils.data, name)
    for name in ("IterDataPipe", "MapDataPipe")
    if hasattr(torch.utils.data, name)
)


def choose(loader: DataLoader[Any], world: World, options: Options) -> tuple[Plan, Way]:
    """The way to read a loader, and how its batches are shared out."""
    iterable = isinstance(loader.dataset, IterableDataset)
    shared = world.size > 1 and not _is_shared_already(loader, world, options)
    source = loader.sampler if loader.batch_sampler is None else loader.batch_sampler
    single = loader.batch_sampler is None and not isinstance(source, BatchSampler)
    if shared:
        _refuse_what_cannot_be_shared(loader, single, options)
    # A sampler of single indices may know batch sizes of its own: they are not the loader's.
    batch_size = None if single else getattr(source, "batch_size", None)
    plan = Plan(
        rank=world.rank if shared else 0,
        size=world.size if shared else 1,
        batch_size=batch_size if isinstance(batch_size, int) and batch_size > 0 else None,
        split=options.split_batches,
        drop_last=not single and bool(getattr(source, "drop_last", False)),
        even=options.even_batches,
    )
    job = _Job(loader, world, plan, source, single, next(_numbers))
    # An iterable data set may well not be the same on all ranks.
    dispatched = iterable if options.dispatch_batches is None else options.dispatch_batches
    if shared and dispatched:
        return plan, _Dispatched(job)
    if iterable:
        return plan, (_Elements if shared else _Whole)(job)
    return plan, _Indexed(job)


def _is_shared_already(loader: DataLoader[Any], world: World, options: Options) -> bool:
    """Whether a sampler, such as DistributedSampler, yields this rank's share only."""
    here = (world.size, world.rank)
    for sampler in shuffling.samplers_of(loader):
        if (getattr(sampler, "num_replicas", None), getattr(sampler, "rank", None)) == here:
            break
    else:
        return False
    kind = type(sampler).__name__
    if options.dispatch_batches:
        raise ValueError(
            f"dispatch_batches=True has rank 0 read for all ranks, and the {kind} of this loader "
            "gives it no more than its own share: make the loader without one"
        )
    warnings.warn(
        f"this loader has a {kind}, so it is read as it is. That sampler repeats samples to make "
        "the ranks equal and does not tell which, so an evaluation over it cannot be exact: make "
        "the loader without one, accel picks each rank's share (and shuffle=True shuffles)",
        stacklevel=5,
    )
    return True


def _refuse_what_cannot_be_shared(loader: DataLoader[Any], single: bool, options: Options) -> None:
    if single and options.split_batches:
        raise ValueError(
            "split_batches=True cuts up the batches that a loader makes, and one with "
            "batch_size=None makes none: use split_batches=False"
        )
    if isinstance(loader.dataset, _PIPES):
        raise ValueError(
            "a DataPipe shares itself out to the ranks of torch.distributed: do not prepare its "
            "loader, or read it in the __iter__ of an IterableDataset"
        )
