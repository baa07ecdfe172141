"""Which process this is, where it computes, and what happens when it fails or ends."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import sys
import time
import uuid
from collections import namedtuple
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import accel
import numpy as np
import pytest
import torch
from accel import absent, group, rng, state
from accel import world as worlds
from accel.errors import InvalidError, LostError, UnreachableError
from accel.state import AcceleratorState, DistributedType, Flag, PartialState, split
from accel.world import World, current
from ranks import Group, RunRanks, Torchrun, alone, plain_environment


@pytest.fixture(autouse=True)
def nothing_is_shared() -> Iterator[None]:
    """Each test makes the first state of its process."""
    AcceleratorState._reset_state()
    yield
    AcceleratorState._reset_state()


# ---- alone -------------------------------------------------------------------


def test_alone_a_process_is_a_world_of_one() -> None:
    s = PartialState(cpu=True)
    assert (s.num_processes, s.process_index, s.local_process_index) == (1, 0, 0)
    assert s.device == torch.device("cpu")
    assert s.distributed_type == DistributedType.NO
    assert not s.use_distributed
    assert s.is_main_process
    assert s.is_last_process
    s.wait_for_everyone()
    with s.main_process_first(), s.local_main_process_first():
        pass


def test_every_state_is_the_same_one() -> None:
    first = PartialState(cpu=True)
    first.note = "here"
    assert PartialState().note == "here"
    assert AcceleratorState().device is first.device
    assert PartialState().world is current()


def test_an_argument_nobody_knows_is_an_error() -> None:
    with pytest.raises(TypeError, match="does not know colour"):
        PartialState(colour="red")
    assert PartialState(cpu=True).initialized


def test_a_flag_is_a_bool_that_can_be_called() -> None:
    yes, no = Flag(True), Flag(False)
    assert yes
    assert yes()
    assert yes == True  # noqa: E712 - as programs write it
    assert not no
    assert not no()
    assert (repr(yes), str(no), f"{yes}") == ("True", "False", "True")
    assert {True: "a"}[yes] == "a"
    assert PartialState(cpu=True).is_local_main_process() is True


def test_decorators_run_where_they_should() -> None:
    s = PartialState(cpu=True)

    @s.on_main_process
    def main(x: int) -> int:
        "Its text."
        return x + 1

    @s.on_process(process_index=1)
    def other() -> int:
        return 1

    @s.on_local_process(local_process_index=0)
    def local() -> int:
        return 2

    assert (main(1), other(), local()) == (2, None, 2)
    assert main.__doc__ == "Its text."
    assert s.on_last_process(lambda: 3)() == 3
    assert s.on_local_main_process()(lambda: 4)() == 4


# ---- parts of something ------------------------------------------------------

Pair = namedtuple("Pair", "a b")


def parts(inputs: Any, n: int, padding: bool = False) -> list[Any]:
    return [split(inputs, rank, n, padding) for rank in range(n)]


def test_the_first_ranks_get_one_more() -> None:
    assert parts([1, 2, 3, 4, 5], 3) == [[1, 2], [3, 4], [5]]
    assert parts((1, 2, 3, 4), 2) == [(1, 2), (3, 4)]
    assert parts([1], 3) == [[1], [], []]
    assert parts([], 2) == [[], []]
    assert [p.tolist() for p in parts(torch.arange(5), 2)] == [[0, 1, 2], [3, 4]]
    assert parts([1, 2], 1) == [[1, 2]]


def test_with_padding_all_get_equally_many_and_the_last_one_is_repeated() -> None:
    assert parts([1, 2, 3, 4, 5], 3, True) == [[1, 2], [3, 4], [5, 5]]
    assert parts([1], 3, True) == [[1], [1], [1]]
    assert parts((1, 2, 3), 2, True) == [(1, 2), (3, 3)]
    assert parts([], 2, True) == [[], []]
    padded = parts(torch.arange(6).reshape(3, 2), 2, True)
    assert padded[1].tolist() == [[4, 5], [4, 5]]
    assert parts(torch.arange(1), 2, True)[1].tolist() == [0]
    assert [p.tolist() for p in parts(np.arange(3), 2, True)] == [[0, 1], [2, 2]]


def test_a_dict_is_split_by_its_values_and_stays_as_it_was() -> None:
    inputs = {"a": [1, 2, 3], "b": torch.arange(3)}
    first, second = parts(inputs, 2)
    assert (first["a"], second["a"]) == ([1, 2], [3])
    assert second["b"].tolist() == [2]
    assert inputs["a"] == [1, 2, 3]
    with pytest.raises(ValueError, match="equally long"):
        parts({"a": [1], "b": [1, 2]}, 2)


def test_the_inputs_are_not_modified() -> None:
    inputs = [[1], [2], [3]]
    with PartialState(cpu=True).split_between_processes(inputs, apply_padding=True) as mine:
        assert mine == [[1], [2], [3]]
    parts(inputs, 2, True)
    assert inputs == [[1], [2], [3]]


# ---- devices -----------------------------------------------------------------


class FakeWorld(World):
    """A place in a world whose ranks all have one CUDA device of the given kinds."""

    def __init__(self, local_rank: int, local_size: int, uuids: list[str]) -> None:
        super().__init__(local_rank, local_size, local_rank, local_size)
        self.uuids = uuids

    def all_gather_object(self, obj: Any, label: str = "") -> list[Any]:
        return [(obj[0], uuid) for uuid in self.uuids]


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Callable[[int, str], None]:
    def have(n: int, uuid: str = "a") -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: n > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: n)
        properties = SimpleNamespace(uuid=uuid)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda i: properties)

    return have


def test_each_rank_computes_on_the_device_of_its_local_rank(cuda: Callable[..., None]) -> None:
    cuda(2)
    assert state.choose_device(FakeWorld(1, 2, [])) == torch.device("cuda", 1)


def test_ranks_that_each_see_one_device_of_their_own_use_that(cuda: Callable[..., None]) -> None:
    cuda(1, "b")
    assert state.choose_device(FakeWorld(1, 2, ["a", "b"])) == torch.device("cuda", 0)


def test_more_ranks_than_devices_are_a_sentence(cuda: Callable[..., None]) -> None:
    cuda(1)
    with pytest.raises(InvalidError, match=r"2 ranks on this machine, and 1 CUDA device: .*cpu"):
        state.choose_device(FakeWorld(1, 2, ["a", "a"]))


@pytest.mark.parametrize("variable", ["ACCELERATE_USE_CPU", "ACCEL_DEVICE", None])
def test_the_cpu_is_used_when_somebody_says_so(
    cuda: Callable[..., None], monkeypatch: pytest.MonkeyPatch, variable: str | None
) -> None:
    cuda(1)
    world = FakeWorld(0, 1, ["a"])
    assert state.choose_device(world) == torch.device("cuda", 0)
    if variable:
        monkeypatch.setenv(variable, "cpu" if "DEVICE" in variable else "True")
    assert state.choose_device(world, cpu=variable is None) == torch.device("cpu")


def test_the_supervisor_assigns_a_device(
    cuda: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    world = FakeWorld(0, 1, ["a"])
    monkeypatch.setenv("ACCEL_DEVICE", "cuda:3")
    cuda(4)
    assert state.choose_device(world) == torch.device("cuda", 3)
    cuda(1)  # one visible device each
    assert state.choose_device(world) == torch.device("cuda", 0)
    cuda(2)
    with pytest.raises(InvalidError, match="cuda:3, and 2 CUDA devices are here"):
        state.choose_device(world)
    cuda(0)
    with pytest.raises(InvalidError, match="sees no CUDA device"):
        state.choose_device(world)
    monkeypatch.setenv("ACCEL_DEVICE", "toaster")
    with pytest.raises(InvalidError, match="'toaster', which is no device"):
        state.choose_device(world)


def test_a_switch_that_says_neither_yes_nor_no_is_a_sentence(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("ACCELERATE_USE_CPU", "maybe")
    with pytest.raises(InvalidError, match="ACCELERATE_USE_CPU is 'maybe'"):
        PartialState()
    monkeypatch.setenv("ACCELERATE_USE_CPU", "")
    assert PartialState().initialized


@pytest.mark.parametrize(
    ("place", "where", "says"),
    [
        ("cpu", "cuda:0", "on cuda:0, and rank 0 computes on cpu: move it"),
        ("cuda:0", "cuda:1", "on cuda:1, and rank 0 computes on cuda:0: move it"),
        ("cpu", "meta", "meta device has no data"),
        ("cuda:0", "cpu", None),
        ("cuda:0", "cuda:0", None),
    ],
)
def test_a_tensor_on_the_wrong_device_is_a_sentence(
    place: str, where: str, says: str | None
) -> None:
    world = FakeWorld(0, 2, [])
    world.device = torch.device(place)
    tensor: Any = SimpleNamespace(device=torch.device(where))
    if says is None:
        world._check_device(tensor)
    else:
        with pytest.raises(InvalidError, match=says):
            world._check_device(tensor)


def test_the_process_group_is_for_cpu_and_cuda_where_there_is_cuda(
    cuda: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    cuda(0)
    assert group.default_backend() == "gloo"
    cuda(1)
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: True)
    assert group.default_backend() == "cpu:gloo,cuda:nccl"


# ---- ranks, where the runtime cannot tell them ------------------------------------

OMPI = {
    "OMPI_COMM_WORLD_RANK": "5",
    "OMPI_COMM_WORLD_SIZE": "8",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
}
ONE = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
TWO = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
SLURM = {"SLURM_PROCID": "6", "SLURM_STEP_NUM_TASKS": "8", "SLURM_LOCALID": "0"}


@pytest.mark.parametrize(
    ("variables", "found"),
    [
        (TWO, (3, 4, 1, 2)),
        (OMPI, (5, 8, 1, 4)),
        (ONE | OMPI, (5, 8, 1, 4)),
        (TWO | OMPI, (3, 4, 1, 2)),
        (SLURM | {"SLURM_STEP_TASKS_PER_NODE": "2(x3),1(x2)"}, (6, 8, 0, 2)),
        (
            SLURM | {"SLURM_STEP_TASKS_PER_NODE": "2(x3),1(x2)", "SLURM_NODEID": "3"},
            (6, 8, 0, 1),
        ),
        ({"RANK": "1", "WORLD_SIZE": "2"}, (1, 2, 0, 1)),
    ],
)
def test_ranks_of_several_machines_are_those_of_the_launcher(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], found: tuple[int, ...]
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert worlds._ranks_from_environment(UnreachableError("no way")) == found


def test_without_any_launcher_the_reason_is_told() -> None:
    with pytest.raises(UnreachableError, match="no way"):
        worlds._ranks_from_environment(UnreachableError("no way"))


# ---- precision ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("asked", "accel_says", "accelerate_says", "get"),
    [
        (None, None, None, "no"),
        (None, "bf16", "fp16", "bf16"),
        (None, None, "fp16", "fp16"),
        ("no", "bf16", None, "no"),
        ("BF16", None, None, "bf16"),
        (False, None, None, "no"),
    ],
)
def test_precision_is_the_argument_or_what_the_launcher_says(
    monkeypatch: pytest.MonkeyPatch, asked: Any, accel_says: Any, accelerate_says: Any, get: str
) -> None:
    for name, value in (("ACCEL", accel_says), ("ACCELERATE", accelerate_says)):
        if value:
            monkeypatch.setenv(f"{name}_MIXED_PRECISION", value)
    assert AcceleratorState(mixed_precision=asked).mixed_precision == get
    assert AcceleratorState().mixed_precision == get


def test_a_precision_there_is_not_is_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="mixed_precision is 'fp4': use one of no, fp16, bf16"):
        AcceleratorState(mixed_precision="fp4")
    monkeypatch.setenv("ACCEL_MIXED_PRECISION", "half")
    with pytest.raises(ValueError, match="ACCEL_MIXED_PRECISION is 'half'"):
        AcceleratorState()


def test_the_first_one_decides_about_precision() -> None:
    AcceleratorState(mixed_precision="bf16")
    with pytest.raises(InvalidError, match="mixed_precision='bf16' already, and 'fp16'"):
        AcceleratorState(mixed_precision="fp16")
    assert "bf16" in repr(AcceleratorState())


# ---- random numbers ----------------------------------------------------------


def draws() -> tuple[float, float, float]:
    return random.random(), float(np.random.rand()), torch.rand(1).item()


def test_a_seed_is_for_everything_a_program_draws_from() -> None:
    accel.set_seed(3)
    first = draws()
    assert draws() != first
    accel.set_seed(3)
    assert draws() == first
    accel.set_seed(2**40)  # more than numpy takes


def test_an_rng_type_there_is_not_is_a_sentence() -> None:
    with pytest.raises(ValueError, match="no RNG type 'dice': use some of torch"):
        accel.synchronize_rng_states(["dice"])
    with pytest.raises(ValueError, match="generator="):
        accel.synchronize_rng_states(["generator"])


def seeds_and_synchronises() -> Any:
    rank = current().rank
    accel.set_seed(5, device_specific=True)
    apart = draws()
    generator = torch.Generator().manual_seed(rank)
    accel.synchronize_rng_states(["torch", "cuda", "xla", "numpy", "python"])
    accel.synchronize_rng_states([rng.RNGType.GENERATOR], generator)
    return apart, draws(), torch.rand(1, generator=generator).item()


def test_generators_are_synchronised_from_rank_0(ranks: RunRanks) -> None:
    (apart0, *together0), (apart1, *together1) = (r.value for r in ranks(2, seeds_and_synchronises))
    assert not set(apart0) & set(apart1)
    assert together0 == together1


# ---- several processes -------------------------------------------------------


def says_who_it_is() -> Any:
    s = PartialState()  # alone: no Accelerator, no cpu=True
    s.print("from the first only")
    with s.split_between_processes(list(range(7))) as mine:
        pass
    x = torch.ones(1)
    torch.distributed.all_reduce(x)
    return (
        s.num_processes,
        s.process_index,
        s.local_process_index,
        s.num_local_processes,
        s.distributed_type == DistributedType.MULTI_CPU,
        (bool(s.is_main_process), bool(s.is_last_process)),
        s.backend,
        mine,
        x.item(),
    )


def mpirun_variables() -> Callable[[int, int], dict[str, str]]:
    namespace = uuid.uuid4().hex

    def variables(rank: int, n: int) -> dict[str, str]:
        names = ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")
        values = (rank, n, rank, n)
        world = {f"OMPI_COMM_WORLD_{k}": str(v) for k, v in zip(names, values, strict=True)}
        return world | {"PMIX_NAMESPACE": namespace}

    return variables


@pytest.mark.parametrize("launcher", ["torchrun", "mpirun"])
def test_partial_state_alone_is_right_on_cpu_ranks(ranks: RunRanks, launcher: str) -> None:
    variables = mpirun_variables() if launcher == "mpirun" else None
    results = ranks(3, says_who_it_is, variables=variables)
    for rank, r in enumerate(results):
        mine = [[0, 1, 2], [3, 4], [5, 6]][rank]
        ends = (rank == 0, rank == 2)
        assert r.value == (3, rank, rank, 3, True, ends, "gloo", mine, 3.0)
        assert r.out == ("from the first only\n" if rank == 0 else "")
        assert r.err == ""


def goes_first(folder: str) -> list[str]:
    s = PartialState()
    log = Path(folder) / "log"
    for turn in range(3):
        first = s.main_process_first() if turn % 2 else s.local_main_process_first()
        with first, log.open("a") as f:
            f.write(f"{turn}{'main' if s.is_main_process else 'other'} ")
        s.wait_for_everyone()
    return log.read_text().split()


def test_the_main_process_is_first(ranks: RunRanks, tmp_path: Path) -> None:
    order = ranks(3, goes_first, str(tmp_path))[0].value
    assert order == [
        w for turn in range(3) for w in (f"{turn}main", f"{turn}other", f"{turn}other")
    ]


USES_GROUP = """
import accel, torch
state = accel.PartialState()
x = torch.ones(1)
torch.distributed.all_reduce(x)
assert x.item() == state.num_processes
"""


def test_programs_one_after_another_do_not_find_each_others_addresses(ranks: RunRanks) -> None:
    launcher = Torchrun()
    ranks(2, USES_GROUP, variables=launcher)
    of_first = launcher.store.num_keys()
    ranks(2, USES_GROUP, variables=launcher)
    # Under a key of the first one, the address of a rank could be that of the first one.
    assert launcher.store.num_keys() >= of_first + 2


def test_two_programs_in_a_shell_are_two_programs(ranks: RunRanks, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(USES_GROUP)
    both = f"""
