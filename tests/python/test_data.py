"""Prepared loaders: every kind of loader, on ranks that are threads, and a sample of them
on real processes."""

from __future__ import annotations

import copy
import dataclasses
import gc
import itertools
import pickle
import random
import threading
import warnings
import weakref
from collections import Counter, namedtuple
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from itertools import product
from typing import Any, cast

import accel.ways
import accel.world
import numpy
import pytest
import torch
from accel.data import PreparedLoader, current_batch, is_prepared, prepare_data_loader
from accel.errors import AccelError, MismatchError
from accel.world import World
from ranks import RunRanks
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
    get_worker_info,
    random_split,
)

# ---- ranks as threads --------------------------------------------------------


class Meeting:
    """Where the ranks of a fake world exchange what they send."""

    def __init__(self, size: int) -> None:
        self.barrier = threading.Barrier(size, timeout=20)
        self.slots: list[Any] = [None] * size


class Fake:
    """A world whose ranks are threads of this process. Counts what is called."""

    def __init__(self, meeting: Meeting, rank: int) -> None:
        self._meeting = meeting
        self.rank, self.size = rank, len(meeting.slots)
        self.local_rank, self.local_size = rank, self.size
        self.calls: Counter[str] = Counter()

    def _exchange(self, name: str, value: Any) -> list[Any]:
        self.calls[name] += 1
        if self.size == 1:
            return [value]
        self._meeting.slots[self.rank] = (name, value)
        self._meeting.barrier.wait()
        slots = list(self._meeting.slots)
        self._meeting.barrier.wait()
        assert {said for said, _ in slots} == {name}
        return [sent for _, sent in slots]

    def all_gather(self, tensor: Tensor, label: str = "") -> Tensor:
        rows = tensor if tensor.dim() else tensor.reshape(1)
        return torch.cat(self._exchange("all_gather", rows.clone()))

    def broadcast_(self, tensor: Tensor, root: int = 0, label: str = "") -> None:
        sent = self._exchange("broadcast", tensor.clone())
        assert {(t.dtype, t.shape) for t in sent} == {(tensor.dtype, tensor.shape)}
        tensor.copy_(sent[root])

    def broadcast_object(self, obj: Any, root: int = 0, label: str = "") -> Any:
        return self._exchange("broadcast_object", obj)[root]

    def join(self) -> None:
        self._exchange("join", None)


_threads = ThreadPoolExecutor(4)


def on_ranks(size: int, function: Callable[[World], Any]) -> list[Any]:
    """What `function` returns on each rank. Its first exception is raised here."""
    meeting = Meeting(size)

    def run(rank: int) -> Any:
        try:
            return function(cast(World, Fake(meeting, rank)))
        except BaseException:
            meeting.barrier.abort()
            raise

    futures = [_threads.submit(run, rank) for rank in range(size)]
    wait(futures)
    failures = [f.exception() for f in futures]
    for failure in failures:
        if failure is not None and not isinstance(failure, threading.BrokenBarrierError):
            raise failure
    return [f.result() for f in futures]


class Recorded:
    """A world whose ranks run one after the other: what rank 0 sends is kept for the others.
    For loaders with workers, which several threads cannot fork."""

    def __init__(self, size: int, rank: int, sent: list[Tensor], gathered: list[Tensor]) -> None:
        self.rank, self.size, self.local_rank, self.local_size = rank, size, rank, size
        self._sent, self._gathered = (sent, gathered) if rank == 0 else (sent[:], gathered[:])

    def all_gather(self, tensor: Tensor, label: str = "") -> Tensor:
        if self.rank == 0:
            self._gathered.append(tensor.clone())
        first = tensor if self.rank == 0 else self._gathered.pop(0)
        return torch.cat([first] + [tensor] * (self.size - 1))

    def broadcast_(self, tensor: Tensor, root: int = 0, label: str = "") -> None:
        if self.rank == 0:
            self._sent.append(tensor.clone())
        else:
            sent = self._sent.pop(0)
            assert (sent.dtype, sent.shape) == (tensor.dtype, tensor.shape)
            tensor.copy_(sent)

    def join(self) -> None:
        pass


def in_turn(size: int, function: Callable[[World], Any]) -> list[Any]:
    """As on_ranks(), one rank after the other."""
    sent: list[Tensor] = []
    gathered: list[Tensor] = []
    return [function(cast(World, Recorded(size, r, sent, gathered))) for r in range(size)]


def failures_on_ranks(
    size: int, function: Callable[[World], Any], run_ranks: Any = on_ranks
) -> list[BaseException | None]:
    """The exception of each rank."""

    def run(world: World) -> BaseException | None:
        try:
            function(world)
        except Exception as failure:
            return failure
        return None

    return run_ranks(size, run)


def alone() -> World:
    return World(0, 1, 0, 1)


# ---- data --------------------------------------------------------------------


class Numbers(Dataset[int]):
    """0, 1, 2, ..."""

    def __init__(self, n: int) -> None:
        self.n = n

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: Any) -> Any:
        return index


class Stream(IterableDataset[int]):
    """0, 1, 2, ... without a length; shared out among workers."""

    def __init__(self, n: int) -> None:
        self.n = n

    def __iter__(self) -> Iterator[int]:
        worker = get_worker_info()
        first, step = (worker.id, worker.num_workers) if worker else (0, 1)
        return iter(range(first, self.n, step))


class SizedStream(Stream):
    def __len__(self) -> int:
        return self.n


@dataclasses.dataclass
class Step:
    """What a program held in one step."""

    samples: list[Any]
    size: int
    real: int
    last: bool


def loop(loader: DataLoader[Any]) -> list[Step]:
    """One pass, and what current_batch() says in it."""
    steps = []
    assert current_batch() is None
    for batch in loader:
        now = current_batch()
        assert now is not None
        samples = batch if isinstance(batch, list) else [batch]
        if isinstance(batch, Tensor):
            samples = batch.reshape(-1).tolist()
        steps.append(Step(samples, now.size, now.real, now.last))
    assert current_batch() is None
    return steps


def read(size: int, make: Callable[[], DataLoader[Any]], **options: Any) -> list[list[Step]]:
    """What each rank gets in one pass."""

    def one(world: World) -> list[Step]:
        return loop(prepare_data_loader(make(), world=world, **options))

    return (in_turn if make().num_workers else on_ranks)(size, one)


def real_samples(ranks: list[list[Step]]) -> list[Any]:
    """The real samples of all ranks, step by step, in rank order."""
    found: list[Any] = []
    for step in range(max(map(len, ranks), default=0)):
        for mine in ranks:
            if step < len(mine):
                found += mine[step].samples[: mine[step].real]
    return found


def gathered(ranks: list[list[Step]]) -> list[Any]:
    """As real_samples(), but what is filled up too: what a plain gather gives."""
    return [s for steps in zip(*ranks, strict=True) for step in steps for s in step.samples]


