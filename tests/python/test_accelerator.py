"""The Accelerator, in worlds of one, two and three real processes."""

from __future__ import annotations

import copy
import ctypes
import io
import pickle
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import accel
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from accel import Accelerator, MismatchError, _lib, absent
from accel import model as models
from accel.handlers import (
    DataLoaderConfiguration,
    DDPCommunicationHookType,
    DistributedDataParallelKwargs,
    GradientAccumulationPlugin,
    GradScalerKwargs,
)
from accel.optimizer import PreparedOptimizer
from together import Checks
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

checks = Checks()


def dataset(n: int, seed: int = 0) -> TensorDataset:
    """Points of three clouds that lie apart."""
    g = torch.Generator().manual_seed(seed)
    labels = torch.arange(n) % 3
    middles = torch.tensor([[2.0, 0, 0, 1], [0, 2, 0, -1], [0, 0, 2, 0]])
    return TensorDataset(middles[labels] + 0.3 * torch.randn(n, 4, generator=g), labels)


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 12), nn.Tanh(), nn.Linear(12, 3))


def equal_everywhere(accelerator: Accelerator, tensors: Iterator[Tensor]) -> bool:
    flat = torch.cat([t.detach().reshape(-1).double() for t in tensors])[None]
    rows = accelerator.gather(flat)
    return torch.equal(rows, rows[:1].expand_as(rows))


def raised(kind: type[BaseException], function: Any, *args: Any, **kwargs: Any) -> str:
    try:
        function(*args, **kwargs)
    except kind as error:
        return str(error)
    raise AssertionError(f"no {kind.__name__} was raised")


def rank_mean(accelerator: Accelerator, values: list[float]) -> float:
    return sum(values[: accelerator.num_processes]) / accelerator.num_processes


# ---- the two loops ---------------------------------------------------------------


def _loops(moves: bool) -> None:
    accelerator = Accelerator(cpu=True)
    torch.manual_seed(accelerator.process_index)  # each rank shuffles and begins otherwise
    train_set, test_set = dataset(50), dataset(37, seed=1)
    model = network()
    if moves:
        model = model.to(accelerator.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    data = DataLoader(train_set, batch_size=4, shuffle=True)
    model, optimizer, data = accelerator.prepare(model, optimizer, data)
    model.train()
    for _ in range(10):
        for source, targets in data:
            if moves:
                source, targets = source.to(accelerator.device), targets.to(accelerator.device)
            optimizer.zero_grad()
            loss = F.cross_entropy(model(source), targets)
            accelerator.backward(loss)
            optimizer.step()
    assert equal_everywhere(accelerator, model.parameters())

    model.eval()
    eval_dataloader = accelerator.prepare(DataLoader(test_set, batch_size=4))
    predictions, labels = [], []
    for source, targets in eval_dataloader:
        with torch.no_grad():
            output = model(source)
        predictions.append(accelerator.gather(output).cpu().numpy())
        labels.append(accelerator.gather(targets).cpu().numpy())
    predictions = np.concatenate(predictions)[: len(eval_dataloader.dataset)]
    labels = np.concatenate(labels)[: len(eval_dataloader.dataset)]

    assert np.array_equal(labels, test_set.tensors[1].numpy())
    with torch.no_grad():
        alone = model(test_set.tensors[0]).numpy()
    assert np.allclose(predictions, alone, atol=1e-6)
    assert (predictions.argmax(1) == labels).mean() > 0.95


@checks.on(1, 2, 3)
def the_five_lines_train_and_evaluate_exactly() -> None:
    _loops(moves=False)


@checks.on(1, 2, 3)
def so_they_do_with_the_programs_own_to_device() -> None:
    _loops(moves=True)


@checks.on(1, 2, 3)
def a_split_batch_trains_as_one_process_does() -> None:
    model = network()
    alone = copy.deepcopy(model)
    optimizer = torch.optim.AdamW(alone.parameters(), lr=0.01)
    for source, targets in DataLoader(dataset(48), batch_size=12):
        optimizer.zero_grad()
        F.cross_entropy(alone(source), targets).backward()
        optimizer.step()

    accelerator = Accelerator(split_batches=True)
    model, optimizer, data = accelerator.prepare(
        model,
        torch.optim.AdamW(model.parameters(), lr=0.01),
        DataLoader(dataset(48), batch_size=12),
    )
    for source, targets in data:
        assert len(source) == 12 // accelerator.num_processes
        optimizer.zero_grad()
        accelerator.backward(F.cross_entropy(model(source), targets))
        optimizer.step()
    for got, expected in zip(model.parameters(), alone.parameters(), strict=True):
        assert torch.allclose(got, expected, atol=1e-5)


@checks.on(2)
def gradients_go_through_the_library() -> None:
    accelerator = Accelerator()
    model = accelerator.prepare(network())
    before = _counters(accelerator)
    accelerator.backward(model(torch.ones(2, 4)).sum())
    after = _counters(accelerator)
    n_bytes = sum(4 * p.numel() for p in model.parameters())
    assert after.backward.calls - before.backward.calls == 1
    assert after.backward.bytes - before.backward.bytes == n_bytes


def _counters(accelerator: Accelerator) -> _lib.Counters:
    counters = _lib.Counters()
    _lib.load().accel_counters(accelerator.state.world.handle, ctypes.byref(counters))
    return counters


# ---- prepare -----------------------------------------------------------------------


@checks.on(1, 2)
def prepare_takes_any_order_in_one_call_or_several() -> None:
    for turn in range(3):
        accelerator = Accelerator()
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1000)
        loader = DataLoader(dataset(8), batch_size=2)
        if turn == 0:
            s, o, d, m, other = accelerator.prepare(scheduler, optimizer, loader, model, "text")
            assert other == "text"
        elif turn == 1:
            s, o = accelerator.prepare(scheduler), accelerator.prepare(optimizer)
            d, m = accelerator.prepare(loader), accelerator.prepare(model)
        else:
            m, o, d, s = accelerator.prepare(model, optimizer, loader, scheduler)
            again = accelerator.prepare(m, o, d, s)
            assert all(a is b for a, b in zip(again, (m, o, d, s), strict=True))
        assert m is model and isinstance(d, DataLoader) and o.optimizer is optimizer
        assert isinstance(o, torch.optim.Optimizer)
        for source, targets in d:
            o.zero_grad()
            accelerator.backward(F.cross_entropy(m(source), targets))
            o.step()
            s.step()
        assert equal_everywhere(accelerator, m.parameters())
        assert scheduler.last_epoch == 8 // 2


