"""Nested structures, and collectives on them: through shared memory and through
torch.distributed, with the same results and the same errors."""

from __future__ import annotations

import pickle
import time
from collections import OrderedDict, UserDict, defaultdict, namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from types import MappingProxyType, SimpleNamespace
from typing import Any, NamedTuple

import accel
import numpy as np
import pytest
import torch
from accel import _lib, labels
from accel import operations as ops
from accel.errors import InvalidError, LostError, MismatchError
from accel.reducer import BufferShare
from accel.ring import Ring
from accel.world import World, current
from ranks import RunRanks

# A rank that sees accel's variables and finds none of its memory, as behind a container's
# wall, goes through torch.distributed.
WALL = {"ACCEL_JOB": "1", "TORCHELASTIC_RUN_ID": "1", "ACCEL_SOCKET": "/nowhere/socket"}
TRANSPORTS = pytest.mark.parametrize("env", [{}, WALL], ids=["shared-memory", "torch"])

# ---- structures -------------------------------------------------------------

Point = namedtuple("Point", "x y")


class Batch(NamedTuple):
    source: torch.Tensor
    target: torch.Tensor | None


@dataclass(frozen=True)
class Frozen:
    x: torch.Tensor
    name: str = "a"


@dataclass
class Output(OrderedDict):
    """As the ModelOutput of transformers: keys and attributes are the same things."""

    loss: torch.Tensor | None = None
    logits: torch.Tensor | None = None

    def __post_init__(self) -> None:
        for key in ("loss", "logits"):
            if getattr(self, key) is not None:
                super().__setitem__(key, getattr(self, key))


class Encoding(UserDict):
    """As the BatchEncoding of transformers, with a .to() that knows no non_blocking."""

    def to(self, device: Any) -> Encoding:
        self.data = {k: v.to(device) for k, v in self.data.items()}
        return self


def t(*values: float) -> torch.Tensor:
    return torch.tensor(values)


STRUCTURES = [
    t(1, 2),
    [t(1), (t(2), {"a": t(3)})],
    {"a": t(1), "b": [t(2), None]},
    OrderedDict(b=t(1), a=t(2)),
    defaultdict(list, a=t(1)),
    Point(t(1), [t(2)]),
    Batch(t(1), None),
    Frozen(t(1)),
    Output(logits=t(1)),
    UserDict(a=t(1)),
    MappingProxyType({"a": t(1)}),
    (),
    None,
]


def flat(data: Any) -> list[Any]:
    return [leaf.tolist() for _, leaf in ops.leaves(data) if isinstance(leaf, torch.Tensor)]


@pytest.mark.parametrize("data", STRUCTURES, ids=lambda d: type(d).__name__)
def test_a_structure_comes_back_as_the_type_it_was_and_the_input_is_untouched(data: Any) -> None:
    before = flat(data)
    doubled = ops.recursively_apply(lambda v: v * 2, data)
    if not isinstance(data, MappingProxyType):
        assert type(doubled) is type(data)
    assert flat(doubled) == [[2 * v for v in values] for values in before]
    assert flat(data) == before


def test_what_is_not_a_tensor_stays_as_it_is() -> None:
    data = {"a": t(1), "name": "x", "n": 3, "array": np.ones(2), "none": None}
    same = ops.recursively_apply(lambda v: v * 2, data)
    assert (same["name"], same["n"], same["none"]) == ("x", 3, None)
    assert same["array"] is data["array"]


def test_a_default_factory_and_the_order_are_kept() -> None:
    assert ops.recursively_apply(lambda v: v, defaultdict(list, a=t(1)))["new"] == []
    assert list(ops.recursively_apply(lambda v: v, OrderedDict(b=t(1), a=t(2)))) == ["b", "a"]
    output = ops.recursively_apply(lambda v: v + 1, Output(logits=t(1)))
    assert output.logits.tolist() == output["logits"].tolist() == [2]
    assert output.loss is None