# ---- exact, whatever the loader ----------------------------------------------


def grid() -> Iterator[tuple[int, dict[str, Any]]]:
    for size, batch_size, drop_last, split, even in product(
        range(1, 5), (1, 2, 3, 4), (False, True), (False, True), (False, True)
    ):
        if not split or batch_size % size == 0:
            yield (
                size,
                {
                    "batch_size": batch_size,
                    "drop_last": drop_last,
                    "split_batches": split,
                    "even_batches": even,
                },
            )


# Kinds of loaders: the data set, and who reads it.
WAYS: dict[str, tuple[Callable[[int], Any], bool | None]] = {
    "indices": (Numbers, False),
    "indices, dispatched": (Numbers, True),
    "elements": (SizedStream, False),
    "elements, dispatched": (SizedStream, None),
}


def check_exact(n: int, size: int, way: str, kind: dict[str, Any]) -> None:
    dataset, dispatch = WAYS[way]
    batch_size, drop_last = kind["batch_size"], kind["drop_last"]
    split, even = kind["split_batches"], kind["even_batches"]

    def one(world: World) -> tuple[list[Step], int, int]:
        loader = DataLoader(dataset(n), batch_size=batch_size, drop_last=drop_last)
        prepared = prepare_data_loader(
            loader, world=world, split_batches=split, even_batches=even, dispatch_batches=dispatch
        )
        return loop(prepared), len(prepared), cast(Fake, world).calls["join"]

    ranks, lengths, joins = zip(*on_ranks(size, one), strict=True)
    width = batch_size * (1 if split else size)
    expected = list(range(n - n % width if drop_last else n))
    assert real_samples(list(ranks)) == expected
    assert [len(mine) for mine in ranks] == list(lengths)
    assert set(joins) == {int(size > 1 and not even and not drop_last)}
    allowed = batch_size // (size if split else 1)
    for mine in ranks:
        assert [step.last for step in mine] == [False] * (len(mine) - 1) + [True] * bool(mine)
        assert all(step.real <= step.size == len(step.samples) <= allowed for step in mine)
    if even or drop_last:
        assert len(set(lengths)) == 1
        assert gathered(list(ranks))[: len(expected)] == expected


@pytest.mark.parametrize("way", WAYS)
def test_each_sample_is_read_once_and_in_order(way: str) -> None:
    for size, kind in grid():
        for n in (0, 1, 2, 3, 5, 7, 8, 11, 12, 16, 23, 24, 40):
            check_exact(n, size, way, kind)


@pytest.mark.parametrize(
    ("way", "options"),
    [
        ("indices", {}),
        ("indices", {"even_batches": False}),
        ("indices", {"split_batches": True}),
        ("indices, dispatched", {}),
        ("elements", {}),
        ("elements", {"even_batches": False}),
        ("elements", {"split_batches": True}),
        ("elements, dispatched", {}),
        ("elements, dispatched", {"split_batches": True}),
    ],
)
def test_each_sample_is_read_once_by_workers(way: str, options: dict[str, Any]) -> None:
    dataset, dispatch = WAYS[way]
    options = {"dispatch_batches": dispatch, **options}
    for n, size in ((11, 2), (7, 3)):
        batch_size = 6 if "split_batches" in options else 2
        ranks = read(
            size, lambda: DataLoader(dataset(n), batch_size=batch_size, num_workers=2), **options
        )
        found = real_samples(ranks)
        if "indices" in way:
            assert found == list(range(n))
        assert sorted(found) == list(range(n))
        if options.get("even_batches", True):
            assert len({len(mine) for mine in ranks}) == 1


@pytest.mark.parametrize(
    "make",
    [
        lambda n, **kw: DataLoader(Numbers(n), batch_size=None, **kw),
        lambda n, **kw: DataLoader(
            Numbers(n), batch_size=None, sampler=BatchSampler(range(n), 2, False), **kw
        ),
        lambda n, **kw: DataLoader(Numbers(n), batch_sampler=[[0, 1], [2], [3, 4, 5], [6]], **kw),
        lambda n, **kw: DataLoader(
            Numbers(n), batch_sampler=[numpy.arange(i, min(i + 2, n)) for i in range(0, n, 2)], **kw
        ),
        lambda n, **kw: DataLoader(Numbers(n), sampler=range(n), batch_size=2, **kw),
    ],
    ids=["single", "batches as indices", "batches of any size", "numpy batches", "range"],
)
@pytest.mark.parametrize(
    ("options", "n_workers"),
    [({}, 0), ({}, 2), ({"even_batches": False}, 0), ({"dispatch_batches": True}, 0)],
)
def test_samplers_of_all_kinds(make: Any, options: dict[str, Any], n_workers: int) -> None:
    ranks = read(3, lambda: make(7, num_workers=n_workers), **options)
    assert real_samples(ranks) == list(range(7))
    if "even_batches" not in options:
        assert len({len(mine) for mine in ranks}) == 1


def test_what_a_sampler_of_single_indices_says_of_batches_is_not_the_loaders() -> None:
    class Grouped(SequentialSampler):
        batch_size, drop_last = 4, True

    ranks = read(2, lambda: DataLoader(Numbers(7), batch_size=None, sampler=Grouped(range(7))))
    assert real_samples(ranks) == list(range(7))
    assert {step.size for mine in ranks for step in mine} == {1}


@pytest.mark.parametrize("dispatch", [False, True])
@pytest.mark.parametrize("n", [0, 1, 6, 7])
def test_an_iterable_data_set_may_yield_whole_batches(n: int, dispatch: bool) -> None:
    class Batches(IterableDataset[Tensor]):
        def __iter__(self) -> Iterator[Tensor]:
            return (torch.tensor([2 * i, 2 * i + 1]) for i in range(n))

    ranks = read(3, lambda: DataLoader(Batches(), batch_size=None), dispatch_batches=dispatch)
    assert real_samples(ranks) == list(range(2 * n))
    assert len({len(mine) for mine in ranks}) == 1
    assert {step.size for mine in ranks for step in mine} <= {2}


def test_a_loader_of_unknown_length_has_none() -> None:
    loader = prepare_data_loader(DataLoader(Stream(3)), world=alone())
    with pytest.raises(TypeError):
        len(loader)
    assert [s.samples for s in loop(loader)] == [[0], [1], [2]]


# ---- in a world of one -------------------------------------------------------


class Augmented(Dataset[Tensor]):
    """Draws from everything that there is to draw from."""

    def __len__(self) -> int:
        return 11

    def __getitem__(self, index: int) -> Tensor:
        drawn = [float(index), random.random(), numpy.random.rand(), torch.rand(()).item()]
        return torch.tensor(drawn, dtype=torch.float64)


