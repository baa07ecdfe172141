"""Which samples a rank reads.

Pure: indices, elements or batches go in, a rank's share of them comes out. No torch, no
other rank, no random number. The order of the samples is the loader's own: put behind
each other in rank order, step by step, the real samples of all ranks are those of the
loader on one process. Where the ranks' shares must be of equal size (`even`), samples
from the beginning fill up the end, and every share says how many of its samples are real.

Words: a *round* is what all ranks together read in one step; a *share* is one rank's part
of it. With `split` the batches of the loader are rounds, else its batches are shares.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import cycle, islice
from typing import Any, NamedTuple, Protocol, TypeVar

T = TypeVar("T")


@dataclass(frozen=True)
class Plan:
    """How `size` ranks share the batches of one loader; `rank` is who asks.

    `batch_size` is the loader's, in samples, or None where batches have no set size.
    `drop_last` drops an incomplete round; otherwise `even` completes it with samples from
    the beginning, and without `even` some ranks read less, or one step less.

    Raises ValueError when `split` cannot cut `batch_size` into `size` equal shares.
    """

    rank: int
    size: int
    batch_size: int | None = None
    split: bool = False
    drop_last: bool = False
    even: bool = True

    def __post_init__(self) -> None:
        if self.split and self.batch_size is not None and self.batch_size % self.size:
            below = self.batch_size - self.batch_size % self.size
            near = f"{below} or {below + self.size}" if below else f"{self.size}"
            raise ValueError(
                f"split_batches=True shares each batch among all {self.size} ranks, and a batch "
                f"of {self.batch_size} samples does not divide: use a batch size of {near}, or "
                "split_batches=False, with which each rank reads batches of its own"
            )

    @property
    def width(self) -> int | None:
        """Samples in a full share, or None where batches have no set size."""
        if self.batch_size is None or not self.split:
            return self.batch_size
        return self.batch_size // self.size

    @property
    def padded(self) -> bool:
        """Whether the last round may be completed with samples from the beginning."""
        return self.size > 1 and self.even and not self.drop_last

    @property
    def ragged(self) -> bool:
        """Whether some ranks may make a step less than others."""
        return self.size > 1 and not self.even and not self.drop_last


class Share(NamedTuple):
    """One rank's batch of one step: `size` samples, the first `real` of which are there
    for their own sake, the others to fill up. `last`: this rank reads no further one."""

    batch: Any
    size: int
    real: int
    last: bool


# ---- batches of indices ------------------------------------------------------


def share_batches(batches: Iterable[Any], plan: Plan) -> Iterator[Share]:
    """The shares of `plan.rank` of the index batches that a batch sampler yields.

    A batch may be any sized sequence (list, tuple, range, numpy array, tensor; others
    become lists), and batches may differ in size; what is cut or filled up stays of its
    type where that is a list, tuple, array or tensor. Reads one round and one batch ahead.
    """
    sized = (b if hasattr(b, "__len__") else list(b) for b in batches)
    if plan.drop_last and plan.batch_size is not None and plan.size > 1:
        sized = _without_short_end(sized, plan.batch_size, len)
    if plan.size == 1:
        mine = ((batch, len(batch)) for batch in sized)
    elif plan.split:
        mine = _cut_batches(sized, plan)
    else:
        mine = _whole_batches(sized, plan)
    for (batch, real), last in _with_last(mine):
        yield Share(batch, len(batch), real, last)


def _whole_batches(batches: Iterator[Any], plan: Plan) -> Iterator[tuple[Any, int]]:
    """Each rank reads every plan.size-th batch."""
    pool: list[Any] | None = None
    for round_, final in _rounds(batches, plan.size):
        if pool is None and plan.padded:
            pool = round_
        if len(round_) < plan.size and plan.drop_last:
            return
        if final and plan.padded:
            yield _completed(round_, pool or round_, plan)
        elif plan.rank < len(round_):
            yield round_[plan.rank], len(round_[plan.rank])


def _completed(round_: list[Any], first: list[Any], plan: Plan) -> tuple[Any, int]:
    """This rank's batch of the last round, filled up with samples of the first one."""
    mine = round_[plan.rank] if plan.rank < len(round_) else None
    if plan.batch_size is None:
        filler = first[(plan.rank - len(round_)) % len(first)]
        return (filler, 0) if mine is None else (mine, len(mine))
    lacking = max(plan.batch_size - len(round_[-1]), 0)
    if mine is not None and (plan.rank < len(round_) - 1 or not lacking):
        return mine, len(mine)
    pool = [index for batch in first for index in batch]
    if not pool:
        return (mine, 0) if mine is not None else (round_[-1], 0)
    if mine is not None:
        return _joined(mine, _taken(pool, 0, lacking)), len(mine)
    start = lacking + (plan.rank - len(round_)) * plan.batch_size
    return _like(round_[-1], _taken(pool, start, plan.batch_size)), 0


