"""``python -m polyccl.compat.torchcomms script.py ...``, or ``-m module``: run a program for torchcomms on PolyCCL, unchanged."""

from __future__ import annotations

import runpy
import sys

from . import install
from .run import run_script

USAGE = "usage: python -m polyccl.compat.torchcomms (script.py | -m module) [arguments ...]"


def main() -> None:
    """Install the names, and run the program that the command line names as Python itself would."""
    match sys.argv[1:]:
        case ["-m", name, *rest]:
            install()
            sys.argv = [name, *rest]
            runpy.run_module(name, run_name="__main__", alter_sys=True)
        case [script, *rest] if not script.startswith("-"):
            try:
                run_script([script, *rest])
            except FileNotFoundError as error:
                if error.filename != script:
                    raise
                raise SystemExit(f"there is no script '{script}'; {USAGE}") from None
        case _:
            print(USAGE, file=sys.stderr)
            raise SystemExit(2)


if __name__ == "__main__":
    main()