class AugmentedStream(IterableDataset[Tensor]):
    def __iter__(self) -> Iterator[Tensor]:
        return (Augmented()[i] for i in numpy.random.permutation(11))


def seed_all(seed: int) -> None:
    random.seed(seed)
    numpy.random.seed(seed)
    torch.manual_seed(seed)


def trace(loader: DataLoader[Any]) -> list[Any]:
    """Two passes, in whose steps the program draws too."""
    seed_all(3)
    found: list[Any] = []
    for _ in range(2):
        for batch in loader:
            found.append((batch.tolist(), torch.rand(3).tolist(), numpy.random.rand()))
            found.append(random.random())
    return found


LOADERS: dict[str, Callable[[], DataLoader[Any]]] = {
    "sequential": lambda: DataLoader(Augmented(), batch_size=4),
    "shuffled": lambda: DataLoader(Augmented(), batch_size=4, shuffle=True),
    "generator": lambda: DataLoader(
        Augmented(), batch_size=4, shuffle=True, generator=torch.Generator().manual_seed(1)
    ),
    "drop_last": lambda: DataLoader(Augmented(), batch_size=4, shuffle=True, drop_last=True),
    "replacement": lambda: DataLoader(
        Augmented(), batch_size=4, sampler=RandomSampler(Augmented(), True, 40)
    ),
    "weighted": lambda: DataLoader(
        Augmented(), batch_size=4, sampler=WeightedRandomSampler([1.0] * 11, 9)
    ),
    "single": lambda: DataLoader(Augmented(), batch_size=None, shuffle=True),
    "iterable": lambda: DataLoader(AugmentedStream(), batch_size=4),
    "workers": lambda: DataLoader(Augmented(), batch_size=4, shuffle=True, num_workers=2),
    "iterable workers": lambda: DataLoader(AugmentedStream(), batch_size=4, num_workers=1),
    "persistent": lambda: DataLoader(
        Augmented(), batch_size=4, shuffle=True, num_workers=1, persistent_workers=True
    ),
}


@pytest.mark.parametrize("kind", LOADERS)
def test_a_world_of_one_is_the_bare_loader_to_the_last_random_number(kind: str) -> None:
    bare = trace(LOADERS[kind]())
    assert trace(prepare_data_loader(LOADERS[kind](), world=alone())) == bare


def test_a_world_of_one_does_not_touch_the_loader() -> None:
    loader = DataLoader(Numbers(4), shuffle=True)
    before = dict(vars(loader))
    loop(prepare_data_loader(loader, world=alone()))
    assert vars(loader) == before
    assert loader.sampler.generator is None  # type: ignore[union-attr]


# ---- one order for all ranks -------------------------------------------------


class Drawing(Sampler[int]):
    """A permutation, drawn from wherever `draw` draws from."""

    def __init__(self, n: int, draw: Callable[[int], list[int]]) -> None:
        self.n, self.draw = n, draw

    def __len__(self) -> int:
        return self.n

    def __iter__(self) -> Iterator[int]:
        return iter(self.draw(self.n))


def draw_numpy(n: int) -> list[int]:
    return numpy.random.permutation(n).tolist()


def draw_python(n: int) -> list[int]:
    return random.sample(range(n), n)


def draw_torch(n: int) -> list[int]:
    return torch.randperm(n).tolist()


class Lazily(Drawing):
    """Draws while it is iterated over."""

    def __iter__(self) -> Iterator[int]:
        left = list(range(self.n))
        while left:
            yield left.pop(self.draw(len(left))[0])


class WithGenerator(Sampler[int]):
    """A user's sampler that takes a generator, as torch's do."""

    def __init__(self, n: int, generator: torch.Generator | None = None) -> None:
        self.n, self.generator = n, generator

    def __len__(self) -> int:
        return self.n

    def __iter__(self) -> Iterator[int]:
        yield from torch.randperm(self.n, generator=self.generator).tolist()


GLOBAL = ("numpy", "python", "torch")
SHUFFLED: dict[str, Callable[[], DataLoader[Any]]] = {
    "shuffle": lambda: DataLoader(Numbers(24), batch_size=3, shuffle=True),
    "generator": lambda: DataLoader(
        Numbers(24), batch_size=3, shuffle=True, generator=torch.Generator()
    ),
    "subset": lambda: DataLoader(Numbers(24), batch_size=3, sampler=SubsetRandomSampler(range(24))),
    "batch sampler": lambda: DataLoader(
        Numbers(24), batch_sampler=BatchSampler(RandomSampler(range(24)), 3, False)
    ),
    "own": lambda: DataLoader(Numbers(24), batch_size=3, sampler=WithGenerator(24)),
    "own, single": lambda: DataLoader(Numbers(24), batch_size=None, sampler=WithGenerator(24)),
    "numpy": lambda: DataLoader(Numbers(24), batch_size=3, sampler=Drawing(24, draw_numpy)),
    "python": lambda: DataLoader(Numbers(24), batch_size=3, sampler=Drawing(24, draw_python)),
    "torch": lambda: DataLoader(Numbers(24), batch_size=3, sampler=Drawing(24, draw_torch)),
    "numpy lazily": lambda: DataLoader(Numbers(24), batch_size=3, sampler=Lazily(24, draw_numpy)),
    "workers": lambda: DataLoader(Numbers(24), batch_size=3, shuffle=True, num_workers=1),
    "persistent": lambda: DataLoader(
        Numbers(24), batch_size=3, shuffle=True, num_workers=1, persistent_workers=True
    ),
}


# Global random states are one for all threads: the others are for processes.
@pytest.mark.parametrize("kind", [k for k in SHUFFLED if not k.startswith(GLOBAL)])
def test_ranks_with_other_seeds_share_one_order(kind: str) -> None:
    make = SHUFFLED[kind]

    def two_passes(world: World) -> tuple[list[Step], list[Step]]:
        loader = make()
        if loader.generator is not None:
            loader.generator.manual_seed(world.rank)
        prepared = prepare_data_loader(loader, world=world)
        return loop(prepared), loop(prepared)

    run = in_turn if make().num_workers else on_ranks
    first, second = zip(*run(2, two_passes), strict=True)
    orders = [real_samples(list(first)), real_samples(list(second))]
    assert all(sorted(order) == list(range(24)) for order in orders)
    assert orders[0] != orders[1]
    assert list(range(24)) not in orders


def test_a_data_sets_own_generator_is_each_ranks_own() -> None:
    def state(world: World) -> int:
        dataset = Numbers(6)
        dataset.generator = torch.Generator().manual_seed(world.rank)  # type: ignore[attr-defined]
        loop(prepare_data_loader(DataLoader(dataset, shuffle=True), world=world))
        return dataset.generator.initial_seed()  # type: ignore[attr-defined]

    assert on_ranks(2, state) == [0, 1]


