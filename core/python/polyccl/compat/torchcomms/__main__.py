"""``python -m polyccl.compat.torchcomms script.py ...``, or ``-m module``: run a program for torchcomms on PolyCCL, unchanged."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

from . import install

USAGE = "usage: python -m polyccl.compat.torchcomms (script.py | -m module) [arguments ...]"


def main() -> None:
    """Install the names, and run the program that the command line names as Python itself would."""
    arguments = sys.argv[1:]
    as_module = arguments[:1] == ["-m"]
    if as_module:
        arguments = arguments[1:]
    if not arguments or (not as_module and arguments[0].startswith("-")):
        print(USAGE, file=sys.stderr)
        raise SystemExit(2)
    install()
    sys.argv = arguments
    if as_module:
        runpy.run_module(arguments[0], run_name="__main__", alter_sys=True)
    else:
        sys.path[0] = str(Path(arguments[0]).resolve().parent)
        runpy.run_path(arguments[0], run_name="__main__")


if __name__ == "__main__":
    main()
