"""What libaccel promises: accel.h, the symbol map and the built library say the same, every
function is documented, and a program that links the library needs the C library only."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
RUNTIME = REPOSITORY / "runtime"
HEADER = RUNTIME / "accel.h"

# A declaration at the beginning of a line, up to its opening parenthesis.
FUNCTION = re.compile(r"^[a-z][\w \t*]*?\b(accel_\w+)\(", re.M)
COMMENT = re.compile(r"/\*.*?\*/", re.S)
# What the C library is made of, on any architecture.
LIBC = re.compile(r"(libc|ld-linux[\w-]*|ld64|ld)\.so\.\d+")


def declared() -> list[str]:
    """The functions of the header, in its order."""
    blank = COMMENT.sub(lambda m: re.sub(r"[^\n]", " ", m.group()), HEADER.read_text())
    return FUNCTION.findall(blank)


def mapped() -> list[str]:
    text = (RUNTIME / "accel.map").read_text()
    names = text.partition("global:")[2].partition("local:")[0]
    return re.findall(r"(\w+);", names)


def library() -> Path:
    build = Path(os.environ.get("ACCEL_BUILD", REPOSITORY / "build"))
    found = build / "runtime" / "libaccel.so.0"
    if not found.exists():
        pytest.skip("libaccel is not built")
    return found


def tool(name: str, *args: object) -> str:
    if not shutil.which(name):
        pytest.skip(f"{name} is not installed")
    return subprocess.run(
        [name, *map(str, args)], capture_output=True, text=True, check=True
    ).stdout


def undocumented(text: str) -> list[str]:
    """Functions whose declaration is not in one paragraph with a comment."""
    found = []
    for match in FUNCTION.finditer(COMMENT.sub("/**/", text)):
        before = COMMENT.sub("/**/", text)[: match.start()]
        if "/**/" not in before.rpartition("\n\n")[2]:
            found.append(match.group(1))
    return found


def test_the_header_declares_functions() -> None:
    names = declared()
    assert len(names) > 20
    assert len(set(names)) == len(names)
    assert {"accel_init", "accel_missing", "accel_error", "accel_on_wait"} <= set(names)


def test_the_map_lists_what_the_header_declares() -> None:
    assert sorted(declared()) == mapped(), "in alphabetical order, each once"
    assert "local:\n\t*;" in (RUNTIME / "accel.map").read_text()


def test_the_library_exports_what_the_header_declares() -> None:
    table = tool("nm", "-D", "--defined-only", library())
    symbols = [line.split()[-1] for line in table.splitlines()]
    names = [s.partition("@")[0] for s in symbols if not s.startswith("ACCEL_")]
    assert sorted(names) == sorted(declared())
    versions = {s.partition("@")[2].lstrip("@") for s in symbols if "@" in s}
    assert versions == {"ACCEL_1"}


def test_every_function_has_a_comment() -> None:
    assert not undocumented(HEADER.read_text())


def test_the_check_of_comments_sees_what_has_none() -> None:
    text = "/* Says one. */\nint accel_a(void);\nint accel_b(void);\n\nint accel_c(int x);\n"
    assert undocumented(text) == ["accel_c"]


def test_a_program_needs_the_c_library_only() -> None:
    needed = re.findall(r"\(NEEDED\).*\[(.*)\]", tool("readelf", "-d", library()))
    assert needed
    assert [n for n in needed if not LIBC.fullmatch(n)] == []


def test_the_library_runs_nothing_but_its_own_at_load() -> None:
    """Bound at once, no executable stack, no relocation of code."""
    assert "(TEXTREL)" not in tool("readelf", "-d", library())
    assert re.search(r"FLAGS.*NOW", tool("readelf", "-d", library()))
    (stack,) = re.findall(r"GNU_STACK(?:\s+\S+){5}\s+(\w+)", tool("readelf", "-lW", library()))
    assert "E" not in stack


@pytest.mark.parametrize(
    ("compiler", "language"),
    [("cc", "c89"), ("cc", "c99"), ("cc", "c17"), ("c++", "c++98"), ("c++", "c++17")],
)
def test_the_header_is_plain_in_every_language_that_includes_it(
    tmp_path: Path, compiler: str, language: str
) -> None:
    source = tmp_path / ("x.c" if compiler == "cc" else "x.cc")
    source.write_text('#include "accel.h"\nint main(void) { return accel_abi() - ACCEL_ABI; }\n')
    tool(
        compiler,
        f"-std={language}",
        *("-Wall", "-Wextra", "-Werror", "-pedantic", "-Wno-long-long"),
        "-fsyntax-only",
        f"-I{RUNTIME}",
        source,
    )


def test_python_calls_what_the_header_declares() -> None:
    package = REPOSITORY / "python" / "accel"
    files = sorted(package.glob("*.py"))
    if not files:
        pytest.skip("there is no Python package")
    called: set[str] = set()
    for path in files:
        called |= set(re.findall(r"\blib\.(accel_\w+)", path.read_text()))
        called |= set(re.findall(r"[\"'](accel_\w+)[\"']", path.read_text()))
    assert called, "the package calls nothing"
    assert called <= set(declared())