def test_the_order_costs_one_broadcast_of_a_tensor_a_pass() -> None:
    def calls(world: World) -> list[Counter[str]]:
        prepared = prepare_data_loader(SHUFFLED["generator"](), world=world)
        counts = []
        for _ in range(2):
            cast(Fake, world).calls.clear()
            loop(prepared)
            counts.append(Counter(cast(Fake, world).calls))
        return counts

    first, second = on_ranks(2, calls)[0]
    assert first == {"all_gather": 1, "broadcast": 1}  # and the loaders are compared, once
    assert second == {"broadcast": 1}


def test_a_loader_that_is_not_shuffled_calls_nobody() -> None:
    def calls(world: World) -> Counter[str]:
        prepared = prepare_data_loader(DataLoader(Numbers(9), batch_size=2), world=world)
        loop(prepared)
        cast(Fake, world).calls.clear()
        loop(prepared)
        return cast(Fake, world).calls

    assert on_ranks(3, calls) == [{}] * 3


def test_loaders_of_the_same_length_are_not_shuffled_alike() -> None:
    def both(world: World) -> tuple[list[Step], list[Step]]:
        first, second = (prepare_data_loader(SHUFFLED["shuffle"](), world=world) for _ in "ab")
        return loop(first), loop(second)

    first, second = zip(*on_ranks(2, both), strict=True)
    assert real_samples(list(first)) != real_samples(list(second))


def test_a_sampler_with_a_private_generator_is_an_error_on_all_ranks() -> None:
    def private(world: World) -> None:
        own = numpy.random.default_rng(world.rank)
        sampler = Drawing(24, lambda n: own.permutation(n).tolist())
        loop(prepare_data_loader(DataLoader(Numbers(24), sampler=sampler), world=world))

    failures = failures_on_ranks(3, private)
    assert all(isinstance(f, MismatchError) for f in failures)
    assert all("Drawing" in str(f) and "seed" in str(f) for f in failures)


def test_a_private_generator_that_parts_later_is_found_then() -> None:
    def private(world: World) -> int:
        own = numpy.random.default_rng(5)
        sampler = Drawing(24, lambda n: own.permutation(n).tolist())
        prepared = prepare_data_loader(DataLoader(Numbers(24), sampler=sampler), world=world)
        loop(prepared)
        own.permutation(world.rank)
        with pytest.raises(MismatchError):
            loop(prepared)
        return 1

    assert on_ranks(3, private) == [1, 1, 1]


def test_indices_that_were_drawn_before_are_compared() -> None:
    def split(world: World) -> None:
        own = torch.Generator().manual_seed(world.rank)
        subset, _ = random_split(Numbers(24), [12, 12], own)
        loop(prepare_data_loader(DataLoader(subset, batch_size=3), world=world))

    def sampled(world: World) -> None:
        own = torch.Generator().manual_seed(world.rank)
        sampler = SubsetRandomSampler(torch.randperm(24, generator=own)[:12].tolist())
        loop(prepare_data_loader(DataLoader(Numbers(24), sampler=sampler), world=world))

    for function, words in ((split, "random_split"), (sampled, "SubsetRandomSampler")):
        failures = failures_on_ranks(2, function)
        assert all(isinstance(f, MismatchError) and words in str(f) for f in failures)


def test_loaders_that_differ_are_an_error_on_all_ranks() -> None:
    def other_length(world: World) -> None:
        loader = DataLoader(Numbers(10 + world.rank), batch_size=5)
        loop(prepare_data_loader(loader, world=world))

    failures = failures_on_ranks(2, other_length)
    assert all(isinstance(f, MismatchError) for f in failures)
    assert all("rank 0: 2\n  rank 1: 3" in str(f) for f in failures)


def test_an_iterable_data_set_that_looks_at_the_rank_is_warned_of() -> None:
    def own_share(world: World) -> None:
        class OwnShare(IterableDataset[int]):
            def __iter__(self) -> Iterator[int]:
                return iter(range(world.rank, 12, world.size))

        loop(prepare_data_loader(DataLoader(OwnShare()), world=world, dispatch_batches=False))

    with pytest.warns(UserWarning, match="OwnShare does not begin with the same sample"):
        on_ranks(2, own_share)


# ---- workers -----------------------------------------------------------------


class Rolls(Dataset[int]):
    """Random augmentation."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> int:
        return int(torch.randint(1 << 40, ()))


def test_workers_of_ranks_with_equal_seeds_do_not_repeat_random_numbers() -> None:
    torch.manual_seed(7)
    ranks = read(2, lambda: DataLoader(Rolls(), batch_size=2, num_workers=1))
    drawn = [s for mine in ranks for step in mine for s in step.samples]
    assert len(set(drawn)) == 8


def test_the_random_numbers_of_workers_follow_the_seed_of_the_rank(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def drawn(world: World) -> list[list[Any]]:
        loader = DataLoader(Rolls(), num_workers=1, generator=torch.Generator().manual_seed(1))
        prepared = prepare_data_loader(loader, world=world)
        return [[s.samples for s in loop(prepared)] for _ in range(2)]

    # What keeps the loaders of one program apart, as in a program that is run again.
    monkeypatch.setattr(accel.ways, "_numbers", itertools.repeat(5))
    first = in_turn(2, drawn)
    assert in_turn(2, drawn) == first
    assert first[0][0] != first[0][1]


class RandomOrder(IterableDataset[int]):
    """An order of its own, drawn in the worker."""

    def __iter__(self) -> Iterator[int]:
        yield from torch.randperm(12).tolist()


def roll_beside(batch: list[int]) -> Tensor:
    """The batch, and a random number of the rank's own."""
    return torch.tensor([*batch, int(torch.randint(1 << 40, ()))])


@pytest.mark.parametrize("persistent", [False, True])
def test_workers_of_an_iterable_data_set_read_one_order(persistent: bool) -> None:
    def two_passes(world: World) -> list[list[list[int]]]:
        loader = DataLoader(
            RandomOrder(),
            batch_size=3,
            num_workers=1,
            collate_fn=roll_beside,
            persistent_workers=persistent,
        )
        prepared = prepare_data_loader(loader, world=world, dispatch_batches=False)
        return [[s.samples for s in loop(prepared)] for _ in range(2)]

    mine, other = in_turn(2, two_passes)
    orders = []
    for a, b in zip(mine, other, strict=True):
        order = [i for batch in a + b for i in batch[:3]]
        assert sorted(order) == list(range(12))
        orders.append(order)
    assert orders[0] != orders[1]
    rolls = [batch[3] for passes in (mine, other) for one in passes for batch in one]
    assert len(set(rolls)) == len(rolls)


def tell_worker(worker_id: int) -> None:
    worker = get_worker_info()
    assert worker is not None
    cast(Stream, worker.dataset).n = 10 + worker_id


