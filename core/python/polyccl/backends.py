"""Where backends are: the plugin files of this installation and of POLYCCL_BACKEND_PATH, and what the build included."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from . import environment
from .errors import BackendUnavailable, InvalidArgument

HOST = "host"
"""The backend that is part of the core: PolyCCL's own link. It has no plugin file."""
KNOWN: tuple[str, ...] = (HOST, "gloo", "nccl", "ncclx", "rccl", "rcclx", "xccl")
"""The backends of this project; others come by POLYCCL_BACKEND_PATH."""

_FILE = re.compile(r"libpolyccl_([a-z0-9_]+)\.so")


def find(name: str) -> Path:
    """The absolute path of backend ``name``'s plugin.

    Raises BackendUnavailable where there is none, with the flag that builds it, and where two files claim the name;
    InvalidArgument for `HOST`.
    """
    if name == HOST:
        raise InvalidArgument("backend 'host' is part of PolyCCL itself and has no plugin file")
    found = _files().get(name, [])
    if len(found) == 1:
        return found[0]
    if found:
        raise BackendUnavailable(
            f"backend '{name}': {len(found)} plugins have this name: {', '.join(map(str, found))}; take all but one of them out of "
            "POLYCCL_BACKEND_PATH or out of the installation"
        )
    at_hand = f"at hand: {', '.join(available())}"
    if name in KNOWN:
        raise BackendUnavailable(
            f"backend '{name}' is not part of this installation ({at_hand}); build it in with `pip install "
            f"-C cmake.define.POLYCCL_BACKEND_{name.upper()}=ON ...`, or name the folder of its plugin in POLYCCL_BACKEND_PATH"
        )
    raise BackendUnavailable(
        f"there is no backend '{name}' ({at_hand}); a vendor's own is found through POLYCCL_BACKEND_PATH, as libpolyccl_{name}.so"
    )


def available() -> list[str]:
    """The names of the backends that have a plugin here, `HOST` first; whether they load is another matter."""
    names = _files()
    return [HOST, *(name for name in KNOWN if name in names), *sorted(set(names) - set(KNOWN))]


def build_record() -> dict[str, Any]:
    """What the build wrote about itself (``_build.json``); empty where there is no such file, as in a source tree."""
    for folder in _package_folders():
        try:
            record = json.loads((folder / "_build.json").read_text(encoding="utf-8"))
        except (OSError, ValueError):
            continue
        if isinstance(record, dict):
            return record
    return {}


def abi() -> int:
    """The number of the plugin ABI that this installation has, major << 16 | minor, from its header."""
    header = (include_dir() / "polyccl" / "backend.h").read_text(encoding="utf-8")
    major, minor = (int(re.findall(rf"#define POLYCCL_ABI_{part} (\d+)", header)[0]) for part in ("MAJOR", "MINOR"))
    return major << 16 | minor


def include_dir() -> Path:
    """The folder to add to a compiler's include path for ``polyccl/backend.h``. Raises BackendUnavailable where there is none."""
    return _data("include", "polyccl/backend.h")


def cmake_dir() -> Path:
    """The folder of PolyCCL's CMake package, for ``polyccl_DIR``. Raises BackendUnavailable where there is none."""
    return _data("cmake", "polycclConfig.cmake")


def _data(folder: str, mark: str) -> Path:
    for base in _package_folders():
        if (base / folder / mark).is_file():
            return base / folder
    source = Path(__file__).resolve().parents[2] / "abi"
    if folder == "include" and (source / mark).is_file():
        return source
    raise BackendUnavailable(f"this installation has no {folder} files ({mark}); install PolyCCL from a wheel or from source")


@cache
def _package_folders() -> Sequence[Path]:
    """The folders of the package: in an editable installation, that of the sources and that of the build."""
    import polyccl

    return [Path(path).resolve() for path in polyccl.__path__]


def _files() -> dict[str, list[Path]]:
    """The plugin files by name."""
    files: dict[str, list[Path]] = {}
    for folder in _package_folders():
        _add(files, sorted((folder / "backends").glob("libpolyccl_*.so")))
    for entry in map(Path, environment.paths("POLYCCL_BACKEND_PATH")):
        if entry.is_dir():
            _add(files, sorted(entry.glob("libpolyccl_*.so")))
        elif entry.is_file() and _FILE.fullmatch(entry.name):
            _add(files, [entry])
        else:
            what = "is not named libpolyccl_<name>.so" if entry.is_file() else "does not exist"
            raise BackendUnavailable(f"environment variable POLYCCL_BACKEND_PATH: {entry} {what}")
    return files


def _add(files: dict[str, list[Path]], paths: Sequence[Path]) -> None:
    for path in paths:
        match = _FILE.fullmatch(path.name)
        if match and path.resolve() not in files.setdefault(match[1], []):
            files[match[1]].append(path.resolve())


__all__ = ["HOST", "KNOWN", "abi", "available", "build_record", "cmake_dir", "find", "include_dir"]
