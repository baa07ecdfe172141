"""What a job prints, and the files it keeps."""

from __future__ import annotations

import hashlib
import os
import re
import stat

from cluster import Cluster, eventually, resident_kb

MEGABYTE = 1 << 20


def binary(n: int) -> bytes:
    """What the worker's action of that name writes."""
    chunk = 65536
    return bytes(
        (i * 167 + (i >> 8) * 13 + at) & 255
        for at in range(0, n, chunk)
        for i in range(min(chunk, n - at))
    )


# --- the screen -----------------------------------------------------------------------


def test_lines_carry_the_rank_in_front(cluster: Cluster) -> None:
    r = cluster.launch(
        "-n",
        "3",
        cluster.worker,
        "if",
        "0",
        "out",
        "zero",
        "if",
        "1",
        "out",
        "one",
        "if",
        "2",
        "out",
        "two",
    )
    assert r.code == 0, r.talk
    assert sorted(r.lines) == ["[0] zero", "[1] one", "[2] two"]


def test_a_single_process_prints_without_a_prefix(cluster: Cluster) -> None:
    r = cluster.launch(cluster.worker, "out", "plain", "err", "talk")
    assert (r.text, r.talk) == ("plain\n", "talk\n")


def test_standard_error_goes_to_standard_error(cluster: Cluster) -> None:
    r = cluster.launch("-n", "2", cluster.worker, "err", "woe", "out", "joy")
    assert sorted(r.lines) == ["[0] joy", "[1] joy"]
    assert sorted(r.talk.splitlines()) == ["[0] woe", "[1] woe"]


def test_a_successful_job_says_nothing_of_its_own(cluster: Cluster) -> None:
    r = cluster.launch("-n", "2", "true")
    assert (r.code, r.out, r.err) == (0, b"", b"")


def test_lines_of_one_rank_stay_in_order_and_whole(cluster: Cluster) -> None:
    r = cluster.launch("-n", "4", cluster.worker, "lines", "500", "1000000")
    for rank in range(4):
        mine = [line for line in r.lines if line.startswith(f"[{rank}] ")]
        assert mine == [f"[{rank}] line {i} of rank {rank}" for i in range(500)]
    assert len(r.lines) == 2000


def test_a_line_appears_while_its_worker_runs(cluster: Cluster) -> None:
    go = cluster.fifo("go")
    job = cluster.start("-n", "2", cluster.worker, "out", "early", "wait", go)
    job.expect(b"[0] early\n")
    job.expect(b"[1] early\n")
    go.release(2)
    assert job.wait().code == 0


def test_half_a_line_is_shown_when_its_worker_ends(cluster: Cluster) -> None:
    r = cluster.launch("-n", "2", cluster.worker, "part", "no newline")
    assert sorted(r.text.split("\n")) == ["", "[0] no newline", "[1] no newline"]
    assert [r.file(k).read_bytes() for k in (0, 1)] == [b"no newline"] * 2


def test_a_prompt_of_a_single_process_appears_before_it_is_answered(cluster: Cluster) -> None:
    go = cluster.fifo("go")
    job = cluster.start(cluster.worker, "part", "name? ", "wait", go)
    job.expect(b"name? ")
    go.release()
    assert job.wait().code == 0


def test_a_worker_on_a_terminal_prints_there(cluster: Cluster) -> None:
    job = cluster.start("-n", "2", cluster.worker, "out", "seen", tty=True)
    r = job.wait()
    assert r.code == 0
    shown = re.sub(r"\x1b\[[0-9;]*m", "", r.text).replace("\r\n", "\n")
    assert sorted(shown.split("\n")) == ["", "[0] seen", "[1] seen"]


def test_no_color_is_respected_on_a_terminal(cluster: Cluster) -> None:
    r = cluster.start(
        "-n", "2", cluster.worker, "out", "seen", tty=True, env={"NO_COLOR": "1"}
    ).wait()
    assert b"\x1b" not in r.out


def test_a_reader_that_goes_away_leaves_nobody_behind(cluster: Cluster) -> None:
    job = cluster.start(
        "-n",
        "2",
        "--grace",
        "300ms",
        cluster.worker,
        "lines",
        "2000",
        "1000000",
        prefix=["sh", "-c", '"$@" | head -n 1', "sh"],
    )
    assert len(job.wait().lines) == 1