import subprocess, sys
shell = '"$0" "$1"; "$0" "$1" && echo done'
sys.exit(subprocess.call(["sh", "-ec", shell, sys.executable, {str(program)!r}]))
"""
    for r in ranks(3, both):
        assert r.out == "done\n"


def has_its_own_group() -> tuple[str | None, int]:
    torch.distributed.init_process_group("gloo")
    s = PartialState()
    x = torch.ones(1)
    torch.distributed.all_reduce(x)
    s.wait_for_everyone()
    torch.distributed.destroy_process_group()
    return s.backend, int(x.item())


def test_a_group_of_the_program_is_used_and_left_to_it(ranks: RunRanks) -> None:
    assert [r.value for r in ranks(2, has_its_own_group)] == [("gloo", 2)] * 2


def has_a_group_of_its_own_alone() -> str:
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    with pytest.raises(InvalidError) as e:
        PartialState()
    return str(e.value)


def test_a_group_of_other_ranks_is_a_sentence(ranks: RunRanks) -> None:
    results = ranks(2, has_a_group_of_its_own_alone)
    assert "rank 0 of 1, and this process is rank 1 of 2" in results[1].value


def half_a_launcher(rank: int, n: int) -> dict[str, str]:
    return {"RANK": "0"}


def test_half_a_launcher_is_a_sentence(ranks: RunRanks) -> None:
    program = "import accel; accel.PartialState()"
    [r] = ranks(1, program, variables=half_a_launcher, check=False)
    assert r.code == 1
    assert "InvalidError" in r.err
    assert "WORLD_SIZE" in r.err.splitlines()[-1]


WALL = {"ACCEL_JOB": "1", "TORCHELASTIC_RUN_ID": "1", "ACCEL_SOCKET": "/nowhere/socket"}


def test_without_shared_memory_one_line_says_what_is_used_instead(ranks: RunRanks) -> None:
    results = ranks(2, says_who_it_is, env=WALL)
    assert results[0].err.count("\n") == 1
    assert "collectives go through torch.distributed" in results[0].err
    assert results[1].err == ""
    assert [r.value[8] for r in results] == [2.0, 2.0]


def test_without_any_way_to_the_others_there_is_a_sentence(ranks: RunRanks) -> None:
    nowhere = WALL | {"MASTER_ADDR": "", "MASTER_PORT": ""}
    for r in ranks(2, "import accel; accel.PartialState()", env=nowhere, check=False):
        assert r.code == 1
        assert "MASTER_ADDR and MASTER_PORT are not set" in r.err


def ends_with_ddp_alive() -> bool:
    s = PartialState()
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))
    model(torch.ones(1, 2)).sum().backward()
    globals()["kept"] = [model, s]
    return True


def test_a_program_that_keeps_ddp_to_its_end_ends_in_order(ranks: RunRanks) -> None:
    for r in ranks(2, ends_with_ddp_alive):
        assert r.value
        assert r.err == ""


# ---- failing -----------------------------------------------------------------

FAILS = """
import sys, threading
import accel
state = accel.PartialState()
state.wait_for_everyone()
if state.process_index == 1:
    forever = threading.Event()
    threading.Thread(target=forever.wait).start()   # keeps the process alive
    print("failing", flush=True)
    raise KeyError("the cause")
