"""The other commands: help, the rank table of a dry run, status, configuration and its
origins; and acceld by itself."""

from __future__ import annotations

import json
import os
import shutil
import socket
import struct
import subprocess
from pathlib import Path
from typing import Any

import pytest

from cluster import Cluster, eventually

LAUNCH_OPTIONS = (
    "--num-processes",
    "--cpu",
    "--mixed-precision",
    "--env",
    "--log-dir",
    "--master-port",
    "--grace",
    "--python",
    "--config",
    "--dry-run",
    "--no-python",
)


# --- help -----------------------------------------------------------------------------


def test_help_names_every_command(cluster: Cluster) -> None:
    r = cluster.run_accel("--help")
    assert (r.code, r.err) == (0, b"")
    for command in ("launch", "config", "status"):
        assert command in r.text


def test_help_of_launch_names_every_option(cluster: Cluster) -> None:
    r = cluster.launch("--help")
    assert r.code == 0
    for option in LAUNCH_OPTIONS:
        assert option in r.text
    assert all(len(line) <= 100 for line in r.lines)


def test_version_is_one_line(cluster: Cluster) -> None:
    r = cluster.run_accel("--version")
    assert r.code == 0 and len(r.lines) == 1 and "accel" in r.text


def test_accel_alone_shows_how_it_is_used(cluster: Cluster) -> None:
    r = cluster.run_accel()
    assert r.code == 2
    assert "launch" in r.text + r.talk


# --- dry run --------------------------------------------------------------------------


def test_dry_run_shows_ranks_and_variables_and_starts_nothing(cluster: Cluster) -> None:
    mark = cluster.files / "ran"
    r = cluster.launch(
        "-n", "3", "--dry-run", "--mixed-precision", "bf16", cluster.worker, "env", mark
    )
    assert r.code == 0, r.talk
    assert not list(cluster.files.iterdir())
    assert not cluster.job_folders()
    for name in (
        "RANK",
        "WORLD_SIZE",
        "LOCAL_RANK",
        "MASTER_ADDR",
        "OMP_NUM_THREADS",
        "ACCELERATE_MIXED_PRECISION",
        "ACCELERATE_USE_CPU",
    ):
        assert name in r.text, name
    assert "bf16" in r.text
    assert str(cluster.worker) in r.text


def test_dry_run_shows_no_secret(cluster: Cluster) -> None:
    r = cluster.launch(
        "-n",
        "2",
        "--dry-run",
        "--env",
        "API_TOKEN=s3cr3t",
        cluster.worker,
        env={"OTHER_SECRET": "hidden-value"},
    )
    assert r.code == 0, r.talk
    assert "s3cr3t" not in r.text + r.talk
    assert "hidden-value" not in r.text + r.talk


def test_dry_run_refuses_what_a_run_refuses(cluster: Cluster) -> None:
    assert cluster.launch("--dry-run", "absent.py").code == 2


def test_verbose_says_more_on_standard_error(cluster: Cluster) -> None:
    r = cluster.launch("-v", "-n", "2", cluster.worker, "out", "x")
    assert r.code == 0 and sorted(r.lines) == ["[0] x", "[1] x"]
    assert len(r.talk.splitlines()) >= 1
    assert r.jobdir and r.jobdir.name in r.talk


# --- status ---------------------------------------------------------------------------


def own_jobs(cluster: Cluster) -> list[dict[str, Any]]:
    """Jobs of this test: the same user may have others, which are listed too."""
    r = cluster.run_accel("status", "--json")
    assert r.code == 0, r.talk
    names = {folder.name for folder in cluster.job_folders()}
    return [job for job in json.loads(r.text) if job["job"] in names]


def test_status_lists_running_jobs_and_none_after(cluster: Cluster) -> None:
    ready, go = cluster.fifo(), cluster.fifo("go")
    job = cluster.start("-n", "2", cluster.worker, "ready", ready, "wait", go)
    ready.take(2)
    assert job.jobdir
    r = cluster.run_accel("status")
    assert r.code == 0 and job.jobdir.name in r.text
    go.release(2)
    assert job.wait().code == 0
    after = cluster.run_accel("status")
    assert after.code == 0 and job.jobdir.name not in after.text