@checks.on(1, 2)
def the_prepared_model_is_the_programs_own() -> None:
    accelerator = Accelerator(mixed_precision="bf16")
    model = network()
    names = list(model.state_dict())
    prepared = accelerator.prepare(model)
    assert prepared is model and accelerator.unwrap_model(model) is model
    assert list(prepared.state_dict()) == names

    average = copy.deepcopy(model)
    assert not models.is_prepared(average)
    with torch.no_grad():
        for p in average.parameters():
            p.zero_()
    # The copy computes with its own parameters, and in the same precision.
    assert average(torch.ones(1, 4)).abs().sum() == 0
    assert model(torch.ones(1, 4)).abs().sum() > 0
    plain = pickle.loads(pickle.dumps(model))
    assert type(plain) is type(model)
    # What is unpickled has the forward of its class.
    x = torch.ones(1, 4) / 3
    assert torch.equal(plain(x), accelerator.unwrap_model(model, keep_fp32_wrapper=False)(x))


@checks.on(1, 2)
def a_model_without_trained_parameters_is_prepared() -> None:
    accelerator = Accelerator()
    nothing, frozen = nn.Flatten(), network().requires_grad_(False)
    model = network()
    assert accelerator.prepare(nothing) is nothing
    assert accelerator.prepare(frozen) is frozen
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    accelerator.backward(F.mse_loss(model(torch.ones(2, 4)), frozen(nothing(torch.ones(2, 4)))))
    optimizer.step()
    assert equal_everywhere(accelerator, frozen.parameters())
    assert all(p.grad is None for p in frozen.parameters())


@checks.on(2)
def buffers_and_parameters_are_those_of_rank_0() -> None:
    accelerator = Accelerator()
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    model.register_buffer("flags", torch.tensor([True, bool(accelerator.process_index)]))
    model.register_buffer("wide", torch.full((3, 4), float(accelerator.process_index)).t())
    with torch.no_grad():
        model[0].weight.fill_(accelerator.process_index + 1)
    model.to(memory_format=torch.contiguous_format)
    accelerator.prepare(model)
    assert torch.equal(model[0].weight, torch.ones(4, 4))
    assert model.flags.tolist() == [True, False] and model.wide.sum() == 0


@checks.on(2)
def different_models_are_an_error_on_all_ranks_that_names_the_parameter() -> None:
    accelerator = Accelerator()
    model = nn.Sequential(nn.Linear(4, 3 + accelerator.process_index))
    text = raised(MismatchError, accelerator.prepare, model)
    assert "0.weight torch.float32 (3, 4)" in text and "rank 1 has 0.weight" in text
    # The world is whole.
    assert accelerator.gather(torch.tensor([1])).tolist() == [1, 1]


@checks.on(2)
def a_model_that_changes_on_one_rank_only_is_an_error_on_all() -> None:
    accelerator = Accelerator()
    model = accelerator.prepare(network())
    accelerator.backward(model(torch.ones(2, 4)).sum())
    if accelerator.process_index == 1:
        model.append(nn.Linear(3, 3))
    text = raised(MismatchError, accelerator.backward, model(torch.ones(2, 4)).sum())
    lines = text.splitlines()
    assert any("rank 1: gather of uint8" in line and "parameters of" in line for line in lines)
    assert "a layer was added" in lines[-1] or accelerator.process_index == 0
    if accelerator.process_index == 1:
        del model[3]
    accelerator.backward(model(torch.ones(2, 4)).sum())


@checks.on(2)
def layouts_in_memory_that_differ_are_an_error_on_all_ranks() -> None:
    """Averaged as they lie, they would be averaged with each other's elements."""
    accelerator = Accelerator()
    model = nn.Conv2d(3, 3, 3)
    if accelerator.process_index == 1:
        model.to(memory_format=torch.channels_last)
    accelerator.prepare(model)
    text = raised(MismatchError, accelerator.backward, model(torch.ones(1, 3, 4, 4)).sum())
    assert "in memory (0, 1, 2, 3)" in text and "in memory (0, 2, 3, 1)" in text


@checks.on(2)
def another_call_on_another_rank_is_an_error_on_all() -> None:
    accelerator = Accelerator()
    model = accelerator.prepare(network())
    accelerator.backward(model(torch.ones(2, 4)).sum())
    if accelerator.process_index == 0:
        text = raised(MismatchError, accelerator.backward, model(torch.ones(2, 4)).sum())
    else:
        text = raised(MismatchError, accelerator.gather, torch.ones(2))
    table, _, advice = text.partition("\n  rank 1: gather of float32 (2,)")
    assert "\n  rank 0: backward" in table
    # Why is not known: what is, comes first.
    assert "same backward" not in text
    assert "on all of them or on none" in advice or accelerator.process_index == 1


@checks.on(2)
def a_call_that_others_do_not_make_is_named_by_what_it_is_for() -> None:
    accelerator = Accelerator()
    first = accelerator.is_main_process
    loader = accelerator.prepare(DataLoader(dataset(20), batch_size=2, shuffle=True))
    ways = {
        "(start of a pass over a DataLoader)": lambda: next(iter(loader)),
        "(check_trigger)": accelerator.check_trigger,
        "(main_process_first)": lambda: accelerator.main_process_first().__enter__(),
        "prepare(), parameters of a model)": lambda: accelerator.prepare(network()),
    }
    for words, call in ways.items():
        if first:
            assert words in raised(MismatchError, accelerator.gather, torch.ones(2))
        else:
            assert words in raised(MismatchError, call)


