"""Build the stand-ins for the vendors' libraries once, and say where they are.

They are kept under ``.cache/doubles`` of this checkout, by a digest of their sources, so that only the first run after a change
waits for the compiler. A test calls :func:`build`; ``python tests/doubles/build.py [sanitizer]`` prints the folder.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

SOURCES = Path(__file__).parent
CACHE = SOURCES.parents[1] / ".cache" / "doubles"
BUILD_SECONDS = 600
KEPT_SECONDS = 24 * 3600


class CannotBuild(RuntimeError):
    """The machine lacks what the stand-ins are built with; a test skips with this text."""


@dataclass(frozen=True)
class Doubles:
    """Absolute paths of the libraries."""

    folder: Path

    @property
    def cuda(self) -> Path:
        return self.folder / "cuda" / "libcuda.so.1"

    @property
    def cudart(self) -> Path:
        return self.folder / "cuda" / "libcudart.so.13"

    @property
    def nccl(self) -> Path:
        """NCCL 2.32.3."""
        return self.folder / "cuda" / "libnccl.so.2"

    @property
    def nccl_old(self) -> Path:
        """NCCL 2.19.3: no AlltoAll, Gather, Scatter, CommShrink, windows, fp8, and no calls with a config."""
        return self.folder / "cuda-old" / "libnccl.so.2"

    @property
    def ncclx(self) -> Path:
        """NCCLX 2.30.3: its own fields in the config, and its own calls."""
        return self.folder / "cuda-ncclx" / "libnccl.so.2"

    @property
    def hip(self) -> Path:
        return self.folder / "hip" / "libamdhip64.so.7"

    @property
    def rccl(self) -> Path:
        """RCCL 2.30.4."""
        return self.folder / "hip" / "librccl.so.1"

    @property
    def rcclx(self) -> Path:
        """The fork of RCCL 2.28.3: commDesc follows nvlinkCentricSched in the config."""
        return self.folder / "hip-rcclx" / "librccl.so.1"

    def environment(self) -> dict[str, str]:
        """The variables by which PolyCCL's plugins find the stand-ins."""
        return {
            "POLYCCL_CUDA_LIBRARY": str(self.cuda),
            "POLYCCL_HIP_LIBRARY": str(self.hip),
            "POLYCCL_NCCL_LIBRARY": str(self.nccl),
            "POLYCCL_NCCLX_LIBRARY": str(self.ncclx),
            "POLYCCL_RCCL_LIBRARY": str(self.rccl),
            "POLYCCL_RCCLX_LIBRARY": str(self.rcclx),
        }


def _digest(sanitizer: str) -> str:
    digest = hashlib.sha256(sanitizer.encode())
    for path in sorted(SOURCES.iterdir()):
        if path.suffix in {".cc", ".h", ".txt", ".map"}:
            digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def _run(command: list[str]) -> None:
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=BUILD_SECONDS, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stdout[-4000:]}")


def build(sanitizer: str = "") -> Doubles:
    """Build what is not built yet, and give its paths. Blocks up to minutes the first time.

    :param sanitizer: ``""``, ``"thread"`` or ``"address,undefined"``.
    :raises CannotBuild: there is no CMake or no C++ compiler.
    :raises RuntimeError: the build failed; the text has the compiler's last words.
    """
    if shutil.which("cmake") is None or shutil.which("c++") is None:
        raise CannotBuild("the stand-ins need cmake and a C++ compiler (apt-get install cmake g++)")
    name = _digest(sanitizer) + (f"-{sanitizer.replace(',', '-')}" if sanitizer else "")
    folder = CACHE / name
    CACHE.mkdir(parents=True, exist_ok=True)
    with (CACHE / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # several test processes may ask at once
        if not (folder / "complete").exists():
            for old in CACHE.iterdir():  # what nobody can still be running on
                if old.is_dir() and time.time() - old.stat().st_mtime > KEPT_SECONDS:
                    shutil.rmtree(old, ignore_errors=True)
            generator = ["-G", "Ninja"] if shutil.which("ninja") else []
            _run(["cmake", *generator, "-S", str(SOURCES), "-B", str(folder), f"-DSTAND_IN_SANITIZER={sanitizer}"])
            _run(["cmake", "--build", str(folder), "-j", str(min(4, os.cpu_count() or 1))])
            (folder / "complete").touch()
    return Doubles(folder)


if __name__ == "__main__":
    print(build(*sys.argv[1:2]).folder)
