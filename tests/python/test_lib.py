"""libaccel.so as Python sees it: the declarations, where it is found, how it fails, and
that signals get through while a call waits."""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from accel import _lib, errors
from accel.world import current
from ranks import REPOSITORY, Group, RunRanks, plain_environment

HEADER = REPOSITORY / "runtime" / "accel.h"


# ---- the header and the declarations ---------------------------------------


def header() -> str:
    text = re.sub(r"/\*.*?\*/", "", HEADER.read_text(), flags=re.S)
    return re.sub(r"^\s*#.*$", "", text, flags=re.M)


def split_arguments(text: str) -> list[str]:
    """At the commas outside of parentheses."""
    parts, depth, part = [], 0, ""
    for c in text:
        depth += (c == "(") - (c == ")")
        if c == "," and not depth:
            parts.append(part.strip())
            part = ""
        else:
            part += c
    parts.append(part.strip())
    return [] if parts == ["void"] else parts


def declared() -> dict[str, tuple[str, list[str]]]:
    """name: (result, arguments) of every function in the header."""
    pattern = re.compile(r"^((?:const )?\w+ \*?)(accel_\w+)\((.*?)\);", re.M | re.S)
    return {
        name: (result.strip(), split_arguments(" ".join(arguments.split())))
        for result, name, arguments in pattern.findall(header())
    }


def enum(name: str) -> dict[str, int]:
    body = re.search(rf"enum {name} \{{(.*?)\}}", header(), re.S)
    assert body, name
    values, last = {}, -1
    for entry in split_arguments(body[1].strip().rstrip(",")):
        key, _, number = (part.strip() for part in entry.partition("="))
        last = int(number) if number else last + 1
        values[key.removeprefix("ACCEL_")] = last
    return values


RESULTS = {
    "int": ctypes.c_int,
    "double": ctypes.c_double,
    "void": None,
    "const char *": ctypes.c_char_p,
    "const uint64_t *": ctypes.POINTER(ctypes.c_uint64),
}
ARGUMENTS = [
    (r"(const )?accel_(world|model) \*\*\w+", ctypes.POINTER(ctypes.c_void_p)),
    (r"(const )?accel_(world|model) \*\w+", ctypes.c_void_p),
    (r"const struct accel_array \*\w+", ctypes.POINTER(_lib.Array)),
    (r"struct accel_counters \*\w+", ctypes.POINTER(_lib.Counters)),
    (r"uint64_t \*\w+", ctypes.POINTER(ctypes.c_uint64)),
    (r"void (\*const |\*)\*\w+", ctypes.POINTER(ctypes.c_void_p)),
    (r"void \*\w+", ctypes.c_void_p),
    (r"const char \*\w+", ctypes.c_char_p),
    (r"int \(\*on_wait\)\(void \*\w+\)", _lib.ON_WAIT),
    (r"int \w+", ctypes.c_int),
    (r"size_t \w+", ctypes.c_size_t),
    (r"uint64_t \w+", ctypes.c_uint64),
]


def ctype_of(argument: str) -> object:
    found = [ctype for pattern, ctype in ARGUMENTS if re.fullmatch(pattern, argument)]
    assert found, f"the test does not know the type of {argument!r}"
    return found[0]


def test_every_function_of_the_header_is_declared_with_its_types() -> None:
    functions = declared()
    assert len(functions) > 25
    assert set(functions) == set(_lib.FUNCTIONS)
    for name, (result, arguments) in functions.items():
        want = (RESULTS[result], tuple(ctype_of(a) for a in arguments))
        assert _lib.FUNCTIONS[name] == want, name


def test_the_library_exports_exactly_the_header() -> None:
    nm = subprocess.run(
        ["nm", "-D", "--defined-only", _lib.load().path], capture_output=True, text=True, check=True
    )
    symbols = {line.split()[-1].split("@")[0] for line in nm.stdout.splitlines()}
    assert {s for s in symbols if not s.startswith("ACCEL_")} == set(declared())


def test_the_constants_are_those_of_the_header() -> None:
    assert f"#define ACCEL_ABI {_lib.ABI}\n" in HEADER.read_text()
    assert {k: getattr(_lib, k) for k in enum("accel_dtype")} == enum("accel_dtype")
    assert {k: getattr(_lib, k) for k in enum("accel_op")} == enum("accel_op")
    assert {k: getattr(_lib, k) for k in enum("accel_prepare_flags")} == enum("accel_prepare_flags")
    assert sorted(errors.BY_CODE) == sorted(enum("accel_error").values())


