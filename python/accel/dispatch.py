"""Batches that rank 0 alone reads, on their way to the other ranks.

What a batch is does not matter: it is pickled, with its tensors taken out, and their
memory travels in one broadcast for all ranks. The pickled form is sent only when it
changes, so a step costs two broadcasts, a short one and the data. Cutting and joining,
which the end of the data needs, knows tensors, arrays and lists of one value a sample in
dicts, lists, tuples and dataclasses.
"""

from __future__ import annotations

import dataclasses
import io
import pickle
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from .errors import AccelError
from .operations import _like_dataclass, _like_mapping, honor_type
from .sampling import Piece

if TYPE_CHECKING:
    from .world import World

# What a header says: a round follows, the last one does, there is none at all, rank 0
# could not go on.
_ROUND, _LAST, _NONE, _ERROR = 1, 2, 3, 4
_ALIGNED = 64
_LABEL = "next batch, read by rank 0"

# Values that are the same for all samples of a batch, or one of a list with one a sample.
_PLAIN = (str, bytes, int, float, bool, complex, type(None))


# ---- sending -----------------------------------------------------------------


class _Spec(NamedTuple):
    """A tensor that travels: where it lies in the broadcast memory."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int


class _Entry(NamedTuple):
    """What one rank gets in a round."""

    pickled: bytes
    specs: list[_Spec]
    size: int | None
    real: int | None
    last: bool


class Leader:
    """Rank 0's end: takes rounds, keeps its own piece of each, and sends the others'.

    Iterates over the pieces of rank 0. What `rounds` raises is raised on all ranks.
    """

    def __init__(self, world: World, rounds: Iterator[list[Piece | None]]) -> None:
        self.world, self._rounds = world, rounds
        self._told = b""
        self._done = False

    def __iter__(self) -> Leader:
        return self

    def __next__(self) -> Piece:
        if self._done:
            raise StopIteration
        self._done = True
        try:
            round_ = next(self._rounds, None)
            parcel = None if round_ is None else _Parcel(round_[1:])
        except Exception as error:
            self._send(_ERROR, "".join(traceback.format_exception(error)).encode(), _NOTHING)
            raise
        if round_ is None or parcel is None:
            self._send(_NONE, b"", _NOTHING)
            raise StopIteration
        self._done = all(piece is None or piece.last for piece in round_)
        news = b"" if parcel.form == self._told else parcel.form
        self._send(_LAST if self._done else _ROUND, news, parcel.memory())
        self._told = parcel.form
        if round_[0] is None:
            raise StopIteration
        return round_[0]

    def _send(self, what: int, form: bytes, memory: Tensor) -> None:
        self.world.broadcast_(torch.tensor([what, len(form), memory.numel()]), label=_LABEL)
        for part in (
            torch.frombuffer(bytearray(form), dtype=torch.uint8) if form else _NOTHING,
            memory,
        ):
            if part.numel():
                self.world.broadcast_(part, label=_LABEL)


class Follower:
    """The end of every other rank: iterates over what rank 0 gives it.

    Raises AccelError with rank 0's traceback when that could not go on.
    """

    def __init__(self, world: World) -> None:
        self.world = world
        self._entries: list[_Entry | None] = []
        self._done = False

    def __iter__(self) -> Follower:
        return self

    def __next__(self) -> Piece:
        if self._done:
            raise StopIteration
        header = torch.zeros(3, dtype=torch.int64)
        self.world.broadcast_(header, label=_LABEL)
        what, news, n = header.tolist()
        payload = _received(self.world, news).numpy().tobytes() if news else b""
        memory = _received(self.world, n)
        if what == _ERROR:
            self._done = True
            raise AccelError(
                "rank 0, which reads for all ranks, could not read its next batch:\n"
                + payload.decode(errors="replace")
            )
        if news:
            self._entries = pickle.loads(payload)
        self._done = what != _ROUND
        entry = None if what == _NONE else self._entries[self.world.rank - 1]
        if entry is None:
            raise StopIteration
        batch = _unpickled(entry, memory)
        return Piece(batch, entry.size, entry.real, entry.last)


def _received(world: World, n: int) -> Tensor:
    memory = torch.empty(n, dtype=torch.uint8)
    if n:
        world.broadcast_(memory, label=_LABEL)
    return memory


_NOTHING = torch.empty(0, dtype=torch.uint8)


class _Parcel:
    """A round on its way to the ranks after 0: `form` says what it is, memory() has the
    tensors. Raises TypeError for a batch that cannot be pickled."""

    def __init__(self, pieces: Sequence[Piece | None]) -> None:
        self._tensors: list[tuple[_Spec, Tensor]] = []
        self._end = 0
        self.form = pickle.dumps([piece and self._entry(piece) for piece in pieces])

    def _entry(self, piece: Piece) -> _Entry:
        file = io.BytesIO()
        pickler = _Pickler(file)
        try:
            pickler.dump(piece.batch)
        except (pickle.PicklingError, TypeError, AttributeError) as error:
            kind = type(piece.batch).__name__
            raise TypeError(
                "rank 0 reads for all ranks (dispatch_batches), and a batch that it read, a "
                f"{kind}, cannot be sent: {error}. Return tensors and plain values from "
                "collate_fn, or pass dispatch_batches=False"
            ) from error
        specs = [self._add(tensor) for tensor in pickler.tensors]
        return _Entry(file.getvalue(), specs, piece.size, piece.real, piece.last)

    def _add(self, tensor: Tensor) -> _Spec:
        start = -(-self._end // _ALIGNED) * _ALIGNED
        self._end = start + tensor.numel() * tensor.element_size()
        spec = _Spec(tensor.dtype, tuple(tensor.shape), start)
        self._tensors.append((spec, tensor))
        return spec

    def memory(self) -> Tensor:
        memory = torch.empty(self._end, dtype=torch.uint8)
        for spec, tensor in self._tensors:
            _view(memory, spec).copy_(tensor)
        return memory


def _view(memory: Tensor, spec: _Spec) -> Tensor:
    count = 1
    for dim in spec.shape:
        count *= dim
    part = memory[spec.offset : spec.offset + count * spec.dtype.itemsize]
    return part.view(spec.dtype).view(spec.shape)


class _Pickler(pickle.Pickler):
    """Takes the tensors out of what it pickles."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self.tensors: list[Tensor] = []
        self._numbers: dict[int, int] = {}

    def persistent_id(self, obj: Any) -> int | None:
        if type(obj) is not Tensor or obj.layout != torch.strided or obj.is_quantized:
            return None
        number = self._numbers.setdefault(id(obj), len(self.tensors))
        if number == len(self.tensors):
            self.tensors.append(obj.detach())
        return number


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, load: Callable[[int], Tensor]) -> None:
        super().__init__(file)
        self.persistent_load = load  # type: ignore[method-assign]


