"""What PROGRAM may be, which interpreter runs it, and that arguments, environment and
standard input reach it byte for byte."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from cluster import Cluster

SHOW = "import sys; print('ran', __name__, sys.argv[1:])\n"
SPEAK = '#!/bin/sh\necho "{name}:$*"\n'
ODD_ARGUMENTS = [
    b"plain",
    b"two words",
    b"",
    b"'",
    b'"',
    b'it\'s "so"',
    b"new\nline",
    b"tab\t",
    b"*",
    b"$HOME",
    b"`id`",
    b"back\\slash",
    b"a=b",
    b"--",
    b"-n",
    b"9",
    b"--num-processes",
    b"-h",
    b"--help",
    b"--",
    b"-x",
    "é€😀".encode(),
    b"\xff\xfe\x80",
    b"\x01\x7f",
    b" ",
    b"",
]


def fake(folder: Path, name: str, says: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    program = folder / name
    program.write_text(SPEAK.format(name=says))
    program.chmod(0o755)
    return program


# --- forms of PROGRAM -----------------------------------------------------------------


def test_a_python_file_runs_with_its_arguments(cluster: Cluster) -> None:
    r = cluster.launch(cluster.write("t.py", SHOW), "--lr", "3e-4")
    assert (r.code, r.text) == (0, "ran __main__ ['--lr', '3e-4']\n"), r.talk


def test_a_python_file_is_found_in_the_working_folder(cluster: Cluster) -> None:
    cluster.write(cluster.cwd / "t.py", SHOW)
    assert cluster.launch("t.py", "x").text == "ran __main__ ['x']\n"


def test_a_python_file_needs_no_execute_permission(cluster: Cluster) -> None:
    r = cluster.launch(cluster.write("t.py", "#!/nonexistent\n" + SHOW, 0o444))
    assert (r.code, r.text) == (0, "ran __main__ []\n"), r.talk


def test_a_module_runs_by_name(cluster: Cluster) -> None:
    cluster.write(cluster.cwd / "pack" / "__init__.py", "")
    cluster.write(cluster.cwd / "pack" / "inner.py", SHOW)
    r = cluster.launch("-m", "pack.inner", "-m", "y")
    assert (r.code, r.text) == (0, "ran __main__ ['-m', 'y']\n"), r.talk


def test_an_elf_program_runs_without_python(cluster: Cluster) -> None:
    r = cluster.launch(cluster.worker, "out", "hello")
    assert (r.code, r.text) == (0, "hello\n"), r.talk


def test_a_script_with_a_shebang_runs_by_it(cluster: Cluster) -> None:
    r = cluster.launch(cluster.write("go", SPEAK.format(name="sh"), 0o755), "a", "b")
    assert (r.code, r.text) == (0, "sh:a b\n"), r.talk


def test_a_script_without_execute_permission_runs_by_its_shebang(cluster: Cluster) -> None:
    r = cluster.launch(cluster.write("go.sh", SPEAK.format(name="sh"), 0o644), "a b", "")
    assert (r.code, r.text) == (0, "sh:a b \n"), r.talk


def test_no_python_runs_a_python_file_by_its_shebang(cluster: Cluster) -> None:
    script = cluster.write("t.py", SPEAK.format(name="shell"), 0o755)
    r = cluster.launch("--no-python", script, "a")
    assert (r.code, r.text) == (0, "shell:a\n"), r.talk


def test_an_executable_is_found_in_the_path(cluster: Cluster) -> None:
    r = cluster.launch("printf", "%s|", "a", "b c")
    assert (r.code, r.text.strip()) == (0, "a|b c|"), r.talk


def test_an_executable_is_found_in_the_working_folder_when_named_so(cluster: Cluster) -> None:
    fake(cluster.cwd, "go", "here")
    assert cluster.launch("./go", "1").text == "here:1\n"


def test_a_path_with_spaces_is_one_path(cluster: Cluster) -> None:
    script = cluster.write("my scripts/a t.py", SHOW)
    assert cluster.launch(script, "z").text == "ran __main__ ['z']\n"


def test_a_name_with_a_leading_dash_runs_by_its_path(cluster: Cluster) -> None:
    cluster.write(cluster.cwd / "-t.py", SHOW)
    assert cluster.launch("./-t.py", "z").text == "ran __main__ ['z']\n"


def test_two_dashes_end_the_options_of_accel(cluster: Cluster) -> None:
    r = cluster.launch("-n", "1", "--", cluster.write("t.py", SHOW), "--", "-q")
    assert r.text == "ran __main__ ['--', '-q']\n", r.talk


def test_a_symbolic_link_to_a_python_file_runs_as_it(cluster: Cluster) -> None:
    (cluster.files / "link.py").symlink_to(cluster.write("real/t.py", SHOW))
    assert cluster.launch(cluster.files / "link.py").text == "ran __main__ []\n"


def test_a_symbolic_link_to_an_executable_runs_as_it(cluster: Cluster) -> None:
    (cluster.files / "link").symlink_to(cluster.worker)
    assert cluster.launch(cluster.files / "link", "out", "x").text == "x\n"


def test_the_worker_starts_in_the_folder_accel_was_called_in(cluster: Cluster) -> None:
    out = cluster.files / "cwd"
    assert cluster.launch(cluster.worker, "cwd", out).code == 0
    assert Path(f"{out}.0").read_text() == str(cluster.cwd)


# --- the interpreter ------------------------------------------------------------------


def test_python_runs_unbuffered(cluster: Cluster) -> None:
    fake(cluster.files / "p", "python3", "path")
    script = cluster.write("t.py", SHOW)
    r = cluster.launch(script, "a", env={"PATH": f"{cluster.files}/p:/usr/bin:/bin"})
    assert r.text == f"path:-u {script} a\n", r.talk


def test_what_a_killed_rank_printed_is_not_lost(cluster: Cluster) -> None:
    script = cluster.write("t.py", "import os\nprint('last words')\nos.kill(os.getpid(), 9)\n")
    r = cluster.launch(script)
    assert (r.code, r.text) == (137, "last words\n")


def test_the_python_option_wins_over_everything(cluster: Cluster) -> None:
    chosen = fake(cluster.files / "chosen", "python-x", "chosen")
    venv = cluster.files / "venv"
    fake(venv / "bin", "python", "venv")
    env = {"VIRTUAL_ENV": str(venv), "PATH": f"{venv}/bin:/usr/bin:/bin"}
    script = cluster.write("t.py", SHOW)
    assert cluster.launch("--python", chosen, script, env=env).text == f"chosen:-u {script}\n"


def test_the_python_option_may_be_a_name_in_the_path(cluster: Cluster) -> None:
    fake(cluster.files / "p", "python-x", "named")
    env = {"PATH": f"{cluster.files}/p:/usr/bin:/bin"}
    r = cluster.launch("--python", "python-x", "-m", "mod", env=env)
    assert r.text == "named:-u -m mod\n", r.talk


def test_python_beside_accel_is_taken_when_that_is_a_virtual_environment(cluster: Cluster) -> None:
    bin_folder = cluster.install()
    fake(bin_folder, "python", "beside")
    other = cluster.files / "other"
    fake(other / "bin", "python", "other")
    env = {"VIRTUAL_ENV": str(other), "PATH": f"{other}/bin:/usr/bin:/bin"}
    script = cluster.write("t.py", SHOW)
    assert cluster.launch(script, env=env).text.startswith("other:"), "no pyvenv.cfg yet"
    cluster.write(cluster.root / "pyvenv.cfg", "home = /usr/bin\n")
    assert cluster.launch(script, env=env).text.startswith("beside:")


def test_accel_reached_by_its_name_still_finds_the_python_beside_it(cluster: Cluster) -> None:
    bin_folder = cluster.install()
    fake(bin_folder, "python", "beside")
    cluster.write(cluster.root / "pyvenv.cfg", "home = /usr/bin\n")
    env = {"PATH": f"{bin_folder}:/usr/bin:/bin"}
    r = cluster.launch(cluster.write("t.py", SHOW), env=env, prefix=["env"], accel=Path("accel"))
    assert r.text.startswith("beside:"), r.talk


@pytest.mark.parametrize("variable", ["VIRTUAL_ENV", "CONDA_PREFIX"])
def test_an_activated_environment_is_taken_when_it_is_on_the_path(
    cluster: Cluster, variable: str
) -> None:
    active = cluster.files / "active"
    fake(active / "bin", "python", "active")
    fake(cluster.files / "p", "python3", "path")
    script = cluster.write("t.py", SHOW)
    on = {variable: str(active), "PATH": f"{cluster.files}/p:{active}/bin:/usr/bin:/bin"}
    off = {variable: str(active), "PATH": f"{cluster.files}/p:/usr/bin:/bin"}
    assert cluster.launch(script, env=on).text.startswith("active:")
    assert cluster.launch(script, env=off).text.startswith("path:"), "it is not on PATH"


def test_a_virtual_environment_comes_before_a_conda_one(cluster: Cluster) -> None:
    for name in ("v", "c"):
        fake(cluster.files / name / "bin", "python", name)
    env = {
        "VIRTUAL_ENV": str(cluster.files / "v"),
        "CONDA_PREFIX": str(cluster.files / "c"),
        "PATH": f"{cluster.files}/c/bin:{cluster.files}/v/bin:/usr/bin:/bin",
    }
    assert cluster.launch(cluster.write("t.py", SHOW), env=env).text.startswith("v:")


# --- bytes ----------------------------------------------------------------------------


@pytest.mark.parametrize("n", [1, 2])
def test_arguments_arrive_byte_for_byte(cluster: Cluster, n: int) -> None:
    out = cluster.files / "args"
    r = cluster.launch("-n", str(n), cluster.worker, "args", out, *ODD_ARGUMENTS)
    assert r.code == 0, r.talk
    for rank in range(n):
        got = Path(f"{out}.{rank}").read_bytes().split(b"\0")[:-1]
        assert got == ODD_ARGUMENTS


def test_a_hundred_kilobytes_of_one_argument_arrive(cluster: Cluster) -> None:
    out, big = cluster.files / "args", b"x" * 100_000 + b"\n\xff"
    assert cluster.launch(cluster.worker, "args", out, big).code == 0
    assert Path(f"{out}.0").read_bytes() == big + b"\0"


def test_two_thousand_arguments_arrive(cluster: Cluster) -> None:
    out, many = cluster.files / "args", [str(i) for i in range(2000)]
    assert cluster.launch(cluster.worker, "args", out, *many).code == 0
    assert Path(f"{out}.0").read_text().split("\0")[:-1] == many


def test_the_environment_arrives_byte_for_byte(cluster: Cluster) -> None:
    out = cluster.files / "env"
    odd = {
        b"ODD_BYTES": b"\xff\xfe\n\t'\"$HOME",
        b"EMPTY": b"",
        b"EQUALS": b"a=b=c",
        b"with.dot": b"1",
        b"LONG": b"y" * 100_000,
        b"PYTHONPATH": b"/a:/b",
        b"LD_LIBRARY_PATH": b"",
    }
    assert cluster.launch(cluster.worker, "env", out, env=odd).code == 0
    entries = Path(f"{out}.0").read_bytes().split(b"\0")[:-1]
    got = dict(entry.split(b"=", 1) for entry in entries)
    assert len(got) == len(entries), "a name appears twice"
    given = cluster.environment(odd)
    assert {name: got.get(name) for name in given} == given


def test_env_option_sets_variables_and_wins_over_the_environment(cluster: Cluster) -> None:
    out = cluster.files / "env"
    r = cluster.launch(
        "--env", "A=1 2=3", "--env", "B=", cluster.worker, "env", out, env={"A": "old"}
    )
    assert r.code == 0, r.talk
    entries = Path(f"{out}.0").read_bytes().split(b"\0")
    assert [e for e in entries if e.startswith((b"A=", b"B="))] == [b"A=1 2=3", b"B="]


def test_standard_input_goes_to_a_single_worker(cluster: Cluster) -> None:
    out, data = cluster.files / "stdin", bytes(range(256)) * 4096
    assert cluster.launch(cluster.worker, "stdin", out, stdin=data).code == 0
    assert Path(f"{out}.0").read_bytes() == data


def test_several_workers_read_an_empty_standard_input(cluster: Cluster) -> None:
    out = cluster.files / "stdin"
    assert cluster.launch("-n", "2", cluster.worker, "stdin", out, stdin=b"data").code == 0
    assert [Path(f"{out}.{r}").read_bytes() for r in (0, 1)] == [b"", b""]


def test_a_closed_standard_input_is_no_obstacle(cluster: Cluster) -> None:
    prefix = ["sh", "-c", 'exec "$@" <&-', "sh"]
    assert cluster.launch(cluster.worker, "out", "x", prefix=prefix).text == "x\n"


def signal_masks(status: str) -> tuple[int, int]:
    """Blocked and ignored signals, but for the two that the C library keeps for itself
    and ignores in whatever posix_spawn starts."""
    table = dict(line.split(":", 1) for line in status.splitlines())
    internal = 1 << 32 - 1 | 1 << 33 - 1
    return int(table["SigBlk"], 16) & ~internal, int(table["SigIgn"], 16) & ~internal


def test_a_worker_starts_with_the_signals_of_who_called_accel(cluster: Cluster) -> None:
    """None blocked, and ignored what was ignored: SIGHUP under nohup, else nothing."""
    _, ignored = signal_masks(Path("/proc/self/status").read_text())
    ignored &= ~(1 << signal.SIGPIPE - 1 | 1 << signal.SIGXFSZ - 1)  # Python's own
    out = cluster.files / "signals"
    assert cluster.launch("-n", "2", cluster.worker, "signals", out).code == 0
    assert [signal_masks(Path(f"{out}.{r}").read_text()) for r in (0, 1)] == [(0, ignored)] * 2


def test_a_hangup_ignored_by_the_caller_is_ignored_by_workers(cluster: Cluster) -> None:
    out = cluster.files / "signals"
    prefix = ["sh", "-c", "trap '' HUP; exec \"$@\"", "sh"]
    assert cluster.launch(cluster.worker, "signals", out, prefix=prefix).code == 0
    assert signal_masks(Path(f"{out}.0").read_text())[1] & 1 << signal.SIGHUP - 1


def test_a_worker_inherits_no_descriptor_but_its_own(cluster: Cluster) -> None:
    out = cluster.files / "fds"
    spare = os.open("/dev/null", os.O_RDONLY)
    try:
        assert cluster.launch("-n", "2", cluster.worker, "fds", out).code == 0
    finally:
        os.close(spare)
    for rank in (0, 1):
        lines = Path(f"{out}.{rank}").read_text().splitlines()
        more = [line for line in lines if int(line.split()[0]) > 2]
        assert all("/memfd:" in line for line in more), more
        assert lines[0].split()[1] == "/dev/null"
