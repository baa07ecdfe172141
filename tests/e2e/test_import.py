"""`import accel` in a program that accel started: the package that belongs to this accel,
behind everything the user has."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

import pytest

from cluster import Cluster

SHOW = """
import importlib.util, os
spec = importlib.util.find_spec("accel")
print(spec.origin if spec else None)
print(os.environ.get("PYTHONPATH"))
"""
# Where the package is, seen from the folder of the executable.
SOURCE_TREE, INSTALLED = "../python", "../lib/accel/python"
LAYOUTS = pytest.mark.parametrize("layout", [SOURCE_TREE, INSTALLED])


def package(folder: Path, inside: str = "") -> Path:
    (folder / "accel").mkdir(parents=True)
    (folder / "accel" / "__init__.py").write_text(inside)
    return folder


def install(cluster: Cluster, layout: str | None, prefix: str = "prefix") -> tuple[Path, Path]:
    """accel in a prefix of its own, with a package or none. Returns both places."""
    bin_folder = cluster.files / prefix / "bin"
    bin_folder.mkdir(parents=True)
    for program in (cluster.accel, cluster.acceld):
        shutil.copy(program, bin_folder)
    folder = Path(os.path.normpath(bin_folder / (layout or INSTALLED)))
    if layout:
        package(folder)
    return bin_folder / "accel", folder


def seen(cluster: Cluster, accel: Path, *options: object, **more: object) -> list[str]:
    """What a Python worker finds: the file of the package, and PYTHONPATH."""
    script = cluster.write("show.py", SHOW)
    words = ["--python", sys.executable, *options, script]
    r = cluster.launch(*words, accel=accel, **more)
    assert r.code == 0, r.talk
    return r.lines


@LAYOUTS
def test_a_python_program_finds_the_package(cluster: Cluster, layout: str) -> None:
    accel, folder = install(cluster, layout)
    assert seen(cluster, accel) == [f"{folder}/accel/__init__.py", str(folder)]


def test_the_package_of_the_source_tree_is_found_from_its_build(cluster: Cluster) -> None:
    folder = cluster.build.parent / "python"
    if not (folder / "accel" / "__init__.py").exists():
        pytest.skip("this build is not in its source tree")
    assert seen(cluster, cluster.accel) == [f"{folder}/accel/__init__.py", str(folder)]


def test_a_link_to_accel_leads_to_its_package(cluster: Cluster) -> None:
    accel, folder = install(cluster, INSTALLED)
    link = cluster.files / "tools" / "accel"
    link.parent.mkdir()
    link.symlink_to(accel)
    assert seen(cluster, link)[1] == str(folder)


def test_the_users_folders_come_first(cluster: Cluster) -> None:
    accel, folder = install(cluster, INSTALLED)
    own = package(cluster.files / "own")
    lines = seen(cluster, accel, env={"PYTHONPATH": f"/nowhere:{own}"})
    assert lines == [f"{own}/accel/__init__.py", f"/nowhere:{own}:{folder}"]


def test_a_folder_given_for_the_job_counts_as_the_users(cluster: Cluster) -> None:
    accel, folder = install(cluster, INSTALLED)
    given = ("--env", "PYTHONPATH=/given")
    lines = seen(cluster, accel, *given, env={"PYTHONPATH": "/other"})
    assert lines[1] == f"/given:{folder}"


@pytest.mark.parametrize("where", ["{0}", "/nowhere:{0}", "{0}:/nowhere", "/a:{0}:/b"])
def test_a_folder_that_is_there_is_not_added_again(cluster: Cluster, where: str) -> None:
    accel, folder = install(cluster, INSTALLED)
    value = where.format(folder)
    assert seen(cluster, accel, env={"PYTHONPATH": value})[1] == value


def test_a_folder_that_only_begins_like_ours_is_another(cluster: Cluster) -> None:
    accel, folder = install(cluster, INSTALLED)
    lines = seen(cluster, accel, env={"PYTHONPATH": f"{folder}2"})
    assert lines[1] == f"{folder}2:{folder}"


def test_an_empty_path_counts_as_none(cluster: Cluster) -> None:
    accel, folder = install(cluster, INSTALLED)
    assert seen(cluster, accel, env={"PYTHONPATH": ""})[1] == str(folder)


def test_where_there_is_no_package_nothing_is_set(cluster: Cluster) -> None:
    accel, _ = install(cluster, None)
    assert seen(cluster, accel)[1] == "None"
    assert seen(cluster, accel, env={"PYTHONPATH": "/x"})[1] == "/x"


def test_a_folder_with_a_colon_cannot_be_named(cluster: Cluster) -> None:
    accel, _ = install(cluster, INSTALLED, prefix="a:b")
    assert seen(cluster, accel)[1] == "None"


@pytest.mark.parametrize("form", ["module", "interpreter", "script", "unexecutable", "env"])
def test_every_form_of_a_python_program_finds_it(cluster: Cluster, form: str) -> None:
    accel, folder = install(cluster, INSTALLED)
    plain = cluster.write(cluster.cwd / "show_it.py", SHOW)
    interpreter = f"#!{sys.executable}\n"
    words: dict[str, list[object]] = {
        "module": ["--python", sys.executable, "-m", "show_it"],
        "interpreter": [sys.executable, plain],
        "script": [cluster.write("tool", interpreter + SHOW, 0o755)],
        "unexecutable": [cluster.write("text", interpreter + SHOW)],
        "env": [cluster.write("tool", "#!/usr/bin/env -S python3 -u\n" + SHOW, 0o755)],
    }
    r = cluster.launch(*words[form], accel=accel)
    assert r.code == 0, r.talk
    assert r.lines[0] == f"{folder}/accel/__init__.py"


def test_other_programs_keep_the_environment_they_had(cluster: Cluster) -> None:
    accel, _ = install(cluster, INSTALLED)
    script = cluster.write("tool", '#!/bin/sh\necho "${PYTHONPATH-none}"\n', 0o755)
    for words in (["sh", "-c", 'echo "${PYTHONPATH-none}"'], [script]):
        assert cluster.launch(*words, accel=accel).lines == ["none"]
    assert cluster.launch(script, accel=accel, env={"PYTHONPATH": "/x"}).lines == ["/x"]


def test_a_dry_run_shows_what_is_added_and_not_what_is_the_users(cluster: Cluster) -> None:
    accel, folder = install(cluster, INSTALLED)
    script = cluster.write("show.py", SHOW)
    dry = ("--python", sys.executable, "--dry-run", script)
    assert f"    PYTHONPATH={folder}\n" in cluster.launch(*dry, accel=accel).text
    shown = cluster.launch(*dry, accel=accel, env={"PYTHONPATH": "/secret"}).text
    assert f"    PYTHONPATH=$PYTHONPATH:{folder}\n" in shown
    assert "/secret" not in shown
    assert "PYTHONPATH" not in cluster.launch("--dry-run", "true", accel=accel).text
