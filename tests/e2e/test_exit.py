"""How a job ends: whose exit status it takes, what the last words on the screen say, and
what Ctrl-C and SIGTERM do."""

from __future__ import annotations

import re
import signal
import sys

import pytest

from cluster import Cluster, alive, eventually


def test_a_job_whose_workers_succeed_ends_with_zero(cluster: Cluster) -> None:
    assert cluster.launch("-n", "3", "true").code == 0


@pytest.mark.parametrize("code", [1, 2, 3, 4, 70, 77, 126, 127, 255])
def test_the_exit_code_of_the_failing_worker_is_ours(cluster: Cluster, code: int) -> None:
    r = cluster.launch("-n", "2", cluster.worker, "if", "1", "exit", str(code), "pause")
    assert r.code == code
    assert r.seconds < 10, "the other worker has not heard the SIGTERM"
    assert "rank 1" in r.talk
    assert str(code) in r.talk


@pytest.mark.parametrize("name", ["SIGSEGV", "SIGKILL", "SIGABRT", "SIGTERM", "SIGINT"])
def test_a_signal_that_ends_a_worker_gives_128_and_is_named(cluster: Cluster, name: str) -> None:
    number = int(signal.Signals[name])
    r = cluster.launch("-n", "2", cluster.worker, "if", "0", "raise", str(number), "pause")
    assert r.code == 128 + number
    assert "rank 0" in r.talk and name in r.talk


def test_the_first_failure_counts_not_the_later_ones(cluster: Cluster) -> None:
    go = cluster.fifo("go")
    ready = cluster.fifo()
    job = cluster.start(
        "-n",
        "4",
        cluster.worker,
        "if",
        "2",
        "wait",
        go,
        "if",
        "2",
        "exit",
        "5",
        "term-exits",
        "9",
        "ready",
        ready,
        "pause",
    )
    ready.take(3)
    go.release()
    r = job.wait()
    assert r.code == 5
    last = r.talk[-2000:]
    assert "rank 2" in last and "rank 3 " not in last


def test_the_last_words_say_which_rank_how_and_its_last_lines(cluster: Cluster) -> None:
    r = cluster.launch(
        "-n",
        "2",
        cluster.worker,
        "if",
        "1",
        "err",
        "first words",
        "if",
        "1",
        "err",
        "last words",
        "if",
        "1",
        "exit",
        "3",
        "pause",
    )
    assert r.code == 3
    live, _, block = r.talk.partition("accel: ")
    assert "[1] last words" in live
    assert "rank 1" in block and re.search(r"(code|status) 3", block), block
    assert "last words" in block
    assert r.jobdir and r.jobdir.name in block, "it says where the logs are"


def test_a_python_traceback_is_in_the_last_words(cluster: Cluster) -> None:
    script = cluster.write(
        "t.py",
        "import os, time\nif os.environ['RANK'] == '0':\n"
        "    raise ValueError('no such luck')\ntime.sleep(60)\n",
    )
    r = cluster.launch("-n", "2", script)
    assert r.code == 1
    assert "ValueError: no such luck" in r.talk.partition("accel: ")[2]


def test_a_single_process_is_named_in_the_last_words_too(cluster: Cluster) -> None:
    r = cluster.launch(cluster.worker, "exit", "3")
    assert r.code == 3
    assert "accel: " in r.talk and "3" in r.talk


def test_a_worker_that_ends_well_early_does_not_end_the_others(cluster: Cluster) -> None:
    go = cluster.fifo("go")
    ready = cluster.fifo()
    job = cluster.start(
        "-n", "2", cluster.worker, "if", "1", "exit", "0", "ready", ready, "wait", go, "out", "done"
    )
    ready.take(1)
    assert eventually(lambda: len(job.workers) == 1)
    go.release()
    r = job.wait()
    assert (r.code, r.lines) == (0, ["[0] done"])


def test_a_program_whose_interpreter_is_missing_gives_127(cluster: Cluster) -> None:
    script = cluster.write("go", "#!/nonexistent/interpreter\n", 0o755)
    r = cluster.launch("-n", "2", script)
    assert r.code == 127
    assert str(script) in r.talk


def test_a_program_that_cannot_be_executed_gives_126(cluster: Cluster) -> None:
    script = cluster.write("go", b"\x7fELF but not really", 0o755)
    r = cluster.launch("-n", "2", script)
    assert r.code == 126
    assert str(script) in r.talk and "xec" in r.talk


# --- stopping the others --------------------------------------------------------------


