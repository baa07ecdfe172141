"""Gradients after accelerator.backward() are those of one process that has all ranks' data.

Each case builds a model, and makes some steps on batches that differ from rank to rank.
It is compared, tensor by tensor, with a reference that computes what every rank computes
and averages; and with torch's DistributedDataParallel where that is right.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import itertools
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
import torch.nn.functional as F
from ranks import run_ranks
from together import run_in_turn
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

Batch = list[Tensor]
Backward = Callable[[Tensor], None]
Gradients = dict[str, Tensor | None]

# max|difference| relative to max|gradient|
TOLERANCE = {
    torch.float32: 1e-6,
    torch.float64: 1e-14,
    torch.float16: 1e-3,
    torch.bfloat16: 8e-3,
    torch.complex64: 1e-6,
}


class Case:
    """What a program does; each case overrides what differs."""

    n_steps = 3
    # Whether a rank comes to the average only where it uses gradients.
    is_late = False
    # Arguments of DistributedDataParallel; None where it is wrong or does not work.
    ddp: ClassVar[dict[str, Any] | None] = {}

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3))

    def batch(self, rank: int, step: int) -> Batch:
        g = torch.Generator().manual_seed(1000 * step + rank)
        return [torch.randn(5, 6, generator=g), torch.randint(0, 3, (5,), generator=g)]

    def prepare(self, accelerator: Any, model: nn.Module) -> nn.Module:
        return accelerator.prepare(model)

    def loss(self, model: nn.Module, batch: Batch, rank: int, step: int) -> Tensor:
        return F.cross_entropy(model(batch[0]), batch[1])

    def before_step(self, model: nn.Module, step: int) -> None:
        """What the program changes about the module between two steps."""

    def zero(self, model: nn.Module, step: int) -> None:
        model.zero_grad()

    def step(
        self, model: nn.Module, batch: Batch, rank: int, step: int, backward: Backward, sync: Sync
    ) -> None:
        """Forward and backward; `sync(False)` is a context without averaging."""
        backward(self.loss(model, batch, rank, step))


Sync = Callable[[], contextlib.AbstractContextManager[Any]]
CASES: dict[str, type[Case]] = {}


def case(cls: type[Case]) -> type[Case]:
    CASES[cls.__name__] = cls
    return cls


# ---- the cases -------------------------------------------------------------------


@case
class mlp(Case):
    pass


@case
class convnet_with_batchnorm(Case):
    def model(self) -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(1, 6, 3),
            nn.BatchNorm2d(6),
            nn.ReLU(),
            nn.Conv2d(6, 8, 3),
            nn.BatchNorm2d(8),
            nn.Flatten(),
            nn.Linear(128, 3),
        )

    def batch(self, rank: int, step: int) -> Batch:
        g = torch.Generator().manual_seed(1000 * step + rank)
        return [torch.randn(5, 1, 8, 8, generator=g), torch.randint(0, 3, (5,), generator=g)]


class _Transformer(nn.Module):
    """Whose output layer shares its weight with the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(20, 16)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True) for _ in range(2)
        )
        self.head = nn.Linear(16, 20, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


@case
class transformer_with_tied_weights(Case):
    def model(self) -> nn.Module:
        return _Transformer()

    def batch(self, rank: int, step: int) -> Batch:
        g = torch.Generator().manual_seed(1000 * step + rank)
        return [torch.randint(0, 20, (3, 7), generator=g), torch.randint(0, 20, (21,), generator=g)]

    def loss(self, model: nn.Module, batch: Batch, rank: int, step: int) -> Tensor:
        return F.cross_entropy(model(batch[0]).flatten(0, 1), batch[1])


class _Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(6, 8)
        self.branches = nn.ModuleList(nn.Linear(8, 3) for _ in range(3))
        self.never = nn.Linear(8, 3)

    def forward(self, x: Tensor, branch: int) -> Tensor:
        return self.branches[branch](self.stem(x))


@case
class parameters_that_some_or_no_ranks_use(Case):
    ddp: ClassVar = {"find_unused_parameters": True}

    def model(self) -> nn.Module:
        return _Branches()

    def loss(self, model: nn.Module, batch: Batch, rank: int, step: int) -> Tensor:
        return F.cross_entropy(model(batch[0], (rank + step) % 3), batch[1])


@case
class two_forwards_before_one_backward(Case):
    def loss(self, model: nn.Module, batch: Batch, rank: int, step: int) -> Tensor:
        return F.cross_entropy(model(batch[0]), batch[1]) + model(batch[0] * 2).square().mean()


@case
class two_backwards_in_a_step(Case):
    ddp = None  # it takes a forward between

    def step(
        self, model: nn.Module, batch: Batch, rank: int, step: int, backward: Backward, sync: Sync
    ) -> None:
        output = model(batch[0])
        one, two = F.cross_entropy(output, batch[1]), output.square().mean()
        backward(one + 0 * two)
        backward(F.cross_entropy(model(batch[0] + 1), batch[1]))


@case
class accumulation_under_no_sync(Case):
    def step(
        self, model: nn.Module, batch: Batch, rank: int, step: int, backward: Backward, sync: Sync
    ) -> None:
        for part in range(3):
            with sync() if part < 2 else contextlib.nullcontext():
                backward(F.cross_entropy(model(batch[0] + part), batch[1]) / 3)


@case
class accumulation_with_parameters_used_only_under_no_sync(Case):
    ddp = None

    def model(self) -> nn.Module:
        return _Branches()

    def step(
        self, model: nn.Module, batch: Batch, rank: int, step: int, backward: Backward, sync: Sync
    ) -> None:
        with sync():
            backward(F.cross_entropy(model(batch[0], rank % 2), batch[1]))
        backward(F.cross_entropy(model(batch[0], 2), batch[1]))


class _Checkpointed(nn.Module):
    """A layer that is used twice, in two checkpointed segments."""

    def __init__(self, use_reentrant: bool) -> None:
        super().__init__()
        self.first = nn.Linear(6, 8)
        self.shared = nn.Sequential(nn.Linear(8, 8), nn.Tanh())
        self.last = nn.Linear(8, 3)
        self.use_reentrant = use_reentrant

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for _ in range(2):
            x = checkpoint(self.shared, x, use_reentrant=self.use_reentrant)
        return self.last(x)


@case
class reentrant_checkpoint_over_a_shared_layer(Case):
    ddp = None  # "marked as ready twice"

    def model(self) -> nn.Module:
        return _Checkpointed(use_reentrant=True)


@case
class plain_checkpoint_over_a_shared_layer(Case):
    def model(self) -> nn.Module:
        return _Checkpointed(use_reentrant=False)


def _backend(accelerator: Any) -> str:
    """The real compiler once, where there is one: it takes seconds."""
    is_there = accelerator.num_processes == 2 and shutil.which("g++")
    return "inductor" if is_there else "aot_eager"


@case
class compiled_before_prepare(Case):
    ddp = None  # the reference is enough for what compiles for seconds

    def prepare(self, accelerator: Any, model: nn.Module) -> nn.Module:
        return accelerator.prepare(torch.compile(model, backend=_backend(accelerator)))


@case
class compiled_after_prepare(Case):
    ddp = None

    def model(self) -> nn.Module:
        # Without a bias, whose gradient would be nothing but rounding before BatchNorm.
        first = nn.Linear(6, 16, bias=False)
        return nn.Sequential(first, nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, 3))

    def prepare(self, accelerator: Any, model: nn.Module) -> nn.Module:
        # In one graph: nothing of accel's is in the forward.
        return torch.compile(accelerator.prepare(model), backend="aot_eager", fullgraph=True)


