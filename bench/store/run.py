#!/usr/bin/env python3
"""Store operations: accel's store against the libuv server of this interpreter's torch.

One C program makes the load (store_load.c); the servers take turns in every round,
and each figure is the median of all rounds. Server CPU is what the server's
threads ran while the load ran, so it does not depend on who else uses the machine.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
TORCH_SERVER = """
import sys, torch.distributed as dist
store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
print("port", store.port, flush=True)
sys.stdin.read()
"""
MIXES = ("set", "add", "get")
CLIENTS = (1, 16)


@dataclass
class Sample:
    requests_per_s: float
    cpu_us_per_request: float


class Server:
    def __init__(self, name: str, argv: list[str]) -> None:
        self.name = name
        self.process = subprocess.Popen(
            argv,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            # torch's server warns of each write that a client's end cut short
            env={**os.environ, "TORCH_CPP_LOG_LEVEL": "ERROR"},
        )
        assert self.process.stdout
        line = self.process.stdout.readline().split()
        if not line:
            sys.exit(f"{name}: the server did not start")
        self.port = int(line[1])

    def cpu_ns(self) -> int:
        """Time on a core of all its threads."""
        tasks = Path(f"/proc/{self.process.pid}/task")
        return sum(int((t / "schedstat").read_text().split()[0]) for t in tasks.iterdir())

    def stop(self) -> None:
        self.process.communicate(timeout=10)


def load(
    program: Path, server: Server, mix: str, clients: int, ms: int, extra: str | None = None
) -> Sample:
    argv = [str(program), str(server.port), mix, str(clients), str(ms)]
    child = subprocess.Popen(
        argv + ([extra] if extra else []),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert child.stdin and child.stdout
    child.stdout.readline()
    before = server.cpu_ns()
    child.stdin.write("\n")
    child.stdin.flush()
    requests, took = child.stdout.readline().split()
    cpu = server.cpu_ns() - before
    child.communicate("\n", timeout=30)
    return Sample(int(requests) / float(took), cpu / int(requests) / 1000)


def median(samples: list[Sample], field: str) -> float:
    return statistics.median(getattr(s, field) for s in samples)


def compare(
    program: Path, servers: list[Server], rounds: int, ms: int
) -> list[dict[str, object]]:
    """Both servers under every mix and number of clients."""
    rows: list[dict[str, object]] = []
    for mix in MIXES:
        for clients in CLIENTS:
            samples: dict[str, list[Sample]] = {s.name: [] for s in servers}
            for i in range(rounds):
                for s in servers if i % 2 else servers[::-1]:
                    samples[s.name].append(load(program, s, mix, clients, ms))
            row: dict[str, object] = {"mix": mix, "clients": clients}
            for s in servers:
                row[f"{s.name}_requests_per_s"] = median(
                    samples[s.name], "requests_per_s"
                )
                row[f"{s.name}_cpu_us"] = median(samples[s.name], "cpu_us_per_request")
            pairs = list(zip(samples["accel"], samples["torch"], strict=True))
            row["speed_ratio"] = statistics.median(
                a.requests_per_s / t.requests_per_s for a, t in pairs
            )
            row["cpu_ratio"] = statistics.median(
                a.cpu_us_per_request / t.cpu_us_per_request for a, t in pairs
            )
            rows.append(row)
    return rows


def stalled_reader(
    program: Path, server: Server, rounds: int, ms: int
) -> dict[str, object]:
    """What fifteen clients lose when the sixteenth reads nothing it asked for."""
    lost = []
    for i in range(rounds):
        kinds = ("idle", "stalled") if i % 2 else ("stalled", "idle")
        speed = {
            k: load(program, server, "get", 15, ms, k).requests_per_s for k in kinds
        }
        lost.append(1 - speed["stalled"] / speed["idle"])
    return {"server": server.name, "lost": statistics.median(lost)}


def show(rows: list[dict[str, object]], stalled: list[dict[str, object]]) -> None:
    print(
        f"{'mix':4} {'clients':>7} {'torch req/s':>12} {'accel req/s':>12} {'ratio':>6}"
        f" {'torch CPU':>10} {'accel CPU':>10} {'ratio':>6}"
    )
    for r in rows:
        print(
            f"{r['mix']:4} {r['clients']:7} {r['torch_requests_per_s']:12.0f}"
            f" {r['accel_requests_per_s']:12.0f} {r['speed_ratio']:6.2f}"
            f" {r['torch_cpu_us']:7.2f} us {r['accel_cpu_us']:7.2f} us"
            f" {r['cpu_ratio']:6.2f}"
        )
    for s in stalled:
        print(
            f"{s['server']}: one stalled reader costs 15 others {s['lost'] * 100:.1f} %"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--build", type=Path, help="build folder ($ACCEL_BUILD, build)")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--ms", type=int, default=300, help="of each load")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    build = args.build or Path(os.environ.get("ACCEL_BUILD", REPOSITORY / "build"))
    program = build / "bench" / "store" / "store_load"

    torch = Server("torch", [sys.executable, "-c", TORCH_SERVER])
    accel = Server("accel", [str(build / "tests" / "tools" / "store_serve")])
    rows = compare(program, [torch, accel], args.rounds, args.ms)
    stalled = [stalled_reader(program, s, args.rounds, args.ms) for s in (accel, torch)]
    torch.stop()
    accel.stop()
    if args.json:
        print(json.dumps({"operations": rows, "stalled_reader": stalled}, indent=1))
    else:
        show(rows, stalled)


if __name__ == "__main__":
    main()
