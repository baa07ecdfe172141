"""Builds the wheel of the Python package, with nothing but the standard library.

The wheel holds the package and, where it has been built, libaccel.so beside it: then it
works without anything else of accel. The library is taken from $ACCEL_BUILD/runtime or
../build/runtime.
"""

from __future__ import annotations

import base64
import hashlib
import os
import re
import sysconfig
import tarfile
import tomllib
import zipfile
from pathlib import Path
from typing import Any

_HERE = Path(__file__).resolve().parent
_PACKAGE = _HERE / "accel"
_SONAME = "libaccel.so.0"

Settings = dict[str, Any] | None


def build_wheel(
    wheel_directory: str, config_settings: Settings = None, metadata_directory: str | None = None
) -> str:
    """Write the wheel into a folder; returns its name."""
    files = {f"accel/{p.name}": p.read_bytes() for p in _sources()}
    library = _library()
    if library is not None:
        files[f"accel/{_SONAME}"] = library.read_bytes()
    return _write_wheel(Path(wheel_directory), files, is_pure=library is None)


def build_editable(
    wheel_directory: str, config_settings: Settings = None, metadata_directory: str | None = None
) -> str:
    """As build_wheel(), but the wheel only points at this folder."""
    files = {"accel.pth": f"{_HERE}\n".encode()}
    return _write_wheel(Path(wheel_directory), files, is_pure=True)


def build_sdist(sdist_directory: str, config_settings: Settings = None) -> str:
    """Write the source archive into a folder; returns its name."""
    root = f"{_project()['name']}-{_version()}"
    path = Path(sdist_directory) / f"{root}.tar.gz"
    own = [_HERE / "pyproject.toml", _HERE / "build_backend.py"]
    with tarfile.open(path, "w:gz", format=tarfile.PAX_FORMAT) as archive:
        for file in own + _sources():
            archive.add(file, f"{root}/{file.relative_to(_HERE)}")
        metadata = _HERE / "PKG-INFO"
        if metadata.exists():
            archive.add(metadata, f"{root}/PKG-INFO")
        else:
            _add_text(archive, f"{root}/PKG-INFO", _metadata())
    return path.name


def _sources() -> list[Path]:
    return sorted([*_PACKAGE.glob("*.py"), _PACKAGE / "py.typed"])


def _library() -> Path | None:
    build = os.environ.get("ACCEL_BUILD")
    folders = ([Path(build)] if build else []) + [_HERE.parent / "build"]
    found = (folder / "runtime" / _SONAME for folder in folders)
    return next((path for path in found if path.exists()), None)


def _project() -> dict[str, Any]:
    return tomllib.loads((_HERE / "pyproject.toml").read_text())["project"]


def _version() -> str:
    found = re.search(r'^__version__ = "(.+)"$', (_PACKAGE / "__init__.py").read_text(), re.M)
    if not found:
        raise RuntimeError(f"{_PACKAGE / '__init__.py'} has no __version__")
    return found[1]


def _metadata() -> str:
    project = _project()
    return (
        "Metadata-Version: 2.4\n"
        f"Name: {project['name']}\n"
        f"Version: {_version()}\n"
        f"Summary: {project['description']}\n"
        f"License-Expression: {project['license']}\n"
        f"Requires-Python: {project['requires-python']}\n"
    )


def _tag(is_pure: bool) -> str:
    if is_pure:
        return "py3-none-any"
    return "py3-none-" + re.sub(r"[.-]", "_", sysconfig.get_platform())


def _write_wheel(folder: Path, files: dict[str, bytes], is_pure: bool) -> str:
    name, version, tag = _project()["name"], _version(), _tag(is_pure)
    info = f"{name}-{version}.dist-info"
    wheel = (
        "Wheel-Version: 1.0\nGenerator: accel\n"
        f"Root-Is-Purelib: {str(is_pure).lower()}\nTag: {tag}\n"
    )
    files = files | {
        f"{info}/METADATA": _metadata().encode(),
        f"{info}/WHEEL": wheel.encode(),
    }
    record = "".join(f"{path},{_hash(data)},{len(data)}\n" for path, data in files.items())
    files[f"{info}/RECORD"] = f"{record}{info}/RECORD,,\n".encode()
    path = folder / f"{name}-{version}-{tag}.whl"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for inside, data in files.items():
            archive.writestr(inside, data)
    return path.name


def _hash(data: bytes) -> str:
    digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest())
    return "sha256=" + digest.decode().rstrip("=")


def _add_text(archive: tarfile.TarFile, name: str, text: str) -> None:
    import io

    entry = tarfile.TarInfo(name)
    entry.size = len(text.encode())
    archive.addfile(entry, io.BytesIO(text.encode()))