def test_the_others_are_asked_before_they_are_killed(cluster: Cluster) -> None:
    ready, go = cluster.fifo(), cluster.fifo("go")
    job = cluster.start(
        "-n",
        "3",
        cluster.worker,
        "if",
        "0",
        "wait",
        go,
        "if",
        "0",
        "exit",
        "3",
        "term-says",
        ready,
        "term-exits",
        "0",
        "ready",
        ready,
        "pause",
    )
    ready.take(2, "ready")
    go.release()
    assert {words[1] for words in ready.take(2, "term")} == {"1", "2"}
    r = job.wait()
    assert r.code == 3
    assert r.seconds < 5, "nobody waits for the end of the grace"


def test_workers_deaf_to_sigterm_are_killed_after_the_grace(cluster: Cluster) -> None:
    ready, go = cluster.fifo(), cluster.fifo("go")
    job = cluster.start(
        "-n",
        "2",
        "--grace",
        "400ms",
        cluster.worker,
        "if",
        "0",
        "wait",
        go,
        "if",
        "0",
        "exit",
        "3",
        "ignore",
        "15",
        "daemon",
        ready,
        "ready",
        ready,
        "pause",
    )
    ready.take(1, "ready")
    pids = [int(words[2]) for words in ready.take(1, "child")]
    go.release()
    r = job.wait()
    assert r.code == 3
    assert 0.35 < r.seconds < 5
    assert eventually(lambda: not any(alive(p) for p in pids))


def test_a_worker_that_has_just_started_hears_the_sigterm(cluster: Cluster) -> None:
    """The signal may come between fork and exec, when it is easily lost."""
    for _ in range(20):
        r = cluster.launch("-n", "4", cluster.worker, "if", "0", "exit", "3", "pause")
        assert (r.code, r.seconds < 10) == (3, True), r.talk


def test_no_grace_means_no_wait(cluster: Cluster) -> None:
    ready, go = cluster.fifo(), cluster.fifo("go")
    job = cluster.start(
        "-n",
        "2",
        "--grace",
        "0",
        cluster.worker,
        "if",
        "0",
        "wait",
        go,
        "if",
        "0",
        "exit",
        "3",
        "ignore",
        "15",
        "ready",
        ready,
        "pause",
    )
    ready.take(1)
    go.release()
    r = job.wait()
    assert r.code == 3 and r.seconds < 3


def test_a_stopped_worker_is_ended_too(cluster: Cluster) -> None:
    """SIGSTOP holds a worker's SIGTERM back; the grace ends it."""
    ready, go = cluster.fifo(), cluster.fifo("go")
    job = cluster.start(
        "-n",
        "2",
        "--grace",
        "300ms",
        cluster.worker,
        "if",
        "0",
        "wait",
        go,
        "if",
        "0",
        "exit",
        "3",
        "ready",
        ready,
        "raise",
        "19",
        "pause",
    )
    ready.take(1)
    go.release()
    assert job.wait().code == 3


def test_children_left_by_workers_that_succeeded_are_ended(cluster: Cluster) -> None:
    ready, go = cluster.fifo(), cluster.fifo("go")
    family = ["child", ready, "setsid-child", ready, "daemon", ready]
    job = cluster.start("-n", "2", "--grace", "300ms", cluster.worker, *family, "wait", go)
    pids = [int(words[2]) for words in ready.take(6, "child")]
    go.release(2)
    assert job.wait().code == 0
    assert eventually(lambda: not any(alive(p) for p in pids))


# --- Ctrl-C and SIGTERM ---------------------------------------------------------------


def test_ctrl_c_stops_in_order_and_gives_130(cluster: Cluster) -> None:
    ready = cluster.fifo()
    job = cluster.start(
        "-n",
        "2",
        cluster.worker,
        "term-says",
        ready,
        "term-exits",
        "0",
        "ready",
        ready,
        "pause",
        tty=True,
    )
    ready.take(2, "ready")
    job.keys(b"\x03")
    ready.take(2, "term")
    assert job.wait().code == 130


def test_a_worker_may_finish_its_work_after_ctrl_c(cluster: Cluster) -> None:
    ready, go = cluster.fifo(), cluster.fifo("go")
    job = cluster.start(
        cluster.worker, "term-says", ready, "ready", ready, "wait", go, "out", "saved", tty=True
    )
    ready.take(1, "ready")
    job.keys(b"\x03")
    ready.take(1, "term")
    go.release()
    r = job.wait()
    assert r.code == 130
    assert "saved" in r.text


def test_ctrl_c_twice_stops_at_once(cluster: Cluster) -> None:
    ready = cluster.fifo()
    job = cluster.start(
        "-n",
        "2",
        "--grace",
        "60",
        cluster.worker,
        "term-says",
        ready,
        "daemon",
        ready,
        "ready",
        ready,
        "pause",
        tty=True,
    )
    ready.take(2, "ready")
    job.keys(b"\x03")
    ready.take(2, "term")
    job.keys(b"\x03")
    r = job.wait(10)
    assert r.code == 130 and r.seconds < 8