@pytest.mark.parametrize(
    ("data", "path"),
    [
        (["a", "b"], r"data\[0\] is a str"),
        ({"names": [t(1), "x"]}, r"data\['names'\]\[1\] is a str"),
        (Point(t(1), 3), r"data.y is a int"),
        (Frozen(t(1)), r"data.name is a str"),
        (np.ones(3), r"data is a ndarray"),
    ],
)
def test_a_leaf_that_is_no_tensor_is_named_by_its_path(data: Any, path: str) -> None:
    with pytest.raises(TypeError, match=f"gather: {path}.*gather_object"):
        ops.gather(data)
    with pytest.raises(TypeError, match=path):
        ops.recursively_apply(lambda v: v, data, error_on_other_type=True)


def test_send_to_device_moves_everything_that_can_be_moved() -> None:
    data = {"a": t(1), "e": Encoding(x=t(2)), "s": "x", "p": Point(t(3), None), "d": Frozen(t(4))}
    moved = ops.send_to_device(data, "meta")
    assert moved["a"].device.type == moved["p"].x.device.type == moved["d"].x.device.type == "meta"
    assert moved["e"]["x"].device.type == "meta"
    assert moved["s"] == "x"
    assert data["a"].device.type == data["d"].x.device.type == "cpu"
    kept = ops.send_to_device(data, "meta", skip_keys="a")
    assert kept["a"].device.type == "cpu"


def test_the_batch_size_is_that_of_the_first_tensor_with_a_dimension() -> None:
    assert ops.find_batch_size({"a": torch.tensor(1), "b": [torch.ones(5, 2)]}) == 5
    assert ops.find_batch_size([torch.tensor(1)]) is None
    with pytest.raises(TypeError, match="no tensor"):
        ops.find_batch_size(["a"])
    assert ops.ignorant_find_batch_size(["a"]) is None


def test_structures_are_concatenated_and_sliced() -> None:
    both = ops.concatenate([{"a": Point(t(1), t(2))}, {"a": Point(t(3), t(4))}])
    assert flat(both) == [[1, 3], [2, 4]]
    assert flat(ops.slice_tensors([t(1, 2, 3)], slice(1, 3))) == [[2, 3]]
    with pytest.raises(TypeError, match="str cannot be concatenated"):
        ops.concatenate(["a", "b"])


def test_half_precision_becomes_float32_and_nothing_else_changes() -> None:
    data = {"a": t(1).half(), "b": t(1).bfloat16(), "c": t(1).double(), "d": torch.tensor([1])}
    kinds = [v.dtype for v in ops.convert_to_fp32(data).values()]
    assert kinds == [torch.float32, torch.float32, torch.float64, torch.int64]
    assert ops.convert_outputs_to_fp32(lambda x: x.half())(t(1)).dtype == torch.float32


def test_a_structure_can_be_described_and_made_again() -> None:
    data = {"a": torch.ones(2, 3), "b": [torch.ones(4, dtype=torch.int8), "x"]}
    made = ops.initialize_tensors(ops.get_data_structure(data))
    assert made["a"].shape == (2, 3)
    assert made["b"][0].dtype == torch.int8
    assert made["b"][1] == "x"


# ---- a world of one --------------------------------------------------------


def test_alone_every_collective_works() -> None:
    x = torch.arange(6.0).reshape(2, 3)
    assert ops.gather(x) is x
    assert ops.gather(torch.tensor(3)).shape == (1,)
    assert ops.gather_object(["a", "b"]) == ["a", "b"]
    assert ops.gather_object({"a": 1}) == [{"a": 1}]
    assert ops.broadcast([x])[0] is x
    assert ops.broadcast_object_list([1, 2]) == [1, 2]
    assert ops.pad_across_processes(x, dim=1).shape == (2, 3)
    summed = ops.reduce(x, "sum", scale=2.0)
    assert summed.tolist() == (2 * x).tolist()
    assert summed is not x
    world = current()
    world.barrier()
    world.join()
    assert not world.should_stop()
    with pytest.raises(TypeError, match="mean of int64"):
        ops.reduce(torch.tensor([1]))
    with pytest.raises(ValueError, match="'avg'"):
        ops.reduce(x, "avg")
    with pytest.raises(InvalidError, match="no rank 1"):
        ops.broadcast(x, from_process=1)