@case
class compiled_in_place(Case):
    ddp = None

    def prepare(self, accelerator: Any, model: nn.Module) -> nn.Module:
        prepared = accelerator.prepare(model)
        prepared.compile(backend="aot_eager")
        return prepared


@case
class channels_last(convnet_with_batchnorm):
    def model(self) -> nn.Module:
        model = nn.Sequential(
            nn.Conv2d(3, 6, 3),
            nn.BatchNorm2d(6),
            nn.Conv2d(6, 8, 1),
            nn.Flatten(),
            nn.Linear(288, 3),
        )
        return model.to(memory_format=torch.channels_last)

    def batch(self, rank: int, step: int) -> Batch:
        g = torch.Generator().manual_seed(1000 * step + rank)
        x = torch.randn(5, 3, 8, 8, generator=g).to(memory_format=torch.channels_last)
        return [x, torch.randint(0, 3, (5,), generator=g)]


@case
class freezing_toggled(Case):
    n_steps = 4
    ddp = None  # a wrong gradient for what is thawed

    def model(self) -> nn.Module:
        model = super().model()
        model[0].weight.requires_grad_(False)
        return model

    def before_step(self, model: nn.Module, step: int) -> None:
        model[0].weight.requires_grad_(step % 2 == 1)
        model[2].bias.requires_grad_(step < 2)