@checks.on(2)
def a_loop_that_one_rank_leaves_early_is_named() -> None:
    accelerator = Accelerator()
    loader = accelerator.prepare(DataLoader(dataset(20), batch_size=2, shuffle=True))

    def two_passes() -> None:
        for _ in range(2):
            for step, (source, _) in enumerate(loader):
                if step == 2 and accelerator.process_index == 1:
                    break
                accelerator.gather(source)

    text = raised(MismatchError, two_passes)
    assert "rank 0: gather of float32 (2, 4)\n" in text
    assert "rank 1: broadcast of uint8 (8,) from rank 0 (start of a pass over a DataLoader)" in text


@checks.on(1, 2)
def an_iterator_is_not_prepared() -> None:
    accelerator = Accelerator()
    loader = DataLoader(dataset(20), batch_size=2)
    for iterator in (iter(loader), iter(accelerator.prepare(loader))):
        with pytest.raises(TypeError, match="prepare the DataLoader itself"):
            accelerator.prepare(iterator)
    own = (x for x in range(3))
    assert accelerator.prepare(own) is own


@checks.on(1)
def what_accelerate_has_and_accel_does_not_says_what_to_do() -> None:
    accelerator = Accelerator()
    for name, advice in (
        ("save_state", "accelerator.save()"),
        ("load_state", "before prepare()"),
        ("log", "is_main_process"),
        ("trackers", "is_main_process"),
        ("profile", "torch.profiler"),
        ("skip_first_batches", "enumerate"),
    ):
        assert not hasattr(accelerator, name)
        text = raised(AttributeError, getattr, accelerator, name)
        assert text.startswith(f"accel's Accelerator has no {name}: ") and advice in text
    assert "no attribute 'nothing'" in raised(AttributeError, getattr, accelerator, "nothing")
    # None of them is there.
    assert not [name for name in absent.OF_ACCELERATOR if name in dir(accelerator)]


@checks.on(2)
def new_parameters_become_those_of_rank_0() -> None:
    accelerator = Accelerator()
    model = accelerator.prepare(network())
    accelerator.backward(model(torch.ones(2, 4)).sum())
    torch.manual_seed(accelerator.process_index)
    model.append(nn.Linear(3, 3))
    accelerator.backward(model(torch.ones(2, 4)).sum())
    assert equal_everywhere(accelerator, model.parameters())
    assert equal_everywhere(accelerator, (p.grad for p in model.parameters()))


# ---- wrong use ---------------------------------------------------------------------


@checks.on(1, 2)
def bad_input_is_a_sentence() -> None:
    accelerator = Accelerator()
    model = accelerator.prepare(network())
    with torch.no_grad():
        assert "no_grad" in raised(
            RuntimeError, accelerator.backward, model(torch.ones(1, 4)).sum()
        )
    assert ".mean()" in raised(ValueError, accelerator.backward, model(torch.ones(2, 4)))
    assert "float" in raised(TypeError, accelerator.backward, 1.5)
    assert "gather_object" in raised(TypeError, accelerator.gather, ["a", "b"])
    lazy = nn.LazyLinear(3)
    assert "run the model once" in raised(ValueError, accelerator.prepare, lazy)
    assert "meta" in raised(ValueError, accelerator.prepare, nn.Linear(3, 3, device="meta"))
    stranger = torch.optim.SGD(network().parameters(), lr=0.1)
    text = raised(ValueError, accelerator.prepare, network(), stranger)
    assert "SGD steps 4 parameters" in text
    assert "DeepSpeed" in raised(NotImplementedError, Accelerator, deepspeed_plugin=object())
    assert "tracker" in raised(NotImplementedError, Accelerator, log_with="tensorboard")
    assert "no argument 'fpl6'" in raised(TypeError, Accelerator, fpl6=True)
    assert "fp8" in raised(ValueError, Accelerator, mixed_precision="fp8")
    assert "contradict" in raised(ValueError, Accelerator, mixed_precision="bf16", fp16=True)
    assert "1 or more" in raised(ValueError, Accelerator, gradient_accumulation_steps=0)
    assert "not int" in raised(TypeError, Accelerator, kwargs_handlers=[3])
    twice = [GradScalerKwargs(), GradScalerKwargs()]
    assert "twice" in raised(ValueError, Accelerator, kwargs_handlers=twice)
    both = {"split_batches": True, "dataloader_config": DataLoaderConfiguration()}
    assert "split_batches" in raised(ValueError, Accelerator, **both)
    plugin = GradientAccumulationPlugin(num_steps=2)
    both = {"gradient_accumulation_steps": 2, "gradient_accumulation_plugin": plugin}
    assert "num_steps" in raised(ValueError, Accelerator, **both)
    assert "2 values for 1" in raised(
        ValueError, accelerator.prepare, network(), device_placement=[True, True]
    )
    Accelerator(fsdp_plugin=None, dynamo_backend="no", log_with=None, project_dir="runs")


@checks.on(2)
def an_optimizer_over_parameters_of_no_prepared_model_is_refused_at_its_step() -> None:
    accelerator = Accelerator()
    model, temperature = network(), nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([*model.parameters(), temperature], lr=0.1)
    model, optimizer = accelerator.prepare(model, optimizer)
    accelerator.backward(model(torch.ones(2, 4)).sum() * temperature.sum())
    text = raised(ValueError, optimizer.step)
    assert "1 parameters that no prepared model has" in text and "(2,)" in text


@checks.on(2)
def an_optimizer_that_steps_in_backward_is_refused() -> None:
    accelerator = Accelerator()
    model = network()
    model[0].weight.register_post_accumulate_grad_hook(lambda p: None)
    assert "0.weight has a post-accumulate-grad hook" in raised(
        ValueError, accelerator.prepare, model
    )


# ---- accumulation -------------------------------------------------------------------


def _grads(model: nn.Module) -> list[Tensor]:
    return [p.grad.clone() for p in model.parameters()]