try:
    state.wait_for_everyone()
except accel.LostError as error:
    print("lost:", error, flush=True)
"""


@pytest.mark.parametrize("env", [{}, WALL], ids=["shared-memory", "torch"])
def test_an_exception_reaches_the_ranks_that_wait_though_its_process_lives_on(
    start_ranks: Callable[..., Group], env: dict[str, str]
) -> None:
    group = start_ranks(2, FAILS, env=env)
    group.expect(1, "failing")
    group.expect(0, "lost: ", 30)
    group.expect(1, "KeyError: 'the cause'", 30, of="err")
    group.signal(1, 9)
    results = group.wait(30)
    assert results[0].code == 0
    if not env:
        assert "rank 1" in results[0].out
        assert "the cause" in results[0].out


def test_an_exception_at_a_prompt_is_no_failure(start_ranks: Callable[..., Group]) -> None:
    program = """
import sys
import accel
state = accel.PartialState()
sys.ps1 = ">>> "
sys.excepthook(ValueError, ValueError("typed wrong"), None)
state.wait_for_everyone()
print("together")
"""
    for r in start_ranks(2, program).wait():
        assert (r.code, r.out) == (0, "together\n")
        assert "typed wrong" in r.err


def leaves_early() -> str:
    s = PartialState()
    s.wait_for_everyone()
    if s.process_index == 1:
        raise SystemExit(3)
    with pytest.raises(LostError) as e:
        s.world.all_gather(torch.ones(1))
    return str(e.value)


def test_a_rank_that_exits_is_an_error_of_the_others(ranks: RunRanks) -> None:
    results = ranks(2, leaves_early, check=False)
    assert [r.code for r in results] == [0, 3]
    assert "rank 1" in results[0].value
    assert results[1].err == ""


def test_the_report_is_written_where_torchrun_looks_for_it(ranks: RunRanks, tmp_path: Path) -> None:
    program = "import accel; accel.PartialState(); raise ValueError('wrong µ')"
    file = tmp_path / "error.json"
    ranks(1, program, env={"TORCHELASTIC_ERROR_FILE": str(file)}, check=False)
    assert "ValueError: wrong µ" in json.loads(file.read_text())["message"]["message"]


def test_an_earlier_excepthook_still_runs(ranks: RunRanks) -> None:
    program = """
