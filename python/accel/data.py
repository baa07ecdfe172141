"""Prepared loaders: the user's DataLoader, of which each rank reads its share.

The user's loader keeps its workers, collate function and order; only what its batch
sampler, or iterable data set, yields is cut down to this rank's share (sampling.py), in
an order that all ranks agree on (shuffling.py). With dispatch_batches rank 0 reads and
gives out (dispatch.py). In a world of one everything is read, with the batches and the
random numbers of the bare loader.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from types import GeneratorType
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset
from torch.utils.data.dataloader import _BaseDataLoaderIter

from . import shuffling
from . import world as worlds
from .operations import send_to_device
from .passes import Batch as Batch
from .passes import Pass, running
from .passes import current_batch as current_batch
from .rng import RNGType, synchronize_rng_states
from .sampling import Plan
from .ways import Options, Way, choose
from .world import World


class PreparedLoader(DataLoader[Any]):
    """A DataLoader whose loop yields this rank's batches, on its device.

    Everything but reading is that of the user's loader: attributes read and set here are
    read and set there. `len()` is the number of steps that this rank makes.

    All ranks iterate over it alike: a rank that leaves the loop early, by `break`, has all
    others do so at the same step. With even_batches=False some ranks have a step less;
    at the end of their loop they answer the collectives of the others until all are done.
    """

    def __init__(self, loader: DataLoader[Any], world: World, options: Options) -> None:
        # Not DataLoader.__init__(): this one has nothing to read by itself.
        plan, way = choose(loader, world, options)
        place = None
        if options.device is not None and torch.device(options.device).type != "cpu":
            place = partial(
                send_to_device, device=options.device, non_blocking=options.non_blocking
            )
        epochs = _Epochs([*shuffling.samplers_of(loader), loader.dataset])
        state = _State(loader, world, options, plan, way, place, epochs)
        self.__dict__["_prepared"] = state

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        state: _State = self.__dict__["_prepared"]
        pass_ = state.begin()
        place, passes = state.place, running.passes
        passes.append(pass_)
        try:
            # No name is bound to a batch, so it goes when the program lets go of it.
            if place is None:
                while pass_.advance():
                    yield pass_.take()
            else:
                while pass_.advance():
                    yield place(pass_.take())
        finally:
            passes.remove(pass_)
            pass_.close()
        state.finish(pass_)

    def __len__(self) -> int:
        """Steps of this rank in one pass. As for the bare loader, a guess where workers share
        out an IterableDataset, and a TypeError where that has no length."""
        return self.__dict__["_prepared"].way.steps()

    @property
    def total_batch_size(self) -> int | None:
        """Samples that all ranks together read in one step; None where batches have no set
        size."""
        state: _State = self.__dict__["_prepared"]
        batch_size = state.plan.batch_size
        if batch_size is None or state.plan.split:
            return batch_size
        return batch_size * state.world.size

    def set_epoch(self, epoch: int) -> None:
        """Tell samplers and data set the epoch, where they have a set_epoch().

        Done by itself at the start of each pass: with the number of complete passes, going
        on from what was last set, here or on the sampler itself.
        """
        self.__dict__["_prepared"].epochs.set(epoch)

    @contextmanager
    def with_even_batches(self, even_batches: bool) -> Iterator[None]:
        """A block in which the loader is read with this `even_batches`."""
        before: _State = self.__dict__["_prepared"]
        options = replace(before.options, even_batches=even_batches)
        again = _remade(before.loader, options, before.epochs.epoch, before.world)
        self.__dict__["_prepared"] = again.__dict__["_prepared"]
        try:
            yield
        finally:
            self.__dict__["_prepared"] = before

    def _get_iterator(self) -> Any:
        return iter(self)

    def __getattr__(self, name: str) -> Any:
        if "_prepared" not in self.__dict__:  # half made, by copy or pickle
            raise AttributeError(name)
        return getattr(self.__dict__["_prepared"].loader, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.__dict__["_prepared"].loader, name, value)

    def __repr__(self) -> str:
        state: _State = self.__dict__["_prepared"]
        rank, size = state.world.rank, state.world.size
        return f"<PreparedLoader of {state.loader!r}, rank {rank} of {size}>"

    def __copy__(self) -> PreparedLoader:
        state: _State = self.__dict__["_prepared"]
        return _remade(state.loader, state.options, state.epochs.epoch, state.world)

    def __deepcopy__(self, memo: dict[int, Any]) -> PreparedLoader:
        state: _State = self.__dict__["_prepared"]
        loader = copy.deepcopy(state.loader, memo)
        return _remade(loader, state.options, state.epochs.epoch, state.world)

    def __reduce_ex__(self, protocol: Any) -> Any:
        state: _State = self.__dict__["_prepared"]
        return _remade, (state.loader, state.options, state.epochs.epoch)


def _remade(
    loader: DataLoader[Any], options: Options, epoch: int, world: World | None = None
) -> PreparedLoader:
    """A prepared loader that was copied, or unpickled: in the world it is then in."""
    prepared = PreparedLoader(loader, world or worlds.current(), options)
    prepared.__dict__["_prepared"].epochs.epoch = epoch
    return prepared


class _Epochs:
    """The epoch, told to what has a set_epoch()."""

    def __init__(self, candidates: Iterable[Any]) -> None:
        self.epoch = 0
        self._followers = [c for c in candidates if callable(getattr(c, "set_epoch", None))]
        self._seen = [getattr(f, "epoch", None) for f in self._followers]

    def set(self, epoch: int) -> None:
        self.epoch = epoch
        for i, follower in enumerate(self._followers):
            follower.set_epoch(epoch)
            self._seen[i] = getattr(follower, "epoch", None)

    def tell(self) -> None:
        """At the start of a pass. What the program told a follower itself wins."""
        for follower, seen in zip(self._followers, self._seen, strict=True):
            epoch = getattr(follower, "epoch", None)
            if isinstance(epoch, int) and epoch != seen:
                self.epoch = epoch
        if self._followers:
            self.set(self.epoch)


class _State:
    """What a PreparedLoader has of its own."""

    def __init__(
        self,
        loader: DataLoader[Any],
        world: World,
        options: Options,
        plan: Plan,
        way: Way,
        place: Callable[[Any], Any] | None,
        epochs: _Epochs,
    ) -> None:
        self.loader, self.world, self.options, self.plan = loader, world, options, plan
        self.way, self.place, self.epochs = way, place, epochs
        self._passes = 0
        self._gave = False

    def begin(self) -> Pass:
        self.epochs.tell()
        if self.options.rng_types:
            synchronize_rng_states(self.options.rng_types, world=self.world)
        self._passes += 1
        return self.way.begin(self._passes)

    def finish(self, pass_: Pass) -> None:
        """After the last batch. Waits for the ranks that have more."""
        if pass_.steps == 0:
            self._refuse_exhausted()
        self._gave = self._gave or pass_.steps > 0
        self.epochs.epoch += 1
        if self.plan.ragged:
            self.world.join()

    def _refuse_exhausted(self) -> None:
        # A rank may get nothing of data that there is.
        whole = self.plan.size == 1 or self.plan.padded
        if not self._gave and (self.plan.drop_last or not whole):
            return
        iterable = isinstance(self.loader.dataset, IterableDataset)
        sources = [self.loader.dataset] if iterable else shuffling.samplers_of(self.loader)
        for source in sources:
            used_up = self._gave and iterable and isinstance(iter(source), GeneratorType)
            if used_up or _reads_once(source):
                raise RuntimeError(
                    f"this loader gave no batch: its {type(source).__name__} can be read only "
                    "once, and has been. Let its __iter__ begin anew each time, or make a new "
                    "loader for each pass"
                )


def _reads_once(source: Any) -> bool:
    """Whether iter() always returns the same iterator."""
    try:
        first = iter(source)
        return first is source or first is iter(source)
    except TypeError:
        return False


def is_prepared(loader: Any) -> bool:
    return isinstance(loader, PreparedLoader)


def is_iterator(obj: Any) -> bool:
    """Whether this is what iter() makes of a DataLoader, be it prepared or not."""
    if isinstance(obj, GeneratorType):
        return obj.gi_code is PreparedLoader.__iter__.__code__
    return isinstance(obj, _BaseDataLoaderIter)


def prepare_data_loader(
    loader: DataLoader[Any],
    *,
    world: World,
    device: torch.device | str | int | None = None,
    split_batches: bool = False,
    rng_types: Iterable[RNGType | str] | None = None,
    dispatch_batches: bool | None = None,
    even_batches: bool = True,
    non_blocking: bool = False,
) -> PreparedLoader:
    """A loader that yields this rank's batches of `loader`, on `device`.

    By default each rank reads batches of the loader's batch size, the first of which go to
    rank 0, 1, ... in turn; with `split_batches` all ranks read a part of each batch, whose
    size must divide by the number of ranks. With `even_batches` samples from the beginning
    complete the end, so that all ranks make the same steps with batches of the same size;
    current_batch() knows which are real. A loader with drop_last drops the end instead.
    Without `even_batches` some ranks read less, or make a step less.

    With `dispatch_batches`, rank 0 alone reads and sends each rank its part: the default
    for an IterableDataset, of which otherwise every rank reads all. It reads one step
    ahead.

    The order is that of rank 0 on all ranks, whatever the sampler draws from; a sampler
    whose `generator` is None is given one. `rng_types` ("torch", "cuda", "numpy",
    "python") makes the program's own random states those of rank 0, too, at the start of
    each pass; "generator", the sampler's, always is.

    A loader that is prepared already is returned as it is. Raises TypeError for what is
    no DataLoader, ValueError for what cannot be shared out; iterating raises MismatchError
    on all ranks where their loaders or samplers differ, RuntimeError where an iterator is
    used up.
    """
    if isinstance(loader, PreparedLoader):
        return loader
    if not isinstance(loader, DataLoader):
        raise TypeError(
            f"a {type(loader).__name__} is no torch.utils.data.DataLoader: make one of it, as "
            "DataLoader(dataset, batch_size=...)"
        )
    kinds = (RNGType.of(kind) for kind in rng_types or ())
    options = Options(
        device=device,
        split_batches=split_batches,
        rng_types=tuple(kind for kind in kinds if kind is not RNGType.GENERATOR),
        dispatch_batches=dispatch_batches,
        even_batches=even_batches,
        non_blocking=non_blocking,
    )
    return PreparedLoader(loader, world, options)
