"""Wrong use and wrong circumstances: one clear sentence, an exit status that says which
kind, nothing started and nothing left behind."""

from __future__ import annotations

import os
import re
import socket

import pytest

from cluster import Cluster, Result


def refused(r: Result, code: int, *words: str) -> None:
    """One sentence (and perhaps what to do) on stderr, that names the thing."""
    assert r.code == code, r.talk
    assert r.out == b""
    assert r.talk.startswith("accel"), r.talk
    assert len(r.talk.splitlines()) <= 3, r.talk
    for word in words:
        assert word in r.talk, r.talk
    assert r.jobdir is None, "a job was made"


# --- PROGRAM --------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["absent.py", "absent", "./absent", "no/such/absent.py"])
def test_a_missing_program_is_refused(cluster: Cluster, name: str) -> None:
    refused(cluster.launch("-n", "2", name), 2, name)


@pytest.mark.parametrize("name", ["place.py", "place"])
def test_a_folder_as_program_is_refused(cluster: Cluster, name: str) -> None:
    (cluster.files / name).mkdir()
    refused(cluster.launch(cluster.files / name), 2, name, "folder")


def test_an_unreadable_python_file_is_refused(cluster: Cluster) -> None:
    script = cluster.write("t.py", "print(1)\n", 0o000)
    refused(cluster.launch(script, prefix=cluster.as_nobody()), 2, "t.py", "ermission")


def test_a_program_without_execute_permission_is_refused(cluster: Cluster) -> None:
    tool = cluster.write("tool", "echo x\n", 0o644)
    refused(cluster.launch(tool), 2, "tool", "executable")


def test_no_program_at_all_is_refused(cluster: Cluster) -> None:
    refused(cluster.launch("-n", "2"), 2)
    refused(cluster.launch(), 2)
    refused(cluster.launch("-m"), 2)


def test_an_empty_program_is_refused(cluster: Cluster) -> None:
    refused(cluster.launch(""), 2)


@pytest.mark.parametrize("python", ["/nonexistent/python", "no-such-python"])
def test_an_interpreter_that_does_not_exist_is_refused(cluster: Cluster, python: str) -> None:
    script = cluster.write("t.py", "print(1)\n")
    refused(cluster.launch("--python", python, script), 2, python)


def test_no_python_in_the_path_is_said(cluster: Cluster) -> None:
    script = cluster.write("t.py", "print(1)\n")
    r = cluster.launch(script, env={"PATH": str(cluster.files)})
    refused(r, 2, "python3")


# --- options --------------------------------------------------------------------------


@pytest.mark.parametrize(
    "n", ["0", "-1", "1e3", "", "two", "2.0", "99999999999999999999", "٣", "0x2", " 2"]
)
def test_a_process_count_that_is_none_is_refused(cluster: Cluster, n: str) -> None:
    refused(cluster.launch("-n", n, "true"), 2, "num-processes")


def test_an_unknown_option_names_the_nearest(cluster: Cluster) -> None:
    refused(cluster.launch("--num-proceses", "2", "true"), 2, "--num-proceses", "--num-processes")
    refused(cluster.launch("--mixed-precison=fp16", "true"), 2, "--mixed-precision")


def test_an_unknown_option_far_from_all_is_refused_without_a_guess(cluster: Cluster) -> None:
    r = cluster.launch("--zzzzzzzzzz", "true")
    refused(r, 2, "--zzzzzzzzzz")
    assert "mean" not in r.talk


def test_an_unknown_command_names_the_nearest(cluster: Cluster) -> None:
    refused(cluster.run_accel("lanch", "true"), 2, "lanch", "launch")


def test_a_missing_value_is_refused(cluster: Cluster) -> None:
    refused(cluster.launch("--log-dir"), 2, "--log-dir")