import sys
sys.excepthook = lambda kind, error, trace: print("mine:", error)
import accel
accel.PartialState()
raise ValueError("x")
"""
    [r] = ranks(1, program, variables=alone, check=False)
    assert (r.code, r.out) == (1, "mine: x\n")


REPORTS = """
import sys
import accel, torch
accelerator = accel.Accelerator()
gather = accelerator.gather
def step():
    gather(torch.ones(2))
if accelerator.process_index == 1:
    raise ValueError("bad")
step()
"""


def test_a_rank_that_lost_another_one_says_so_in_one_line(ranks: RunRanks, tmp_path: Path) -> None:
    program = tmp_path / "train.py"
    program.write_text(REPORTS)
    file = tmp_path / "error.json"
    lost, failed = ranks(2, program, check=False, env={"TORCHELASTIC_ERROR_FILE": str(file)})
    assert (lost.code, failed.code) == (1, 1)
    [line] = lost.err.splitlines()
    assert re.search(
        rf"accel: rank 0 gives up at {program}:7: rank 1 failed \(process \d+\): ValueError: bad$",
        line,
    )
    assert "Traceback" in failed.err and failed.err.rstrip().endswith("ValueError: bad")


def test_a_rank_that_lost_another_one_leaves_its_line_in_the_error_file(
    ranks: RunRanks, tmp_path: Path
) -> None:
    name = "import os; os.environ['TORCHELASTIC_ERROR_FILE'] += os.environ['RANK']\n"
    env = {"TORCHELASTIC_ERROR_FILE": str(tmp_path / "error-")}
    ranks(2, name + REPORTS, check=False, env=env)
    said = [json.loads((tmp_path / f"error-{r}").read_text()) for r in range(2)]
    assert said[0]["message"]["message"].startswith("accel: rank 0 gives up at <string>:8: rank 1")
    assert "Traceback" in said[1]["message"]["message"]
    # The supervisor takes a file's time for that of the failure, if it is in the past.
    ages = [time.time() - (tmp_path / f"error-{r}").stat().st_mtime for r in range(2)]
    assert ages[0] < 0 <= ages[1]


def test_everything_is_printed_when_asked_for(ranks: RunRanks) -> None:
    lost, _ = ranks(2, REPORTS, check=False, env={"ACCEL_TRACEBACK": "full"})
    assert "Traceback" in lost.err and "operations.py" in lost.err
    assert "accel.errors.LostError: rank 1" in lost.err


def test_a_failure_while_another_one_is_dealt_with_hides_neither(ranks: RunRanks) -> None:
    program = """