def test_a_heartbeat_costs_about_a_microsecond() -> None:
    step, best = current().step, 1.0
    for _ in range(20):
        start = time.perf_counter()
        for _ in range(500):
            step()
        best = min(best, (time.perf_counter() - start) / 500)
    assert best < 1e-6


# ---- real ranks ------------------------------------------------------------


def kinds_and_shapes() -> list[torch.Tensor]:
    """What rank-independent code may want to send, all of it 1 or True somewhere."""
    real = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
    whole = [torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64, torch.bool]
    odd = [torch.uint16, torch.uint32, torch.uint64, torch.complex64, torch.complex128]
    odd += [torch.float8_e4m3fn]
    found = [torch.arange(6).reshape(2, 3).to(kind) for kind in real + whole + odd]
    base = torch.arange(24.0).reshape(2, 3, 4)
    found += [base.transpose(0, 2), base[:, ::2], base.expand(5, 2, 3, 4), base[:0]]
    found += [torch.empty(3, 0), torch.ones([1, 2] * 5), torch.tensor(7), torch.tensor(True)]
    found += [base.to(torch.complex64).conj(), base.to(torch.complex64).conj().imag]
    found += [base.clone().requires_grad_(), torch.nn.Parameter(torch.ones(2))]
    found += [torch.ones(2, 3, 4, 4).to(memory_format=torch.channels_last)]
    return found


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    if a.dtype.itemsize == 1 and a.dtype != torch.bool:
        a, b = a.view(torch.uint8), b.view(torch.uint8)
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b)


def every_kind_of_tensor_travels() -> None:
    world = accel.PartialState().world
    for x in kinds_and_shapes():
        parts = [x.detach() if x.dim() else x.reshape(1)] * world.size
        if x.dtype == torch.float8_e4m3fn:
            want = torch.cat([p.view(torch.uint8) for p in parts]).view(x.dtype)
        else:
            want = torch.cat(parts)
        got = world.all_gather(x)
        assert same(got, want), (x.dtype, x.shape, got)
        assert not got.requires_grad
        there = x.detach().clone() if world.rank == 1 else torch.zeros_like(x)
        world.broadcast_(there, 1)
        assert same(there, x.detach()), (x.dtype, x.shape)


