"""One order of samples on all ranks, whatever a sampler draws its random numbers from.

A rank reads its share of an order that all ranks have to agree on. So at the start of
each pass rank 0 tells the state of the samplers' generators, and a seed: for generators
that samplers lack, and for those that draw from Python's, numpy's or torch's global
state, which run on a state of their own, apart from the program's. What cannot be steered
that way is compared. Rank 0's seed is made from its global states without drawing from
them, so a program that is seeded gives the same order each time it runs, and the
program's own numbers are what they would be without a loader.
"""

from __future__ import annotations

import ctypes
import hashlib
import random
import sys
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from itertools import islice
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    Subset,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from .errors import MismatchError

if TYPE_CHECKING:
    from .world import World

_ABSENT = object()

# Draw from `generator` alone, once they have one.
_STEERED = (RandomSampler, SubsetRandomSampler, WeightedRandomSampler)


# What ranks are at that begin to read a loader.
START = "start of a pass over a DataLoader"


class Shuffle:
    """What gives one loader the same order on all ranks. `number` tells the loaders of a
    program apart: two of the same length are not shuffled alike.

    Samplers that have a `generator` which is None get one.
    """

    def __init__(self, loader: DataLoader[Any], world: World, number: int) -> None:
        self.world = world
        self._seeds = _Seeds(number)
        self.samplers = samplers_of(loader)
        self.settled = _is_settled(self.samplers[0])
        self._owned: list[torch.Generator] = []
        self._given: list[torch.Generator] = []
        # A map-style data set's generator is for augmentation: each rank's own.
        of_order = [loader.dataset] if isinstance(loader.dataset, IterableDataset) else []
        for owner in [*self.samplers, *of_order]:
            generator = getattr(owner, "generator", _ABSENT)
            if isinstance(generator, torch.Generator):
                if all(generator is not g for g in self._given):
                    self._given.append(generator)
            elif generator is None and owner is not loader.dataset:
                with suppress(AttributeError):  # one that cannot be set is compared
                    owner.generator = torch.Generator()
                    self._owned.append(owner.generator)

    @property
    def generators(self) -> int:
        return len(self._owned) + len(self._given)

    def begin(self, seed_needed: bool) -> int:
        """Synchronise, and return a seed that is the same on all ranks. Collective, but
        where there is nothing to tell: one broadcast of some kilobytes."""
        seed_needed = seed_needed or bool(self._owned)
        if not self._given and not seed_needed:
            return 0
        seed = 0
        if seed_needed and self.world.rank == 0:
            seed = self._seeds.next(*_program_state())
        states = [g.get_state() for g in self._given]
        message = torch.cat([torch.tensor([seed]).view(torch.uint8), *states])
        self.world.broadcast_(message, label=START)
        first, *told = message.split([8, *(s.numel() for s in states)])
        if self.world.rank:
            for generator, state in zip(self._given, told, strict=True):
                generator.set_state(state.clone())
        seed = int(first.clone().view(torch.int64))
        for i, generator in enumerate(self._owned):
            generator.manual_seed(mixed(seed, i))
        return seed


def samplers_of(loader: DataLoader[Any]) -> list[Any]:
    """The samplers that decide the order of a loader, outermost first, each once."""
    found: list[Any] = []
    # Beside a batch sampler of the user's there is a sampler that nobody asks.
    pending = [loader.sampler if loader.batch_sampler is None else loader.batch_sampler]
    while pending:
        sampler = pending.pop(0)
        if sampler is None or any(sampler is s for s in found):
            continue
        found.append(sampler)
        pending += [getattr(sampler, name, None) for name in ("sampler", "batch_sampler")]
    return found


def _is_settled(sampler: Any) -> bool:
    """Whether a sampler draws from nothing but generators that Shuffle synchronises."""
    if type(sampler) is BatchSampler:
        return _is_settled(sampler.sampler)
    return type(sampler) in (SequentialSampler, range, *_STEERED)


class _Seeds:
    """A seed for each pass, from states that nothing is drawn from: the same for the same
    states, but another one when they did not change from pass to pass."""

    def __init__(self, *salt: int) -> None:
        self._salt = salt
        self._last, self._repeated = 0, 0

    def next(self, *states: int | bytes) -> int:
        state = mixed(*states)
        self._repeated = self._repeated + 1 if state == self._last else 0
        self._last = state
        return mixed(state, self._repeated, *self._salt)


class WorkerSeeds:
    """Where the workers of a loader take their base seed from: as without accel, torch's
    state or that of the loader's generator decides it, but it differs from rank to rank."""

    def __init__(self, rank: int, number: int) -> None:
        self._seeds = _Seeds(rank, number)
        self._generator = torch.Generator()

    def next(self, generator: torch.Generator | None) -> torch.Generator:
        state = torch.get_rng_state() if generator is None else generator.get_state()
        return self._generator.manual_seed(self._seeds.next(_memory(state)))


def _program_state() -> Iterator[int | bytes]:
    yield _memory(torch.get_rng_state())
    yield hash(random.getstate()[1])
    numpy_random = sys.modules.get("numpy.random")
    if numpy_random is not None:
        _, key, position, *_ = numpy_random.get_state()
        yield key.tobytes()
        yield int(position)


def mixed(*values: int | bytes) -> int:
    """A seed from several numbers or states: 0 to 2^63 - 1."""
    digest = hashlib.blake2b(digest_size=8)
    for value in values:
        digest.update(
            value if isinstance(value, bytes) else value.to_bytes(9, "little", signed=True)
        )
    return int.from_bytes(digest.digest(), "little") >> 1


def _memory(tensor: Tensor) -> bytes:
    return ctypes.string_at(tensor.data_ptr(), tensor.numel() * tensor.element_size())


