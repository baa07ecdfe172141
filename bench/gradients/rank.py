"""Steps with and without averaging: one rank, with accel and DDP in the same process.

    rank.py MODEL

"steps N" answers with the seconds of N steps of each mode. A step is zero_grad, forward,
backward and averaging; the modes of step i run behind each other in an order that is
shuffled alike on all ranks, each from a barrier on.
"""

from __future__ import annotations

import copy
import random
import sys
from collections.abc import Callable
from pathlib import Path
from time import perf_counter

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import models
import ranks
import torch
from accel import Accelerator
from accel.world import current
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

TOLERANCE = 1e-6  # of a tensor's largest gradient


class Steps:
    """The same model twice, prepared by accel and wrapped by DDP."""

    def __init__(self, name: str) -> None:
        case = models.CASES[name]
        torch.manual_seed(1)
        model = case.build()
        self.accelerator = Accelerator(cpu=True)
        # Through the process group that accel has initialised: gloo.
        self.ddp = DistributedDataParallel(copy.deepcopy(model))
        self.model = self.accelerator.prepare(model)
        self.world = current()
        torch.manual_seed(2 + self.world.rank)
        self.batch = torch.randn(case.shape)
        self.modes: dict[str, Callable[[], None]] = {
            "accel": self._accel,
            "accel no_sync": self._accel_alone,
            "ddp": self._ddp,
            "ddp no_sync": self._ddp_alone,
        }
        self._order = random.Random(3)

    def measure(self, n: str) -> dict[str, list[float]]:
        seconds: dict[str, list[float]] = {mode: [] for mode in self.modes}
        for _ in range(int(n)):
            for mode in self._order.sample(list(self.modes), len(self.modes)):
                self.world.barrier()
                start = perf_counter()
                self.modes[mode]()
                seconds[mode].append(perf_counter() - start)
        return seconds

    def check(self) -> None:
        """Both average to the same, and that differs from this rank's own gradients."""
        self._accel_alone()
        own = self._gradients(self.model)
        self._accel()
        self._ddp()
        pairs = zip(self._gradients(self.model), self._gradients(self.ddp), strict=True)
        if any((a - b).abs().max() > TOLERANCE * b.abs().max() for a, b in pairs):
            sys.exit("rank.py: accel and DDP have different gradients")
        if all(map(torch.equal, own, self._gradients(self.model))):
            sys.exit("rank.py: nothing was averaged")

    @staticmethod
    def _gradients(model: nn.Module) -> list[Tensor]:
        return [p.grad.clone() for p in model.parameters() if p.grad is not None]

    # ---- modes ---------------------------------------------------------------

    def _accel(self) -> None:
        self.model.zero_grad(set_to_none=True)
        self.accelerator.backward(models.loss_of(self.model(self.batch)))

    def _accel_alone(self) -> None:
        with self.accelerator.no_sync(self.model):
            self._accel()

    def _ddp(self) -> None:
        self.ddp.zero_grad(set_to_none=True)
        models.loss_of(self.ddp(self.batch)).backward()

    def _ddp_alone(self) -> None:
        with self.ddp.no_sync():
            self._ddp()


def main() -> None:
    torch.set_num_threads(1)
    steps = Steps(sys.argv[1])
    steps.check()
    steps.measure("3")
    ranks.serve(steps.world.rank, {"steps": steps.measure})


if __name__ == "__main__":
    main()