def test_worker_init_fn_finds_the_users_data_set() -> None:
    ranks = read(
        2,
        lambda: DataLoader(Stream(0), num_workers=1, worker_init_fn=tell_worker),
        dispatch_batches=False,
    )
    assert real_samples(ranks) == list(range(10))


class Failing(Dataset[int]):
    def __init__(self, rank: int) -> None:
        self.rank = rank

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> int:
        if self.rank == 1 and index == 3:
            raise KeyError("sample 3 is bad")
        return index


@pytest.mark.parametrize("n_workers", [0, 1])
def test_what_fails_on_one_rank_is_raised_there(n_workers: int) -> None:
    def one(world: World) -> list[Step]:
        loader = DataLoader(Failing(world.rank), num_workers=n_workers)
        return loop(prepare_data_loader(loader, world=world))

    failures = failures_on_ranks(2, one, in_turn)
    assert failures[0] is None
    assert isinstance(failures[1], KeyError) and "sample 3 is bad" in str(failures[1])


# ---- the batch a program holds -----------------------------------------------


def test_loops_may_be_nested() -> None:
    outer = prepare_data_loader(DataLoader(Numbers(5), batch_size=2), world=alone())
    inner = prepare_data_loader(DataLoader(Numbers(3), batch_size=3), world=alone())
    sizes = []
    for _ in outer:
        before = current_batch()
        for _ in inner:
            assert current_batch() is not before
            assert current_batch().size == 3 and current_batch().last  # type: ignore[union-attr]
        assert current_batch() is before
        sizes.append(before.size)  # type: ignore[union-attr]
    assert sizes == [2, 2, 1]
    assert current_batch() is None


def test_a_loader_may_be_nested_in_itself() -> None:
    loader = prepare_data_loader(DataLoader(Numbers(3)), world=alone())
    found = [(a.item(), b.item(), current_batch().last) for a in loader for b in loader]  # type: ignore[union-attr]
    assert found == [(a, b, b == 2) for a in range(3) for b in range(3)]


def test_a_loop_that_is_left_does_not_count() -> None:
    loader = prepare_data_loader(DataLoader(Numbers(5)), world=alone())
    for _ in loader:
        break
    assert current_batch() is None

    def raising() -> None:
        for _ in loader:
            raise KeyError

    with pytest.raises(KeyError):
        raising()
    assert current_batch() is None
    next(iter(loader))
    assert current_batch() is None
    assert len(loop(loader)) == 5


def test_a_loop_that_is_left_keeps_nothing() -> None:
    class Source(IterableDataset[int]):
        def __iter__(self) -> Iterator[int]:
            try:
                yield from range(3)
            finally:
                closed.append(True)

    closed: list[bool] = []
    loader = prepare_data_loader(DataLoader(Source()), world=alone())
    gc.disable()
    try:
        for _ in loader:
            held = current_batch()
            break
        assert closed == [True]
        assert held is not None and held.last is False
    finally:
        gc.enable()


def test_loops_may_end_in_any_order() -> None:
    long, short = (
        prepare_data_loader(DataLoader(Numbers(n), batch_size=n), world=alone()) for n in (4, 3)
    )
    first, second = iter(long), iter(short)
    next(first), next(second)
    assert current_batch().size == 3  # type: ignore[union-attr]
    assert next(first, None) is None
    assert current_batch().size == 3  # type: ignore[union-attr]
    assert next(second, None) is None
    assert current_batch() is None


def test_each_thread_has_its_own_loops() -> None:
    loader = prepare_data_loader(DataLoader(Numbers(5)), world=alone())
    for _ in loader:
        assert _threads.submit(current_batch).result() is None


class Counting(Numbers):
    """Counts what is read."""

    def __init__(self, n: int) -> None:
        super().__init__(n)
        self.read = 0

    def __getitem__(self, index: int) -> int:
        self.read += 1
        return index


def test_the_last_batch_is_known_without_reading_ahead() -> None:
    dataset = Counting(6)
    for step, _ in enumerate(prepare_data_loader(DataLoader(dataset), world=alone())):
        assert current_batch().last is (step == 5)  # type: ignore[union-attr]
        assert dataset.read == step + 1


def test_an_iterable_data_set_is_read_ahead_when_asked_only() -> None:
    taken: list[int] = []

    class Source(IterableDataset[int]):
        def __iter__(self) -> Iterator[int]:
            for i in range(3):
                taken.append(i)
                yield i

    kept = []
    for step, _ in enumerate(prepare_data_loader(DataLoader(Source()), world=alone())):
        batch = current_batch()
        assert batch is not None
        assert len(taken) == step + 1
        if step == 1:
            assert batch.last is False
            assert len(taken) == 3
        kept.append(batch)
    assert [batch.last for batch in kept] == [False, False, True]


def test_what_fails_ahead_is_raised_in_its_own_step() -> None:
    class Source(IterableDataset[int]):
        def __iter__(self) -> Iterator[int]:
            yield 0
            raise KeyError("sample 1 is bad")

    steps = 0
    with pytest.raises(KeyError):
        for _ in prepare_data_loader(DataLoader(Source()), world=alone()):
            assert current_batch().last is False  # type: ignore[union-attr]
            steps += 1
    assert steps == 1


def test_a_batch_lives_no_longer_than_the_program_holds_it() -> None:
    def keep(batch: list[int]) -> Tensor:
        tensor = torch.tensor(batch)
        alive.append(weakref.ref(tensor))
        return tensor

    for dataset in (Numbers(4), Stream(4)):
        alive: list[weakref.ref[Tensor]] = []
        loader = DataLoader(dataset, collate_fn=keep)
        for batch in prepare_data_loader(loader, world=alone()):
            del batch
            assert alive[-1]() is None


# ---- ranks that make other numbers of steps ----------------------------------


def test_ranks_of_an_uneven_loop_meet_at_its_end() -> None:
    def joins(world: World) -> list[int]:
        prepared = prepare_data_loader(DataLoader(Numbers(5)), world=world, even_batches=False)
        found = []
        for _ in prepared:
            found.append(cast(Fake, world).calls["join"])
        found.append(cast(Fake, world).calls["join"])
        for _ in prepared:
            break
        return [*found, cast(Fake, world).calls["join"]]

    assert on_ranks(2, joins) == [[0, 0, 0, 1, 1], [0, 0, 1, 1]]


# ---- rank 0 reads for all ----------------------------------------------------

Point = namedtuple("Point", "x y")


@dataclasses.dataclass
class Record:
    ids: Tensor
    names: list[str]
    scale: float