@checks.on(1, 2)
def accumulation_is_one_large_batch_wherever_zero_grad_stands() -> None:
    for zero_first in (False, True):
        accelerator = Accelerator(gradient_accumulation_steps=3)
        torch.manual_seed(1)
        model = network()
        large = copy.deepcopy(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
        data = DataLoader(dataset(28), batch_size=2)
        model, optimizer, data = accelerator.prepare(model, optimizer, data)
        size = accelerator.num_processes
        syncs = []
        for source, targets in data:
            with accelerator.accumulate(model):
                if zero_first:
                    optimizer.zero_grad()
                accelerator.backward(F.cross_entropy(model(source), targets))
                syncs.append(accelerator.sync_gradients)
                optimizer.step()
                if not zero_first:
                    optimizer.zero_grad()
        steps = len(syncs)
        assert steps == 14 // size
        assert syncs == [i % 3 == 2 or i == steps - 1 for i in range(steps)]

        expected = torch.optim.SGD(large.parameters(), lr=0.2)
        points, labels = dataset(28).tensors
        per_step = 2 * size * 3
        for start in range(0, 28, per_step):
            expected.zero_grad()
            part = slice(start, start + per_step)
            whole = F.cross_entropy(large(points[part]), labels[part], reduction="sum")
            (whole / per_step).backward()
            expected.step()
        for got, right in zip(model.parameters(), large.parameters(), strict=True):
            assert torch.allclose(got, right, atol=1e-6), zero_first


@checks.on(2)
def micro_steps_do_not_talk_to_other_ranks() -> None:
    accelerator = Accelerator(gradient_accumulation_steps=2)
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = accelerator.prepare(model, optimizer)
    x = torch.full((1, 4), float(accelerator.process_index))
    before = _counters(accelerator).backward.calls
    with accelerator.accumulate(model):
        accelerator.backward(model(x).sum())
        optimizer.step()
        optimizer.zero_grad()
        assert not accelerator.sync_gradients
    assert _counters(accelerator).backward.calls == before
    assert not equal_everywhere(accelerator, iter(_grads(model)))
    with accelerator.accumulate(model):
        accelerator.backward(model(x).sum())
        assert equal_everywhere(accelerator, iter(_grads(model)))
        optimizer.step()
    assert _counters(accelerator).backward.calls == before + 1


@checks.on(1, 2)
def a_loss_that_is_dropped_can_be_zeroed_in_a_step_that_ends() -> None:
    accelerator = Accelerator(gradient_accumulation_steps=2)
    model = network()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for micro in range(2):
        with accelerator.accumulate(model):
            accelerator.backward(model(torch.ones(1, 4)).sum())
            optimizer.zero_grad()
        assert (model[0].weight.grad is None) == (micro == 1)


# ---- whoever averages ------------------------------------------------------------------


def _one_number(accelerator: Accelerator) -> tuple[Any, Any, nn.Parameter]:
    """A model that is one weight, whose gradient is the input; and its optimizer."""
    model = nn.Linear(1, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    model, optimizer = accelerator.prepare(model, optimizer)
    with torch.no_grad():
        model.weight.zero_()
    return model, optimizer, model.weight


@checks.on(1, 2, 3)
def a_bare_backward_is_averaged_by_step_or_clipping() -> None:
    accelerator = Accelerator()
    x = torch.tensor([[1.0 + accelerator.process_index]])
    mean = rank_mean(accelerator, [1, 2, 3])
    for how in ("step", "clip", "value", "unscale"):
        model, optimizer, weight = _one_number(accelerator)
        model(x).sum().backward()
        assert weight.grad.item() == x.item()
        if how == "clip":
            norm = accelerator.clip_grad_norm_(model.parameters(), 0.5)
            assert norm.item() == pytest.approx(mean)
            assert weight.grad.item() == pytest.approx(0.5, rel=1e-4)
        elif how == "value":
            accelerator.clip_grad_value_(model.parameters(), 0.25)
            assert weight.grad.item() == 0.25
        elif how == "unscale":
            accelerator.unscale_gradients()
            assert weight.grad.item() == pytest.approx(mean)
        optimizer.step()
        expected = {"clip": 0.5, "value": 0.25}.get(how, mean)
        assert weight.item() == pytest.approx(-expected, rel=1e-4)


@checks.on(2)
def a_step_after_no_sync_averages_and_one_inside_does_not() -> None:
    accelerator = Accelerator()
    model, optimizer, weight = _one_number(accelerator)
    x = torch.tensor([[1.0 + accelerator.process_index]])
    with accelerator.no_sync(model):
        accelerator.backward(model(x).sum())
        model(x).sum().backward()
    optimizer.step()
    assert weight.item() == -3.0
    optimizer.zero_grad()
    with accelerator.no_sync(model):
        accelerator.backward(model(x).sum())
        optimizer.step()
    assert weight.item() == -3.0 - x.item()


@checks.on(2)
def no_sync_holds_one_model_of_two() -> None:
    accelerator = Accelerator()
    one, _, first = _one_number(accelerator)
    two, _, second = _one_number(accelerator)
    x = torch.tensor([[1.0 + accelerator.process_index]])
    with accelerator.no_sync(one):
        accelerator.backward((one(x) + two(x)).sum())
    assert first.grad.item() == x.item() and second.grad.item() == 1.5


@checks.on(2)
def no_sync_knows_a_compiled_model() -> None:
    accelerator = Accelerator()
    x = torch.tensor([[1.0 + accelerator.process_index]])
    model, _, weight = _one_number(accelerator)
    compiled = torch.compile(model, backend="aot_eager")
    with accelerator.no_sync(compiled):
        accelerator.backward(compiled(x).sum())
    assert weight.grad.item() == x.item()
    accelerator.backward(compiled(x).sum())
    assert weight.grad.item() == 3.0


@checks.on(2)
def a_backward_of_something_else_on_one_rank_is_nobodys_business() -> None:
    accelerator = Accelerator()
    model, optimizer, weight = _one_number(accelerator)
    probe = nn.Linear(1, 1)
    x = torch.tensor([[1.0 + accelerator.process_index]])
    accelerator.backward(model(x).sum())
    if accelerator.is_main_process:
        probe(x).sum().backward()
    before = _counters(accelerator).backward.calls
    optimizer.step()
    assert _counters(accelerator).backward.calls == before
    assert weight.item() == -1.5


@checks.on(2)
def a_backward_that_raises_halfway_is_averaged_all_the_same() -> None:
    class Trap(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            raise FloatingPointError

    accelerator = Accelerator()
    for backward in (accelerator.backward, lambda loss: loss.backward()):
        model, optimizer, weight = _one_number(accelerator)
        x = torch.tensor([[1.0 + accelerator.process_index]])
        trapped = Trap.apply(x.clone().requires_grad_())
        raised(FloatingPointError, backward, (model(x) + trapped).sum())
        weight.grad = x.clone() if weight.grad is None else weight.grad
        optimizer.step()
        assert weight.item() == -1.5


@checks.on(1, 2)
def a_compiled_step_that_calls_backward_itself() -> None:
    accelerator = Accelerator()
    model, optimizer, weight = _one_number(accelerator)
    x = torch.tensor([[1.0 + accelerator.process_index]])

    @torch.compile(backend="aot_eager")
    def step(x: Tensor) -> None:
        model(x).sum().backward()

    step(x)
    optimizer.step()
    assert weight.item() == -rank_mean(accelerator, [1.0, 2.0])


@checks.on(2)
def what_torch_averages_is_left_to_it() -> None:
    accelerator = Accelerator()
    torch.manual_seed(0)
    wrapped = DistributedDataParallel(nn.Linear(1, 1, bias=False))
    model, optimizer = accelerator.prepare(wrapped, torch.optim.SGD(wrapped.parameters(), lr=1.0))
    assert model is wrapped and accelerator.unwrap_model(model) is wrapped.module
    weight = wrapped.module.weight
    before = weight.item()
    calls = _counters(accelerator).backward.calls
    accelerator.backward(model(torch.tensor([[1.0 + accelerator.process_index]])).sum())
    optimizer.step()
    assert weight.item() == pytest.approx(before - 1.5)
    assert _counters(accelerator).backward.calls == calls


@checks.on(2)
def a_model_for_evaluation_is_shared_and_not_averaged() -> None:
    accelerator = Accelerator()
    model = nn.Linear(1, 1, bias=False)
    with torch.no_grad():
        model.weight.fill_(accelerator.process_index)
    assert accelerator.prepare_model(model, evaluation_mode=True) is model
    assert model.weight.item() == 0
    accelerator.backward(model(torch.tensor([[1.0 + accelerator.process_index]])).sum())
    assert model.weight.grad.item() == 1.0 + accelerator.process_index


@checks.on(2, 3)
def a_rank_without_a_loss_takes_part_in_its_step() -> None:
    accelerator = Accelerator()
    model, optimizer, weight = _one_number(accelerator)
    for turn in range(accelerator.num_processes):
        optimizer.zero_grad()
        if turn != accelerator.process_index:
            accelerator.backward(model(torch.ones(1, 1)).sum())
        optimizer.step()
    n = accelerator.num_processes
    assert weight.item() == pytest.approx(-(n - 1), rel=1e-6)
    assert equal_everywhere(accelerator, iter([weight]))


@checks.on(1, 2)
def a_closure_sees_averaged_gradients() -> None:
    accelerator = Accelerator()
    model = nn.Linear(4, 1)
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=4)
    model, optimizer = accelerator.prepare(model, optimizer)
    points, labels = dataset(12).tensors
    mine = slice(accelerator.process_index, None, accelerator.num_processes)
    first, calls = None, 0

    def closure() -> Tensor:
        nonlocal first, calls
        calls += 1
        optimizer.optimizer.zero_grad()
        loss = F.mse_loss(model(points[mine]).squeeze(1), labels[mine].float())
        if calls % 2:
            loss.backward()
        else:
            accelerator.backward(loss)
        # One decision for all: the line search looks at the loss.
        total = accelerator.reduce(loss, "mean")
        first = total if first is None else first
        return total

    for _ in range(3):
        last = optimizer.step(closure)
    assert equal_everywhere(accelerator, model.parameters())
    assert calls > 3 and closure() < first and last is not None


@checks.on(1, 2)
def two_optimizers_step_after_one_backward() -> None:
    accelerator = Accelerator()
    model = network()
    optimizers = [torch.optim.SGD(part.parameters(), lr=0.1) for part in (model[0], model[2])]
    model, *optimizers = accelerator.prepare(model, *optimizers)
    alone = copy.deepcopy(model)
    for step in range(3):
        x = torch.full((2, 4), 1.0 + step + accelerator.process_index)
        for optimizer in optimizers:
            optimizer.zero_grad()
        accelerator.backward(model(x).square().sum())
        for optimizer in optimizers:
            optimizer.step()
        alone.zero_grad()
        for rank in range(accelerator.num_processes):
            y = torch.full((2, 4), 1.0 + step + rank)
            (alone(y).square().sum() / accelerator.num_processes).backward()
        with torch.no_grad():
            for p in alone.parameters():
                p -= 0.1 * p.grad
    for got, right in zip(model.parameters(), alone.parameters(), strict=True):
        assert torch.allclose(got, right, atol=1e-5)


@checks.on(2)
def generator_and_discriminator_train_in_turns() -> None:
    accelerator = Accelerator()
    makers = nn.Linear(2, 4), nn.Linear(4, 1)
    generator, critic = accelerator.prepare(*makers)
    ways = [torch.optim.SGD(m.parameters(), lr=0.1) for m in makers]
    step_generator, step_critic = accelerator.prepare(*ways)
    for step in range(3):
        noise = torch.randn(3, 2, generator=torch.Generator().manual_seed(10 * step))
        noise += accelerator.process_index
        step_critic.zero_grad()
        fake = generator(noise)
        accelerator.backward(critic(fake.detach()).mean() - critic(torch.ones(3, 4)).mean())
        accelerator.clip_grad_norm_(critic.parameters(), 1.0)
        step_critic.step()
        step_generator.zero_grad()
        accelerator.backward(-critic(fake).mean())
        step_generator.step()
    assert equal_everywhere(accelerator, [*generator.parameters(), *critic.parameters()])


# ---- schedulers, optimizer state ------------------------------------------------------


def _rate_after(accelerator: Accelerator, n: int, **kwargs: Any) -> tuple[float, Any]:
    model = nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
    for _ in range(n):
        with accelerator.accumulate(model):
            accelerator.backward(model(torch.ones(1, 4)).sum())
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    return scheduler.get_last_lr()[0], scheduler


@checks.on(1, 2, 3)
def a_schedule_counts_the_steps_of_all_processes() -> None:
    size = Accelerator().num_processes
    assert _rate_after(Accelerator(), 2)[0] == 0.5 ** (2 * size)
    assert _rate_after(Accelerator(split_batches=True), 2)[0] == 0.5**2
    assert _rate_after(Accelerator(step_scheduler_with_optimizer=False), 2)[0] == 0.5**2
    accumulating = Accelerator(gradient_accumulation_steps=2)
    rate, scheduler = _rate_after(accumulating, 5)
    assert rate == 0.5 ** (2 * size)
    # The initial step, two real ones, and three micro-steps.
    assert scheduler.scheduler._step_count == 1 + 2 * size + 3
    plugin = GradientAccumulationPlugin(num_steps=2, adjust_scheduler=False)
    _, scheduler = _rate_after(Accelerator(gradient_accumulation_plugin=plugin), 5)
    assert scheduler.scheduler._step_count == 1 + 2 * size


@checks.on(1, 2)
def a_schedule_may_end_in_the_middle_and_a_plateau_counts_once() -> None:
    accelerator = Accelerator()
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    cycle = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1.0, total_steps=3)
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=2)
    model, optimizer, cycle, plateau = accelerator.prepare(model, optimizer, cycle, plateau)
    for _ in range(4):
        optimizer.step()
        cycle.step()
        plateau.step(1.0)
    assert cycle.scheduler.last_epoch == 3
    assert plateau.scheduler.num_bad_epochs == 0 and plateau.scheduler.last_epoch == 4