# ---- a random state of its own -----------------------------------------------


class Apart(Iterator[Any]):
    """Iterates over what `start` returns with global random states of its own, made from
    `seed`; the program's are back after each step. Takes `count` items in one step."""

    def __init__(self, start: Callable[[], Iterator[Any]], seed: int, count: int) -> None:
        self._start: Callable[[], Iterator[Any]] | None = start
        self._count = count
        self._states: list[Any] = _states_of_seed(seed)
        self._items: deque[Any] = deque()

    def __next__(self) -> Any:
        if not self._items:
            self._step()
        if not self._items:
            raise StopIteration
        return self._items.popleft()

    def _step(self) -> None:
        program = _states()
        _set_states(self._states)
        try:
            if self._start is not None:
                self._source, self._start = self._start(), None
            for item in self._source:
                self._items.append(item)
                if len(self._items) == self._count:
                    break
        finally:
            self._states = _states()
            _set_states(program)


def _states() -> list[Any]:
    numpy_random = sys.modules.get("numpy.random")
    numpy_state = numpy_random.get_state(legacy=False) if numpy_random else None
    return [torch.get_rng_state(), random.getstate(), numpy_state]


def _set_states(states: list[Any]) -> None:
    torch.set_rng_state(states[0])
    random.setstate(states[1])
    if states[2] is not None:
        sys.modules["numpy.random"].set_state(states[2])  # type: ignore[attr-defined]


def _states_of_seed(seed: int) -> list[Any]:
    numpy_random = sys.modules.get("numpy.random")
    numpy_state = None
    if numpy_random is not None:
        numpy_state = numpy_random.RandomState(seed % 2**32).get_state(legacy=False)
    torch_state = torch.Generator().manual_seed(seed).get_state()
    return [torch_state, random.Random(seed).getstate(), numpy_state]


# ---- comparing ---------------------------------------------------------------

_ORDER = "the order of the samples"


class Compared(Iterator[Any]):
    """The batches of a sampler; before the first, all ranks compare the `count` that come
    first, and the `facts` about their loaders. Raises MismatchError on all ranks."""

    def __init__(
        self, batches: Iterator[Any], count: int, world: World, sampler: Any, facts: dict[str, int]
    ) -> None:
        self._batches, self._count = batches, count
        self._world, self._sampler, self._facts = world, sampler, facts
        self._first: deque[Any] | None = None

    def __next__(self) -> Any:
        if self._first is None:
            self._first = deque(self._compare())
        return self._first.popleft() if self._first else next(self._batches)

    def _compare(self) -> list[Any]:
        first = list(islice(self._batches, self._count))
        facts = {**self._facts, _ORDER: digest_of_indices(first)}
        compare(self._world, facts, f"its sampler, a {type(self._sampler).__name__},")
        return first


def compare(world: World, facts: dict[str, int], sampler: str = "") -> None:
    """Raise MismatchError on all ranks where the ranks' facts about a loader differ.
    Collective: one gather of a few numbers."""
    numbers = torch.tensor([list(facts.values())], dtype=torch.int64)
    table = world.all_gather(numbers, START)
    for name, column in zip(facts, table.T.tolist(), strict=True):
        if len(set(column)) == 1:
            continue
        if name == _ORDER:
            odd = next(rank for rank, value in enumerate(column) if value != column[0])
            raise MismatchError(
                f"the ranks would not share out the same samples: the loader is the same, but "
                f"{sampler} begins with other indices on rank {odd} than on rank 0. Seed what it "
                "draws from with the same number on all ranks (accel.set_seed(7) before it is "
                "made), give it a torch.Generator as .generator, and let it not look at the rank: "
                "accel picks each rank's share"
            )
        lines = "\n".join(f"  rank {rank}: {value}" for rank, value in enumerate(column))
        raise MismatchError(
            f"the loaders of the ranks differ in {name}:\n{lines}\n"
            "All ranks must make the same loader; accel picks each rank's share"
        )


def digest_of_indices(batches: Iterable[Any]) -> int:
    """A number that tells lists of indices apart; 0 where they are no plain values."""
    plain = _plain([*batches])
    return 0 if plain is None else zlib.crc32(repr(plain).encode())


def _plain(value: Any) -> Any | None:
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, (int, str, bytes, float)):
        return value
    if isinstance(value, (list, tuple, range)):
        values = [_plain(v) for v in value]
        return None if None in values else values
    return None


def digest_of_subset(dataset: Any) -> int:
    """A number that tells the indices of a Subset apart, e.g. those of random_split()."""
    digest = 0
    while isinstance(dataset, Subset):
        indices, dataset = dataset.indices, dataset.dataset
        digest = zlib.crc32(str(digest_of_indices([indices])).encode(), digest)
    return digest


def digest_of_content(data: Any) -> int:
    """A number that tells samples apart, by the values of what is plain in them."""
    if isinstance(data, Tensor):
        if data.layout != torch.strided or data.device.type != "cpu" or data.is_quantized:
            return zlib.crc32(repr(tuple(data.shape)).encode())
        return zlib.crc32(_memory(data.detach()[:4096].contiguous() if data.dim() else data))
    if hasattr(data, "tobytes"):
        return zlib.crc32(data.tobytes())
    if isinstance(data, (int, str, float, bool, bytes, type(None))):
        return zlib.crc32(repr(data).encode())
    parts: Iterable[Any] = ()
    if isinstance(data, Mapping):
        parts = (part for item in data.items() for part in item)
    elif isinstance(data, (list, tuple)):
        parts = data
    digest = zlib.crc32(type(data).__name__.encode())
    for part in parts:
        digest = zlib.crc32(str(digest_of_content(part)).encode(), digest)
    return digest
