"""Accelerator: what a training loop needs to run on any number of processes."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import IO, Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

from . import data, operations, saving
from . import model as models
from .absent import of_accelerator
from .gradients import Gradients
from .handlers import (
    AutocastKwargs,
    DataLoaderConfiguration,
    DistributedDataParallelKwargs,
    GradientAccumulationPlugin,
    GradScalerKwargs,
    Handlers,
    InitProcessGroupKwargs,
    accumulation,
    asked_precision,
    at_least_one,
    loading,
    refuse,
)
from .optimizer import PreparedOptimizer
from .precision import LossScaler, Precision, loss_scaler
from .reducer import Reducer
from .scheduler import PreparedScheduler
from .state import AcceleratorState, DistributedType, Flag
from .uneven import Prepared, Uneven


class Accelerator:
    """The processes of the job, and this one's place among them.

    Args:
        device_placement: move models, optimizer state and batches to `device`.
        split_batches: a loader's batch is shared out over the ranks, instead of one each.
        mixed_precision: "no", "fp16" or "bf16"; by default what the launcher says.
        gradient_accumulation_steps: micro-steps of accumulate() that make a step.
        cpu: compute on the CPU whatever else there is.
        dataloader_config: a DataLoaderConfiguration, instead of split_batches,
            dispatch_batches and even_batches.
        rng_types: which random states rank 0 gives the others when a loader starts:
            "torch", "cuda", "numpy", "python", "generator".
        gradient_accumulation_plugin: instead of gradient_accumulation_steps.
        step_scheduler_with_optimizer: schedulers step as often as the optimizer does.
        kwargs_handlers: DistributedDataParallelKwargs, GradScalerKwargs, AutocastKwargs,
            InitProcessGroupKwargs.
        dispatch_batches: rank 0 reads the data, and sends the others their part.
        even_batches: all ranks get equally many batches of equal size; samples from the
            beginning fill up the last ones.
        fp16: mixed_precision="fp16", as older scripts ask for it.
        project_dir: kept as an attribute.

    The first one in a process joins the world and initialises torch.distributed; raises
    what PartialState raises, and ValueError or TypeError for arguments that do not work.
    """

    def __init__(
        self,
        device_placement: bool = True,
        split_batches: bool | None = None,
        mixed_precision: str | None = None,
        gradient_accumulation_steps: int | None = None,
        cpu: bool = False,
        *,
        dataloader_config: DataLoaderConfiguration | None = None,
        rng_types: list[str] | None = None,
        gradient_accumulation_plugin: GradientAccumulationPlugin | None = None,
        step_scheduler_with_optimizer: bool = True,
        kwargs_handlers: Iterable[Any] | None = None,
        dispatch_batches: bool | None = None,
        even_batches: bool | None = None,
        fp16: bool | None = None,
        project_dir: str | os.PathLike[str] | None = None,
        **unsupported: Any,
    ) -> None:
        refuse(unsupported)
        self._handlers = Handlers(kwargs_handlers)
        group = self._handlers.get(InitProcessGroupKwargs)
        self.state = AcceleratorState(
            asked_precision(mixed_precision, fp16),
            cpu,
            backend=group.backend,
            init_method=group.init_method,
            timeout=group.timeout,
        )
        self.device_placement = device_placement
        self.step_scheduler_with_optimizer = step_scheduler_with_optimizer
        self.project_dir = project_dir
        self.rng_types = rng_types
        self.dataloader_config = loading(
            dataloader_config, split_batches, dispatch_batches, even_batches
        )
        self._world = self.state.world
        self._precision = Precision(
            self.state.mixed_precision, self.device, self._handlers.get(AutocastKwargs)
        )
        self._gradients = Gradients(
            self._world,
            reducer=Reducer(self._world) if self._world.size > 1 else None,
            scaler=loss_scaler(self._precision, self.device, self._handlers.get(GradScalerKwargs)),
            plugin=accumulation(gradient_accumulation_plugin, gradient_accumulation_steps),
        )
        self._prepared = Prepared()
        self._uneven = Uneven(self._world, self._gradients, self._prepared)
        self._trigger = False

    def __repr__(self) -> str:
        return repr(self.state)

    def __getattr__(self, name: str) -> Any:
        raise of_accelerator(name)

    # ---- who and where -------------------------------------------------------

    @property
    def device(self) -> torch.device:
        return self.state.device

    @property
    def distributed_type(self) -> DistributedType:
        return self.state.distributed_type

    @property
    def num_processes(self) -> int:
        return self._world.size

    @property
    def process_index(self) -> int:
        return self._world.rank

    @property
    def local_process_index(self) -> int:
        return self._world.local_rank

    @property
    def is_main_process(self) -> Flag:
        """Is this rank 0? Can be called as well."""
        return self.state.is_main_process

    @property
    def is_local_main_process(self) -> Flag:
        """Is this the first rank of its machine? Can be called as well."""
        return self.state.is_local_main_process

    @property
    def is_last_process(self) -> Flag:
        """Is this the rank with the highest number? Can be called as well."""
        return self.state.is_last_process

    @property
    def use_distributed(self) -> bool:
        """Are there other ranks?"""
        return self._world.size > 1

    @property
    def mixed_precision(self) -> str:
        return self.state.mixed_precision

    @property
    def split_batches(self) -> bool:
        return self.dataloader_config.split_batches

    @property
    def dispatch_batches(self) -> bool | None:
        return self.dataloader_config.dispatch_batches

    @property
    def even_batches(self) -> bool:
        return self.dataloader_config.even_batches

    @even_batches.setter
    def even_batches(self, value: bool) -> None:
        self.dataloader_config.even_batches = value

    # ---- prepare -------------------------------------------------------------

    def prepare(self, *objects: Any, device_placement: list[bool] | None = None) -> Any:
        """Models, optimizers, schedulers and DataLoaders in any order, ready for the job:
        returns them in that order, one alone as itself. Anything else is returned as it is.

        A model without parameters, or with none that is trained, is prepared as others
        are. `device_placement` says for each object whether to move it. Collective.

        Raises ValueError for an optimizer that steps no parameter of a prepared model,
        TypeError for an iterator over a DataLoader, and what prepare_model() and
        prepare_data_loader() raise.
        """
        places = device_placement or [self.device_placement] * len(objects)
        if len(places) != len(objects):
            raise ValueError(
                f"device_placement has {len(places)} values for {len(objects)} objects"
            )
        if any(map(data.is_iterator, objects)):
            raise TypeError(
                "prepare() got an iterator over a DataLoader, which has begun to read for this "
                "rank alone: prepare the DataLoader itself"
            )
        ready = list(objects)
        for kind, prepare_one in (
            (nn.Module, self.prepare_model),
            (Optimizer, self.prepare_optimizer),
            (DataLoader, self.prepare_data_loader),
            ((LRScheduler, PreparedScheduler), self._prepare_scheduler),
        ):
            for i, obj in enumerate(objects):
                if isinstance(obj, kind):
                    ready[i] = prepare_one(obj, places[i])
        if any(isinstance(o, nn.Module) for o in objects):
            self._check_optimizers([o for o in ready if isinstance(o, PreparedOptimizer)])
        return ready[0] if len(ready) == 1 else tuple(ready)

    def prepare_model(
        self,
        model: nn.Module,
        device_placement: bool | None = None,
        evaluation_mode: bool = False,
    ) -> nn.Module:
        """The model on `device`, with the parameters and buffers of rank 0. On CPUs it is
        the same object; on CUDA devices, in a world of more than one and unless
        `evaluation_mode`, torch's DistributedDataParallel around it. Collective.

        Before each training forward the buffers are those of rank 0: they are sent when
        gradients are averaged.

        Raises ValueError for a model whose parameters have no memory yet, or hooks that use
        gradients during backward; MismatchError on all ranks when their models differ.
        """
        if any(m is model for m in self._prepared.models):
            return model
        before = list(model.parameters())
        options = self._handlers.get(DistributedDataParallelKwargs)
        prepared = model
        if not models.is_prepared(model):
            prepared = models.prepare_model(
                model,
                world=self._world,
                device=self.device,
                precision=self._precision,
                device_placement=self._places(device_placement),
                ddp=None if evaluation_mode else options,
            )
        self._follow_parameters(before, list(prepared.parameters()))
        if models.averages_itself(prepared):
            self._gradients.wrapped.append(prepared)
        elif self._gradients.reducer is not None and not evaluation_mode:
            self._gradients.reducer.add(prepared, options.broadcast_buffers)
        self._prepared.models.append(prepared)
        return prepared

    def _places(self, device_placement: bool | None) -> bool:
        return self.device_placement if device_placement is None else device_placement

    def _follow_parameters(self, before: list[nn.Parameter], after: list[nn.Parameter]) -> None:
        """Have optimizers step what has become of a model's parameters."""
        new = {id(b): a for b, a in zip(before, after, strict=True) if a is not b}
        for optimizer in self._prepared.optimizers:
            if new:
                optimizer.replace_parameters(new)
            optimizer.place_again()

    def prepare_optimizer(
        self, optimizer: Optimizer, device_placement: bool | None = None
    ) -> PreparedOptimizer:
        """The optimizer, with its state where its parameters are."""
        if isinstance(optimizer, PreparedOptimizer):
            return optimizer
        for known in self._prepared.optimizers:
            if known.optimizer is optimizer:
                return known
        prepared = PreparedOptimizer(
            optimizer, self._gradients, place=self._places(device_placement)
        )
        self._prepared.optimizers.append(prepared)
        return prepared

    def prepare_data_loader(
        self, data_loader: DataLoader[Any], device_placement: bool | None = None
    ) -> data.PreparedLoader:
        """The loader, of which each rank reads its part; see data.prepare_data_loader()."""
        config = self.dataloader_config
        prepared = data.prepare_data_loader(
            data_loader,
            world=self._uneven.as_world(),
            device=self.device if self._places(device_placement) else None,
            split_batches=config.split_batches,
            rng_types=self.rng_types,
            dispatch_batches=config.dispatch_batches,
            even_batches=config.even_batches,
            non_blocking=config.non_blocking,
        )
        if not any(known is prepared for known in self._prepared.loaders):
            self._prepared.loaders.append(prepared)
        return prepared

    def prepare_scheduler(self, scheduler: LRScheduler | PreparedScheduler) -> PreparedScheduler:
        """The scheduler, which steps when its optimizer does."""
        if isinstance(scheduler, PreparedScheduler):
            return scheduler
        of = getattr(scheduler, "optimizer", None)
        own = [o for o in self._prepared.optimizers if of is o or of is o.optimizer]
        prepared = PreparedScheduler(
            scheduler,
            own or self._prepared.optimizers,
            self._gradients,
            per_process=not self.split_batches,
            with_optimizer=self.step_scheduler_with_optimizer,
        )
        self._prepared.schedulers.append(prepared)
        return prepared

    def _prepare_scheduler(self, scheduler: LRScheduler, _place: bool) -> PreparedScheduler:
        return self.prepare_scheduler(scheduler)

    def _check_optimizers(self, optimizers: list[PreparedOptimizer]) -> None:
        known = {id(p) for model in self._prepared.models for p in model.parameters()}
        for optimizer in optimizers:
            stepped = [p for group in optimizer.param_groups for p in group["params"]]
            if not any(id(p) in known for p in stepped):
                raise ValueError(
                    f"this {type(optimizer.optimizer).__name__} steps {len(stepped)} parameters, "
                    "none of which a prepared model has: make it from the parameters() of the "
                    "model that is prepared, after the model has got its last layer"
                )

    # ---- gradients -----------------------------------------------------------

    def backward(self, loss: Tensor, **kwargs: Any) -> None:
        """loss.backward(), with the loss divided by gradient_accumulation_steps and, for
        fp16, scaled; then the gradients of prepared models are averaged over all ranks.
        Collective, except where accumulate() or no_sync() say that it is not the time.

        `kwargs` go to Tensor.backward(). A rank without a gradient counts as zero. What
        torch.autograd.grad() returns is not averaged: reduce() it.

        Raises TypeError for what is not a tensor, ValueError for a loss that is no single
        number, RuntimeError for one that no parameter has a part in.
        """
        if not isinstance(loss, Tensor):
            raise TypeError(f"backward() takes a loss, a tensor, and got a {type(loss).__name__}")
        if not loss.requires_grad:
            raise RuntimeError(
                "backward() got a loss that depends on no parameter which is trained: it was "
                "computed under torch.no_grad(), from detached tensors, or by a model whose "
                "parameters are all frozen"
            )
        if loss.numel() != 1 and kwargs.get("gradient") is None:
            raise ValueError(
                f"backward() got a loss of shape {tuple(loss.shape)}: make it one number, e.g. "
                "with .mean(), or pass gradient="
            )
        gradients = self._gradients
        steps = gradients.plugin.num_steps
        if steps != 1:
            loss = loss / steps
        if gradients.scaler is not None:
            loss = gradients.scaler.scale(loss)
        gradients.run_backward(loss, kwargs)

    @contextmanager
    def accumulate(self, *prepared: nn.Module) -> Iterator[None]:
        """A micro-step: gradients are averaged, and optimizers and schedulers step, only in
        each `gradient_accumulation_steps`-th, and with the last batch of a loader."""
        gradients = self._gradients
        batch = data.current_batch()
        # Asking an iterable data set for its end reads ahead.
        counts = gradients.plugin.num_steps > 1
        gradients.begin_micro_step(counts and batch is not None and batch.last)
        if gradients.sync or gradients.plugin.sync_each_batch or not gradients.wrapped:
            yield
            return
        with ExitStack() as stack:
            for model in prepared:
                stack.enter_context(self.no_sync(model))
            yield

    @contextmanager
    def no_sync(self, model: nn.Module) -> Iterator[None]:
        """Leave the model's gradients as this rank has them. They are averaged with the next
        backward outside, or at the latest by the optimizer's step."""
        inner = _ddp_of(model)
        if inner is not None:
            with inner.no_sync():
                yield
            return
        reducer = self._gradients.reducer
        if reducer is None:
            yield
            return
        reducer.hold(model, +1)
        try:
            yield
        finally:
            reducer.hold(model, -1)

    @property
    def sync_gradients(self) -> bool:
        """Whether this micro-step ends a step; True outside of accumulate()."""
        return self._gradients.sync

    @property
    def gradient_accumulation_steps(self) -> int:
        return self._gradients.plugin.num_steps

    @gradient_accumulation_steps.setter
    def gradient_accumulation_steps(self, steps: int) -> None:
        self._gradients.plugin.num_steps = at_least_one(steps)

    def unscale_gradients(self, optimizer: Any = None) -> None:
        """Divide gradients by the loss scale of fp16, for one or some optimizers or for all;
        the step does so anyway. Averages before what a bare loss.backward() left."""
        gradients = self._gradients
        if not gradients.sync:
            return
        gradients.finish()
        if gradients.scaler is None:
            return
        chosen = self._prepared.optimizers if optimizer is None else optimizer
        for one in chosen if isinstance(chosen, (list, tuple)) else [chosen]:
            gradients.scaler.unscale_(getattr(one, "optimizer", one))

    def clip_grad_norm_(
        self, parameters: Tensor | Iterable[Tensor], max_norm: float, norm_type: float = 2
    ) -> Tensor:
        """Scale the averaged, unscaled gradients down so that their norm is at most
        `max_norm`. Returns the norm before. In a micro-step that does not end a step nothing
        is clipped."""
        parameters = self._before_clipping(parameters)
        limit = max_norm if self._gradients.sync else float("inf")
        return nn.utils.clip_grad_norm_(parameters, limit, norm_type=norm_type)

    def clip_grad_value_(self, parameters: Tensor | Iterable[Tensor], clip_value: float) -> None:
        """Limit each element of the averaged, unscaled gradients to -clip_value to
        clip_value; nothing in a micro-step that does not end a step."""
        parameters = self._before_clipping(parameters)
        if self._gradients.sync:
            nn.utils.clip_grad_value_(parameters, clip_value)

    def _before_clipping(self, parameters: Tensor | Iterable[Tensor]) -> list[Tensor]:
        parameters = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        if self._gradients.sync:
            self._gradients.finish()
            self._gradients.unscale((o.optimizer for o in self._prepared.optimizers), parameters)
        return parameters

    @property
    def optimizer_step_was_skipped(self) -> bool:
        """Whether the last step of some optimizer was left out because of an overflow."""
        return any(o.step_was_skipped for o in self._prepared.optimizers)

    @property
    def scaler(self) -> LossScaler | None:
        """The loss scale of fp16."""
        return self._gradients.scaler

    def autocast(
        self, autocast_handler: AutocastKwargs | None = None
    ) -> AbstractContextManager[Any]:
        """A context that computes in mixed precision, for what is outside of prepared
        models, e.g. the loss."""
        return self._precision.autocast(autocast_handler)

    # ---- uneven inputs -------------------------------------------------------

    @contextmanager
    def join_uneven_inputs(
        self, joinables: Iterable[Any] = (), even_batches: bool | None = None
    ) -> Iterator[None]:
        """A block in which ranks may make different numbers of steps: those that are done
        wait at its end and count as zero, and then get the model, optimizer and scheduler
        of a rank that made all steps. `even_batches` holds for prepared loaders meanwhile.
        Collective.

        `joinables` are the models of the block: on CUDA devices they have to be named, and
        no other collective is in the block.
        """
        wrapped = [m for m in map(_ddp_of, joinables) if m is not None]
        with ExitStack() as stack:
            if even_batches is not None:
                for loader in self._prepared.loaders:
                    stack.enter_context(loader.with_even_batches(even_batches))
            if wrapped:
                with self._uneven.left_to_torch(wrapped):
                    yield
            else:
                yield
                self._world.join()
            self._uneven.catch_up()

    # ---- collectives ---------------------------------------------------------

    def gather(self, tensor: Any) -> Any:
        """The tensors of all ranks behind each other along dimension 0, in rank order, in
        each place of a nested structure: (n, ...) becomes (sum of n, ...). A tensor without
        dimensions counts as one row. Collective; errors as operations.gather()."""
        return operations.gather(tensor, world=self._world)

    def gather_object(self, obj: Any) -> list[Any]:
        """The objects of all ranks as one list, lists put behind each other. Collective."""
        return operations.gather_object(obj, world=self._world)

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """As gather(), without the samples that only fill up the last batch of the loader
        whose loop is running: over a whole evaluation each sample comes once, in order.

        Tensors, and in gather_object()'s way lists, that are as long as the batch are cut to
        the samples that are real. Anything but tensors goes through gather_object(), as with
        `use_gather_object`. Collective.
        """
        tensors_only = not use_gather_object and all(
            leaf is None or isinstance(leaf, Tensor) for _, leaf in operations.leaves(input_data)
        )
        batch = data.current_batch()
        if batch is not None and batch.real != batch.size:
            cut = _cut_tensors if tensors_only else _cut_objects
            input_data = cut(input_data, batch.size, batch.real)
        return self.gather(input_data) if tensors_only else self.gather_object(input_data)

    def reduce(self, tensor: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
        """Each tensor combined elementwise over all ranks, as a new one, times `scale`:
        "sum", "mean", "min", "max" or "none". Collective."""
        return operations.reduce(tensor, reduction, scale, world=self._world)

    def broadcast(self, tensor: Any, from_process: int = 0) -> Any:
        """Copy each tensor of one rank into that of the others, in place. Collective."""
        return operations.broadcast(tensor, from_process, world=self._world)

    def pad_across_processes(
        self, tensor: Any, dim: int = 0, pad_index: int = 0, pad_first: bool = False
    ) -> Any:
        """Each tensor made as long along `dim` as the longest of all ranks. Collective."""
        return operations.pad_across_processes(tensor, dim, pad_index, pad_first, world=self._world)

    def set_trigger(self) -> None:
        """Let check_trigger() be True on all ranks when they ask next."""
        self._trigger = True

    def check_trigger(self) -> bool:
        """Whether any rank called set_trigger() since the last time. Collective."""
        flag = torch.tensor([int(self._trigger)])
        self._world.reduce_(flag, "max", "check_trigger")
        if flag.item():
            self._trigger = False
        return bool(flag.item())

    def should_stop(self) -> bool:
        """Whether the job was asked to end in order: save, and leave the loop. The same
        answer on all ranks. Collective."""
        return self._world.should_stop()

    def wait_for_everyone(self) -> None:
        """Wait until all ranks are here. Collective."""
        self.state.wait_for_everyone()

    # ---- one rank or another -------------------------------------------------

    def main_process_first(self) -> AbstractContextManager[None]:
        """The block runs on rank 0 first, then on the others. Collective."""
        return self.state.main_process_first()

    def local_main_process_first(self) -> AbstractContextManager[None]:
        """The block runs on the first rank of each machine first, then on the others."""
        return self.state.local_main_process_first()

    def split_between_processes(
        self, inputs: Any, apply_padding: bool = False
    ) -> AbstractContextManager[Any]:
        """This rank's part of `inputs`; see PartialState.split_between_processes()."""
        return self.state.split_between_processes(inputs, apply_padding)

    def on_main_process(self, function: Callable[..., Any] | None = None) -> Any:
        """A decorator: the function runs on rank 0 only."""
        return self.state.on_main_process(function)

    def on_local_main_process(self, function: Callable[..., Any] | None = None) -> Any:
        """A decorator: the function runs on the first rank of each machine only."""
        return self.state.on_local_main_process(function)

    def on_last_process(self, function: Callable[..., Any] | None = None) -> Any:
        """A decorator: the function runs on the rank with the highest number only."""
        return self.state.on_last_process(function)

    def on_process(
        self, function: Callable[..., Any] | None = None, process_index: int | None = None
    ) -> Any:
        """A decorator: the function runs on rank `process_index` only."""
        return self.state.on_process(function, process_index)

    def on_local_process(
        self, function: Callable[..., Any] | None = None, local_process_index: int | None = None
    ) -> Any:
        """A decorator: the function runs on that rank of each machine only."""
        return self.state.on_local_process(function, local_process_index)

    def print(self, *args: Any, **kwargs: Any) -> None:
        """print() on the first rank of each machine."""
        self.state.print(*args, **kwargs)

    # ---- models again, and files ---------------------------------------------

    def unwrap_model(
        self,
        model: nn.Module,
        keep_fp32_wrapper: bool = True,
        keep_torch_compile: bool = True,
    ) -> nn.Module:
        """The module that prepare() was given. `keep_fp32_wrapper` False takes mixed
        precision from its forward, for good; `keep_torch_compile` False returns what
        torch.compile() was given."""
        return models.unwrap(
            model, keep_fp32_wrapper=keep_fp32_wrapper, keep_torch_compile=keep_torch_compile
        )

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> dict[str, Any]:
        """The state dict of the module that prepare() was given."""
        if unwrap:
            model = self.unwrap_model(model, keep_torch_compile=False)
        return model.state_dict()

    def save(
        self,
        obj: Any,
        f: str | os.PathLike[str] | IO[bytes],
        save_on_each_node: bool = False,
        safe_serialization: bool = False,
    ) -> None:
        """Save `obj` with torch.save(), on rank 0, or with `save_on_each_node` on the first
        rank of each machine. A file appears when it is whole. Not collective."""
        if self.is_local_main_process if save_on_each_node else self.is_main_process:
            saving.save(obj, f, safe_serialization)

    def save_model(
        self,
        model: nn.Module,
        save_directory: str | os.PathLike[str],
        max_shard_size: int | str = "10GB",
        safe_serialization: bool = True,
    ) -> None:
        """Save the model's weights into a folder, on rank 0: as model.safetensors where the
        safetensors package is installed, else as pytorch_model.bin. Files appear when they
        are whole. Not collective.

        Raises NotADirectoryError when `save_directory` is a file.
        """
        if os.path.isfile(save_directory):
            raise NotADirectoryError(f"{os.fspath(save_directory)} is a file: give a folder")
        if self.is_main_process:
            state = self.get_state_dict(model)
            saving.save_weights(state, save_directory, max_shard_size, safe_serialization)

    # ---- the end -------------------------------------------------------------

    def free_memory(self, *objects: Any) -> list[None]:
        """Forget all prepared objects, and free what torch keeps of their memory. Returns a
        None for each of `objects`: `model, optimizer = accelerator.free_memory(model,
        optimizer)`. All ranks call it, or none."""
        self._prepared.clear()
        self._gradients.wrapped.clear()
        self._gradients.micro_step, self._gradients.sync = 0, True
        if self._gradients.reducer is not None:
            self._gradients.reducer.clear()
        n = len(objects)
        del objects
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        return [None] * n

    def clear(self, *objects: Any) -> list[None]:
        """free_memory()."""
        return self.free_memory(*objects)

    def end_training(self) -> None:
        """Forget all prepared objects. The world is left when the program ends."""
        self.free_memory()


def _cut_tensors(structure: Any, size: int, real: int) -> Any:
    def cut(tensor: Tensor) -> Tensor:
        if not real:  # the whole batch only fills up, and with it what was made of it
            return (tensor if tensor.dim() else tensor.reshape(1))[:0]
        return tensor[:real] if tensor.dim() and tensor.shape[0] == size else tensor

    return operations.recursively_apply(cut, structure)


def _cut_objects(value: Any, size: int, real: int) -> Any:
    """Lists and tensors as long as the batch, wherever they are, cut to what is real."""
    if isinstance(value, Tensor):
        return _cut_tensors(value, size, real)
    if isinstance(value, (list, tuple)) and not hasattr(value, "_fields"):
        # A pair of columns is not a batch of two.
        if len(value) == size and not any(_is_as_long(v, size) for v in value):
            return value[:real]
        return type(value)(_cut_objects(v, size, real) for v in value)
    if isinstance(value, dict):
        return {k: _cut_objects(v, size, real) for k, v in value.items()}
    return value


def _is_as_long(value: Any, size: int) -> bool:
    if isinstance(value, Tensor):
        return value.dim() > 0 and value.shape[0] == size
    return isinstance(value, (list, tuple)) and len(value) == size


def _ddp_of(model: Any) -> DistributedDataParallel | None:
    inner = models.uncompiled(model) if isinstance(model, nn.Module) else None
    return inner if isinstance(inner, DistributedDataParallel) else None