def test_output_of_a_grandchild_is_shown_after_its_parent_has_gone(cluster: Cluster) -> None:
    r = cluster.launch(
        "-n",
        "2",
        cluster.worker,
        "if",
        "0",
        "out",
        "parent",
        "if",
        "1",
        "sleep",
        "300",
        "if",
        "0",
        "heir",
        "50",
    )
    assert r.code == 0
    assert "[0] parent" in r.lines


# --- the files ------------------------------------------------------------------------


def test_each_rank_has_its_own_files_byte_for_byte(cluster: Cluster) -> None:
    r = cluster.launch("-n", "2", cluster.worker, "out", "to out", "err", "to err")
    for rank in (0, 1):
        assert r.file(rank).read_bytes() == b"to out\n"
        assert r.file(rank, "err").read_bytes() == b"to err\n"


def test_a_file_exists_only_once_something_was_written(cluster: Cluster) -> None:
    r = cluster.launch("-n", "2", cluster.worker, "if", "0", "err", "x")
    made = sorted(p.name for p in r.file(0).parent.iterdir())
    assert made == ["0-0.err"] if r.file(0).parent.exists() else made == []


def test_folders_and_files_of_a_job_are_private(cluster: Cluster) -> None:
    mask = os.umask(0)
    try:
        r = cluster.launch("-n", "2", cluster.worker, "out", "x")
    finally:
        os.umask(mask)
    assert r.jobdir
    paths = [r.jobdir, *r.jobdir.rglob("*")]
    modes = {str(p): stat.S_IMODE(p.stat().st_mode) for p in paths}
    wanted = {str(p): 0o700 if p.is_dir() else 0o600 for p in paths}
    assert modes == wanted


def test_a_job_keeps_plan_events_and_report(cluster: Cluster) -> None:
    r = cluster.launch("-n", "2", cluster.worker, "out", "x", env={"SECRET_TOKEN": "s3cr3t"})
    assert r.jobdir
    names = {p.name for p in r.jobdir.iterdir()}
    assert {"plan.json", "events.jsonl", "report.json", "attempt-0"} <= names
    assert r.plan and r.report
    assert len(r.events) >= 4, "two workers started and ended"
    for path in r.jobdir.rglob("*"):
        if path.is_file():
            assert b"s3cr3t" not in path.read_bytes(), f"{path} keeps the environment"


def test_a_failed_job_reports_its_verdict(cluster: Cluster) -> None:
    r = cluster.launch("-n", "2", cluster.worker, "if", "1", "exit", "3", "pause")
    assert r.code == 3
    text = (r.jobdir / "report.json").read_text() if r.jobdir else ""
    assert re.search(r'"(exit_)?(code|status)"\s*:\s*3\b', text), text


def test_log_dir_chooses_where_the_job_is_kept(cluster: Cluster) -> None:
    logs = cluster.files / "my logs"
    r = cluster.launch("-n", "2", "--log-dir", logs, cluster.worker, "out", "kept")
    assert r.code == 0, r.talk
    found = sorted(logs.rglob("attempt-0/0-*.out"))
    assert [p.read_bytes() for p in found] == [b"kept\n"] * 2
    assert not cluster.job_folders()


def test_two_jobs_in_one_log_dir_keep_apart(cluster: Cluster) -> None:
    logs = cluster.files / "logs"
    for word in ("first", "second"):
        assert cluster.launch("--log-dir", logs, cluster.worker, "out", word).code == 0
    kept = {p.read_bytes() for p in logs.rglob("0-0.out")}
    assert kept == {b"first\n", b"second\n"}


def test_a_relative_log_dir_counts_from_the_working_folder(cluster: Cluster) -> None:
    r = cluster.launch("--log-dir", "../files/logs", cluster.worker, "out", "x")
    assert r.code == 0, r.talk
    assert list((cluster.files / "logs").rglob("0-0.out"))


# --- a lot of it ----------------------------------------------------------------------