import accel
state = accel.PartialState()
if state.process_index == 1:
    raise ValueError("bad")
try:
    {}["the cause"]
except KeyError:
    state.wait_for_everyone()
"""
    lost, _ = ranks(2, program, check=False)
    assert "KeyError: 'the cause'" in lost.err and "LostError: rank 1" in lost.err
    assert "state.py" not in lost.err


def test_the_traceback_of_an_error_of_accel_shows_the_program_only(ranks: RunRanks) -> None:
    program = """
import accel, torch
accelerator = accel.Accelerator()
model = accelerator.prepare(torch.nn.Linear(2, 2))
def train():
    if accelerator.process_index == 1:
        accelerator.gather(torch.ones(2))
    else:
        accelerator.backward(model(torch.ones(1, 2)).sum())
train()
"""
    for r in ranks(2, program, check=False):
        frames = [line for line in r.err.splitlines() if "File " in line]
        assert len(frames) == 2 and all("<string>" in frame for frame in frames)
        assert r.err.count("MismatchError") == 1
        assert "rank 1: gather of float32 (2,)" in r.err


def test_a_failure_to_join_shows_the_program_only(ranks: RunRanks) -> None:
    [r] = ranks(1, "import accel; accel.PartialState()", variables=half_a_launcher, check=False)
    assert r.err.count("File ") == 1


INTERRUPTED = """
import os, signal
import accel
state = accel.PartialState()
state.wait_for_everyone()
print("waiting", flush=True)
if state.process_index == 1:
    signal.sigwait([signal.SIGUSR1])
