"""16-bit training: autocast around forward, and the loss scale of fp16."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from accel import Accelerator, AcceleratorState
from accel.handlers import AutocastKwargs, GradScalerKwargs
from accel.precision import is_wrapped
from together import Checks
from torch import Tensor, nn

checks = Checks()

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}


class Spy(nn.Module):
    """Keeps the type it computed in."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3)
        self.dtype: torch.dtype | None = None

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        self.dtype = y.dtype
        return y


@dataclass
class Output:
    loss: Tensor
    hidden: tuple[Tensor, list[Tensor]]


def _anew(**kwargs: Any) -> Accelerator:
    AcceleratorState._reset_state()
    return Accelerator(cpu=True, **kwargs)


def _fp16(**kwargs: Any) -> Accelerator:
    """With a scale at which a gradient of 1 fits into float16, whose largest is 65504."""
    options = GradScalerKwargs(init_scale=1024.0, **kwargs.pop("options", {}))
    return _anew(mixed_precision="fp16", kwargs_handlers=[options], **kwargs)


def _scaler(accelerator: Accelerator) -> Any:
    assert accelerator.scaler is not None
    return accelerator.scaler


def _raised(kind: type[BaseException], function: Any, *args: Any) -> str:
    with pytest.raises(kind) as caught:
        function(*args)
    return str(caught.value)


# ---- autocast ----------------------------------------------------------------------


@checks.on(1, 2)
def forward_computes_in_16_bits_and_returns_float32() -> None:
    for name, dtype in DTYPES.items():
        accelerator = _anew(mixed_precision=name)
        assert accelerator.mixed_precision == name
        model = accelerator.prepare(Spy())
        output = model(torch.randn(2, 4))
        assert model.dtype is dtype and output.dtype is torch.float32
        assert all(p.dtype is torch.float32 for p in model.parameters())
        accelerator.backward(output.sum())
        assert all(p.grad.dtype is torch.float32 for p in model.parameters())
        with accelerator.autocast():
            assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype is dtype
            with accelerator.autocast(AutocastKwargs(enabled=False)):
                assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype is torch.float32
        plain = accelerator.unwrap_model(model, keep_fp32_wrapper=False)
        assert plain is model and not is_wrapped(model)
        model(torch.randn(2, 4))
        assert model.dtype is torch.float32


@checks.on(1)
def without_mixed_precision_nothing_is_touched() -> None:
    accelerator = _anew()
    model = accelerator.prepare(Spy())
    assert "forward" not in vars(model) and accelerator.scaler is None
    with accelerator.autocast():
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype is torch.float32


@checks.on(1)
def structures_come_back_in_float32() -> None:
    class Deep(nn.Module):
        def forward(self, x: Tensor) -> Output:
            y = x @ x
            return Output(y.sum(), (y, [y, torch.ones(1, dtype=torch.int64)]))

    model = _anew(mixed_precision="bf16").prepare(Deep())
    output = model(torch.ones(2, 2))
    assert output.loss.dtype is output.hidden[0].dtype is output.hidden[1][0].dtype is torch.float32
    assert output.hidden[1][1].dtype is torch.int64


@checks.on(1)
def a_forward_of_the_objects_own_is_kept() -> None:
    accelerator = _anew(mixed_precision="bf16")
    model = Spy()
    inner = model.forward
    model.forward = lambda x: inner(x) + 1  # type: ignore[method-assign]
    own = model.forward
    accelerator.prepare(model)
    with torch.no_grad():
        model.linear.weight.zero_()
        model.linear.bias.zero_()
    assert torch.equal(model(torch.ones(1, 4)), torch.ones(1, 3)) and model.dtype is torch.bfloat16
    accelerator.unwrap_model(model, keep_fp32_wrapper=False)
    assert model.forward is own


@checks.on(1)
def a_compiled_model_computes_in_16_bits() -> None:
    for before in (True, False):
        accelerator = _anew(mixed_precision="bf16")
        model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 3))
        eager = copy.deepcopy(model)
        if before:
            model = accelerator.prepare(torch.compile(model, backend="aot_eager"))
        else:
            model = torch.compile(accelerator.prepare(model), backend="aot_eager", fullgraph=True)
        x = torch.randn(2, 4)
        output = model(x)
        with torch.autocast("cpu", torch.bfloat16):
            expected = eager(x)
        assert expected.dtype is torch.bfloat16 and output.dtype is torch.float32
        assert torch.allclose(output, expected.float(), atol=2e-2)
        assert not torch.equal(output, eager(x))
        accelerator.backward(output.sum())


@checks.on(1)
def older_scripts_ask_with_fp16() -> None:
    assert _anew(fp16=True).mixed_precision == "fp16"
    assert _anew(fp16=False).mixed_precision == "no"


# ---- the loss scale ------------------------------------------------------------------