@checks.on(1)
def the_state_of_an_optimizer_follows_its_parameters() -> None:
    model = nn.Linear(3, 3, device="meta")
    optimizer = torch.optim.Adam(model.parameters())
    state = {
        "step": torch.tensor(1.0),
        "exp_avg": torch.ones(3, 3),
        "nested": {"more": [torch.ones(1)]},
    }
    optimizer.state[model.weight] = dict(state)
    accelerator = Accelerator()
    prepared = accelerator.prepare_optimizer(optimizer)
    here = optimizer.state[model.weight]
    assert here["exp_avg"].device.type == here["nested"]["more"][0].device.type == "meta"
    assert here["step"].device.type == "cpu"

    # As one that does not move what it loads.
    optimizer.load_state_dict = lambda s: optimizer.state.update({model.weight: dict(state)})
    prepared.load_state_dict({})
    assert optimizer.state[model.weight]["exp_avg"].device.type == "meta"


@checks.on(1, 2)
def the_prepared_optimizer_looks_like_the_one_inside() -> None:
    accelerator = Accelerator()
    model = network()
    inner = torch.optim.AdamW(model.parameters(), lr=0.1)
    _, optimizer = accelerator.prepare(model, inner)
    assert optimizer.param_groups is inner.param_groups and optimizer.defaults is inner.defaults
    optimizer.param_groups[0]["lr"] = 0.3
    assert inner.param_groups[0]["lr"] == 0.3
    # A scheduler that is made of the prepared one.
    scheduler = accelerator.prepare(torch.optim.lr_scheduler.StepLR(optimizer, 1))
    accelerator.backward(model(torch.ones(1, 4)).sum())
    seen = []
    optimizer.register_step_post_hook(lambda *_: seen.append(1))
    optimizer.step()
    scheduler.step()
    assert seen == [1] and len(inner.state) == 4
    plain = pickle.loads(pickle.dumps(optimizer))
    assert type(plain) is torch.optim.AdamW
    assert plain.state_dict()["param_groups"] == inner.state_dict()["param_groups"]
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))]})
    assert len(inner.param_groups) == 2
    assert optimizer.state is inner.state and "AdamW" in repr(optimizer)


