"""Rules that a compiler does not check: who may include whom, how the files are written,
and that what users can say is documented."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]

# Folder -> folders whose headers it may include, besides its own.
LAYERS: dict[str, set[str]] = {
    "base": set(),
    "rendezvous": {"base"},
    "detect": {"base"},
    "supervisor": {"base", "rendezvous", "detect"},
    "config": {"base", "detect"},
    "ssh": {"base"},
    "sagemaker": {"base", "config"},
    "runtime": {"base"},
    "cmd": {"base", "rendezvous", "detect", "supervisor", "config", "ssh"},
}
# Library header -> files or folders that may include it.
LIBRARIES: dict[str, tuple[str, ...]] = {
    "uv.h": ("base/loop.c",),
    "yaml.h": ("config/",),
    "jansson.h": ("rendezvous/", "supervisor/", "cmd/", "bench/"),
    "getopt.h": (),
    "base/opt.h": ("base/", "config/", "cmd/", "supervisor/main.c", "bench/", "tests/"),
}
WORDS = (
    "TO" + "DO",
    "FIX" + "ME",
    "X" + "XX",
    "HA" + "CK:",
    "for " + "now",
    "place" + "holder",
    "simpl" + "ified",
)
# Folders of somebody's machine; examples and tests have users called "me" and "ada".
MACHINE_PATH = re.compile(
    r"(?<![\w.$}{/-])/(?:work|root|home/(?!me/|ada/)[a-z]\w*|Users|opt)/(?!ml\b)\w"
)
INCLUDE = re.compile(r'^\s*#\s*include\s+(["<])([^">]+)[">]', re.M)
MACRO = re.compile(r"^[ \t]*#[ \t]*define\b(?:[^\n\\]|\\.|\\\n)*", re.M | re.S)
GUARD = re.compile(r"^#pragma once$|^#ifndef \w+_H\b", re.M)
OPTION = re.compile(r"^ +(?:-\w, )?(--[a-z][a-z0-9-]+)", re.M)
BINARY = {".png", ".gz", ".bin"}


def listed() -> list[Path]:
    """Files that belong to the repository; without git, all but build folders."""
    ask = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    r = subprocess.run(ask, cwd=REPOSITORY, capture_output=True, check=False)
    if r.returncode == 0 and r.stdout:
        names = sorted({os.fsdecode(n) for n in r.stdout.split(b"\0") if n})
        return [p for p in (REPOSITORY / n for n in names) if p.is_file()]
    skip = re.compile(r"(^|/)(\.git|\.venv|build[^/]*|__pycache__)(/|$)")
    found = (p for p in REPOSITORY.rglob("*") if p.is_file())
    return sorted(p for p in found if not skip.search(str(p.relative_to(REPOSITORY).parent)))


FILES = listed()
C_FILES = [p for p in FILES if p.suffix in (".c", ".h")]


def name(path: Path) -> str:
    return str(path.relative_to(REPOSITORY))


def text_files() -> list[Path]:
    """Not the corpora of the fuzzers, which may hold any byte."""
    return [p for p in FILES if p.suffix not in BINARY and "corpus" not in p.parts]


def without_comments(code: str) -> str:
    blank = re.sub(r"/\*.*?\*/", lambda m: "\n" * m.group().count("\n"), code, flags=re.S)
    return re.sub(r"//[^\n]*", "", blank)


def includes(path: Path) -> list[tuple[str, str]]:
    return INCLUDE.findall(without_comments(path.read_text()))


def test_there_is_something_to_check() -> None:
    assert len(C_FILES) > 20


def test_folders_include_only_the_folders_below_them() -> None:
    wrong = []
    for path in C_FILES:
        top = path.relative_to(REPOSITORY).parts[0]
        if top not in LAYERS:
            continue
        for kind, header in includes(path):
            folder = header.split("/")[0]
            if kind == '"' and folder != top and folder not in LAYERS[top]:
                wrong.append(f"{name(path)} includes {header}")
    assert not wrong


def test_own_headers_are_named_from_the_root_and_exist() -> None:
    wrong = [
        f"{name(path)} includes {header}"
        for path in C_FILES
        for kind, header in includes(path)
        if kind == '"' and not (REPOSITORY / header).is_file()
    ]
    assert not wrong


def test_libraries_are_included_only_where_they_belong() -> None:
    wrong = []
    for path in C_FILES:
        for _, header in includes(path):
            allowed = LIBRARIES.get(header)
            if allowed is not None and not name(path).startswith(allowed):
                wrong.append(f"{name(path)} includes {header}")
    assert not wrong


def test_every_header_is_guarded() -> None:
    wrong = [name(p) for p in C_FILES if p.suffix == ".h" and not GUARD.search(p.read_text())]
    assert not wrong


def test_no_macro_returns() -> None:
    wrong = [
        f"{name(p)}: {m.group().splitlines()[0]}"
        for p in C_FILES
        for m in MACRO.finditer(without_comments(p.read_text()))
        if re.search(r"\breturn\b", m.group())
    ]
    assert not wrong


def test_macro_check_sees_continued_lines() -> None:
    long = "#define F(x) \\\n\tif (x) \\\n\t\treturn 1\n"
    short = "#define F(x) (x)\nint f(void)\n{ return 1; }\n"
    assert "return" in next(MACRO.finditer(long)).group()
    assert "return" not in next(MACRO.finditer(short)).group()


def test_nothing_is_left_for_later() -> None:
    wrong = []
    for path in text_files():
        for i, line in enumerate(path.read_text().splitlines(), 1):
            found = (w for w in WORDS if re.search(rf"\b{re.escape(w)}(?!\w)", line))
            wrong += [f"{name(path)}:{i}: {w}" for w in found]
    assert not wrong


def test_no_file_knows_one_machine() -> None:
    wrong = [
        f"{name(path)}:{i}: {line.strip()}"
        for path in text_files()
        for i, line in enumerate(path.read_text().splitlines(), 1)
        if MACHINE_PATH.search(line)
    ]
    assert not wrong


def test_lines_end_cleanly() -> None:
    wrong = []
    for path in text_files():
        text = path.read_bytes()
        if not text:
            continue
        if not text.endswith(b"\n"):
            wrong.append(f"{name(path)}: no newline at the end")
        if re.search(rb"[ \t\r]$", text, re.M):
            wrong.append(f"{name(path)}: blanks at the end of a line")
        if path.suffix in (".py", ".toml", ".yaml") and b"\t" in text:
            wrong.append(f"{name(path)}: a tab")
    assert not wrong


def test_scripts_can_be_run_and_stop_at_the_first_error() -> None:
    scripts = [p for p in FILES if p.read_bytes()[:2] == b"#!" and p.suffix != ".py"]
    assert {"dev/setup", "dev/demo", "dev/test", ".ci/run"} <= {name(p) for p in scripts}
    for path in scripts:
        assert os.access(path, os.X_OK), f"{name(path)} is not executable"
        first = path.read_text().splitlines()[0]
        if first.endswith(("bash", "sh")):
            assert "set -e" in path.read_text(), f"{name(path)} goes on after errors"
            subprocess.run(["bash", "-n", path], check=True)


def test_c_files_are_formatted() -> None:
    if not shutil.which("clang-format"):
        pytest.skip("clang-format is not installed")
    version = subprocess.run(["clang-format", "--version"], capture_output=True, text=True)
    if " 14." not in version.stdout:
        pytest.skip("another version than 14 lays out some things its own way")
    r = subprocess.run(
        ["clang-format", "--dry-run", "-Werror", *C_FILES],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=False,
    )
    places = [line for line in r.stderr.splitlines() if "error:" in line]
    assert r.returncode == 0, "\n".join(places[:40])


def test_python_files_are_clean() -> None:
    ruff = shutil.which("ruff")
    if not ruff:
        pytest.skip("ruff is not installed")
    config = Path(__file__).parent / "ruff.toml"
    r = subprocess.run(
        [ruff, "check", "--no-cache", "--config", config, "."],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=False,
    )
    assert r.returncode == 0, r.stdout


def test_the_page_of_settings_follows_the_table() -> None:
    build = Path(os.environ.get("ACCEL_BUILD", REPOSITORY / "build"))
    printer = build / "tests" / "tools" / "settings_doc"
    if not printer.exists():
        pytest.skip("the tests' tools are not built")
    page = subprocess.run([printer], capture_output=True, text=True, check=True).stdout
    assert (REPOSITORY / "docs" / "settings.md").read_text() == page


def test_every_option_is_documented() -> None:
    accel = Path(os.environ.get("ACCEL_BUILD", REPOSITORY / "build")) / "accel"
    if not accel.exists():
        pytest.skip("accel is not built")
    pages = [p for p in FILES if p.suffix == ".md"]
    told = "\n".join(p.read_text() for p in pages)
    help_text = subprocess.run(
        [accel, "launch", "--help"], capture_output=True, text=True, check=True
    ).stdout
    options = set(OPTION.findall(help_text)) - {"--help"}
    assert len(options) > 8, "the help has no options"
    missing = sorted(o for o in options if not re.search(rf"(?<![\w-]){o}(?![\w-])", told))
    assert not missing