def reductions_are_right() -> None:
    world = accel.PartialState().world
    n, r = world.size, world.rank
    for kind in (torch.float32, torch.float64, torch.float16, torch.bfloat16):
        x = torch.tensor([r + 1.0, -r, 0.5]).to(kind)
        want = {
            "sum": [n * (n + 1) / 2, -n * (n - 1) / 2, 0.5 * n],
            "mean": [(n + 1) / 2, -(n - 1) / 2, 0.5],
            "min": [1, 1.0 - n, 0.5],
            "max": [n, 0, 0.5],
        }
        for op, values in want.items():
            assert same(ops.reduce(x, op), torch.tensor(values).to(kind)), (kind, op)
        assert same(x, torch.tensor([r + 1.0, -r, 0.5]).to(kind))
    for kind in (torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64):
        x = torch.tensor([r + 1, 3]).to(kind)
        for op, values in {"sum": [n * (n + 1) // 2, 3 * n], "min": [1, 3], "max": [n, 3]}.items():
            assert same(ops.reduce(x, op), torch.tensor(values).to(kind)), (kind, op)
    flags = torch.tensor([r == 0, True, False])
    assert ops.reduce(flags, "sum").tolist() == [True, True, False]
    assert ops.reduce(flags, "min").tolist() == [False, True, False]
    assert ops.reduce(flags, "max").tolist() == [True, True, False]
    # Accumulated in float32: 2048 + 1 is 2048 in float16.
    half = torch.tensor([2048.0 if r == 0 else 1.0]).half()
    assert ops.reduce(half, "sum").item() == torch.tensor(2047.0 + n).half().item()
    z = torch.tensor([1 + 2j]) * (r + 1)
    assert ops.reduce(z, "mean").tolist() == [(1 + 2j) * (n + 1) / 2]
    wide = torch.arange(12.0).reshape(3, 4).t()
    world.reduce_(wide, "sum")
    assert same(wide, n * torch.arange(12.0).reshape(3, 4).t())
    parameter = torch.nn.Parameter(torch.full((2,), float(r)))
    world.reduce_(parameter, "sum")
    assert parameter.tolist() == [n * (n - 1) / 2] * 2
    assert parameter.requires_grad


def ragged_and_nested_data_is_gathered() -> None:
    world = accel.PartialState().world
    n, r = world.size, world.rank
    rows, counts = world.all_gather_rows(torch.full((r, 2), r))
    assert counts == list(range(n))
    assert rows.tolist() == [[q, q] for q in range(n) for _ in range(q)]
    nothing = world.all_gather(torch.empty(0, 4))
    assert nothing.shape == (0, 4)
    data = {"a": t(r), "b": [Point(torch.tensor([[r]]), None)]}
    got = ops.gather(data)
    assert got["a"].tolist() == list(range(n))
    assert got["b"][0].x.tolist() == [[q] for q in range(n)]
    padded = ops.pad_across_processes(torch.ones(2, r + 1), dim=1, pad_index=-1)
    assert padded.tolist() == [[1.0] * (r + 1) + [-1.0] * (n - r - 1)] * 2
    first = ops.pad_across_processes([torch.ones(r + 1)], dim=-1, pad_first=True)[0]
    assert first.tolist() == [0.0] * (n - r - 1) + [1.0] * (r + 1)
    assert ops.gather(ops.pad_across_processes(torch.ones(2, r + 1), dim=1)).shape == (2 * n, n)


def objects_travel() -> None:
    world = accel.PartialState().world
    n, r = world.size, world.rank
    assert ops.gather_object([r, "x"]) == [v for q in range(n) for v in (q, "x")]
    assert ops.gather_object({"rank": r}) == [{"rank": q} for q in range(n)]
    assert ops.gather_object([]) == []
    mine = [None, None] if r != 1 else [{"a": 1}, "b" * 100_000]
    assert ops.broadcast_object_list(mine, from_process=1) == [{"a": 1}, "b" * 100_000]
    assert world.broadcast_object(r) == 0
    assert world.all_gather_object("x" * r) == ["x" * q for q in range(n)]


def the_rest_works() -> None:
    world = accel.PartialState().world
    world.barrier()
    assert world.should_stop() is False
    # The program's own collectives.
    x = torch.ones(2)
    torch.distributed.all_reduce(x)
    assert x.tolist() == [world.size] * 2
    shared = world.handle is not None
    assert shared is (repr(world).endswith("shared_memory=True)"))


def what_cannot_be_sent_is_refused_before_anything_moves() -> None:
    world = accel.PartialState().world
    for bad in (torch.eye(2).to_sparse(), torch.nested.nested_tensor([t(1), t(1, 2)])):
        with pytest.raises(TypeError, match="convert it to a dense one"):
            world.all_gather(bad)
    with pytest.raises(InvalidError, match="meta device"):
        world.all_gather(torch.ones(2, device="meta"))
    with pytest.raises(TypeError, match="no order"):
        world.reduce_(torch.ones(2, dtype=torch.complex64), "max")
    with pytest.raises(TypeError, match="uint32 cannot be reduced"):
        world.reduce_(torch.ones(2, dtype=torch.uint32), "sum")
    with pytest.raises(TypeError, match="gather_object"):
        ops.gather(["a", "b"])
    assert world.all_gather(torch.tensor(1)).tolist() == [1] * world.size


def counters() -> _lib.Counters:
    counted = _lib.Counters()
    _lib.load().accel_counters(current().handle, counted)
    return counted


def tensors_are_not_pickled() -> None:
    """One call of the runtime with the tensor's own bytes."""
    world, x = current(), torch.randn(64, 10)
    before, dumps = counters().gather, pickle.dumps
    pickle.dumps = None  # type: ignore[assignment]
    try:
        world.all_gather(x)
    finally:
        pickle.dumps = dumps
    after = counters().gather
    assert (after.calls - before.calls, after.bytes - before.bytes) == (1, 64 * 10 * 4)


def everything_works() -> bool:
    every_kind_of_tensor_travels()
    reductions_are_right()
    ragged_and_nested_data_is_gathered()
    objects_travel()
    the_rest_works()
    what_cannot_be_sent_is_refused_before_anything_moves()
    if current().handle:
        tensors_are_not_pickled()
    return current().handle is not None


@TRANSPORTS
@pytest.mark.parametrize("n", [2, 3])
def test_collectives_are_right(ranks: RunRanks, n: int, env: dict[str, str]) -> None:
    assert [r.value for r in ranks(n, everything_works, env=env)] == [not env] * n


def mismatches() -> list[str]:
    """Every way to disagree, each an error on all ranks that says who wanted what."""
    world = accel.PartialState().world
    r = world.rank
    ways: list[tuple[Callable[[], Any], Callable[[], Any]]] = [
        (lambda: world.all_gather(torch.ones(2, 3)), lambda: world.all_gather(torch.ones(2, 4))),
        (lambda: world.all_gather(torch.ones(2)), lambda: world.all_gather(torch.ones(2).int())),
        (lambda: world.all_gather(torch.ones(2)), lambda: world.all_gather(torch.ones(2, 2))),
        (lambda: world.all_gather(torch.ones(2)), world.barrier),
        (lambda: world.reduce_(torch.ones(2), "sum"), lambda: world.reduce_(torch.ones(2), "max")),
        (lambda: world.reduce_(torch.ones(2), "sum"), lambda: world.reduce_(torch.ones(3), "sum")),
        (lambda: world.broadcast_(torch.ones(2), 0), lambda: world.broadcast_(torch.ones(2), 1)),
        (lambda: world.broadcast_object(1, 0), lambda: world.broadcast_object(1, 1)),
        (
            lambda: world.all_gather(torch.ones([1, 2, 3] * 3)),
            lambda: world.all_gather(torch.ones([1, 3, 2] * 3)),
        ),
        (world.barrier, world.should_stop) if world.handle else (world.barrier, objects_travel),
    ]
    said = []
    for one, other in ways:
        with pytest.raises(MismatchError) as e:
            (one if r == 0 else other)()
        said.append(str(e.value))
        assert world.all_gather(torch.tensor([r])).tolist() == list(range(world.size))
    return said


@TRANSPORTS
def test_ranks_that_want_different_things_all_get_a_sentence(
    ranks: RunRanks, env: dict[str, str]
) -> None:
    results = ranks(2, mismatches, env=env)
    for r in results:
        assert "(2, 3)" in r.value[0]
        assert "(2, 4)" in r.value[0]
        assert "float32" in r.value[1]
        assert "int32" in r.value[1]
        assert "barrier" in r.value[3]


def keys_come_in_any_order() -> list[str]:
    """Values are paired by key, not by position; other structures are an error on all ranks."""
    world = accel.PartialState().world
    r, n = world.rank, world.size
    both = {"a": torch.tensor([r]), "b": torch.tensor([10 + r])}
    mine = dict(sorted(both.items(), reverse=r == 1))
    for data in (mine, OrderedDict(mine), UserDict(mine), [mine], Point(1 * t(r), mine)):
        got = ops.gather(data)
        assert type(got) is type(data)
        found = got if "a" in got else got[-1]
        assert list(found) == list(mine)
        assert found["a"].tolist() == list(range(n))
        assert found["b"].tolist() == [10 + q for q in range(n)]
    numbered = dict(sorted({2: t(2), 10: t(10), "x": t(0)}.items(), key=str, reverse=r == 1))
    assert {k: v.tolist() for k, v in ops.reduce(numbered, "max").items()} == {
        2: [2],
        10: [10],
        "x": [0],
    }
    sent = {k: v.clone() if r == 0 else torch.zeros_like(v) for k, v in mine.items()}
    assert ops.broadcast(sent) is sent
    assert {k: v.tolist() for k, v in sent.items()} == {"a": [0], "b": [10]}
    wide = dict(sorted({"a": torch.ones(2 + r), "b": torch.ones(5)}.items(), reverse=r == 1))
    padded = ops.pad_across_processes(wide)
    assert (len(padded["a"]), len(padded["b"])) == (n + 1, 5)

    class Anonymous:  # its repr() says where it is in memory
        pass

    assert ops.gather({Anonymous(): t(r)}).popitem()[1].tolist() == list(range(n))
    return [said_of(*pair) for pair in OTHER_STRUCTURES]


_LONG = "x" * 60
OTHER_STRUCTURES = [
    ({"a": t(1)}, {"b": t(1)}),
    ([t(1), t(2)], [t(1), t(2), t(3)]),
    ({"a": t(1), "b": t(2)}, {"a": t(1)}),
    ({"a": t(1), "b": None}, {"a": None, "b": t(1)}),
    (Point(t(1), t(2)), [t(1), t(2)]),
    ({_LONG + "a": t(1)}, {_LONG + "b": t(1)}),
]


def said_of(one: Any, other: Any) -> str:
    world = accel.PartialState().world
    data = one if world.rank == 0 else other
    for call in (ops.broadcast, ops.pad_across_processes, lambda d: ops.reduce(d, "sum")):
        with pytest.raises(MismatchError):
            call(data)
    with pytest.raises(MismatchError) as e:
        ops.gather(data)
    assert world.all_gather(torch.tensor([world.rank])).tolist() == list(range(world.size))
    return str(e.value)


@TRANSPORTS
def test_structures_are_paired_by_their_keys(ranks: RunRanks, env: dict[str, str]) -> None:
    for r in ranks(2, keys_come_in_any_order, env=env):
        keys, lengths, more, nones, kinds, long = r.value
        assert "data['a'], 1 of 1" in keys and "data['b'], 1 of 1" in keys
        assert "data[0], 1 of 2" in lengths and "data[0], 1 of 3" in lengths
        assert "data['a'], 1 of 2" in more and "data['a'], 1 of 1" in more
        assert "data['a']" in nones and "data['b']" in nones
        assert "data.x" in kinds and "data[0]" in kinds
        said = {line.split("(")[-1] for line in long.splitlines() if line.startswith("  rank")}
        assert len(said) == 2 and all("data['xxx" in label for label in said)


def other_calls() -> list[str]:
    """What is meant, where the call by itself would not tell."""
    world = accel.PartialState().world
    with_label = [
        lambda: ops.gather_object([1]),
        lambda: ops.broadcast_object_list([1]),
        lambda: ops.pad_across_processes(torch.ones(2)),
        lambda: world.barrier("first"),
    ]
    said = []
    for call in with_label:
        with pytest.raises(MismatchError) as e:
            world.all_gather(torch.ones(3, 3)) if world.rank else call()
        said.append(str(e.value))
    return said


@TRANSPORTS
def test_calls_are_named_by_what_they_are_for(ranks: RunRanks, env: dict[str, str]) -> None:
    words = ["(gather_object)", "(broadcast_object_list of rank 0)", "(pad_across_processes)"]
    for r in ranks(2, other_calls, env=env):
        for text, word in zip(r.value, [*words, "(first)"], strict=True):
            assert word in text


def test_a_label_travels_as_numbers_and_a_long_one_is_told_from_others_by_a_hash() -> None:
    for label in ("", "a", "data['ä']", "x" * labels.SIZE):
        assert labels.unpacked(labels.packed(label)) == label
        assert len(labels.packed(label)) == labels.WORDS
    long = [labels.encoded("data['" + "ä" * 60 + end) for end in "ab"]
    assert long[0] != long[1]
    assert all(len(x) <= labels.SIZE and x.decode().startswith("data['ä") for x in long)


def labels_set(monkeypatch: pytest.MonkeyPatch, call: Callable[[], Any]) -> int:
    """How many labels a call of a ring of one sets."""
    world = current()
    ring = Ring(world.handle, 1)
    library = SimpleNamespace(**{n: getattr(_lib.load(), n) for n in _lib.FUNCTIONS})
    count = []
    library.accel_label = lambda *_: count.append(1)
    ring._library = library
    monkeypatch.setattr(world, "size", 2)
    monkeypatch.setattr(world, "_ring", ring)
    call()
    return len(count)


def test_a_bare_tensor_has_no_label(monkeypatch: pytest.MonkeyPatch) -> None:
    assert labels_set(monkeypatch, lambda: ops.gather(t(1))) == 0
    assert labels_set(monkeypatch, lambda: ops.reduce(t(1), "sum")) == 0
    assert labels_set(monkeypatch, lambda: ops.gather([t(1), t(2)])) == 2


def joins_early() -> Any:
    """Rank 0 has most to do; the others answer until it is done."""
    world = accel.PartialState().world
    r, n = world.rank, world.size
    world.barrier()
    got: list[Any] = []
    for turn in range(n - r):
        present = n - turn
        x = torch.full((2,), float(r + 1))
        world.reduce_(x, "mean")
        assert x.tolist() == [(present + 1) / 2] * 2, x
        for op, want in (("min", 1), ("max", present), ("sum", present * (present + 1) / 2)):
            y = torch.tensor([r + 1])
            world.reduce_(y, op)
            assert y.item() == want, (op, y)
        flag = torch.tensor([True])
        world.reduce_(flag, "min")
        assert flag.item() is True
        assert world.all_gather(torch.tensor(r)).tolist() == list(range(present))
        assert world.all_gather_object(r) == list(range(present))
        assert world.broadcast_object("a" if r == 0 else None) == "a"
        word = torch.zeros(3) if r else torch.ones(3)
        world.broadcast_(word)
        assert word.tolist() == [1, 1, 1]
        world.barrier()
        assert world.should_stop() is False
        if present == n - 1:
            for send in (world.broadcast_, world.broadcast_object):
                with pytest.raises(MismatchError) as e:
                    send(torch.ones(1), n - 1)
                got.append(str(e.value))
    world.join()
    world.barrier()
    world.join()
    return got


@TRANSPORTS
def test_a_rank_that_is_done_answers_until_the_others_are(
    ranks: RunRanks, env: dict[str, str]
) -> None:
    results = ranks(3, joins_early, env=env)
    assert [len(r.value) for r in results] == [2, 2, 0]
    assert all("rank 2" in text for r in results[:2] for text in r.value), results


def rank_0_has_no_more_data() -> float:
    world = accel.PartialState().world
    buffer = torch.tensor([float(world.rank)])
    if world.rank:
        BufferShare(world)([buffer])
    world.join()
    return buffer.item()


@TRANSPORTS
def test_buffers_are_those_of_the_lowest_rank_that_has_data(
    ranks: RunRanks, env: dict[str, str]
) -> None:
    assert [r.value for r in ranks(3, rank_0_has_no_more_data, env=env)] == [0.0, 1.0, 1.0]


def dies_while_others_wait() -> str:
    import os
    import signal

    world = accel.PartialState().world
    world.barrier()
    if world.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(LostError) as e:
        world.all_gather(torch.ones(3))
    return str(e.value)


@TRANSPORTS
def test_a_rank_that_is_killed_is_an_error_of_the_others(
    ranks: RunRanks, env: dict[str, str]
) -> None:
    results = ranks(2, dies_while_others_wait, env=env, check=False)
    assert [r.code for r in results] == [0, -9]
    if not env:
        assert "rank 1" in results[0].value


def test_a_world_says_what_it_is() -> None:
    assert isinstance(current(), World)
    assert current() is current()
    assert "size=1" in repr(current())