state.wait_for_everyone()
"""


def test_ctrl_c_is_one_line_of_each_rank(start_ranks: Callable[..., Group]) -> None:
    group = start_ranks(2, INTERRUPTED)
    for rank in range(2):
        group.expect(rank, "waiting")
    group.expect_waiting(0)
    group.signal(0, signal.SIGINT)
    group.expect(0, "accel: rank 0 was interrupted at <string>:9", of="err")
    group.signal(1, signal.SIGUSR1)
    first, _ = group.wait()
    assert first.code == -signal.SIGINT
    assert first.err.count("\n") == 1


def test_ctrl_c_in_a_world_of_one_is_as_ever(ranks: RunRanks) -> None:
    program = "import accel; accel.PartialState(); raise KeyboardInterrupt"
    [r] = ranks(1, program, variables=alone, check=False)
    assert r.code == -signal.SIGINT
    assert "Traceback" in r.err


# ---- programs that ranks start ---------------------------------------------------

STARTS_CHILDREN = """
import subprocess, sys
import accel
state = accel.PartialState()
child = "import accel, os; print(accel.PartialState().num_processes, 'HOME' in os.environ)"
command = [sys.executable, "-c", child]
inherits = subprocess.run(command, capture_output=True, text=True)
assert "clean_environment()" in inherits.stderr, inherits.stderr
assert "OwnedError" in inherits.stderr
clean = accel.utils.clean_environment()
print(subprocess.run(command, env=clean, capture_output=True, text=True, check=True).stdout)
state.wait_for_everyone()
"""


@pytest.mark.parametrize("launcher", ["torchrun", "mpirun"])
def test_a_child_with_a_clean_environment_is_a_world_of_one(ranks: RunRanks, launcher: str) -> None:
    variables = mpirun_variables() if launcher == "mpirun" else None
    for r in ranks(2, STARTS_CHILDREN, variables=variables, env={"HOME": "/"}):
        assert r.out.split() == ["1", "True"]


def test_a_clean_environment_keeps_what_is_not_a_launchers(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = {"PATH": "/bin", "ACCEL_LIBRARY": "x", "OMP_NUM_THREADS": "2", "LOCAL_DATA": "y"}
    gone = {"ACCEL_JOB", "ACCEL_CONTROL_FD", "TORCHELASTIC_ERROR_FILE", "ROLE_RANK", "PMIX_RANK"}
    gone |= {"SLURM_STEP_ID", "MASTER_PORT", "LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_SIZE"}
    for name in gone:
        monkeypatch.setenv(name, "1")
    for name, value in kept.items():
        monkeypatch.setenv(name, value)
    clean = accel.utils.clean_environment()
    assert not gone & clean.keys()
    assert kept.items() <= clean.items()
    assert gone <= os.environ.keys()


# ---- logging -----------------------------------------------------------------


LOGS = """
import logging, sys
import accel
from accel.logging import get_logger
logging.basicConfig(stream=sys.stdout, format="%(name)s %(lineno)d %(message)s")
log = get_logger("training", log_level="INFO")
try:
    log.info("too early")
