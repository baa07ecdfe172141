"""Learn to read handwritten digits: an ordinary PyTorch loop, and five lines of accel.

The same file on one process or many:

    python examples/digits.py
    accel launch -n 2 examples/digits.py
    torchrun --nproc-per-node 2 examples/digits.py

The five lines are marked with (1) to (5).
"""

from __future__ import annotations

import argparse
import time

import numpy as np
import torch
import torch.nn.functional as F
from accel import Accelerator  # (1)
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

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


def main() -> None:
    parser = argparse.ArgumentParser(description="Handwritten digits with accel")
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--batch", type=int, default=64, help="pictures per step, over all ranks")
    parser.add_argument("--lr", type=float, default=5e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--mixed-precision", choices=("no", "fp16", "bf16"))
    parser.add_argument("--cpu", action="store_true", help="also where there are other devices")
    args = parser.parse_args()

    accelerator = Accelerator(cpu=args.cpu, mixed_precision=args.mixed_precision)  # (2)
    torch.manual_seed(args.seed)
    train_set, test_set = load(args.seed)
    share = max(1, args.batch // accelerator.num_processes)
    data = DataLoader(train_set, batch_size=share, shuffle=True)
    eval_dataloader = DataLoader(test_set, batch_size=100)
    model = build_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    steps = args.epochs * len(data)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, args.lr, total_steps=steps)

    model, optimizer, scheduler, data, eval_dataloader = accelerator.prepare(  # (3)
        model, optimizer, scheduler, data, eval_dataloader
    )

    began = time.perf_counter()
    model.train()
    for epoch in range(1, args.epochs + 1):
        total = 0.0
        for source, targets in data:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(source), targets)
            accelerator.backward(loss)  # (4)
            optimizer.step()
            scheduler.step()
            total += loss.item()
        if epoch % 5 == 0 or epoch == args.epochs:
            accelerator.print(f"epoch {epoch:2d}  loss {total / len(data):.4f}")
    spent = time.perf_counter() - began

    model.eval()
    predictions, labels = [], []
    for source, targets in eval_dataloader:
        with torch.no_grad():
            output = model(source)
        predictions.append(accelerator.gather(output).cpu().numpy())  # (5)
        labels.append(accelerator.gather(targets).cpu().numpy())
    predictions = np.concatenate(predictions)[: len(eval_dataloader.dataset)]
    labels = np.concatenate(labels)[: len(eval_dataloader.dataset)]

    accuracy = (predictions.argmax(1) == labels).mean()
    if accelerator.is_main_process:
        print(f"trained in {spent:.1f} s on {accelerator.num_processes} process(es)")
        print(f"accuracy {accuracy:.4f}")


if __name__ == "__main__":
    main()