def test_status_as_json_tells_jobs_and_workers(cluster: Cluster) -> None:
    ready, go = cluster.fifo(), cluster.fifo("go")
    job = cluster.start("-n", "3", cluster.worker, "ready", ready, "wait", go)
    ready.take(3)
    (shown,) = own_jobs(cluster)
    assert (shown["num_processes"], shown["running"], shown["attempt"]) == (3, 3, 0)
    assert shown["job_dir"] == str(job.jobdir)
    go.release(3)
    assert job.wait().code == 0
    assert own_jobs(cluster) == []


def test_status_shows_two_jobs_at_once(cluster: Cluster) -> None:
    ready, go = cluster.fifo(), cluster.fifo("go")
    jobs = [cluster.start(cluster.worker, "ready", ready, "wait", go) for _ in range(2)]
    ready.take(2)
    assert len(own_jobs(cluster)) == 2
    go.release(2)
    assert [job.wait().code for job in jobs] == [0, 0]


def test_status_does_not_disturb_a_job(cluster: Cluster) -> None:
    ready, go = cluster.fifo(), cluster.fifo("go")
    job = cluster.start("-n", "2", cluster.worker, "ready", ready, "wait", go, "out", "done")
    ready.take(2)
    for _ in range(20):
        assert cluster.run_accel("status").code == 0
    go.release(2)
    assert job.wait().lines and job.proc.returncode == 0


def test_status_passes_over_a_stale_socket_and_removes_it(cluster: Cluster) -> None:
    folder = cluster.run / "accel"
    folder.mkdir(mode=0o700)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as dead:
        dead.bind(str(folder / "dead.sock"))
    r = cluster.run_accel("status")
    assert r.code == 0 and "dead" not in r.text + r.talk
    assert not (folder / "dead.sock").exists()


# --- configuration --------------------------------------------------------------------


def test_config_show_tells_where_each_value_comes_from(cluster: Cluster) -> None:
    path = cluster.write("c.yaml", "num_processes: 3\nmixed_precision: no\ngrace: 20 s\n")
    r = cluster.run_accel(
        "config", "show", "--origin", "--config", path, env={"ACCEL_MIXED_PRECISION": "bf16"}
    )
    assert r.code == 0, r.talk
    row = {line.split()[0]: line for line in r.lines if line.split()}
    assert "3" in row["num_processes"] and "c.yaml:1" in row["num_processes"]
    assert "bf16" in row["mixed_precision"] and "ACCEL_MIXED_PRECISION" in row["mixed_precision"]
    assert "20" in row["grace"] and "c.yaml:3" in row["grace"]
    assert "default" in row["master_port"] or "not set" in row["master_port"]


def test_a_flag_wins_over_variable_file_and_default(cluster: Cluster) -> None:
    path = cluster.write("c.yaml", "num_processes: 4\n")
    count = [cluster.worker, "out", "x"]
    variable = {"ACCEL_NUM_PROCESSES": "3"}
    assert len(cluster.launch("--config", path, *count).lines) == 4
    assert len(cluster.launch("--config", path, *count, env=variable).lines) == 3
    assert len(cluster.launch("--config", path, "-n", "2", *count, env=variable).lines) == 2
    assert len(cluster.launch(*count).lines) == 1


def test_a_file_in_the_working_folder_is_read(cluster: Cluster) -> None:
    cluster.write(cluster.cwd / "accel.yaml", "num_processes: 2\nenv:\n  GREETING: hello\n")
    out = cluster.files / "env"
    r = cluster.launch(cluster.worker, "env", out)
    assert r.code == 0, r.talk
    assert b"GREETING=hello" in Path(f"{out}.1").read_bytes().split(b"\0")


@pytest.mark.parametrize("word", ["no", "No", "NO", "off", "'no'", '"no"', "no # comment"])
def test_no_is_a_precision_however_yaml_reads_it(cluster: Cluster, word: str) -> None:
    path = cluster.write("c.yaml", f"mixed_precision: {word}\n")
    out = cluster.files / "env"
    r = cluster.launch("--config", path, cluster.worker, "env", out)
    assert r.code == 0, r.talk
    assert b"ACCEL_MIXED_PRECISION=no" in Path(f"{out}.0").read_bytes().split(b"\0")


