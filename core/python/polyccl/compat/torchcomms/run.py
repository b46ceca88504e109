"""How a script for torchcomms is run unchanged: in this process, and in those that it spawns.

multiprocessing gives a process that it spawns the contents of the script first. It finds them by the name of ``__main__``'s spec:
here that is this module, which installs the names before it runs the script again.
"""

from __future__ import annotations

import os
import runpy
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

from polyccl.compat.torchcomms import install

SPAWNED = "__mp_main__"
"""The name under which multiprocessing runs what stands for a script."""

_SCRIPT = "_POLYCCL_TORCHCOMMS_SCRIPT"  # the environment's word for which script it is, for spawned processes


def run_script(arguments: list[str]) -> None:
    """Run the script ``arguments[0]`` as ``python script.py ...`` does. Raises what it raises."""
    path = Path(arguments[0])
    code = compile(path.read_bytes(), str(path), "exec")
    install()
    main = ModuleType("__main__")
    main.__file__ = str(path)
    main.__spec__ = ModuleSpec("polyccl.compat.torchcomms.run", None)
    sys.modules["__main__"] = main
    os.environ[_SCRIPT] = str(path.resolve())
    sys.argv = arguments
    sys.path[0] = str(path.resolve().parent)
    exec(code, main.__dict__)


if __name__ == SPAWNED:
    install()
    globals().update(runpy.run_path(os.environ[_SCRIPT], run_name=SPAWNED))

__all__ = ["run_script"]