@checks.on(1, 2)
def small_gradients_survive_in_fp16() -> None:
    """Without a scale they would be 0 in float16, where the smallest number is 6e-8."""
    for scaled in (False, True):
        options = GradScalerKwargs(enabled=scaled)
        accelerator = _anew(mixed_precision="fp16", kwargs_handlers=[options])
        assert (accelerator.scaler is not None) == scaled
        model = nn.Linear(4, 1, bias=False)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        model, optimizer = accelerator.prepare(model, optimizer)
        before = model.weight.detach().clone()
        accelerator.backward(model(torch.ones(1, 4)).sum() * 1e-8)
        optimizer.step()
        moved = (before - model.weight).abs().max().item()
        grad = model.weight.grad.abs().max().item()
        assert grad == (pytest.approx(1e-8, rel=1e-2) if scaled else 0)
        assert (moved > 0) == scaled


@checks.on(1, 2)
def fp16_trains_like_float32() -> None:
    losses = {}
    for name in ("no", "fp16", "bf16"):
        torch.manual_seed(0)
        accelerator = _anew(mixed_precision=name)
        model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 3))
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        model, optimizer = accelerator.prepare(model, optimizer)
        g = torch.Generator().manual_seed(accelerator.process_index)
        x, y = torch.randn(30, 8, generator=g), torch.randint(0, 3, (30,), generator=g)
        for _ in range(25):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            accelerator.backward(loss)
            norm = accelerator.clip_grad_norm_(model.parameters(), 5.0)
            assert 0 < norm.item() < 5  # of gradients without the scale
            optimizer.step()
            assert not accelerator.optimizer_step_was_skipped
            losses.setdefault("first", loss.item())
        losses[name] = loss.item()
    assert losses["fp16"] == pytest.approx(losses["no"], rel=0.05)
    assert losses["bf16"] == pytest.approx(losses["no"], rel=0.05)
    assert losses["no"] < 0.9 * losses["first"]


@checks.on(1, 2, 3)
def an_overflow_on_one_rank_skips_the_step_on_all() -> None:
    accelerator = _fp16()
    model = nn.Linear(2, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
    scaler = _scaler(accelerator)
    before = model.weight.detach().clone()
    assert scaler.get_scale() == 1024.0
    x = torch.full((1, 2), 1e4 if accelerator.is_last_process else 1.0)
    optimizer.zero_grad()
    accelerator.backward((model(x) * 1e3).sum())
    optimizer.step()
    scheduler.step()
    assert optimizer.step_was_skipped and accelerator.optimizer_step_was_skipped
    assert torch.equal(model.weight, before) and scheduler.scheduler.last_epoch == 0
    assert scaler.get_scale() == 512.0
    optimizer.zero_grad()
    accelerator.backward(model(torch.ones(1, 2)).sum())
    optimizer.step()
    assert not optimizer.step_was_skipped and not torch.equal(model.weight, before)
    rows = accelerator.gather(model.weight.detach())
    assert torch.equal(rows, rows[:1].expand_as(rows))
    assert accelerator.gather(torch.tensor([scaler.get_scale()])).unique().numel() == 1


@checks.on(2)
def an_overflow_that_only_one_rank_can_see_is_one_on_all() -> None:
    """Gradients that were changed after they were averaged."""
    accelerator = _fp16()
    model = nn.Linear(2, 1, bias=False)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
    accelerator.backward(model(torch.ones(1, 2)).sum())
    if accelerator.is_main_process:
        model.weight.grad[0, 0] = float("nan")
    optimizer.step()
    assert optimizer.step_was_skipped
    assert _scaler(accelerator).get_scale() == 512.0


@checks.on(1)
def the_scale_grows_and_shrinks_as_configured() -> None:
    options = GradScalerKwargs(init_scale=8.0, growth_interval=2, growth_factor=4.0)
    accelerator = _anew(mixed_precision="fp16", kwargs_handlers=[options])
    model = nn.Linear(2, 1)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.0))
    scales = []
    for step in range(5):
        optimizer.zero_grad()
        bad = float("inf") if step == 4 else 1.0
        accelerator.backward(model(torch.ones(1, 2)).sum() * bad)
        optimizer.step()
        scales.append(_scaler(accelerator).get_scale())
    assert scales == [8.0, 32.0, 32.0, 128.0, 64.0]
    saved = _scaler(accelerator).state_dict()
    assert saved["scale"] == 64.0


@checks.on(1, 2)
def two_optimizers_divide_by_the_scale_of_their_backward() -> None:
    accelerator = _fp16(options={"growth_interval": 1})  # it changes with each step
    model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 1, bias=False))
    with torch.no_grad():
        for p in model.parameters():
            p.fill_(1.0)
    ways = [torch.optim.SGD(m.parameters(), lr=1.0) for m in model]
    model, *optimizers = accelerator.prepare(model, *ways)
    accelerator.backward(model(torch.ones(1, 2)).sum())
    for optimizer in optimizers:
        optimizer.step()
    assert model[0].weight.grad.flatten().tolist() == [1.0] * 4
    assert model[1].weight.grad.flatten().tolist() == [2.0, 2.0]
    assert _scaler(accelerator).get_scale() == 2048.0


