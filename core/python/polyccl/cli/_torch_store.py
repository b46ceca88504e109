"""The store of torch.distributed under ``polyccl launch``: torch's TCPStore, on a socket that the launcher already listens on.

Run as a script with the descriptor of that socket and its port, once the first rank has connected. It ends when its standard
input does, which is when the launcher closes it, or ends.
"""

from __future__ import annotations

import os
import sys


def main() -> None:
    """Serve until standard input ends."""
    descriptor, port = int(sys.argv[1]), int(sys.argv[2])
    sys.path.pop(0)  # this script's folder, whose modules are not for torch to find
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # torch warns of every stranger's connection
    from torch.distributed import TCPStore

    store = TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=descriptor)
    sys.stdin.read()
    del store


if __name__ == "__main__":
    main()