# ---- evaluation ------------------------------------------------------------------------


class Numbers(IterableDataset[int]):
    def __init__(self, n: int) -> None:
        self.n = n

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.n))


@checks.on(1, 2, 3)
def gather_for_metrics_gives_each_sample_once() -> None:
    ways: list[dict[str, Any]] = [
        {},
        {"split_batches": True},
        {"dispatch_batches": True},
        {"even_batches": False},
    ]
    for n in (1, 7, 12, 25):
        for way in ways:
            for data in (list(range(n)), Numbers(n)):
                accelerator = Accelerator(**way)
                loader = accelerator.prepare(DataLoader(data, batch_size=6))
                seen, texts = [], []
                for batch in loader:
                    got = accelerator.gather_for_metrics({"x": batch, "more": (batch[:, None],)})
                    assert torch.equal(got["x"], got["more"][0][:, 0])
                    seen += got["x"].tolist()
                    texts += accelerator.gather_for_metrics([str(int(i)) for i in batch])
                # A rank whose loop is over has not seen the last ones.
                if accelerator.even_batches or accelerator.is_main_process:
                    assert seen == list(range(n)), (n, way, type(data))
                    assert texts == [str(i) for i in range(n)]
                # Outside of the loop nothing is cut.
                assert len(accelerator.gather_for_metrics(torch.ones(6))) == (
                    6 * accelerator.num_processes
                )


@checks.on(2)
def what_is_not_as_long_as_the_batch_is_gathered_whole() -> None:
    accelerator = Accelerator()
    loader = accelerator.prepare(DataLoader(list(range(5)), batch_size=4))
    for batch in loader:
        loss = accelerator.gather_for_metrics(torch.tensor(1.0))
        assert loss.shape == (2,)
        objects = accelerator.gather_for_metrics({"ids": batch, "names": ["x"] * 4, "n": 3}, True)
        real = [len(o["ids"]) for o in objects]
        assert real == [len(o["names"]) for o in objects] == [4, 1]
        assert all(o["n"] == 3 for o in objects)


@checks.on(2, 3)
def a_single_sample_that_fills_up_the_end_is_left_out() -> None:
    accelerator = Accelerator()
    for n in (1, 4, 5):
        numbers = [torch.tensor(float(i)) for i in range(n)]
        loader = accelerator.prepare(DataLoader(numbers, batch_size=None))
        seen = [accelerator.gather_for_metrics(sample) for sample in loader]
        assert torch.cat(seen).tolist() == list(range(n))