def _unpickled(entry: _Entry, memory: Tensor) -> Any:
    # Copies: the memory holds the batches of all ranks, and would live as long as one.
    tensors = [_view(memory, spec).clone() for spec in entry.specs]
    return _Unpickler(io.BytesIO(entry.pickled), tensors.__getitem__).load()


# ---- cutting and joining -----------------------------------------------------


class _Unlike(Exception):
    """Batches that cannot be put together."""


class Samples:
    """Batches made of samples along dimension 0: a sampling.Kind."""

    def rows(self, batch: Any) -> int | None:
        """As the first tensor or array says, else the first list of one value a sample;
        None where a part of the batch is of a type that cannot be cut."""
        arrays: list[int] = []
        lists: list[int] = []
        if not _measure(batch, arrays, lists):
            return None
        return next(iter(arrays + lists), None)

    def cut(self, batch: Any, start: int, end: int) -> Any:
        n = self.rows(batch)
        if start == 0 and end == n:
            return batch

        def one(leaf: Any) -> Any:
            return leaf[start:end] if _rows(leaf) == n else leaf

        return _map(one, batch)

    def joined(self, batches: Sequence[Any]) -> Any | None:
        try:
            return _joined(list(batches), [self.rows(b) for b in batches])
        except _Unlike:
            return None


