"""Learn to read handwritten digits, on any number of processes.

Ordinary PyTorch: torch.distributed and DistributedDataParallel, nothing else.

    accel launch -n 2 examples/digits_ddp.py
    torchrun --nproc-per-node 2 examples/digits_ddp.py
    python examples/digits_ddp.py
"""

from __future__ import annotations

import argparse
import gc
import os
import time

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

N_TEST = 360  # of 1797 pictures, never trained on


def load(seed: int) -> tuple[TensorDataset, TensorDataset]:
    """The pictures as (1, 8, 8) floats from 0 to 1, in a shuffled train and test set."""
    digits = load_digits()
    order = torch.randperm(len(digits.target), generator=torch.Generator().manual_seed(seed))
    pictures = (torch.tensor(digits.images, dtype=torch.float32) / 16).unsqueeze(1)[order]
    labels = torch.tensor(digits.target, dtype=torch.int64)[order]
    train = TensorDataset(pictures[N_TEST:], labels[N_TEST:])
    test = TensorDataset(pictures[:N_TEST], labels[:N_TEST])
    return train, test


def build_model() -> nn.Module:
    return nn.Sequential(
        nn.Flatten(),
        nn.Linear(64, 512),
        nn.ReLU(),
        nn.Dropout(0.5),
        nn.Linear(512, 64),
        nn.ReLU(),
        nn.Linear(64, 10),
    )


@torch.no_grad()
def accuracy(model: nn.Module, test: TensorDataset, rank: int, world: int) -> float:
    """Each rank marks its share of the test set; the counts are added up."""
    model.eval()
    pictures, labels = (t[rank::world] for t in test.tensors)
    right = (model(pictures).argmax(1) == labels).sum()
    counts = torch.tensor([right.item(), len(labels)], dtype=torch.float64)
    dist.all_reduce(counts)
    model.train()
    return (counts[0] / counts[1]).item()


def train(args: argparse.Namespace) -> float:
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(args.seed)
    train_set, test_set = load(args.seed)
    sampler = DistributedSampler(train_set, world, rank, shuffle=True, seed=args.seed)
    loader = DataLoader(train_set, batch_size=max(1, args.batch // world), sampler=sampler)
    model = DistributedDataParallel(build_model())
    steps = args.epochs * len(loader)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, args.lr, total_steps=steps)

    for epoch in range(1, args.epochs + 1):
        sampler.set_epoch(epoch)
        total, began = 0.0, time.perf_counter()
        for pictures, labels in loader:
            loss = nn.functional.cross_entropy(model(pictures), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            total += loss.item()
        if epoch % 5 == 0 or epoch == args.epochs:
            spent = time.perf_counter() - began
            print(f"epoch {epoch:2d}  loss {total / len(loader):.4f}  {spent:.2f} s")
    # Without the wrapper, which would synchronise buffers that the test does not change.
    return accuracy(model.module, test_set, rank, world)


def main() -> None:
    parser = argparse.ArgumentParser(description="Handwritten digits with DistributedDataParallel")
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--batch", type=int, default=64, help="pictures per step, over all ranks")
    parser.add_argument("--lr", type=float, default=5e-3)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    alone = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "0"}
    if "RANK" not in os.environ:  # started by hand: a world of one
        os.environ.update(alone)
    dist.init_process_group("gloo")
    began = time.perf_counter()
    score = train(args)
    if dist.get_rank() == 0:
        print(
            f"trained in {time.perf_counter() - began:.1f} s on {dist.get_world_size()} process(es)"
        )
        print(f"accuracy {score:.4f}")
    # A DistributedDataParallel model holds on to the process group, in a cycle of references.
    # Were both only freed as the interpreter goes down, gloo's threads could abort the rank.
    gc.collect()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