def test_a_closed_terminal_ends_the_job(cluster: Cluster) -> None:
    ready = cluster.fifo()
    job = cluster.start(
        "-n",
        "2",
        "--grace",
        "300ms",
        cluster.worker,
        "daemon",
        ready,
        "ready",
        ready,
        "pause",
        tty=True,
        hold=True,
    )
    pids = [int(words[2]) for words in ready.take(4)]
    job.hang_up()
    assert job.wait(10).code == 128 + signal.SIGHUP
    assert eventually(lambda: not any(alive(p) for p in pids))


@pytest.mark.parametrize(("signo", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_to_accel_stops_the_job_in_order(cluster: Cluster, signo: int, code: int) -> None:
    ready = cluster.fifo()
    job = cluster.start(
        "-n", "2", cluster.worker, "term-says", ready, "term-exits", "0", "ready", ready, "pause"
    )
    ready.take(2, "ready")
    job.signal(signo)
    ready.take(2, "term")
    r = job.wait()
    assert r.code == code
    assert r.report, "a stopped job has its report"


def test_sigterm_during_the_start_is_not_lost(cluster: Cluster) -> None:
    ready = cluster.fifo()
    job = cluster.start("-n", "32", cluster.worker, "ready", ready, "pause")
    ready.take(1)
    job.signal(signal.SIGTERM)
    r = job.wait()
    assert r.code == 143
    assert r.seconds < 10, "a worker has not heard the SIGTERM"


def test_ignored_hangup_stays_ignored(cluster: Cluster) -> None:
    ready, go = cluster.fifo(), cluster.fifo("go")
    job = cluster.start(
        cluster.worker,
        "ready",
        ready,
        "wait",
        go,
        "out",
        "alive",
        prefix=["sh", "-c", "trap '' HUP; exec \"$@\"", "sh"],
    )
    ready.take(1)
    job.signal(signal.SIGHUP)
    go.release()
    r = job.wait()
    assert (r.code, r.text) == (0, "alive\n")


COUNT_SIGINTS = """
import signal, sys, time
n = 0
def on_sigint(*_):
    global n
    n += 1
signal.signal(signal.SIGINT, on_sigint)
open(sys.argv[1], "w").write("ready\\n")
while not n:
    signal.pause()
end = time.monotonic() + 0.2
while time.monotonic() < end:
    time.sleep(0.01)
print("SIGINTs:", n)
"""


def test_ctrl_c_reaches_the_program_once(cluster: Cluster) -> None:
    ready = cluster.fifo()
    script = cluster.write(cluster.files / "count.py", COUNT_SIGINTS)
    job = cluster.start("--python", sys.executable, script, ready)
    ready.take(1)
    job.signal(signal.SIGINT)
    assert job.wait().text == "SIGINTs: 1\n"


@pytest.mark.parametrize(
    "written",
    ['{"message": {"message": "ValueError: bad sample"}}', '{"message": "ValueError: bad sample"}'],
    ids=["nested", "flat"],
)
def test_what_a_program_says_went_wrong_is_passed_on(cluster: Cluster, written: str) -> None:
    r = cluster.launch(
        "-n",
        "2",
        "sh",
        "-c",
        f"[ $RANK = 1 ] || exec sleep 60; echo '{written}' >\"$TORCHELASTIC_ERROR_FILE\"; exit 5",
    )
    assert r.code == 5
    assert "ValueError: bad sample" in r.talk
    assert r.report["first_failure"]["message"] == "ValueError: bad sample"


@pytest.mark.parametrize("printed", ["ValueError: bad sample", "something else"])
def test_what_was_printed_as_well_as_reported_is_shown_once(cluster: Cluster, printed: str) -> None:
    report = '{"message": "Traceback\\nValueError: bad sample"}'
    r = cluster.launch(
        "-n",
        "2",
        "sh",
        "-c",
        f"[ $RANK = 1 ] || exec sleep 60; printf %s '{report}' >\"$TORCHELASTIC_ERROR_FILE\"; "
        f"echo '{printed}' >&2; exit 5",
    )
    assert "  | ValueError: bad sample" in r.talk
    assert ("its last lines" in r.talk) == (printed == "something else")


def test_a_failure_that_hangs_in_its_exit_is_still_the_first(cluster: Cluster) -> None:
    """Rank 0 fails and is slow to leave; rank 1 fails because of that, and is quick."""
    ready = cluster.fifo()
    r = cluster.launch(
        "-n",
        "2",
        "sh",
        "-c",
        'if [ $RANK = 0 ]; then echo \'{"message": "the cause"}\' >"$TORCHELASTIC_ERROR_FILE"; '
        f"echo x >{ready}; exec sleep 60; fi; read _ <{ready}; sleep 0.3; exit 7",
    )
    assert r.report["first_failure"]["rank"] == 0
    assert r.code == 1
    assert "the cause" in r.talk