class Units:
    """Batches that are given out as they are, one a rank: a sampling.Kind."""

    def rows(self, batch: Any) -> int | None:
        return None

    def cut(self, batch: Any, start: int, end: int) -> Any:
        return batch

    def joined(self, batches: Sequence[Any]) -> Any | None:
        return None


def _is_array(value: Any) -> bool:
    return isinstance(value, Tensor) or (hasattr(value, "dtype") and hasattr(value, "shape"))


def _is_list_of_values(value: Any) -> bool:
    return (
        isinstance(value, (list, tuple))
        and not hasattr(value, "_fields")
        and bool(value)
        and all(isinstance(v, _PLAIN) for v in value)
    )


def _rows(leaf: Any) -> int | None:
    if _is_array(leaf):
        return leaf.shape[0] if len(leaf.shape) else None
    return len(leaf) if _is_list_of_values(leaf) else None


def _is_dataclass(value: Any) -> bool:
    return dataclasses.is_dataclass(value) and not isinstance(value, type)


def _measure(data: Any, arrays: list[int], lists: list[int]) -> bool:
    """Collect the first dimensions; False where something cannot be cut."""
    if _is_array(data):
        if isinstance(data, Tensor) and data.layout != torch.strided:
            return False
        if len(data.shape):
            arrays.append(data.shape[0])
        return True
    if _is_list_of_values(data):
        lists.append(len(data))
        return True
    if isinstance(data, Mapping):
        return all(_measure(v, arrays, lists) for v in data.values())
    if isinstance(data, (list, tuple)):
        return all(_measure(v, arrays, lists) for v in data)
    if _is_dataclass(data):
        return all(_measure(v, arrays, lists) for v in vars(data).values())
    return isinstance(data, _PLAIN)


def _map(function: Callable[[Any], Any], data: Any) -> Any:
    """As map_structure(), with a list of one value a sample as a leaf."""
    if _is_array(data) or _is_list_of_values(data):
        return function(data)
    if isinstance(data, Mapping):
        return _like_mapping(data, {k: _map(function, v) for k, v in data.items()})
    if isinstance(data, (list, tuple)):
        return honor_type(data, [_map(function, v) for v in data])
    return _like_dataclass(data, lambda v: _map(function, v)) if _is_dataclass(data) else data


def _joined(parts: list[Any], rows: list[int | None]) -> Any:
    first = parts[0]
    if any(type(part) is not type(first) for part in parts):
        raise _Unlike
    if all(_rows(part) == n is not None for part, n in zip(parts, rows, strict=True)):
        return _joined_leaves(parts)
    if isinstance(first, Mapping):
        if any(part.keys() != first.keys() for part in parts):
            raise _Unlike
        return _like_mapping(first, {k: _joined([p[k] for p in parts], rows) for k in first})
    if isinstance(first, (list, tuple)):
        if any(len(part) != len(first) for part in parts):
            raise _Unlike
        columns = zip(*parts, strict=True)
        return honor_type(first, [_joined(list(column), rows) for column in columns])
    if _is_dataclass(first):
        fields = [f.name for f in dataclasses.fields(first) if hasattr(first, f.name)]
        columns = {name: [getattr(p, name, None) for p in parts] for name in fields}
        names = iter(columns)
        return _like_dataclass(first, lambda _: _joined(columns[next(names)], rows))
    return _common(parts)


def _joined_leaves(parts: list[Any]) -> Any:
    first = parts[0]
    if isinstance(first, (list, tuple)):
        return type(first)([value for part in parts for value in part])
    if any(p.shape[1:] != first.shape[1:] or p.dtype != first.dtype for p in parts):
        raise _Unlike
    if isinstance(first, Tensor):
        return torch.cat(parts)
    import numpy

    return numpy.concatenate(parts)


def _common(parts: list[Any]) -> Any:
    """A value that is not one a sample: it has to be the same in all parts."""
    first = parts[0]
    for part in parts[1:]:
        if isinstance(first, Tensor):
            same = first.shape == part.shape and torch.equal(first, part)
        else:
            same = bool(first == part) if isinstance(first, _PLAIN) else first is part
        if not same:
            raise _Unlike
    return first