@case
class zero_grad_to_zero(Case):
    ddp: ClassVar = {"find_unused_parameters": True}

    def model(self) -> nn.Module:
        return _Branches()

    def loss(self, model: nn.Module, batch: Batch, rank: int, step: int) -> Tensor:
        return F.cross_entropy(model(batch[0], (rank + step) % 3), batch[1])

    def zero(self, model: nn.Module, step: int) -> None:
        model.zero_grad(set_to_none=step % 2 == 0)


class _Penalty(Case):
    def step(
        self, model: nn.Module, batch: Batch, rank: int, step: int, backward: Any, sync: Sync
    ) -> None:
        loss = F.cross_entropy(model(batch[0]), batch[1])
        backward(loss, create_graph=True)


@case
class create_graph(_Penalty):
    ddp = None  # it does not support this

    def zero(self, model: nn.Module, step: int) -> None:
        for p in model.parameters():
            p.grad = None


@case
class a_gradient_penalty(Case):
    ddp = None

    def step(
        self, model: nn.Module, batch: Batch, rank: int, step: int, backward: Backward, sync: Sync
    ) -> None:
        x = batch[0].clone().requires_grad_()
        loss = F.cross_entropy(model(x), batch[1])
        (slope,) = torch.autograd.grad(loss, x, create_graph=True)
        backward(loss + slope.square().sum())


@case
class float64_parameters(Case):
    def model(self) -> nn.Module:
        return super().model().double()

    def batch(self, rank: int, step: int) -> Batch:
        x, y = super().batch(rank, step)
        return [x.double(), y]


@case
class float16_parameters(Case):
    ddp = None  # gloo adds halves in halves

    def model(self) -> nn.Module:
        return super().model().half()

    def batch(self, rank: int, step: int) -> Batch:
        x, y = super().batch(rank, step)
        return [x.half(), y]

    def loss(self, model: nn.Module, batch: Batch, rank: int, step: int) -> Tensor:
        return F.cross_entropy(model(batch[0]).float(), batch[1])


@case
class bfloat16_parameters(float16_parameters):
    def model(self) -> nn.Module:
        return Case.model(self).bfloat16()

    def batch(self, rank: int, step: int) -> Batch:
        x, y = Case.batch(self, rank, step)
        return [x.bfloat16(), y]


@case
class types_mixed(Case):
    def model(self) -> nn.Module:
        model = super().model()
        model[0].double()
        return model

    def loss(self, model: nn.Module, batch: Batch, rank: int, step: int) -> Tensor:
        hidden = model[1](model[0](batch[0].double())).float()
        return F.cross_entropy(model[2](hidden), batch[1])

    ddp = None  # called through its parts


class _Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 3, dtype=torch.complex64))

    def forward(self, x: Tensor) -> Tensor:
        return (x.to(torch.complex64) @ self.weight).conj().abs()


@case
class complex_parameters(Case):
    def model(self) -> nn.Module:
        return _Complex()