@pytest.mark.parametrize(
    "text", ["", "# nothing\n", "---\n", "\ufeffnum_processes: 1\n", "num_processes: 1\r\n", "{}\n"]
)
def test_an_odd_but_valid_file_loads(cluster: Cluster, text: str) -> None:
    r = cluster.launch("--config", cluster.write("c.yaml", text), cluster.worker, "out", "x")
    assert (r.code, r.text) == (0, "x\n"), r.talk


# --- acceld by itself -----------------------------------------------------------------


def test_acceld_is_static(build: Path) -> None:
    """No program header asks for a loader."""
    image = (build / "acceld").read_bytes()
    assert image[:5] == b"\x7fELF\x02"
    offset, size, count = struct.unpack_from("<Q", image, 32) + struct.unpack_from("<HH", image, 54)
    kinds = [struct.unpack_from("<I", image, offset + i * size)[0] for i in range(count)]
    pt_load, pt_interp = 1, 3
    assert pt_load in kinds and pt_interp not in kinds


def test_acceld_alone_says_what_it_is_for(cluster: Cluster) -> None:
    r = subprocess.run(
        [cluster.acceld],
        env=cluster.environment(),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        timeout=10,
        check=False,
    )
    assert r.returncode == 2
    assert b"accel launch" in r.stderr


def test_a_job_runs_with_acceld_in_an_empty_chroot(cluster: Cluster) -> None:
    """accel finds, as its acceld, a script that enters the chroot first: the plan, the
    output and the verdict then cross the socketpair as always."""
    if os.geteuid() != 0:
        pytest.skip("chroot needs root")
    folder = cluster.install()
    jail = cluster.root / "jail"
    inside = jail / str(cluster.worker.parent).lstrip("/")
    inside.mkdir(parents=True)
    for program in (cluster.acceld, cluster.worker):
        shutil.copy(program, inside / program.name)
    version = ["chroot", str(jail), str(cluster.acceld), "--version"]
    assert subprocess.run(version, capture_output=True, timeout=10, check=True).stdout

    (jail / str(cluster.cwd).lstrip("/")).mkdir(parents=True)
    cluster.acceld.write_text(
        # accel has made these folders for the job, and the same must be inside.
        f"#!/bin/sh\nset -e\n"
        f"for folder in {cluster.state}/accel/jobs/* {cluster.run}/accel; do\n"
        f'\tmkdir -p -m 700 "{jail}$folder"\n'
        f'done\nexec chroot {jail} {folder}/acceld "$@"\n'
    )
    r = cluster.launch(cluster.worker, "out", "from the jail", "err", "and its edge")
    assert (r.code, r.text) == (0, "from the jail\n"), r.talk
    assert "and its edge" in r.talk
    kept = list(jail.rglob("0-0.out"))
    assert [p.read_text() for p in kept] == ["from the jail\n"]


def test_accel_finds_acceld_beside_itself_and_through_a_link(cluster: Cluster) -> None:
    folder = cluster.install()
    assert cluster.launch(cluster.worker, "out", "x").text == "x\n"
    link = cluster.files / "accel"
    link.symlink_to(folder / "accel")
    assert cluster.launch(cluster.worker, "out", "y", accel=link).text == "y\n"


def test_a_missing_acceld_is_said(cluster: Cluster) -> None:
    folder = cluster.install()
    (folder / "acceld").unlink()
    r = cluster.launch("true")
    assert r.code != 0 and "acceld" in r.talk
    assert len(r.talk.splitlines()) <= 3


def test_the_keeper_waits_and_the_daemon_works(cluster: Cluster) -> None:
    ready, go = cluster.fifo(), cluster.fifo("go")
    job = cluster.start("-n", "2", cluster.worker, "ready", ready, "wait", go)
    pids = {int(words[2]) for words in ready.take(2)}
    assert set(job.workers) == pids
    assert eventually(lambda: len(os.listdir(f"/proc/{job.daemon}/task")) == 1), "one thread"
    go.release(2)
    assert job.wait().code == 0
