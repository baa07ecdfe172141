"""What ordinary programs use of torch.distributed, over gloo. Runs with every torch from
1.13 on; rank 0 says "all is well" at the end."""

import datetime
import gc
import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

LIMIT = datetime.timedelta(seconds=60)


def reductions(rank: int, world: int) -> None:
    t = torch.full((1000,), float(rank + 1))
    dist.all_reduce(t)
    assert t[0].item() == world * (world + 1) / 2
    parts = [torch.zeros(3) for _ in range(world)]
    dist.all_gather(parts, torch.full((3,), float(rank)))
    assert [p[0].item() for p in parts] == list(range(world))


def objects(rank: int, world: int) -> None:
    got = [None] * world
    dist.all_gather_object(got, {"rank": rank, "text": "x" * 1000})
    assert [g["rank"] for g in got] == list(range(world))
    box = [{"from": 0}] if rank == 0 else [None]
    dist.broadcast_object_list(box, src=0)
    assert box == [{"from": 0}]


def groups(rank: int, world: int) -> None:
    for members in ([0], list(range(world))):
        group = dist.new_group(members, timeout=LIMIT)
        if rank in members:
            t = torch.ones(1)
            dist.all_reduce(t, group=group)
            assert t.item() == len(members)
    dist.barrier()
    dist.monitored_barrier(timeout=LIMIT)


def training(rank: int, world: int) -> None:
    torch.manual_seed(rank)  # different at first: DDP makes them equal
    model = DistributedDataParallel(torch.nn.Linear(4, 2))
    model(torch.full((8, 4), float(rank + 1))).sum().backward()
    mine = torch.cat([p.grad.flatten() for p in model.parameters()])
    theirs = [torch.empty_like(mine) for _ in range(world)]
    dist.all_gather(theirs, mine)
    assert all(torch.equal(mine, t) for t in theirs)
    mean = 8 * sum(r + 1 for r in range(world)) / world
    assert torch.allclose(model.module.weight.grad, torch.full((2, 4), mean))


def main() -> None:
    dist.init_process_group("gloo", timeout=LIMIT)
    rank, world = dist.get_rank(), dist.get_world_size()
    assert (rank, world) == (int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))
    reductions(rank, world)
    objects(rank, world)
    groups(rank, world)
    training(rank, world)
    dist.barrier()
    if rank == 0:
        print("all is well with torch", torch.__version__)
    gc.collect()  # the DDP model, before the group it holds on to
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
