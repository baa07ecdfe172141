"""pip install ./python: offline, with the library beside the package."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import accel
import pytest
from ranks import PACKAGES, REPOSITORY, plain_environment

# No index, no configuration of this machine: whatever is not here is not there.
OFFLINE = ["--isolated", "--no-index", "--disable-pip-version-check", "--no-cache-dir"]


def pip(*args: str | Path) -> None:
    command = [sys.executable, "-m", "pip", "install", *OFFLINE, *map(str, args)]
    done = subprocess.run(command, env=plain_environment(), capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("installed")
    pip("--target", folder, PACKAGES)
    return folder


def test_pip_installs_the_package_without_fetching_anything(installed: Path) -> None:
    names = {p.name for p in (installed / "accel").iterdir() if p.suffix != ".pyc"}
    sources = {p.name for p in (PACKAGES / "accel").glob("*.py")}
    assert sources <= names
    assert "py.typed" in names


def test_what_was_installed_works_by_itself(installed: Path) -> None:
    env = plain_environment() | {"PYTHONPATH": str(installed)}
    env.pop("ACCEL_BUILD", None)
    env.pop("ACCEL_LIBRARY", None)
    program = "import accel; from accel import _lib; accel.PartialState(); print(_lib.load().path)"
    said = subprocess.run(
        [sys.executable, "-c", program], env=env, capture_output=True, text=True, cwd="/"
    )
    assert said.stdout.strip() == str(installed / "accel" / "libaccel.so.0"), said.stderr


def test_package_and_program_have_one_version() -> None:
    meson = (REPOSITORY / "meson.build").read_text()
    assert re.search(r"version: '(.+?)'", meson)[1] == accel.__version__