def test_the_structures_have_the_layout_of_the_header(tmp_path: Path) -> None:
    fields = [f"offsetof(struct accel_array, {name})" for name, _ in _lib.Array._fields_]
    fields += [f"offsetof(struct accel_counters, {name})" for name, _ in _lib.Counters._fields_]
    sizes = ["sizeof(struct accel_array)", "sizeof(struct accel_counters)"]
    prints = "\n".join(f'printf("%zu\\n", (size_t){e});' for e in fields + sizes)
    source = f'#include <stdio.h>\n#include "{HEADER}"\nint main(void) {{ {prints} }}\n'
    (tmp_path / "sizes.c").write_text(source)
    subprocess.run(["cc", "-o", tmp_path / "sizes", tmp_path / "sizes.c"], check=True)
    said = subprocess.run([tmp_path / "sizes"], capture_output=True, text=True, check=True)
    ours = [
        getattr(kind, n).offset for kind in (_lib.Array, _lib.Counters) for n, _ in kind._fields_
    ]
    ours += [ctypes.sizeof(_lib.Array), ctypes.sizeof(_lib.Counters)]
    assert [int(n) for n in said.stdout.split()] == ours


def test_each_error_is_an_exception_of_its_own() -> None:
    assert len(set(errors.BY_CODE.values())) == len(errors.BY_CODE)
    assert issubclass(errors.WaitTimeoutError, TimeoutError)
    assert issubclass(errors.OutOfMemoryError, MemoryError)
    assert str(errors.WaitTimeoutError("rank 1 did not come")) == "rank 1 did not come"
    for kind in errors.BY_CODE.values():
        assert issubclass(kind, errors.AccelError)


# ---- finding it ------------------------------------------------------------


def tree(root: Path, *files: str) -> Path:
    for file in files:
        (root / file).parent.mkdir(parents=True, exist_ok=True)
        (root / file).touch()
    return root


def test_a_library_beside_the_package_comes_first(tmp_path: Path) -> None:
    found = _lib.candidates(tmp_path / "a" / "accel", {})
    assert found[0] == tmp_path / "a" / "accel" / _lib.SONAME


def test_in_a_checkout_the_build_folder_is_looked_into(tmp_path: Path) -> None:
    tree(tmp_path, "runtime/accel.h")
    package = tmp_path / "python" / "accel"
    assert tmp_path / "build" / "runtime" / _lib.SONAME in _lib.candidates(package, {})
    chosen = _lib.candidates(package, {"ACCEL_BUILD": "/elsewhere"})
    assert chosen[1] == Path("/elsewhere/runtime") / _lib.SONAME


@pytest.mark.parametrize("folder", ["lib", "lib64", "lib/x86_64-linux-gnu"])
@pytest.mark.parametrize(
    "package", ["lib/accel/python/accel", "lib/python3.11/site-packages/accel"]
)
def test_installed_it_is_found_below_the_same_prefix(
    tmp_path: Path, folder: str, package: str
) -> None:
    tree(tmp_path, f"{folder}/{_lib.SONAME}")
    found = [p for p in _lib.candidates(tmp_path / package, {}) if p.exists()]
    assert found == [tmp_path / folder / _lib.SONAME]


FINDS = """
import sys
from pathlib import Path
from accel import _lib
try:
    _lib._find(Path(sys.argv[1]), {})
except ImportError as error:
    print(error)
"""


def test_a_missing_library_is_a_sentence_that_says_where_it_was_looked_for(
    tmp_path: Path, ranks: RunRanks
) -> None:
    # In a process of its own: the loader gives a library that is loaded to whoever asks.
    package = tmp_path / "lib" / "accel" / "python" / "accel"
    said = ranks(1, FINDS, package)[0].out
    if not said:
        pytest.skip("a libaccel.so is installed on this machine")
    assert f"{package / _lib.SONAME}: no such file" in said
    assert f"{tmp_path / 'lib' / _lib.SONAME}: no such file" in said
    assert f"  {_lib.SONAME}: " in said
    assert "say in ACCEL_LIBRARY where it is" in said


def test_a_chosen_library_that_is_none_is_named(tmp_path: Path) -> None:
    with pytest.raises(errors.LibraryNotFoundError, match="ACCEL_LIBRARY says /no/such"):
        _lib._find(tmp_path, {"ACCEL_LIBRARY": "/no/such"})
    with pytest.raises(errors.VersionError, match="not accel's library"):
        _lib._find(tmp_path, {"ACCEL_LIBRARY": "libc.so.6"})


def build_library(folder: Path, source: str) -> str:
    (folder / "other.c").write_text(source)
    path = folder / "other.so"
    subprocess.run(["cc", "-shared", "-fPIC", "-o", path, folder / "other.c"], check=True)
    return str(path)


def test_another_interface_is_refused_with_both_versions(tmp_path: Path) -> None:
    source = 'int accel_abi(void) { return 77; } const char *accel_version(void) { return "9.9"; }'
    with pytest.raises(errors.VersionError) as e:
        _lib.Library(build_library(tmp_path, source))
    assert "interface 77" in str(e.value)
    assert "9.9" in str(e.value)
    assert f"needs interface {_lib.ABI}" in str(e.value)
    assert "Install both from one version" in str(e.value)


