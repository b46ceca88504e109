"""Sees to it that nothing of a job outlives ``polyccl launch``, even if that is killed.

Run as a script, isolated from the user's Python path. Standard input is a pipe on which each rank announces its process group
before it becomes the command (``+123``), and the launcher those that are over (``-123``). When the pipe ends without the launcher
having said ``done``, every group that is left is killed.
"""

from __future__ import annotations

import os
import signal
import sys
from contextlib import suppress


def main() -> None:
    """Follow the pipe to its end, then kill what is left."""
    groups: set[int] = set()
    for line in sys.stdin:
        word = line.strip()
        if word == "done":
            return
        if word.startswith("+"):
            groups.add(int(word[1:]))
        elif word.startswith("-"):
            groups.discard(int(word[1:]))
    for group in groups:
        with suppress(OSError):
            os.killpg(group, signal.SIGKILL)


if __name__ == "__main__":
    main()