def _cut_batches(batches: Iterator[Any], plan: Plan) -> Iterator[tuple[Any, int]]:
    """Each rank reads its slice of every batch."""
    first: Any = None
    for batch, final in _with_last(batches):
        n = len(batch)
        first = batch if first is None else first
        full = plan.batch_size if plan.batch_size and n <= plan.batch_size else n
        width = -(-full // plan.size)
        start = plan.rank * width
        real = min(max(n - start, 0), width)
        # A batch that is short before the end cannot leave a rank without one either.
        if real < width and (plan.even or not final) and len(first):
            batch = _joined(batch, _taken(list(first), 0, width * plan.size - n))
        elif not real:
            continue
        yield _slice(batch, start, start + width), real


# ---- elements of an iterable -------------------------------------------------


def share_elements(elements: Iterable[T], plan: Plan) -> Iterator[tuple[T, bool]]:
    """The elements of `plan.rank` of an iterable data set, each with whether it is real.

    Consecutive runs of plan.width elements (1 without a batch size) are one share. All of
    `elements` is read: a round at a time, and the first one is kept to complete the last.
    """
    width = plan.width or 1
    start, count = plan.rank * width, plan.size * width
    source = iter(elements)
    first: list[T] | None = None
    while buffer := list(islice(source, count)):
        n = len(buffer)
        if n < count and plan.drop_last:
            return
        if first is None and plan.padded:
            first = buffer
        if n < count and first is not None:
            buffer = buffer + _taken(first, 0, count - n)
        for i, element in enumerate(buffer[start : start + width], start):
            yield element, i < n


# ---- batches of data that rank 0 gives out -----------------------------------


class Kind(Protocol):
    """What share_data() needs to know of the data it hands out."""

    def rows(self, batch: Any) -> int | None:
        """Samples in a batch, or None where they cannot be told apart."""

    def cut(self, batch: Any, start: int, end: int) -> Any:
        """Samples `start` to `end` of a batch."""

    def joined(self, batches: Sequence[Any]) -> Any | None:
        """The samples of all batches in one, or None where their shapes differ."""


class Piece(NamedTuple):
    """What one rank gets of a round; `size` is None, and with it `real` where not 0, when
    samples cannot be told apart. `last`: the rank gets nothing in the next round."""

    batch: Any
    size: int | None
    real: int | None
    last: bool = False


def share_data(batches: Iterable[Any], plan: Plan, kind: Kind) -> Iterator[list[Piece | None]]:
    """Rounds of read batches: a piece for each rank.

    Whole batches where they are full, so nothing is copied. The end is cut into equal
    pieces, completed with the first samples of the first batch; where shapes differ so
    that this is impossible, whole batches with none of their samples real stand in. In
    the last round, without `even`, None stands for a rank that gets nothing. Reads a
    round and a batch ahead.

    Raises TypeError with `split` when the samples of a batch cannot be told apart.
    """
    if plan.drop_last and plan.batch_size is not None:
        batches = _without_short_end(iter(batches), plan.batch_size, kind.rows)
    rounds = (_cut_data if plan.split else _whole_data)(iter(batches), plan, kind)
    pending = next(rounds, None)
    while pending is not None:
        following = next(rounds, None)
        coming = following or [None] * plan.size
        yield [p and p._replace(last=c is None) for p, c in zip(pending, coming, strict=True)]
        pending = following


def _whole_data(batches: Iterator[Any], plan: Plan, kind: Kind) -> Iterator[list[Piece | None]]:
    head: Any = None
    for round_, final in _rounds(batches, plan.size):
        sizes = [kind.rows(batch) for batch in round_]
        if head is None and plan.padded:
            head = _head(round_[0], sizes[0], plan, kind)
        if len(round_) < plan.size and plan.drop_last:
            return
        short = len(round_) < plan.size or (plan.batch_size or 0) > (sizes[-1] or 0)
        pieces = None
        if final and short and plan.padded and None not in sizes:
            pieces = _even_pieces(round_, sum(s or 0 for s in sizes), head, plan, kind)
        yield pieces or _whole_pieces(round_, sizes, plan)


def _whole_pieces(round_: list[Any], sizes: list[int | None], plan: Plan) -> list[Piece | None]:
    pieces: list[Piece | None] = [Piece(b, n, n) for b, n in zip(round_, sizes, strict=True)]
    lacking = plan.size - len(round_)
    return pieces + [Piece(round_[0], sizes[0], 0) if plan.padded else None] * lacking


def _cut_data(batches: Iterator[Any], plan: Plan, kind: Kind) -> Iterator[list[Piece | None]]:
    head: Any = None
    for batch, final in _with_last(batches):
        n = kind.rows(batch)
        if n is None:
            raise TypeError(
                f"split_batches=True cuts each batch into {plan.size} pieces, but this batch, a "
                f"{type(batch).__name__}, has no tensor whose first dimension counts its samples: "
                "use split_batches=False"
            )
        if head is None:
            head = _head(batch, n, plan, kind)
        if n % plan.size and (plan.even or not final):
            # Where the first batch has another shape, this one fills itself up.
            pieces = _even_pieces([batch], n, head, plan, kind)
            yield pieces or _even_pieces([batch], n, batch, plan, kind) or _no_way(batch)
        elif n:
            yield _pieces(batch, n, -(-n // plan.size), plan, kind)


def _no_way(batch: Any) -> list[Piece | None]:
    raise TypeError(
        f"the last batch, a {type(batch).__name__}, cannot be completed so that all ranks get a "
        "part: use drop_last=True, even_batches=False or split_batches=False"
    )


def _head(batch: Any, n: int | None, plan: Plan, kind: Kind) -> Any:
    return kind.cut(batch, 0, min(plan.size, n)) if n else batch


def _even_pieces(
    batches: list[Any], n: int, head: Any, plan: Plan, kind: Kind
) -> list[Piece | None] | None:
    """`n` samples in pieces of equal size, or None where they cannot be put together."""
    width = -(-n // plan.size)
    lacking, parts = width * plan.size - n, list(batches)
    available = kind.rows(head) or 0
    if not n:
        return None
    while lacking > 0:
        if not available:
            return None
        parts.append(kind.cut(head, 0, min(lacking, available)))
        lacking -= available
    batch = parts[0] if len(parts) == 1 else kind.joined(parts)
    return None if batch is None else _pieces(batch, n, width, plan, kind)


def _pieces(batch: Any, n: int, width: int, plan: Plan, kind: Kind) -> list[Piece | None]:
    rows = kind.rows(batch) or 0
    pieces: list[Piece | None] = []
    for start in range(0, plan.size * width, width):
        size, real = (min(max(m - start, 0), width) for m in (rows, n))
        cut = kind.cut(batch, start, start + size) if size else None
        pieces.append(Piece(cut, size, real) if size else None)
    return pieces + [None] * (plan.size - len(pieces))


# ---- how many steps ----------------------------------------------------------


def steps_of_batches(plan: Plan, batches: int, samples: int | None = None) -> int:
    """Steps that plan.rank makes over share_batches() of `batches` batches. `samples` are
    the indices in them, where known: only without `even` and with `split` they matter."""
    if plan.size == 1:
        return batches
    if plan.split:
        return batches - _absent_at_the_end(plan, samples, plan.width)
    return _steps_of_whole(plan, batches)


def steps_of_data(plan: Plan, batches: int, samples: int | None = None) -> int:
    """As steps_of_batches(), over share_data()."""
    if plan.size == 1:
        return batches
    if plan.split:
        end = samples % plan.batch_size if samples and plan.batch_size else 0
        return batches - _absent_at_the_end(plan, samples, -(-end // plan.size))
    return _steps_of_whole(plan, batches)


def steps_of_elements(plan: Plan, elements: int) -> int:
    """Steps that plan.rank makes over share_elements() of `elements` elements."""
    width = plan.width or 1
    full, end = divmod(elements, plan.size * width)
    if plan.drop_last or not end:
        return full
    return full + (1 if plan.even else end > plan.rank * width)


def _steps_of_whole(plan: Plan, batches: int) -> int:
    if plan.drop_last:
        return batches // plan.size
    if plan.even:
        return -(-batches // plan.size)
    return (batches - plan.rank + plan.size - 1) // plan.size


def _absent_at_the_end(plan: Plan, samples: int | None, width: int | None) -> int:
    """1 when the last batch is too short for this rank to get a slice of it."""
    if not plan.ragged or not plan.batch_size or not samples or width is None:
        return 0
    end = samples % plan.batch_size
    return int(0 < end <= plan.rank * width)


# ---- helpers -----------------------------------------------------------------


def _with_last(items: Iterable[T]) -> Iterator[tuple[T, bool]]:
    source = iter(items)
    for item in source:
        for following in source:
            yield item, False
            item = following
        yield item, True


def _rounds(batches: Iterator[T], size: int) -> Iterator[tuple[list[T], bool]]:
    """Lists of `size` batches, or what is left; and whether nothing comes after."""
    pending = list(islice(batches, size))
    while pending:
        following = list(islice(batches, 1)) if len(pending) == size else []
        yield pending, not following
        pending = following + list(islice(batches, size - 1)) if following else []


def _without_short_end(
    batches: Iterator[T], batch_size: int, rows: Callable[[T], int | None]
) -> Iterator[T]:
    """Drop the very last batch when it is short: a batch sampler that says `drop_last`
    may leave that to us."""
    for batch, final in _with_last(batches):
        n = rows(batch) if final else None
        if n is None or n >= batch_size:
            yield batch


def _taken(pool: list[T], start: int, n: int) -> list[T]:
    """`n` samples of a pool that has no end, from `start` on."""
    start %= len(pool)
    return list(islice(cycle(pool), start, start + n))


def _slice(batch: Any, start: int, end: int) -> Any:
    try:
        return batch[start:end]
    except TypeError:
        return list(batch)[start:end]


def _joined(batch: Any, more: list[Any]) -> Any:
    return _like(batch, [*batch, *more])


def _like(batch: Any, indices: list[Any]) -> Any:
    """`indices` as the type of `batch`."""
    if isinstance(batch, tuple) and not hasattr(batch, "_fields"):
        return tuple(indices)
    # Arrays and tensors make their own kind of a list of rows.
    if hasattr(batch, "new_tensor"):
        rows = [index.tolist() if hasattr(index, "tolist") else index for index in indices]
        return batch.new_tensor(rows)
    if hasattr(batch, "__array__"):
        import numpy

        return numpy.asarray(indices, dtype=batch.dtype)
    return indices
