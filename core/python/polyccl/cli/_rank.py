"""Becomes one rank of ``polyccl launch``: tie this process's life to the launcher's, then run the command in its place.

Run as a script, isolated from the user's Python path, with the launcher's process id, the descriptor of the keeper's pipe (see
`_keeper`) and the command. The kernel ends the rank when its launcher dies in any way; only the process itself can ask for that,
which is why this step exists. What the rank starts in its process group is the keeper's to end.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def main() -> None:
    """Replace this process by the command; exit status 127 when that cannot be run."""
    launcher, pipe, command = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != launcher:  # it died before the kernel was asked
        sys.exit(1)
    os.write(pipe, f"+{os.getpid()}\n".encode())  # this process leads its group
    os.close(pipe)  # the keeper waits for its end, which must be the launcher's
    for number in (signal.SIGPIPE, signal.SIGXFSZ):  # this interpreter ignores them, and the command would inherit that
        signal.signal(number, signal.SIG_DFL)
    try:
        os.execvp(command[0], command)
    except OSError as error:
        print(f"polyccl launch: cannot run {command[0]!r}: {error.strerror}", file=sys.stderr)
        sys.exit(127)


if __name__ == "__main__":
    main()