@pytest.mark.parametrize(
    ("options", "word"),
    [
        (["--mixed-precision", "fp17"], "bf16"),
        (["--master-port", "66660"], "master-port"),
        (["--master-port", "-1"], "master-port"),
        (["--master-port", "http"], "master-port"),
        (["--grace", "soon"], "grace"),
        (["--grace", "-1"], "grace"),
        (["--env", "NOVALUE"], "NOVALUE"),
        (["--env", "=x"], "env"),
        (["--cpu=maybe"], "cpu"),
    ],
)
def test_a_value_that_is_not_allowed_is_refused(
    cluster: Cluster, options: list[str], word: str
) -> None:
    refused(cluster.launch(*options, "true"), 2, word)


def test_aliases_of_other_launchers_are_accepted(cluster: Cluster) -> None:
    for option in ("--nproc-per-node", "--num_processes", "--nproc_per_node", "--num-processes"):
        r = cluster.launch(option, "2", cluster.worker, "out", "x")
        assert sorted(r.lines) == ["[0] x", "[1] x"], r.talk
        assert len(cluster.launch(f"{option}=3", cluster.worker, "out", "x").lines) == 3


# --- configuration --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("num_processes: [\n", ":"),
        ("num_processes: two\n", ":1"),
        ("\n\nmixed_precision: fp17\n", ":3"),
        ("\tnum_processes: 2\n", ":1"),
        ("- a\n- list\n", ":"),
        ("num_processes: 0\n", ":1"),
        ("grace: {a: 1}\n", ":1"),
    ],
)
def test_a_broken_configuration_file_gives_3_and_the_line(
    cluster: Cluster, text: str, place: str
) -> None:
    path = cluster.write("c.yaml", text)
    refused(cluster.launch("--config", path, "true"), 3, f"c.yaml{place}")


def test_a_configuration_file_that_is_missing_gives_3(cluster: Cluster) -> None:
    path = cluster.files / "nope.yaml"
    refused(cluster.launch("--config", path, "true"), 3, "nope.yaml")
    refused(cluster.launch("true", env={"ACCEL_CONFIG": str(path)}), 3, "nope.yaml")


def test_a_folder_as_configuration_file_gives_3(cluster: Cluster) -> None:
    refused(cluster.launch("--config", cluster.files, "true"), 3)


def test_a_bad_variable_gives_3_and_its_name(cluster: Cluster) -> None:
    r = cluster.launch("true", env={"ACCEL_NUM_PROCESSES": "many"})
    refused(r, 3, "ACCEL_NUM_PROCESSES")


def test_an_unknown_key_is_a_warning_with_the_nearest(cluster: Cluster) -> None:
    path = cluster.write("c.yaml", "num_proceses: 2\n")
    r = cluster.launch("--config", path, cluster.worker, "out", "ran")
    assert (r.code, r.text) == (0, "ran\n")
    assert "num_proceses" in r.talk and "num_processes" in r.talk


# --- circumstances --------------------------------------------------------------------


def test_a_log_dir_below_a_file_is_refused(cluster: Cluster) -> None:
    cluster.write("plain", "")
    refused(cluster.launch("--log-dir", cluster.files / "plain" / "x", "true"), 2, "plain")


def test_a_log_dir_that_cannot_be_written_is_refused(cluster: Cluster) -> None:
    prefix = cluster.as_nobody()
    closed = cluster.root / "closed"
    closed.mkdir()
    closed.chmod(0o555)
    if os.geteuid() == 0:
        os.chown(closed, 0, 0)
    r = cluster.launch("--log-dir", closed / "logs", "true", prefix=prefix)
    refused(r, 2, "closed", "ermission")


def test_a_master_port_taken_by_somebody_else_is_refused(cluster: Cluster) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        r = cluster.launch("-n", "2", "--master-port", port, cluster.worker, "out", "x")
    assert r.code == 2, r.talk
    assert r.out == b""
    assert not cluster.job_folders()
    assert port in r.talk and "taken" in r.talk
    assert len(r.talk.splitlines()) <= 3


XDG = ("XDG_STATE_HOME", "XDG_RUNTIME_DIR")