class _Words(nn.Module):
    def __init__(self, tied: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(30, 4, sparse=True)
        self.other = nn.Embedding(10, 4, sparse=True)
        self.head = nn.Linear(4, 3)
        self.tied = tied

    def forward(self, tokens: Tensor, use_other: bool) -> Tensor:
        x = self.embedding(tokens).mean(1)
        if use_other:
            x = x + self.other(tokens % 10).mean(1)
        if self.tied:
            x = x + (x @ self.embedding.weight.t()).mean(1, keepdim=True)
        return self.head(x)


@case
class sparse_embedding(Case):
    ddp = None  # it hands sparse gradients to the group only where all ranks have them

    def model(self) -> nn.Module:
        return _Words()

    def batch(self, rank: int, step: int) -> Batch:
        g = torch.Generator().manual_seed(1000 * step + rank)
        tokens = torch.randint(0, 30, (4 + rank, 5), generator=g)
        return [tokens, torch.randint(0, 3, (4 + rank,), generator=g)]

    def loss(self, model: nn.Module, batch: Batch, rank: int, step: int) -> Tensor:
        return F.cross_entropy(model(batch[0], step == 1 and rank == 0), batch[1])


@case
class sparse_embedding_on_all_ranks(sparse_embedding):
    ddp: ClassVar = {}

    def model(self) -> nn.Module:
        model = _Words()
        del model.other
        return model

    def loss(self, model: nn.Module, batch: Batch, rank: int, step: int) -> Tensor:
        return F.cross_entropy(model(batch[0], False), batch[1])


@case
class sparse_embedding_tied_to_a_dense_layer_on_some_ranks(sparse_embedding):
    def loss(self, model: nn.Module, batch: Batch, rank: int, step: int) -> Tensor:
        model.tied = rank == 1
        return F.cross_entropy(model(batch[0], False), batch[1])


class _Functional(nn.Module):
    """A sparse gradient that no module's attribute announces."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(30, 3))

    def forward(self, tokens: Tensor) -> Tensor:
        return F.embedding(tokens, self.weight, sparse=True).mean(1)


@case
class sparse_gradient_out_of_the_blue(sparse_embedding):
    def model(self) -> nn.Module:
        return _Functional()

    def loss(self, model: nn.Module, batch: Batch, rank: int, step: int) -> Tensor:
        return F.cross_entropy(model(batch[0]), batch[1])


class _Strange(nn.Module):
    """Parameters that lie in memory in their own ways."""

    def __init__(self) -> None:
        super().__init__()
        self.transposed = nn.Parameter(torch.randn(5, 6).t())
        self.gaps = nn.Parameter(torch.randn(5, 8)[:, :3])
        self.empty = nn.Parameter(torch.randn(0, 4))
        self.scalar = nn.Parameter(torch.randn(()))
        self.deep = nn.Parameter(torch.randn(1, 1, 1, 1, 1, 1, 1, 1, 1, 3))

    def forward(self, x: Tensor) -> Tensor:
        y = x @ self.transposed @ self.gaps * self.scalar + self.deep.flatten()
        return y + self.empty.sum()


@case
class strange_strides_and_shapes(Case):
    def model(self) -> nn.Module:
        return _Strange()


@case
class gradients_that_lie_otherwise(Case):
    """The program gives a parameter a gradient whose strides are not the parameter's."""

    ddp = None

    def zero(self, model: nn.Module, step: int) -> None:
        weight = model[0].weight  # (16, 6)
        if step == 0:
            weight.grad = torch.zeros(6, 16).t()
        elif step == 1:
            weight.grad = torch.zeros(16, 12)[:, ::2]
        else:
            weight.grad = torch.zeros(16, 1).expand(16, 6)  # replaced, not added to in place
        model[0].bias.grad = model[2].weight.grad = model[2].bias.grad = None

    def step(
        self, model: nn.Module, batch: Batch, rank: int, step: int, backward: Backward, sync: Sync
    ) -> None:
        if step == 2:  # torch cannot add to an expanded gradient
            model[0].weight.requires_grad_(False)
            model[0].weight.grad = torch.full((16, 1), float(rank)).expand(16, 6)
        super().step(model, batch, rank, step, backward, sync)


@case
class a_layer_is_replaced(Case):
    ddp = None

    def before_step(self, model: nn.Module, step: int) -> None:
        if step == 1:
            model[2] = nn.Linear(16, 3)
            with torch.no_grad():
                model[2].weight.copy_(torch.linspace(-1, 1, 48).view(3, 16))
                model[2].bias.zero_()


@case
class an_adapter_is_added(Case):
    ddp = None

    def before_step(self, model: nn.Module, step: int) -> None:
        if step == 1:
            model.append(nn.Linear(3, 3))
            with torch.no_grad():
                model[3].weight.copy_(torch.eye(3))
                model[3].bias.zero_()
        if step == 2:
            model[0].register_parameter("bias", None)


@case
class the_type_changes(Case):
    ddp = None

    def before_step(self, model: nn.Module, step: int) -> None:
        if step == 1:
            model.double()

    def loss(self, model: nn.Module, batch: Batch, rank: int, step: int) -> Tensor:
        return F.cross_entropy(model(batch[0].to(model[0].weight.dtype)), batch[1])


@case
class parameters_are_pruned_in_place(Case):
    ddp = None

    def before_step(self, model: nn.Module, step: int) -> None:
        if step == 1:
            model[0].weight.data = model[0].weight.data[:7].clone()
            model[0].bias.data = model[0].bias.data[:7].clone()
            model[2].weight.data = model[2].weight.data[:, :7].clone()


@case
class a_rank_without_data(Case):
    is_late = True
    ddp = None

    def step(
        self, model: nn.Module, batch: Batch, rank: int, step: int, backward: Backward, sync: Sync
    ) -> None:
        if rank != step % 2:
            backward(self.loss(model, batch, rank, step))


@case
class loss_backward_called_directly(Case):
    is_late = True

    def step(
        self, model: nn.Module, batch: Batch, rank: int, step: int, backward: Backward, sync: Sync
    ) -> None:
        self.loss(model, batch, rank, step).backward()


@case
class a_hundred_parameters_of_all_sizes(Case):
    """More than one pass of everything that is cut into pieces."""

    n_steps = 1
    ddp: ClassVar = {"gradient_as_bucket_view": True}

    def model(self) -> nn.Module:
        sizes = [6] + [1 + (37 * i) % 190 for i in range(50)] + [700, 900, 3]
        return nn.Sequential(*[nn.Linear(a, b) for a, b in itertools.pairwise(sizes)])

    def loss(self, model: nn.Module, batch: Batch, rank: int, step: int) -> Tensor:
        return model(batch[0]).square().mean()


# ---- running a case ----------------------------------------------------------------


@dataclass
class Job:
    rank: int
    size: int


def _gradients(model: nn.Module) -> Gradients:
    named = {n.replace("_orig_mod.", ""): p for n, p in model.named_parameters()}
    return {n: None if p.grad is None else p.grad.detach().clone() for n, p in named.items()}


def _dense(t: Tensor) -> Tensor:
    return t.to_dense() if t.is_sparse else t


def _same(what: str, one: Gradients, other: Gradients) -> None:
    assert one.keys() == other.keys()
    for name, expected in other.items():
        got = one[name]
        assert (got is None) == (expected is None), f"{what}: {name} is {got}, not {expected}"
        if got is None or expected is None:
            continue
        assert got.dtype == expected.dtype and got.shape == expected.shape, f"{what}: {name}"
        got, expected = _dense(got), _dense(expected)
        if not expected.numel():
            continue
        wide = torch.complex128 if got.is_complex() else torch.float64
        worst = (got.to(wide) - expected.to(wide)).abs().max().item()
        limit = TOLERANCE[expected.dtype] * expected.abs().max().item()
        assert worst <= limit, f"{what}: {name} is off by {worst:.3g}, more than {limit:.3g}"


def _reference(c: Case, replicas: list[nn.Module], step: int) -> Gradients:
    """What each rank computes, averaged. Replicas start a step equal, buffers included."""
    for rank, replica in enumerate(replicas):
        c.zero(replica, step)
        for mine, first in zip(replica.buffers(), replicas[0].buffers(), strict=True):
            mine.data.copy_(first)
        batch = c.batch(rank, step)

        def backward(loss: Tensor, **kwargs: Any) -> None:
            loss.backward(**kwargs)

        c.step(replica, batch, rank, step, backward, contextlib.nullcontext)
    every = [_gradients(r) for r in replicas]
    return {name: _mean([g[name] for g in every]) for name in every[0]}


def _mean(gradients: list[Tensor | None]) -> Tensor | None:
    have = [_dense(g) for g in gradients if g is not None]
    if not have:
        return None
    wide = torch.complex128 if have[0].is_complex() else torch.float64
    total = torch.stack([g.to(wide) for g in have]).sum(0)
    return (total / len(gradients)).to(have[0].dtype)


def _copy_values(source: nn.Module, target: nn.Module) -> None:
    with torch.no_grad():
        for a, b in zip(source.parameters(), target.parameters(), strict=True):
            b.copy_(a)


def _apply(model: nn.Module, gradients: Gradients) -> None:
    named = {n.replace("_orig_mod.", ""): p for n, p in model.named_parameters()}
    with torch.no_grad():
        for name, gradient in gradients.items():
            if gradient is not None:
                named[name] -= 0.1 * _dense(gradient)


def _equal_on_all_ranks(accelerator: Any, tensors: list[Tensor], what: str) -> None:
    for tensor in tensors:
        rows = accelerator.gather(_dense(tensor.detach()).reshape(1, -1).contiguous())
        assert torch.equal(rows, rows[:1].expand_as(rows)), f"{what} differ between ranks"


def run_case(name: str, job: Job) -> None:
    from accel import Accelerator

    c = CASES[name]()
    torch.manual_seed(5)
    original = c.model()
    replicas = [copy.deepcopy(original) for _ in range(job.size)]
    if job.rank:  # what rank 0 built must win
        with torch.no_grad():
            for p in original.parameters():
                p.add_(1)
    accelerator = Accelerator()
    model = c.prepare(accelerator, original)
    for p, q in zip(original.parameters(), replicas[0].parameters(), strict=True):
        assert torch.equal(p, q), "prepare() gave other parameters than rank 0 has"
    ddp = None
    if c.ddp is not None:
        ddp = DistributedDataParallel(copy.deepcopy(replicas[0]), **c.ddp)
    sync = functools.partial(accelerator.no_sync, original)
    if model is not original and not isinstance(original, type(model)):
        sync = functools.partial(accelerator.no_sync, accelerator._prepared.models[-1])

    for step in range(c.n_steps):
        for m in (original, *replicas, *([ddp.module] if ddp else [])):
            c.before_step(m, step)
        expected = _reference(c, replicas, step)
        c.zero(original, step)
        c.step(model, c.batch(job.rank, step), job.rank, step, accelerator.backward, sync)
        if c.is_late:
            _finish(accelerator, original)
        got = _gradients(original)
        _same(f"step {step}, reference", got, expected)
        _equal_on_all_ranks(accelerator, [g for g in got.values() if g is not None], "gradients")
        _equal_on_all_ranks(accelerator, list(original.buffers()), "buffers")
        for mine, theirs in zip(original.buffers(), replicas[0].buffers(), strict=True):
            assert torch.equal(mine, theirs), "buffers are not those of rank 0"
        if ddp is not None:
            c.zero(ddp.module, step)
            c.step(
                ddp, c.batch(job.rank, step), job.rank, step, lambda t: t.backward(), ddp.no_sync
            )
            _same(f"step {step}, DDP", got, _gradients(ddp.module))
        for m in (*replicas, *([ddp.module] if ddp else [])):
            _apply(m, expected)
        _copy_values(replicas[0], original)
    accelerator.free_memory()


def _finish(accelerator: Any, model: nn.Module) -> None:
    """What ranks do after backward; one that had none takes part in the average here."""
    accelerator._gradients.finish_for(getattr(model, "n_averaged", 0))
    model.n_averaged = accelerator._gradients.reducer.n_averaged


def _share_no_memory() -> None:
    """Join as ranks on several machines do."""
    from accel import errors, world

    world._current = world._join_through_torch(errors.UnreachableError("this is a test"))


def run_all(names: list[str], transport: str) -> dict[str, str]:
    """Runs in each rank. The traceback of each case that failed."""
    from accel import PartialState

    if transport == "torch":
        _share_no_memory()
    job = Job(PartialState().process_index, PartialState().num_processes)
    return run_in_turn({name: functools.partial(run_case, name, job) for name in names})


# What is compiled is averaged in no other way.
WORLDS = [
    (n, transport, name)
    for n, transport in ((2, "runtime"), (3, "runtime"), (2, "torch"))
    for name in CASES
    if transport == "runtime" or "compiled" not in name
]


@functools.cache
def results(n: int, transport: str) -> dict[str, str]:
    names = [name for m, t, name in WORLDS if (m, t) == (n, transport)]
    return run_ranks(n, run_all, names, transport, timeout=300)[0].value


@pytest.mark.parametrize(("n", "transport", "name"), WORLDS)
def test_gradients_are_those_of_one_process(n: int, transport: str, name: str) -> None:
    failed = results(n, transport)
    assert name not in failed, failed[name]