def structured(indices: list[int]) -> dict[str, Any]:
    i = torch.tensor(indices)
    return {
        "x": torch.stack([i.float(), -i.float()], 1),
        "half": i.to(torch.bfloat16),
        "mask": i % 2 == 0,
        "complex": torch.complex(i.float(), i.float()),
        "names": [f"sample {n}" for n in indices],
        "point": Point(i, (i * 2, None)),
        "record": Record(i, [str(n) for n in indices], 0.5),
        "array": numpy.array(indices),
        "strided": torch.stack([i, i]).T,
        "constant": torch.tensor([1.0, 2.0, 3.0])[None],
        "version": 3,
    }


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("n", [11, 8, 5])
def test_structures_arrive_as_they_are(n: int, split: bool) -> None:
    def one(world: World) -> list[tuple[dict[str, Any], int]]:
        loader = DataLoader(Numbers(n), batch_size=4, collate_fn=structured)
        prepared = prepare_data_loader(
            loader, world=world, dispatch_batches=True, split_batches=split
        )
        return [(batch, current_batch().real) for batch in prepared]  # type: ignore[union-attr]

    found: list[int] = []
    for steps in zip(*on_ranks(2, one), strict=True):
        for batch, real in steps:
            indices = batch["x"][:, 0].int().tolist()
            expected = structured(indices)
            assert list(batch) == list(expected)
            for key in ("x", "half", "mask", "complex", "strided", "constant"):
                assert batch[key].dtype is expected[key].dtype
                assert torch.equal(batch[key], expected[key])
            assert batch["names"] == expected["names"]
            assert type(batch["point"]) is Point
            assert batch["point"].y[0].tolist() == [2 * i for i in indices]
            assert batch["point"].y[1] is None
            assert type(batch["record"]) is Record and batch["record"].scale == 0.5
            assert batch["record"].ids.tolist() == indices
            assert batch["record"].names == [str(i) for i in indices]
            assert type(batch["array"]) is numpy.ndarray and batch["array"].tolist() == indices
            assert batch["version"] == 3
            found += indices[:real]
    assert found == list(range(n))


def test_batches_of_any_type_are_given_out_whole() -> None:
    def one(world: World) -> list[tuple[Any, int]]:
        loader = DataLoader(Stream(7), batch_size=2, collate_fn=frozenset)
        prepared = prepare_data_loader(loader, world=world)
        return [(batch, current_batch().real) for batch in prepared]  # type: ignore[union-attr]

    first, second = on_ranks(2, one)
    assert [batch for batch, _ in first] == [{0, 1}, {4, 5}]
    assert [batch for batch, _ in second] == [{2, 3}, {6}]


def padded(indices: list[int]) -> Tensor:
    """As long as the largest index: another shape in each batch."""
    return torch.stack([torch.full((max(indices) + 1,), i) for i in indices])


@pytest.mark.parametrize(("n", "split"), [(n, split) for n in (8, 9, 10, 11) for split in (0, 1)])
def test_batches_padded_to_their_own_length_need_no_common_shape(n: int, split: int) -> None:
    def one(world: World) -> list[list[int]]:
        loader = DataLoader(Numbers(n), batch_size=4, collate_fn=padded)
        prepared = prepare_data_loader(
            loader, world=world, dispatch_batches=True, split_batches=bool(split)
        )
        return [b[: current_batch().real, 0].tolist() for b in prepared]  # type: ignore[union-attr]

    found = [i for steps in zip(*on_ranks(2, one), strict=True) for step in steps for i in step]
    assert found == list(range(n))


def test_only_rank_0_reads_what_is_dispatched() -> None:
    def one(world: World) -> int:
        dataset = Counting(8)
        loop(prepare_data_loader(DataLoader(dataset), world=world, dispatch_batches=True))
        return dataset.read

    assert on_ranks(3, one) == [8, 0, 0]


def test_a_step_costs_two_broadcasts() -> None:
    def calls(world: World) -> Counter[str]:
        loader = DataLoader(Numbers(8), collate_fn=lambda i: (torch.tensor(i), "a constant"))
        for step, _ in enumerate(prepare_data_loader(loader, world=world, dispatch_batches=True)):
            if step == 1:
                cast(Fake, world).calls.clear()
            if step == 2:
                return cast(Fake, world).calls
        raise AssertionError

    assert on_ranks(2, calls) == [{"broadcast": 2}] * 2


@pytest.mark.parametrize("n_workers", [0, 1])
def test_what_fails_on_rank_0_is_raised_on_all_ranks(n_workers: int) -> None:
    def one(world: World) -> list[Step]:
        loader = DataLoader(Failing(1), num_workers=n_workers)
        return loop(prepare_data_loader(loader, world=world, dispatch_batches=True))

    failures = failures_on_ranks(3, one, in_turn if n_workers else on_ranks)
    assert isinstance(failures[0], KeyError)
    assert all(isinstance(f, AccelError) for f in failures[1:])
    assert all("rank 0" in str(f) and "sample 3 is bad" in str(f) for f in failures[1:])


def test_a_batch_that_cannot_be_sent_is_an_error_on_all_ranks() -> None:
    def one(world: World) -> list[Step]:
        loader = DataLoader(Stream(4), collate_fn=lambda batch: threading.Lock())
        return loop(prepare_data_loader(loader, world=world))

    failures = failures_on_ranks(2, one)
    assert isinstance(failures[0], TypeError) and "collate_fn" in str(failures[0])
    assert isinstance(failures[1], AccelError) and "collate_fn" in str(failures[1])


def test_what_arrives_does_not_hold_what_the_others_got() -> None:
    def one(world: World) -> int:
        loader = DataLoader(Numbers(8), batch_size=2)
        batch = next(iter(prepare_data_loader(loader, world=world, dispatch_batches=True)))
        return batch.untyped_storage().nbytes()

    assert on_ranks(3, one)[1:] == [16, 16]


# ---- epochs ------------------------------------------------------------------


class Epochal(Sampler[int]):
    def __init__(self, n: int) -> None:
        self.n, self.epoch = n, 0
        self.told: list[int] = []

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch
        self.told.append(epoch)

    def __len__(self) -> int:
        return self.n

    def __iter__(self) -> Iterator[int]:
        return iter((i + self.epoch) % self.n for i in range(self.n))


def test_samplers_and_data_sets_are_told_the_epoch() -> None:
    sampler, dataset = Epochal(3), Numbers(3)
    told: list[int] = []
    dataset.set_epoch = told.append  # type: ignore[attr-defined]
    loader = prepare_data_loader(DataLoader(dataset, sampler=sampler), world=alone())
    starts = [loop(loader)[0].samples for _ in range(2)]
    for _ in loader:
        break  # not a complete pass
    loop(loader)
    assert starts == [[0], [1]]
    assert sampler.told == told == [0, 1, 2, 2]
    loader.set_epoch(7)
    loop(loader)
    loop(loader)
    assert sampler.told[-3:] == [7, 7, 8]