@checks.on(2)
def a_pair_of_columns_is_not_a_batch_of_two() -> None:
    accelerator = Accelerator()
    loader = accelerator.prepare(DataLoader(list(range(3)), batch_size=2))
    names, scores = [], []
    for batch in loader:
        columns = ([f"n{int(i)}" for i in batch], batch)
        for pair in accelerator.gather_for_metrics([columns]):
            names += pair[0]
            scores += pair[1].tolist()
    assert names == ["n0", "n1", "n2"]
    assert scores == [0, 1, 2]


# ---- uneven inputs ---------------------------------------------------------------------


@checks.on(2, 3)
def after_uneven_loops_all_ranks_have_the_same_model() -> None:
    for own_loader in (False, True):
        accelerator = Accelerator(even_batches=False)
        model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))
        optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
        model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
        n_batches = 1 + accelerator.num_processes
        if own_loader:  # each rank has data of its own, rank 0 the least
            n = 2 + accelerator.process_index
            data = [t.tensors for t in (dataset(4, seed) for seed in range(n))]
        else:
            data = accelerator.prepare(DataLoader(dataset(4 * n_batches), batch_size=4))
        steps = 0
        for _ in range(2):
            with accelerator.join_uneven_inputs([model]):
                for source, targets in data:
                    optimizer.zero_grad()
                    accelerator.backward(F.cross_entropy(model(source), targets))
                    optimizer.step()
                    scheduler.step()
                    steps += 1
        made = accelerator.gather(torch.tensor([steps])).tolist()
        assert max(made) > min(made), "nothing was uneven"
        assert equal_everywhere(accelerator, model.parameters())
        assert equal_everywhere(accelerator, model.buffers())
        moments = [s["exp_avg"] for s in optimizer.state.values()]
        assert equal_everywhere(accelerator, iter(moments))
        rates = torch.tensor(scheduler.get_last_lr())
        assert equal_everywhere(accelerator, iter([rates]))


@checks.on(2)
def even_batches_can_be_changed_for_a_block() -> None:
    accelerator = Accelerator()
    loader = accelerator.prepare(DataLoader(list(range(5)), batch_size=2))
    even = [b.tolist() for b in loader]
    with accelerator.join_uneven_inputs([], even_batches=False):
        uneven = [b.tolist() for b in loader]
    assert [b.tolist() for b in loader] == even
    assert [len(b) for b in even] == [2, 2]
    assert [len(b) for b in uneven] == ([2, 1] if accelerator.process_index == 0 else [2])


# ---- other calls -----------------------------------------------------------------------


@checks.on(1, 2, 3)
def all_ranks_see_a_trigger_once() -> None:
    accelerator = Accelerator()
    assert not accelerator.check_trigger()
    if accelerator.is_last_process:
        accelerator.set_trigger()
    assert accelerator.check_trigger()
    assert not accelerator.check_trigger()
    assert accelerator.should_stop() is False


@checks.on(1, 2, 3)
def collectives_and_places() -> None:
    accelerator = Accelerator()
    n, rank = accelerator.num_processes, accelerator.process_index
    assert accelerator.gather({"a": [torch.tensor([rank])]})["a"][0].tolist() == list(range(n))
    assert accelerator.gather(torch.tensor(rank)).tolist() == list(range(n))
    assert accelerator.gather_object([rank]) == list(range(n))
    assert accelerator.reduce(torch.tensor([1.0])).item() == n
    assert accelerator.reduce(torch.tensor([1.0 + rank]), "mean", scale=2.0).item() == n + 1
    assert accelerator.broadcast(torch.tensor([rank]), from_process=n - 1).item() == n - 1
    padded = accelerator.pad_across_processes(torch.ones(rank + 1), pad_index=-1)
    assert padded.tolist() == [1.0] * (rank + 1) + [-1.0] * (n - rank - 1)
    accelerator.wait_for_everyone()
    assert accelerator.is_main_process == (rank == 0) and accelerator.is_main_process() == (
        rank == 0
    )
    assert accelerator.is_last_process() == (rank == n - 1)
    assert accelerator.local_process_index == rank
    assert accelerator.is_local_main_process() == (rank == 0)
    assert accelerator.use_distributed == (n > 1) and accelerator.device.type == "cpu"
    with accelerator.main_process_first(), accelerator.local_main_process_first():
        pass
    with accelerator.split_between_processes(list(range(2 * n))) as part:
        assert part == [2 * rank, 2 * rank + 1]
    assert accelerator.on_main_process(lambda: 1)() == (1 if rank == 0 else None)
    assert accelerator.on_last_process(lambda: 1)() == (1 if rank == n - 1 else None)
    assert accelerator.on_process(lambda: 1, process_index=0)() == (1 if rank == 0 else None)
    assert accelerator.on_local_main_process(lambda: 1)() == (1 if rank == 0 else None)
    assert accelerator.on_local_process(lambda: 1, 0)() == (1 if rank == 0 else None)
    assert torch.distributed.is_initialized() == (n > 1)
    assert "Num processes" in repr(accelerator)


@checks.on(1, 2)
def torch_distributed_works_beside_it() -> None:
    accelerator = Accelerator()
    if accelerator.use_distributed:
        value = torch.ones(1)
        torch.distributed.all_reduce(value)
        assert value.item() == accelerator.num_processes


@checks.on(1, 2)
def memory_is_freed_and_training_begins_anew() -> None:
    accelerator = Accelerator()
    for _ in range(2):
        model = network()
        model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        accelerator.backward(model(torch.ones(1, 4)).sum())
        optimizer.step()
        model, optimizer = accelerator.free_memory(model, optimizer)
        assert model is None and optimizer is None
    assert accelerator.clear() == []
    accelerator.end_training()


# ---- files ------------------------------------------------------------------------------


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, 8)
        self.middle = nn.Linear(8, 8)
        self.head = nn.Linear(8, 50, bias=False)
        self.head.weight = self.embedding.weight