def test_a_hundred_megabytes_without_a_newline_need_no_memory(cluster: Cluster) -> None:
    ready, go = cluster.fifo(), cluster.fifo("go")
    job = cluster.start(
        "-n",
        "2",
        cluster.worker,
        "if",
        "1",
        "wait",
        go,
        "if",
        "0",
        "flood",
        "100",
        "if",
        "0",
        "ready",
        ready,
        "if",
        "0",
        "wait",
        go,
    )
    daemon = job.daemon
    ready.take(1, timeout=60)
    peak = {"acceld": resident_kb(daemon), "accel": resident_kb(job.pid)}
    go.release(2)
    r = job.wait(60)
    assert r.code == 0
    assert all(kb < 16 * 1024 for kb in peak.values()), peak
    want = hashlib.sha256()
    for _ in range(100):
        want.update(b"x" * MEGABYTE)
    with r.file(0).open("rb") as f:
        assert hashlib.file_digest(f, "sha256").hexdigest() == want.hexdigest()


def test_a_hundred_megabytes_of_a_single_process_are_kept_exactly(cluster: Cluster) -> None:
    r = cluster.launch(cluster.worker, "flood", "100", timeout=60)
    assert r.code == 0
    assert r.file(0).stat().st_size == 100 * MEGABYTE


def test_binary_bytes_are_kept_exactly(cluster: Cluster) -> None:
    n = 300_000
    r = cluster.launch("-n", "2", cluster.worker, "binary", str(n))
    assert r.code == 0
    for rank in (0, 1):
        assert r.file(rank).read_bytes() == binary(n)


def test_a_terminal_gets_no_control_bytes(cluster: Cluster) -> None:
    script = cluster.write("t.sh", "#!/bin/sh\nprintf 'a\\000b\\001\\377c\\033[2Jd\\n'\n", 0o755)
    r = cluster.launch("-n", "2", script, tty=True, env={"NO_COLOR": "1"})
    assert r.code == 0
    assert not re.search(rb"[\0\1\x1b]", r.out), r.out
    r.out.decode()
    assert r.file(1).read_bytes() == b"a\0b\x01\xffc\x1b[2Jd\n"


def test_a_letter_split_over_two_writes_is_whole_on_the_screen(cluster: Cluster) -> None:
    go = cluster.fifo("go")
    job = cluster.start(
        "-n", "2", cluster.worker, "part", b"\xe2\x82", "wait", go, "part", b"\xac\n"
    )
    go.release(2)
    r = job.wait()
    assert sorted(r.lines) == ["[0] €", "[1] €"]


def test_ten_thousand_lines_a_second_of_two_ranks_are_all_kept(cluster: Cluster) -> None:
    r = cluster.launch("-n", "2", cluster.worker, "lines", "20000", "10000", timeout=60)
    assert r.code == 0
    for rank in (0, 1):
        want = "".join(f"line {i} of rank {rank}\n" for i in range(20000))
        assert r.file(rank).read_text() == want
    assert r.seconds < 10, "workers are not slowed down"


def test_a_terminal_that_stops_holds_nobody_up(cluster: Cluster) -> None:
    """As under Ctrl-S: the screen may skip, saying so; files and workers go on."""
    ready = cluster.fifo()
    job = cluster.start(
        "-n",
        "2",
        cluster.worker,
        "lines",
        "50000",
        "10000000",
        "ready",
        ready,
        tty=True,
        hold=True,
    )
    ready.take(2)
    job.read_on()
    r = job.wait()
    assert r.code == 0
    for rank in (0, 1):
        want = "".join(f"line {i} of rank {rank}\n" for i in range(50000))
        assert r.file(rank).read_text() == want
    shown = [line for line in r.lines if " of rank " in line]
    skipped = sum(int(n.replace(",", "")) for n in re.findall(r"([\d,]+) lines", r.text))
    assert len(shown) + skipped == 100_000


def test_a_slow_pipe_gets_every_line(cluster: Cluster) -> None:
    go = cluster.fifo("go")
    job = cluster.start(
        "-n", "2", cluster.worker, "lines", "50000", "10000000", "wait", go, hold=True
    )
    folder = eventually(lambda: list(cluster.state.rglob("0-0.out")))
    assert folder
    job.read_on()
    go.release(2)
    r = job.wait()
    assert sorted(r.lines) == sorted(
        f"[{rank}] line {i} of rank {rank}" for rank in (0, 1) for i in range(50000)
    )


def test_eight_processes_start_and_end_within_a_second(cluster: Cluster) -> None:
    assert cluster.launch("-n", "8", "true").seconds < 1.0
