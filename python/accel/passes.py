"""The batch a program holds, and the passes over loaders that it comes from."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

from .operations import ignorant_find_batch_size
from .sampling import Piece

# ---- the batch a program holds -----------------------------------------------


class Batch:
    """The batch that a program holds, on this rank.

    size: its samples, as many as its tensors have rows
    real: how many of them, from the first on, are there for their own sake; fewer than
        `size` only where the end of the data was filled up
    last: whether this rank gets no further batch in this pass. Where only reading tells,
        asking reads the next batch.
    """

    __slots__ = ("_last", "_pass", "real", "size")

    def __init__(self, size: int, real: int, last: bool | None, pass_: Pass | None = None) -> None:
        self.size, self.real = size, real
        self._last, self._pass = last, pass_

    @property
    def last(self) -> bool:
        if self._last is None:
            assert self._pass is not None
            self._last = self._pass.is_last()
        return self._last

    def __repr__(self) -> str:
        return f"Batch(size={self.size}, real={self.real}, last={self._last})"


class _Running(threading.local):
    """The passes whose loops run in this thread, the innermost last."""

    def __init__(self) -> None:
        self.passes: list[Pass] = []


running = _Running()


def current_batch() -> Batch | None:
    """The batch of the innermost prepared loader whose loop runs in this thread; None
    outside of any loop. A loop left by `break` or an exception does not count."""
    passes = running.passes
    return passes[-1].batch if passes else None


# ---- passes: where batches come from -----------------------------------------

NOTHING: Any = object()


class Pass:
    """One pass over a loader. advance() gets the next batch, take() hands it over."""

    def __init__(self) -> None:
        self.batch: Batch | None = None
        self.steps = 0
        self._held: Any = None

    def advance(self) -> bool:
        """False at the end. Does not keep the batch that was handed over."""
        raise NotImplementedError

    def take(self) -> Any:
        held, self._held = self._held, None
        return held

    def is_last(self) -> bool:
        raise NotImplementedError

    def close(self) -> None:
        """The loop is left: the batch is no longer held, and nothing holds the source."""
        batch, self.batch, self._held = self.batch, None, None
        if batch is not None:
            batch._last, batch._pass = bool(batch._last), None


# What the sampler's side says of a batch: size, real, last.
Note = tuple[int, int, bool]


class IndexedPass(Pass):
    """Over a map-style data set: `notes()`, asked once a batch is there, has what the
    sampler's side says of the batches. With `single` their sizes show in reading only."""

    def __init__(
        self, source: Iterator[Any], notes: Callable[[], deque[Note]], single: bool
    ) -> None:
        super().__init__()
        self._source, self._ask, self._single = source, notes, single
        self._notes: deque[Note] | None = None

    def advance(self) -> bool:
        try:
            held = next(self._source)
        except StopIteration:
            return False
        if self._notes is None:
            self._notes = self._ask()
        size, real, last = self._notes.popleft()
        if self._single:
            rows = rows_of(held)
            size, real = rows, rows if real else 0
        self._held = held
        self.batch = Batch(size, real, last)
        self.steps += 1
        return True


# What a source of data yields, with what it says of it: batch, size, real.
Described = tuple[Any, int, int]


class ReadingPass(Pass):
    """Over a source whose end shows only in reading: an iterable data set, a loader with
    an __iter__ of its own. Reads ahead when asked whether a batch is the last one."""

    def __init__(self, source: Iterator[Any], describe: Callable[[Any], Described]) -> None:
        super().__init__()
        self._source, self._describe = source, describe
        self._ahead: Any = NOTHING
        self._failure: Exception | None = None
        self._ended = False

    def advance(self) -> bool:
        if self._ahead is NOTHING:
            self._read()
        if self._failure is not None:
            self._ended = True
            raise self._failure
        item, self._ahead = self._ahead, NOTHING
        if self.batch is not None:
            self.batch._last, self.batch._pass = self._ended, None
        if self._ended:
            return False
        self._held, size, real = self._describe(item)
        self.batch = Batch(size, real, None, self)
        self.steps += 1
        return True

    def is_last(self) -> bool:
        if self._ahead is NOTHING:
            self._read()
        return self._ended

    def _read(self) -> None:
        if self._ended or self._failure is not None:
            return
        try:
            self._ahead = next(self._source)
        except StopIteration:
            self._ended = True
        except Exception as failure:
            # It belongs to the next step, as without a look ahead.
            self._failure = failure


class DispatchedPass(Pass):
    """Over what rank 0 reads and gives out."""

    def __init__(self, source: Iterator[Piece]) -> None:
        super().__init__()
        self._source = source

    def advance(self) -> bool:
        piece = next(self._source, None)
        if piece is None:
            return False
        self._held, size, real, last = piece
        if size is None:
            size = rows_of(self._held)
        self.batch = Batch(size, size if real is None else real, last)
        self.steps += 1
        return True


def rows_of(batch: Any) -> int:
    """Samples in a batch about which nothing else is known."""
    return ignorant_find_batch_size(batch) or 1