def _shared_folder(accelerator: Accelerator) -> Path:
    folder = tempfile.mkdtemp(prefix="accel-") if accelerator.is_main_process else None
    return Path(accelerator.state.world.broadcast_object(folder))


@checks.on(1, 2)
def one_rank_saves_and_files_are_whole() -> None:
    accelerator = Accelerator()
    folder = _shared_folder(accelerator)
    accelerator.save({"rank": accelerator.process_index}, folder / "state.pt")
    accelerator.wait_for_everyone()
    assert torch.load(folder / "state.pt")["rank"] == 0
    accelerator.save({"a": torch.ones(2)}, folder / "a.safetensors", safe_serialization=True)
    accelerator.wait_for_everyone()
    # What fails leaves neither a new file nor a part of one, and an old one as it is.
    if accelerator.is_main_process:
        raised(Exception, accelerator.save, lambda: None, folder / "state.pt")
        assert torch.load(folder / "state.pt")["rank"] == 0
        assert "open file" in raised(
            TypeError, accelerator.save, {}, io.BytesIO(), safe_serialization=True
        )
    assert sorted(f.name for f in folder.iterdir()) == ["a.safetensors", "state.pt"]
    buffer = io.BytesIO()
    accelerator.save([1], buffer)
    assert bool(buffer.getvalue()) == bool(accelerator.is_main_process)


@checks.on(1, 2)
def a_model_is_saved_in_one_file_or_several() -> None:
    import safetensors.torch

    accelerator = Accelerator()
    folder = _shared_folder(accelerator)
    model = accelerator.prepare(Tied())
    with torch.no_grad():
        model.middle.weight.copy_(torch.arange(64.0).view(8, 8).t())
    accelerator.save_model(model, folder)
    accelerator.save_model(model, folder / "parts", max_shard_size="1KB")
    accelerator.save_model(model, folder / "torch", safe_serialization=False)
    accelerator.wait_for_everyone()
    other = Tied()
    safetensors.torch.load_model(other, folder / "model.safetensors")
    for a, b in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b)
    parts = sorted(f.name for f in (folder / "parts").iterdir())
    assert parts == [
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
        "model.safetensors.index.json",
    ]
    whole = torch.load(folder / "torch" / "pytorch_model.bin")
    assert list(whole) == list(model.state_dict())
    assert list(accelerator.get_state_dict(model)) == list(model.state_dict())
    (folder / "file").touch()
    text = raised(NotADirectoryError, accelerator.save_model, model, folder / "file")
    assert "give a folder" in text


# ---- what CUDA uses, on the CPU -----------------------------------------------------------


@checks.on(2)
def a_wrapped_model_trains_accumulates_and_unwraps() -> None:
    needs_ddp = models._needs_ddp
    models._needs_ddp = lambda model: True
    try:
        for options in (
            DistributedDataParallelKwargs(find_unused_parameters=True, broadcast_buffers=False),
            DistributedDataParallelKwargs(comm_hook=DDPCommunicationHookType.FP16),
        ):
            _train_wrapped(options)
    finally:
        models._needs_ddp = needs_ddp


def _train_wrapped(options: DistributedDataParallelKwargs) -> None:
    original_in_ddp = models.DistributedDataParallel

    class OnCpu(original_in_ddp):  # type: ignore[valid-type, misc]
        def __init__(self, module: nn.Module, device_ids: Any = None, **kwargs: Any) -> None:
            super().__init__(module, **kwargs)

    models.DistributedDataParallel = OnCpu  # type: ignore[misc]
    try:
        accelerator = Accelerator(gradient_accumulation_steps=2, kwargs_handlers=[options])
        model = network()
        own = model
        model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    finally:
        models.DistributedDataParallel = original_in_ddp  # type: ignore[misc]
    assert isinstance(model, DistributedDataParallel) and accelerator.unwrap_model(model) is own
    compiled = torch.compile(model, backend="aot_eager")
    assert accelerator.unwrap_model(compiled)._orig_mod is own
    assert accelerator.unwrap_model(compiled, keep_torch_compile=False) is own
    x = torch.full((2, 4), 1.0 + accelerator.process_index)
    for micro in range(4):
        with accelerator.accumulate(model):
            accelerator.backward(model(x).square().sum())
            if micro == 0:
                assert not equal_everywhere(accelerator, iter(_grads(own)))
            optimizer.step()
            optimizer.zero_grad()
    assert equal_everywhere(accelerator, own.parameters())
    assert list(accelerator.get_state_dict(model)) == list(own.state_dict())
    with accelerator.no_sync(model):
        accelerator.backward(model(x).sum())
    assert not equal_everywhere(accelerator, iter(_grads(own)))

    if options.comm_hook is DDPCommunicationHookType.NO:
        return  # Join does not go with find_unused_parameters
    accelerator.gradient_accumulation_steps = 1
    data = accelerator.prepare(DataLoader(dataset(12), batch_size=4))
    with accelerator.join_uneven_inputs([model], even_batches=False):
        for source, targets in data:
            optimizer.zero_grad()
            accelerator.backward(F.cross_entropy(model(source), targets))
            optimizer.step()
    assert equal_everywhere(accelerator, own.parameters())


# ---- in this process ------------------------------------------------------------------------


def test_a_prepared_step_costs_microseconds() -> None:
    """Bounds a world of one loosely; the benchmarks measure."""
    import timeit

    accelerator = Accelerator()
    parameter = nn.Parameter(torch.zeros(1))
    inner = torch.optim.SGD([parameter], lr=0.1)
    optimizer = accelerator.prepare(inner)
    assert isinstance(optimizer, PreparedOptimizer)
    loss = (parameter * 0).sum()

    def best(function: Any) -> float:
        return min(timeit.repeat(function, number=200, repeat=7)) / 200

    added = best(lambda: accelerator.backward(loss, retain_graph=True)) - best(
        lambda: loss.backward(retain_graph=True)
    )
    added += best(optimizer.step) - best(inner.step)
    added += best(optimizer.zero_grad) - best(inner.zero_grad)
    assert added < 70e-6


def test_public_names_are_there() -> None:
    assert accel.Accelerator is Accelerator


test_together = checks.test()