@checks.on(1)
def a_step_the_program_leaves_out_does_not_spoil_the_next() -> None:
    accelerator = _fp16()
    model = nn.Linear(2, 1, bias=False)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
    for zero in (optimizer.zero_grad, model.zero_grad, optimizer.zero_grad):
        zero()
        accelerator.backward(model(torch.ones(1, 2)).sum())
        norm = accelerator.clip_grad_norm_(model.parameters(), 100.0)
        assert norm.item() == pytest.approx(2**0.5)
    optimizer.step()
    assert model.weight.grad.flatten().tolist() == [1.0, 1.0]


@checks.on(1, 2)
def clipping_one_model_leaves_the_others_scaled() -> None:
    accelerator = _fp16()
    parts = nn.Linear(2, 1, bias=False), nn.Linear(2, 1, bias=False)
    one, two = accelerator.prepare(*parts)
    ways = [torch.optim.SGD(m.parameters(), lr=1.0) for m in parts]
    step_one, step_two = accelerator.prepare(*ways)
    accelerator.backward(one(torch.ones(1, 2)).sum())
    accelerator.clip_grad_norm_(one.parameters(), 100.0)
    accelerator.backward(two(torch.ones(1, 2)).sum())
    assert two.weight.grad[0, 0].item() == 1024.0
    step_one.step()
    step_two.step()
    assert one.weight.grad[0, 0].item() == two.weight.grad[0, 0].item() == 1.0


@checks.on(1, 2)
def accumulation_and_fp16_go_together() -> None:
    accelerator = _fp16(gradient_accumulation_steps=2)
    model = nn.Linear(2, 1, bias=False)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
    for micro in range(4):
        with accelerator.accumulate(model):
            optimizer.zero_grad()
            accelerator.backward(model(torch.full((1, 2), 1.0 + micro)).sum())
            norm = accelerator.clip_grad_norm_(model.parameters(), 1e3)
            if accelerator.sync_gradients:
                mean = (micro + (1 + micro)) / 2
                assert norm.item() == pytest.approx(2**0.5 * mean, rel=1e-3)
            optimizer.step()


@checks.on(2)
def a_rank_without_a_loss_steps_along_in_fp16() -> None:
    accelerator = _fp16()
    model = nn.Linear(2, 1, bias=False)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
    for turn in range(4):
        optimizer.zero_grad()
        if turn % 2 == accelerator.process_index:
            accelerator.backward(model(torch.ones(1, 2)).sum())
        optimizer.step()
        assert not optimizer.step_was_skipped
        assert model.weight.grad.flatten().tolist() == [0.5, 0.5]
    scale = torch.tensor([_scaler(accelerator).get_scale()])
    assert accelerator.gather(scale).tolist() == [1024.0] * 2


@checks.on(1)
def what_cannot_work_in_fp16_is_a_sentence() -> None:
    accelerator = _fp16()
    model = nn.Linear(2, 1, bias=False)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
    accelerator.backward(model(torch.ones(1, 2)).sum())
    optimizer.step()
    optimizer.zero_grad()
    model(torch.ones(1, 2)).sum().backward()
    assert "accelerator.backward(loss)" in _raised(RuntimeError, optimizer.step)
    assert "closure" in _raised(RuntimeError, optimizer.step, lambda: None)

    halves = nn.Linear(2, 1, bias=False).half()
    halves, optimizer = accelerator.prepare(halves, torch.optim.SGD(halves.parameters(), lr=1.0))
    accelerator.backward(halves(torch.ones(1, 2)).sum())
    assert "leave out model.half()" in _raised(ValueError, optimizer.step)


@checks.on(1)
def fused_and_sparse_optimizers_step_in_fp16() -> None:
    accelerator = _fp16()
    model = nn.Linear(2, 1, bias=False)
    words = nn.Embedding(5, 2, sparse=True)
    ways = (
        torch.optim.AdamW(model.parameters(), lr=0.1, fused=True),
        torch.optim.SparseAdam(words.parameters(), lr=0.1),
    )
    before = [model.weight.detach().clone(), words.weight.detach().clone()]
    model, words, *optimizers = accelerator.prepare(model, words, *ways)
    for overflow in (True, False):
        for optimizer in optimizers:
            optimizer.zero_grad()
        factor = float("inf") if overflow else 1.0
        accelerator.backward(model(words(torch.tensor([1, 1]))).sum() * factor)
        for optimizer in optimizers:
            optimizer.step()
        for was, now in zip(before, (model.weight, words.weight), strict=True):
            assert torch.equal(was, now) == overflow


test_together = checks.test()