@pytest.mark.leaves("files in the temporary folder")
def test_home_unset_works(cluster: Cluster) -> None:
    prefix = cluster.as_nobody()
    r = cluster.launch("-n", "2", cluster.worker, "out", "x", without=("HOME", *XDG), prefix=prefix)
    assert r.code == 0, r.talk
    assert sorted(r.lines) == ["[0] x", "[1] x"]


@pytest.mark.leaves("files in the temporary folder")
def test_home_missing_works(cluster: Cluster) -> None:
    prefix = cluster.as_nobody()
    r = cluster.launch(
        "-n",
        "2",
        cluster.worker,
        "out",
        "x",
        without=XDG,
        env={"HOME": "/nonexistent"},
        prefix=prefix,
    )
    assert r.code == 0, r.talk
    assert sorted(r.lines) == ["[0] x", "[1] x"]


@pytest.mark.leaves("files in the temporary folder")
def test_home_read_only_works(cluster: Cluster) -> None:
    prefix = cluster.as_nobody()
    cluster.home.chmod(0o555)
    r = cluster.launch("-n", "2", cluster.worker, "out", "x", without=XDG, prefix=prefix)
    assert r.code == 0, r.talk
    assert sorted(r.lines) == ["[0] x", "[1] x"]


@pytest.mark.leaves("files in the temporary folder")
def test_the_logs_of_a_job_without_a_home_are_where_it_says(cluster: Cluster) -> None:
    prefix = cluster.as_nobody()
    r = cluster.launch(cluster.worker, "exit", "3", without=("HOME", *XDG), prefix=prefix)
    assert r.code == 3
    kept = list(cluster.tmp.rglob("report.json"))
    assert len(kept) == 1
    assert str(kept[0].parent) in r.talk
    for folder in [kept[0].parent, *kept[0].parent.parents]:
        if folder == cluster.tmp:
            break
        assert folder.stat().st_mode & 0o077 == 0, folder


def test_a_state_folder_alone_is_enough(cluster: Cluster) -> None:
    r = cluster.launch(cluster.worker, "out", "x", without=("HOME", "LANG", "PATH"))
    assert (r.code, r.text) == (0, "x\n"), r.talk


@pytest.mark.leaves("files in the temporary folder")
def test_a_runtime_folder_too_long_for_a_socket_works(cluster: Cluster) -> None:
    long = cluster.root / ("r" * 120)
    long.mkdir(mode=0o700)
    r = cluster.launch("-n", "2", cluster.worker, "out", "x", env={"XDG_RUNTIME_DIR": str(long)})
    assert r.code == 0, r.talk
    assert not [p for p in cluster.tmp.rglob("*") if not p.is_dir()]


@pytest.mark.leaves("files in the temporary folder")
def test_a_runtime_folder_that_is_missing_works(cluster: Cluster) -> None:
    r = cluster.launch(
        "-n", "2", cluster.worker, "out", "x", env={"XDG_RUNTIME_DIR": "/nonexistent/run"}
    )
    assert r.code == 0, r.talk


def test_a_working_folder_that_cannot_be_written_works(cluster: Cluster) -> None:
    prefix = cluster.as_nobody()
    cluster.cwd.chmod(0o555)
    if os.geteuid() == 0:
        os.chown(cluster.cwd, 0, 0)
    r = cluster.launch(cluster.worker, "out", "x", prefix=prefix)
    assert (r.code, r.text) == (0, "x\n"), r.talk


def test_options_after_the_program_are_the_programs(cluster: Cluster) -> None:
    r = cluster.launch(cluster.worker, "out", "x", "--nope")
    assert r.code == 98, r.talk
    assert "no action '--nope'" in r.talk


def test_no_message_has_a_hole(cluster: Cluster) -> None:
    """Words of a format that was not filled in."""
    for args in (["--nope"], ["-n", "0", "true"], ["absent.py"], ["--grace", "x", "true"]):
        talk = cluster.launch(*args).talk
        assert not re.search(r"\(null\)|%[sdu]|errno", talk), talk
