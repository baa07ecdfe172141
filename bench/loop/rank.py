"""A training loop and an evaluation's gather: one rank with one library.

    rank.py bare|accel|accelerate

"epoch" answers with the seconds of an epoch, of its steps, and how many there were;
"gather CALLS SAMPLES", not for bare, with seconds for each call.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from time import perf_counter
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import ranks
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

BATCH, STEPS, FEATURES, CLASSES = 64, 100, 64, 10


def accelerator_of(library: str) -> Any:
    """A fresh process has one library only: both wrap functions of torch."""
    if library == "accel":
        from accel import Accelerator
    else:
        from accelerate import Accelerator
    return Accelerator(cpu=True)


class Loop:
    """A small MLP, a shuffling loader, and SGD."""

    def __init__(self, accelerator: Any) -> None:
        torch.manual_seed(1)
        self.model: Any = nn.Sequential(
            nn.Linear(FEATURES, 128), nn.ReLU(), nn.Linear(128, CLASSES)
        )
        self.optimizer: Any = torch.optim.SGD(self.model.parameters(), lr=0.01, momentum=0.9)
        data = TensorDataset(
            torch.randn(STEPS * BATCH, FEATURES), torch.randint(CLASSES, (STEPS * BATCH,))
        )
        self.data: Any = DataLoader(data, batch_size=BATCH, shuffle=True)
        self.backward: Callable[[Tensor], None] = Tensor.backward
        if accelerator:
            self.model, self.optimizer, self.data = accelerator.prepare(
                self.model, self.optimizer, self.data
            )
            self.backward = accelerator.backward
        self.model.train()

    def epoch(self) -> dict[str, Any]:
        stamps = [perf_counter()]
        for source, targets in self.data:
            self.optimizer.zero_grad()
            loss = F.cross_entropy(self.model(source), targets)
            self.backward(loss)
            self.optimizer.step()
            stamps.append(perf_counter())
        return {
            "seconds": perf_counter() - stamps[0],
            "steps": len(stamps) - 1,
            # Not the first, which starts the loader.
            "step": [b - a for a, b in pairwise(stamps[1:])],
        }


def gather(accelerator: Any, calls: str, samples: str) -> list[float]:
    """gather_for_metrics() of a (64, 10) tensor while a loader is in the middle."""
    rows = TensorDataset(torch.randn(4 * BATCH * accelerator.num_processes, CLASSES))
    data = accelerator.prepare(DataLoader(rows, batch_size=BATCH))
    taken: list[float] = []
    for (output,) in data:
        # The first batch is enough, but a loop that is left early stays active in Accelerate.
        while len(taken) < int(samples):
            start = perf_counter()
            for _ in range(int(calls)):
                gathered = accelerator.gather_for_metrics(output)
            taken.append((perf_counter() - start) / int(calls))
            if gathered.shape != (BATCH * accelerator.num_processes, CLASSES):
                sys.exit(f"rank.py: gathered {tuple(gathered.shape)}")
    accelerator.free_memory()
    return taken


def main() -> None:
    torch.set_num_threads(1)
    library = sys.argv[1]
    accelerator = None if library == "bare" else accelerator_of(library)
    loop = Loop(accelerator)
    loop.epoch()
    ranks.serve(
        accelerator.process_index if accelerator else 0,
        {
            "epoch": loop.epoch,
            "gather": lambda calls, samples: gather(accelerator, calls, samples),
        },
    )


if __name__ == "__main__":
    main()