except RuntimeError as error:
    assert "PartialState" in str(error)
rank = accel.PartialState().process_index
log.info("once %d", rank)
log.log(logging.INFO, "every %d", rank, main_process_only=False)
log.debug("not said", main_process_only=False)
for _ in range(2):
    log.warning_once("one warning")
log.error("in turn %d", rank, main_process_only=False, in_order=True)
"""


def test_a_logger_speaks_for_all_ranks(ranks: RunRanks) -> None:
    first, second = (r.out.splitlines() for r in ranks(2, LOGS))
    everywhere = ["training 13 every {}", "training 17 in turn {}"]
    only_first = ["training 12 once 0", "training 16 one warning"]
    assert first == [only_first[0], everywhere[0].format(0), only_first[1], everywhere[1].format(0)]
    assert second == [line.format(1) for line in everywhere]


def forks() -> str:
    s = PartialState()
    read, write = os.pipe()
    pid = os.fork()
    if not pid:
        try:
            s.wait_for_everyone()
        except accel.ForkedError as error:
            os.write(write, str(error).encode())
        sys.exit(0)  # runs what is registered for the end, in the child
    os.close(write)
    said = os.read(read, 1000).decode()
    assert os.waitpid(pid, 0)[1] == 0
    s.wait_for_everyone()  # the world is still whole
    return said


def test_a_fork_that_calls_and_ends_leaves_the_world_whole(ranks: RunRanks) -> None:
    assert all("fork" in r.value for r in ranks(2, forks))


# ---- importing ---------------------------------------------------------------


IMPORTS = """
import torch, time
start = time.process_time()
from accel import Accelerator, PartialState, utils
print(time.process_time() - start)
"""


def test_importing_accel_takes_less_than_30_ms_beyond_torch(tmp_path: Path) -> None:
    env = plain_environment() | {"PYTHONPYCACHEPREFIX": str(tmp_path)}
    del env["PYTHONDONTWRITEBYTECODE"]
    taken = []
    for _ in range(3):  # the first one compiles
        command = [sys.executable, "-c", IMPORTS]
        said = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
        taken.append(float(said.stdout))
    assert min(taken) < 0.03, taken


def test_the_package_says_what_it_has() -> None:
    for name in ("PartialState", "AcceleratorState", "set_seed", "AccelError", "World", "utils"):
        assert getattr(accel, name) is not None
        assert name in dir(accel)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        accel.nothing  # noqa: B018


@pytest.mark.parametrize("module", ["accel", "accel.utils"])
def test_what_accelerate_has_and_accel_does_not_says_what_to_do(module: str) -> None:
    where = sys.modules[module]
    for name, advice in (
        ("skip_first_batches", "enumerate"),
        ("notebook_launcher", "accel launch"),
        ("ProfileKwargs", "torch.profiler"),
        ("find_executable_batch_size", "batch size"),
        ("is_peft_available", "find_spec"),
    ):
        assert not hasattr(where, name)
        with pytest.raises(AttributeError, match=f"^{module} has no {name}: .*{advice}"):
            getattr(where, name)
        with pytest.raises(ImportError, match=f"^{module} has no {name}: .*{advice}"):
            exec(f"from {module} import {name}", {})
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        where.nothing  # noqa: B018
    with pytest.raises(ImportError, match="cannot import name 'nothing'"):
        exec(f"from {module} import nothing", {})
    assert not [name for name in absent.OF_PACKAGE if name in vars(where)]


def test_a_progress_bar_is_drawn_by_one_rank(ranks: RunRanks) -> None:
    pytest.importorskip("tqdm")
    program = """
import accel
rank = accel.PartialState().process_index
assert list(accel.utils.tqdm(range(3), desc="some")) == [0, 1, 2]
list(accel.utils.tqdm(range(3), main_process_only=False, desc=f"rank {rank}"))
"""
    first, second = ranks(2, program)
    assert "some" in first.err and "rank 0" in first.err
    assert "some" not in second.err and "rank 1" in second.err


def test_small_utilities() -> None:
    model = torch.nn.Linear(2, 2)
    prepared = accel.Accelerator().prepare(torch.nn.Linear(2, 2))
    assert accel.utils.extract_model_from_parallel(model) is model
    assert accel.utils.extract_model_from_parallel(prepared) is prepared
    assert accel.utils.release_memory(model, 3) == [None, None]
    for name in dir(accel.utils):
        if name.startswith("is_") and name.endswith("_available"):
            assert getattr(accel.utils, name)() in (True, False)


def test_the_names_of_utils_exist() -> None:
    from accel import utils

    for name in utils.__all__:
        assert getattr(utils, name) is not None
