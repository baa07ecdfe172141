"""Which samples a rank reads: the pure part, without torch and without other ranks."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from accel import sampling
from accel.sampling import Piece, Plan, Share

# ---- what the ranks get, with all of them simulated --------------------------


class Lists:
    """Batches that are lists of samples: a sampling.Kind."""

    def rows(self, batch: list[int]) -> int | None:
        return len(batch)

    def cut(self, batch: list[int], start: int, end: int) -> list[int]:
        return batch[start:end]

    def joined(self, batches: Sequence[list[int]]) -> list[int] | None:
        return [sample for batch in batches for sample in batch]


class Shapes(Lists):
    """Batches of four, each of another shape, so that they cannot be put together."""

    def joined(self, batches: Sequence[list[int]]) -> list[int] | None:
        alike = len({sample // 4 for batch in batches for sample in batch}) == 1
        return super().joined(batches) if alike else None


def batches_of(n: int, size: int, drop_last: bool = False) -> list[list[int]]:
    found = [list(range(i, min(i + size, n))) for i in range(0, n, size)]
    return [b for b in found if len(b) == size] if drop_last else found


def shares(batches: list[Any], **plan: Any) -> list[list[Share]]:
    return [
        list(sampling.share_batches(iter(batches), Plan(rank=r, **plan)))
        for r in range(plan["size"])
    ]


def pieces(batches: list[Any], kind: Any = None, **plan: Any) -> list[list[Piece]]:
    rounds = list(sampling.share_data(iter(batches), Plan(rank=0, **plan), kind or Lists()))
    return [[p for r in rounds if (p := r[rank]) is not None] for rank in range(plan["size"])]


def element_shares(n: int, **plan: Any) -> list[list[Share]]:
    """share_elements(), put into batches as a loader would."""
    ranks = []
    for rank in range(plan["size"]):
        p = Plan(rank=rank, **plan)
        mine = list(sampling.share_elements(range(n), p))
        width = p.width or 1
        runs = [mine[i : i + width] for i in range(0, len(mine), width)]
        found = []
        for i, run in enumerate(runs):
            # What is real comes first in a batch.
            assert sorted(run, key=lambda e: not e[1]) == run
            real = sum(is_real for _, is_real in run)
            found.append(Share([e for e, _ in run], len(run), real, i == len(runs) - 1))
        ranks.append(found)
    return ranks


def real_samples(ranks: Sequence[Sequence[Any]]) -> list[Any]:
    """The real samples of all ranks, step by step, in rank order."""
    found: list[Any] = []
    for step in range(max(map(len, ranks), default=0)):
        for mine in ranks:
            if step < len(mine):
                found += list(mine[step].batch)[: mine[step].real]
    return found


def only_batches(ranks: list[list[Any]]) -> str:
    """As the tables below write it: 0123, 89 | 4567"""

    def written(batch: list[int]) -> str:
        return ("" if max(batch) < 10 else " ").join(map(str, batch))

    return " | ".join(", ".join(written(s.batch) for s in mine) for mine in ranks)


# ---- what two ranks get with batches of four ---------------------------------

# n, and what is read; the right half is rank 1's.
TABLE = {
    ("shard", True): {
        10: "0123, 8901 | 4567, 2345",
        11: "0123, 8 9 10 0 | 4567, 1234",
        3: "0120 | 1201",
        1: "0000 | 0000",
    },
    ("shard", False): {10: "0123, 89 | 4567", 11: "0123, 8 9 10 | 4567", 3: "012 | "},
    ("split", True): {
        10: "01, 45, 89 | 23, 67, 01",
        11: "01, 45, 89 | 23, 67, 10 0",
        3: "01 | 20",
        1: "00 | 00",
    },
    ("split", False): {
        10: "01, 45, 89 | 23, 67",
        11: "01, 45, 89 | 23, 67, 10",
        1: "0 | ",
    },
    ("dispatch", True): {
        10: "0123, 8 | 4567, 9",
        11: "0123, 89 | 4567, 10 0",
        3: "01 | 20",
        1: "0 | 0",
    },
    ("dispatch, split", True): {
        10: "01, 45, 8 | 23, 67, 9",
        11: "01, 45, 89 | 23, 67, 10 0",
        3: "01 | 20",
        1: "0 | 0",
    },
    ("elements", True): {
        10: "0123, 8901 | 4567, 2345",
        11: "0123, 8 9 10 0 | 4567, 1234",
        3: "0120 | 1201",
    },
}


@pytest.mark.parametrize(("way", "even", "n"), [(*key, n) for key in TABLE for n in TABLE[key]])
def test_two_ranks_share_batches_of_four_as_the_table_says(way: str, even: bool, n: int) -> None:
    plan = {"size": 2, "batch_size": 4, "split": "split" in way, "even": even}
    if way == "elements":
        found: list[list[Any]] = element_shares(n, **plan)
    elif "dispatch" in way:
        found = pieces(batches_of(n, 4), **plan)
    else:
        found = shares(batches_of(n, 4), **plan)
    assert only_batches(found) == TABLE[way, even][n]


@pytest.mark.parametrize("way", ["shard", "dispatch", "elements"])
def test_with_drop_last_an_incomplete_round_is_dropped(way: str) -> None:
    plan = {"size": 2, "batch_size": 4, "drop_last": True}
    batches = batches_of(11, 4, drop_last=True)
    ranks = {
        "shard": lambda: shares(batches, **plan),
        "dispatch": lambda: pieces(batches, **plan),
        "elements": lambda: element_shares(11, **plan),
    }[way]()
    assert only_batches(ranks) == "0123 | 4567"


# ---- properties --------------------------------------------------------------


def check(ranks: list[list[Any]], n: int, steps: list[int], size: int, **plan: Any) -> None:
    samples = list(range(n))
    real = real_samples(ranks)
    if plan["drop_last"]:
        width = plan["batch_size"] * (1 if plan["split"] else size)
        samples = samples[: n - n % width]
    assert real == samples
    assert [len(mine) for mine in ranks] == steps
    if plan["even"] or plan["drop_last"]:
        assert len(set(steps)) == 1
    allowed = plan["batch_size"] // (size if plan["split"] else 1)
    for mine in ranks:
        for i, share in enumerate(mine):
            assert share.size == len(share.batch) <= allowed
            assert 0 <= share.real <= share.size
            assert share.last is (i == len(mine) - 1)
            if not share.last or not plan["even"]:
                assert share.real == share.size > 0


def plans() -> Iterator[dict[str, Any]]:
    for size, batch_size, drop_last, split, even in product(
        range(1, 5), range(1, 6), (False, True), (False, True), (False, True)
    ):
        if not split or batch_size % size == 0:
            yield {
                "size": size,
                "batch_size": batch_size,
                "drop_last": drop_last,
                "split": split,
                "even": even,
            }


def test_each_sample_is_read_once_and_in_order() -> None:
    for n, plan in product(range(41), plans()):
        size, batch_size = plan["size"], plan["batch_size"]
        batches = batches_of(n, batch_size, plan["drop_last"])
        samples = len(batches) * batch_size if plan["drop_last"] else n
        ranks = [Plan(rank=r, **plan) for r in range(size)]
        count = len(batches)
        check(
            shares(batches, **plan),
            n,
            [sampling.steps_of_batches(p, count, samples) for p in ranks],
            **plan,
        )
        check(
            element_shares(n, **plan), n, [sampling.steps_of_elements(p, n) for p in ranks], **plan
        )
        check(
            pieces(batches, **plan),
            n,
            [sampling.steps_of_data(p, count, samples) for p in ranks],
            **plan,
        )


def test_batches_of_any_size_are_read_once_and_in_order() -> None:
    generator = torch.Generator().manual_seed(5)
    for size, split, even, known in product(range(2, 5), *[(False, True)] * 3):
        for count in range(8):
            sizes = torch.randint(1, 6, (count,), generator=generator).tolist()
            numbers = iter(range(100))
            batches = [[next(numbers) for _ in range(s)] for s in sizes]
            plan = {"size": size, "split": split, "even": even}
            plan["batch_size"] = (60 if split else 5) if known else None
            for ranks in (shares(batches, **plan), pieces(batches, **plan)):
                assert real_samples(ranks) == list(range(sum(sizes)))
                assert not even or len({len(mine) for mine in ranks}) == 1


def test_ranks_without_a_batch_repeat_whole_ones_where_batches_have_no_size() -> None:
    ranks = shares([[0], [1, 2], [3, 4, 5], [6]], size=3)
    assert [[s.batch for s in mine] for mine in ranks] == [
        [[0], [6]],
        [[1, 2], [0]],
        [[3, 4, 5], [1, 2]],
    ]
    assert [[s.real for s in mine] for mine in ranks] == [[1, 1], [2, 0], [3, 0]]


def test_whole_batches_stand_in_where_they_cannot_be_put_together() -> None:
    ranks = pieces(batches_of(11, 4), Shapes(), size=2, batch_size=4)
    assert only_batches(ranks) == "0123, 8 9 10 | 4567, 8 9 10"
    assert [mine[-1].real for mine in ranks] == [3, 0]


def test_a_batch_of_another_shape_completes_itself() -> None:
    ranks = pieces(batches_of(9, 4), Shapes(), size=2, batch_size=4, split=True)
    assert only_batches(ranks) == "01, 45, 8 | 23, 67, 8"
    assert [mine[-1].real for mine in ranks] == [1, 0]


# ---- one rank ----------------------------------------------------------------


def test_a_world_of_one_reads_the_very_batches() -> None:
    batches = [(1, 2), [3], numpy.array([4, 5])]
    found = list(sampling.share_batches(batches, Plan(0, 1, batch_size=4, even=True)))
    assert all(share.batch is batch for share, batch in zip(found, batches, strict=True))
    assert [(s.size, s.real, s.last) for s in found] == [(2, 2, False), (1, 1, False), (2, 2, True)]


def test_a_world_of_one_reads_no_more_than_one_batch_ahead() -> None:
    taken: list[int] = []

    def batches() -> Iterator[list[int]]:
        for i in range(10):
            taken.append(i)
            yield [i]

    found = sampling.share_batches(batches(), Plan(0, 1, batch_size=1))
    assert next(found).batch == [0]
    assert taken == [0, 1]


# ---- batches of other types --------------------------------------------------


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize(
    "make",
    [
        list,
        tuple,
        numpy.array,
        torch.tensor,
        lambda indices: numpy.array(indices, dtype=numpy.int32),
        lambda indices: range(indices[0], indices[-1] + 1),
        iter,
    ],
    ids=["list", "tuple", "numpy", "tensor", "numpy32", "range", "iterator"],
)
def test_batches_may_be_of_any_sequence_type(make: Any, split: bool) -> None:
    batches = [make(b) for b in batches_of(11, 4)]
    ranks = []
    for rank in range(2):
        again = [make(b) for b in batches_of(11, 4)] if make is iter else batches
        ranks.append(list(sampling.share_batches(again, Plan(rank, 2, 4, split=split))))
    assert [int(i) for i in real_samples(ranks)] == list(range(11))
    kind = list if make is iter else type(make([1]))
    for share in ranks[0] + ranks[1]:
        if make in (list, tuple, numpy.array, torch.tensor):
            assert type(share.batch) is kind
        if hasattr(batches[0], "dtype"):
            assert share.batch.dtype == batches[0].dtype


def test_rows_of_an_array_stay_together() -> None:
    batches = [numpy.array([[0, 10], [1, 11]]), numpy.array([[2, 12]])]
    last = list(sampling.share_batches(batches, Plan(1, 2, 2)))[-1]
    assert last.batch.tolist() == [[2, 12], [0, 10]]
    assert last.real == 1


# ---- wrong use ---------------------------------------------------------------


def test_a_batch_that_does_not_divide_is_refused_with_sizes_that_do() -> None:
    with pytest.raises(ValueError, match="6 or 9"):
        Plan(0, 3, batch_size=8, split=True)
    with pytest.raises(ValueError, match="batch size of 4,"):
        Plan(0, 4, batch_size=2, split=True)


def test_what_cannot_be_cut_is_refused_when_split() -> None:
    class Whole(Lists):
        def rows(self, batch: list[int]) -> int | None:
            return None

    class Apart(Lists):
        def joined(self, batches: Sequence[list[int]]) -> list[int] | None:
            return None

    for kind, batch in ((Whole(), [1, 2]), (Apart(), [1, 2, 3])):
        with pytest.raises(TypeError, match="split_batches=False"):
            pieces([batch], kind, size=2, split=True)


def test_sampling_needs_neither_torch_nor_numpy() -> None:
    program = (
        "import sys; sys.path.insert(0, sys.argv[1]); import sampling; "
        "assert not {'torch', 'numpy', 'accel'} & set(sys.modules)"
    )
    folder = Path(sampling.__file__).parent
    # -S: a virtual environment's own start-up may import what it likes.
    subprocess.run([sys.executable, "-S", "-c", program, str(folder)], check=True, timeout=30)