def test_an_epoch_that_the_program_told_the_sampler_itself_wins() -> None:
    sampler = Epochal(5)
    loader = prepare_data_loader(DataLoader(Numbers(5), sampler=sampler), world=alone())
    sampler.set_epoch(3)
    assert [loop(loader)[0].samples for _ in range(2)] == [[3], [4]]


# ---- devices -----------------------------------------------------------------


def test_batches_are_put_on_the_device() -> None:
    loader = DataLoader(Numbers(2), collate_fn=lambda i: {"x": [torch.tensor(i)], "name": "n"})
    (first, _) = prepare_data_loader(loader, world=alone(), device="meta")
    assert first["x"][0].device.type == "meta" and first["name"] == "n"


def test_on_a_cpu_batches_are_left_alone() -> None:
    batch = object()
    loader = DataLoader(Numbers(1), collate_fn=lambda _: batch)
    assert next(iter(prepare_data_loader(loader, world=alone(), device="cpu"))) is batch


# ---- loaders that are something else than a plain DataLoader -----------------


def test_a_prepared_loader_is_a_loader_with_the_users_attributes() -> None:
    class Own(DataLoader[Any]):
        colour = "red"

        def paint(self, colour: str) -> None:
            self.colour = colour

        def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
            return ((self.colour, batch.tolist()) for batch in super().__iter__())

    def one(world: World) -> list[Any]:
        loader = Own(Numbers(6), batch_size=2, num_workers=0)
        prepared = prepare_data_loader(loader, world=world)
        assert isinstance(prepared, DataLoader) and is_prepared(prepared)
        assert not is_prepared(loader)
        assert prepared.dataset is loader.dataset and prepared.batch_size == 2
        assert prepared.num_workers == 0 and prepared.sampler is loader.sampler
        assert prepared.total_batch_size == 2 * world.size
        assert prepare_data_loader(prepared, world=world) is prepared
        prepared.paint("blue")
        prepared.extra = 1  # type: ignore[attr-defined]
        assert loader.extra == 1  # type: ignore[attr-defined]
        with pytest.raises(AttributeError):
            _ = prepared.nothing_of_that_name
        return [(batch, current_batch().size, current_batch().last) for batch in prepared]  # type: ignore[union-attr]

    first, second = on_ranks(2, one)
    assert first == [(("blue", [0, 1]), 2, False), (("blue", [4, 5]), 2, True)]
    assert [batch for batch, _, _ in second] == [("blue", [2, 3]), ("blue", [0, 1])]


def test_attributes_that_change_are_used_in_the_next_pass() -> None:
    prepared = prepare_data_loader(DataLoader(Numbers(2), batch_size=2), world=alone())
    loop(prepared)
    prepared.collate_fn = lambda batch: torch.tensor(batch) + 10
    assert loop(prepared)[0].samples == [10, 11]


def test_a_loader_that_bypasses_its_sampler_is_refused() -> None:
    class Endless(DataLoader[Any]):
        """Keeps one iterator for ever, made before anybody could prepare it."""

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.iterator = super().__iter__()

        def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
            return (next(self.iterator) for _ in range(len(self)))

    failures = failures_on_ranks(
        2, lambda w: loop(prepare_data_loader(Endless(Numbers(4)), world=w))
    )
    assert all(isinstance(f, ValueError) and "Endless" in str(f) for f in failures)
    ranks = read(2, lambda: Endless(Numbers(4)), dispatch_batches=True)
    assert real_samples(ranks) == [0, 1, 2, 3]


def test_a_distributed_sampler_is_not_shared_out_again() -> None:
    def one(world: World) -> list[Step]:
        sampler = DistributedSampler(Numbers(7), world.size, world.rank, shuffle=False)
        loader = DataLoader(Numbers(7), batch_size=2, sampler=sampler)
        with warnings.catch_warnings(record=True) as caught:
            prepared = prepare_data_loader(loader, world=world)
        if world.rank == 0:
            assert "DistributedSampler" in str(caught[0].message)
            assert "exact" in str(caught[0].message)
        assert len(prepared) == 2
        return loop(prepared)

    first, second = on_ranks(2, one)
    assert [s.samples for s in first] == [[0, 2], [4, 6]]
    assert [s.samples for s in second] == [[1, 3], [5, 0]]


def test_a_distributed_sampler_cannot_be_dispatched() -> None:
    def one(world: World) -> None:
        sampler = DistributedSampler(Numbers(7), world.size, world.rank)
        prepare_data_loader(
            DataLoader(Numbers(7), sampler=sampler), world=world, dispatch_batches=True
        )

    assert all(isinstance(f, ValueError) for f in failures_on_ranks(2, one))


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_prepared_loader_can_be_copied(world_size: int) -> None:
    def one(world: World) -> list[list[Any]]:
        loader = DataLoader(Numbers(6), batch_size=2, num_workers=0)
        prepared = prepare_data_loader(loader, world=world, split_batches=True)
        prepared.set_epoch(4)
        found = [prepared, copy.copy(prepared), copy.deepcopy(prepared)]
        assert found[1].dataset is loader.dataset and found[2].dataset is not loader.dataset
        return [[s.samples for s in loop(p)] for p in found]

    for rank in on_ranks(world_size, one):
        assert rank[0] == rank[1] == rank[2]


def test_a_prepared_loader_can_be_pickled() -> None:
    prepared = prepare_data_loader(DataLoader(Numbers(3)), world=alone())
    prepared.set_epoch(2)
    again = pickle.loads(pickle.dumps(prepared))
    assert isinstance(again, PreparedLoader)
    assert [s.samples for s in loop(again)] == [[0], [1], [2]]


# ---- bad input ---------------------------------------------------------------


class Once(IterableDataset[int]):
    """Can be read once."""

    def __init__(self, n: int) -> None:
        self.source = iter(range(n))

    def __iter__(self) -> Iterator[int]:
        return self.source


class OnceThroughGenerator(Once):
    def __iter__(self) -> Iterator[int]:
        yield from self.source


@pytest.mark.parametrize(
    "make",
    [
        lambda: DataLoader(Once(4)),
        lambda: DataLoader(OnceThroughGenerator(4)),
        lambda: DataLoader(Numbers(4), batch_sampler=iter([[0, 1], [2]])),
        lambda: DataLoader(Numbers(4), sampler=iter([0, 1, 2])),  # type: ignore[arg-type]
    ],
    ids=["iterator", "generator", "batch sampler", "sampler"],
)
@pytest.mark.parametrize("size", [1, 2])
def test_a_loader_that_is_used_up_says_so(make: Any, size: int) -> None:
    def one(world: World) -> None:
        prepared = prepare_data_loader(make(), world=world)
        assert loop(prepared)
        with pytest.raises(RuntimeError, match="only once"):
            loop(prepared)

    on_ranks(size, one)