def test_a_library_without_some_function_is_refused(tmp_path: Path) -> None:
    source = 'int accel_abi(void) { return %d; } const char *accel_version(void) { return "0"; }'
    with pytest.raises(errors.VersionError, match="has no accel_init"):
        _lib.Library(build_library(tmp_path, source % _lib.ABI))


def test_a_copy_of_the_package_finds_the_library_of_its_prefix(tmp_path: Path) -> None:
    home = tmp_path / "lib" / "accel" / "python" / "accel"
    shutil.copytree(REPOSITORY / "python" / "accel", home)
    library = tmp_path / "lib" / _lib.SONAME
    shutil.copy(_lib.load().path, library)
    env = plain_environment() | {"PYTHONPATH": str(home.parent)}
    env.pop("ACCEL_BUILD", None)
    env.pop("ACCEL_LIBRARY", None)
    said = subprocess.run(
        [sys.executable, "-c", "from accel import _lib; print(_lib.load().path)"],
        env=env,
        capture_output=True,
        text=True,
        check=True,
    )
    assert Path(said.stdout.strip()) == library


# ---- signals ---------------------------------------------------------------

RAISES_AND_CALLS = """
#include <signal.h>
#include <stddef.h>
int raise_and_call(int signo, int (*on_wait)(void *)) { raise(signo); return on_wait(NULL); }
"""


@pytest.fixture(scope="module")
def waiting(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    """Does what libaccel does when a signal comes while it waits."""
    library = ctypes.CDLL(build_library(tmp_path_factory.mktemp("waiting"), RAISES_AND_CALLS))
    library.raise_and_call.argtypes = (ctypes.c_int, _lib.ON_WAIT)
    return library


class Chosen(Exception):
    pass


def test_what_a_signal_handler_raises_gives_up_the_wait_and_is_kept(waiting: ctypes.CDLL) -> None:
    signals = _lib.Signals()

    def handler(signo: int, frame: object) -> None:
        raise Chosen

    before = signal.signal(signal.SIGUSR1, handler)
    try:
        for _ in range(3):
            assert waiting.raise_and_call(signal.SIGUSR1, signals.callback) == 1
            assert isinstance(signals.take(), Chosen)
            assert signals.take() is None
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert signals.callback(None) == 0


def test_a_signal_handler_that_returns_lets_the_wait_go_on(waiting: ctypes.CDLL) -> None:
    signals, seen = _lib.Signals(), []
    before = signal.signal(signal.SIGUSR1, lambda signo, frame: seen.append(signo))
    try:
        assert waiting.raise_and_call(signal.SIGUSR1, signals.callback) == 0
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert seen == [signal.SIGUSR1]


WAITS = """
import signal
from accel.world import current
world = current()
if world.rank == 1:
    signal.pause()
try:
    print("waiting", flush=True)
    world.barrier()
except KeyboardInterrupt:
    print("interrupted")
"""


def test_ctrl_c_in_a_collective_is_a_keyboard_interrupt(
    start_ranks: Callable[..., Group],
) -> None:
    group = start_ranks(2, WAITS)
    group.expect(0, "waiting")
    group.expect_waiting(0)
    group.signal(0, signal.SIGINT)
    group.expect(0, "interrupted", 10)
    group.signal(1, signal.SIGKILL)
    assert [r.code for r in group.wait(20)] == [0, -signal.SIGKILL]


JOINS_ALONE = """
from accel.world import current
try:
    print("joining", flush=True)
    current()
except KeyboardInterrupt:
    print("interrupted")
"""


@pytest.mark.parametrize("rank", [0, 1])
def test_ctrl_c_while_the_others_have_not_come_is_a_keyboard_interrupt(
    start_ranks: Callable[..., Group], rank: int
) -> None:
    missing = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
    missing |= {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    group = start_ranks(1, JOINS_ALONE, env=missing)
    group.expect(0, "joining")
    group.expect_waiting(0)
    group.signal(0, signal.SIGINT)
    [r] = group.wait(20)
    assert (r.code, r.out) == (0, "joining\ninterrupted\n"), r.err


def _share_a_core_for_a_while() -> tuple[set[int], set[int]]:
    world = current()
    everywhere = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(everywhere)})
    for _ in range(50):
        world.barrier()
    os.sched_setaffinity(0, everywhere)
    for _ in range(500):
        world.barrier()
    return everywhere, os.sched_getaffinity(0)


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="ranks share the only core")
def test_ranks_that_leave_a_common_core_may_run_where_they_could_before(ranks: RunRanks) -> None:
    for rank in ranks(2, _share_a_core_for_a_while):
        before, after = rank.value
        assert before == after
