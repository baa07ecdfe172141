"""Collectives from Python: one rank, which does what run.py asks with accel's World and
with torch.distributed over gloo, both in this process.

    rank.py BYTES

A request is WHAT BYTES CALLS SAMPLES, as collectives_load.c's, and so is the answer:
nanoseconds for each call, one for each sample of CALLS calls. All ranks begin a sample
together.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from time import perf_counter_ns

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import ranks
import torch
import torch.distributed as dist
from accel.world import World, current
from torch import Tensor

SETTLE_NS = 20_000_000


def settle() -> None:
    """Compute for a while, as a training step does. Ranks that were woken up by one
    process may be on one core; the kernel moves them apart when both want to run."""
    end = perf_counter_ns() + SETTLE_NS
    while perf_counter_ns() < end:
        pass


class Load:
    """This rank's data, and what can be done to it."""

    def __init__(self, most_bytes: int) -> None:
        self.world: World = current()
        base = torch.arange(most_bytes // 4, dtype=torch.float32).remainder_(1000).add_(1)
        self.source = base * (self.world.rank + 1)
        self.data = torch.empty_like(self.source)
        # Whole numbers, so that sums are exact.
        self.sum = base.mul_(self.world.size * (self.world.size + 1) // 2)

    def variants(self, tensor: Tensor) -> dict[str, Callable[[], object]]:
        return {
            "accel": partial(self.world.reduce_, tensor, "sum"),
            "gloo": partial(dist.all_reduce, tensor),
            "accel_barrier": self.world.barrier,
            "gloo_barrier": dist.barrier,
            "step": self.world.step,
        }

    def check_sums(self) -> None:
        """A wrong sum is no figure. Also touches all pages."""
        for what in ("accel", "gloo"):
            self.data.copy_(self.source)
            self.variants(self.data)[what]()
            if not torch.equal(self.data, self.sum):
                sys.exit(f"rank.py: {what}: the sum is wrong")
        del self.sum

    def measure(self, what: str, n_bytes: str, calls: str, samples: str) -> list[float]:
        tensor, source = (t[: int(n_bytes) // 4] for t in (self.data, self.source))
        call = self.variants(tensor)[what]
        settle()
        return [self._sample_ns(call, tensor, source, int(calls)) for _ in range(int(samples))]

    def _sample_ns(
        self, call: Callable[[], object], tensor: Tensor, source: Tensor, calls: int
    ) -> float:
        tensor.copy_(source)  # since sums of sums overflow at some time
        self.world.barrier()
        start = perf_counter_ns()
        for _ in range(calls):
            call()
        return (perf_counter_ns() - start) / calls


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    load = Load(int(sys.argv[1]))
    load.check_sums()
    names = load.variants(load.data)
    ranks.serve(load.world.rank, {name: partial(load.measure, name) for name in names})
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