def test_a_loader_that_was_used_up_before_says_so() -> None:
    loader = DataLoader(Once(4))
    list(loader)
    with pytest.raises(RuntimeError, match="only once"):
        loop(prepare_data_loader(loader, world=alone()))


def test_an_empty_loader_ends_at_once() -> None:
    for loader in (DataLoader(Stream(0)), DataLoader([], batch_size=2)):  # type: ignore[arg-type]
        prepared = prepare_data_loader(loader, world=alone())
        assert loop(prepared) == loop(prepared) == []
    # Too few for a round, and too few for each rank: not used up.
    for options in ({"even_batches": False}, {}):
        ranks = read(
            3,
            lambda: DataLoader(Once(1), drop_last=not options),
            dispatch_batches=False,
            **options,
        )
        assert ranks[2] == []


def test_what_is_no_loader_is_refused() -> None:
    for wrong in ([1, 2], Numbers(3), iter(DataLoader(Numbers(3)))):
        with pytest.raises(TypeError, match="DataLoader"):
            prepare_data_loader(wrong, world=alone())  # type: ignore[arg-type]


def test_batches_that_do_not_divide_are_refused_when_split() -> None:
    for make, words in (
        (lambda: DataLoader(Numbers(9), batch_size=8), "6 or 9"),
        (lambda: DataLoader(Numbers(9), batch_size=None), "batch_size=None"),
        (lambda: DataLoader(Stream(9), batch_size=8), "6 or 9"),
    ):
        failures = failures_on_ranks(
            3, lambda w: prepare_data_loader(make(), world=w, split_batches=True)
        )
        assert all(isinstance(f, ValueError) and words in str(f) for f in failures)
        prepare_data_loader(make(), world=alone(), split_batches=True)


def test_a_data_pipe_is_refused_where_it_would_share_itself_out() -> None:
    pipes = pytest.importorskip("torch.utils.data.datapipes.iter")
    failures = failures_on_ranks(
        2, lambda w: prepare_data_loader(DataLoader(pipes.IterableWrapper([1])), world=w)
    )
    assert all(isinstance(f, ValueError) and "DataPipe" in str(f) for f in failures)


def test_an_unknown_rng_type_is_refused() -> None:
    with pytest.raises(ValueError, match="dice"):
        prepare_data_loader(DataLoader(Numbers(3)), world=alone(), rng_types=["dice"])


def test_rng_types_give_all_ranks_the_state_of_rank_0() -> None:
    sent: list[str] = []

    def one(world: World) -> None:
        prepared = prepare_data_loader(
            DataLoader(Numbers(4)), world=world, rng_types=["python", "generator"]
        )
        loop(prepared)
        if world.rank == 0:
            sent.extend(cast(Fake, world).calls)

    on_ranks(2, one)
    assert sent == ["broadcast_object", "all_gather"]


# ---- real processes ----------------------------------------------------------


def draw() -> list[Any]:
    return [random.random(), numpy.random.randn(3).tolist(), torch.rand(3).tolist()]


def read_all(seed_step: int) -> dict[str, list[Any]]:
    """Every shuffled loader, over two passes, with other seeds on each rank; and what the
    program draws meanwhile, which must be what it draws without a loader."""
    world = accel.world.current()
    found: dict[str, list[Any]] = {}
    for kind, make in SHUFFLED.items():
        loader = make()
        if loader.generator is not None:
            loader.generator.manual_seed(world.rank)
        prepared = prepare_data_loader(loader, world=world)
        passes = []
        for _ in range(2):
            seed_all(1 + seed_step * world.rank)
            expected = draw()
            seed_all(1 + seed_step * world.rank)
            drawn: list[Any] = []
            samples: list[Any] = []
            for step, batch in enumerate(prepared):
                real = current_batch().real  # type: ignore[union-attr]
                samples += world.all_gather(torch.as_tensor(batch).reshape(-1)[:real]).tolist()
                if step == 1:
                    drawn = [
                        random.random(),
                        numpy.random.randn(3).tolist(),
                        torch.rand(3).tolist(),
                    ]
            assert drawn == expected, kind
            passes.append(samples)
        found[kind] = passes
    return found


def test_processes_share_one_order_and_keep_their_own_random_numbers(ranks: RunRanks) -> None:
    first = ranks(2, read_all, 1)
    assert first[0].value == first[1].value
    for kind, passes in first[0].value.items():
        assert all(sorted(samples) == list(range(24)) for samples in passes), kind
        assert passes[0] != passes[1] and list(range(24)) not in passes, kind
    assert ranks(2, read_all, 1)[0].value == first[0].value


def evaluate() -> dict[str, Any]:
    """Exact evaluations, and uneven loops in which the ranks with more call collectives."""
    world = accel.world.current()
    found: dict[str, Any] = {}
    for way, (dataset, dispatch) in WAYS.items():
        for even, n_workers in ((True, 0), (False, 0), (True, 1)):
            loader = DataLoader(dataset(11), batch_size=2, num_workers=n_workers)
            prepared = prepare_data_loader(
                loader, world=world, dispatch_batches=dispatch, even_batches=even
            )
            samples: list[int] = []
            total = torch.zeros(1)
            for batch in prepared:
                real = current_batch().real  # type: ignore[union-attr]
                samples += world.all_gather(batch[:real]).tolist()
                mine = batch[:real].sum().float().reshape(1)
                world.reduce_(mine, "sum")
                total += mine
            found[f"{way} {even} {n_workers}"] = (samples, total.item())
    world.barrier()
    return found


@pytest.mark.parametrize("size", [2, 3])
def test_processes_evaluate_exactly(size: int, ranks: RunRanks) -> None:
    results = ranks(size, evaluate)
    for values in zip(*(result.value.items() for result in results), strict=True):
        kind = values[0][0]
        # The last ranks to leave an uneven loop saw it all.
        samples, total = max((value for _, value in values), key=lambda v: len(v[0]))
        assert samples == list(range(11)), kind
        assert total == 55, kind


def read_badly() -> str:
    """Rank 1 gets other indices; then rank 0 cannot read what it should give out."""
    world = accel.world.current()
    own = numpy.random.default_rng(world.rank)
    sampler = Drawing(24, lambda n: own.permutation(n).tolist())
    said = []
    for loader, dispatch in (
        (DataLoader(Numbers(24), sampler=sampler), False),
        (DataLoader(Failing(1)), True),
    ):
        try:
            for _ in prepare_data_loader(loader, world=world, dispatch_batches=dispatch):
                pass
        except Exception as failure:
            said.append(f"{type(failure).__name__}: {failure}")
    world.barrier()  # the world is whole
    return "\n".join(said)


def test_processes_are_told_what_is_wrong(ranks: RunRanks) -> None:
    for result in ranks(2, read_badly):
        assert "MismatchError" in result.value and "Drawing" in result.value
        assert "sample 3 is bad" in result.value
