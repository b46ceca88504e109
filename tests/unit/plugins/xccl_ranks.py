"""One rank of a test of the xccl plugin: `python xccl_ranks.py PLUGIN DIRECTORY SCENARIO RANK SIZE`.

As `ranks.py`, whose kinds it runs, but only what the plugin has; messages in groups too, which it does not offer for host memory
but must do. oneCCL writes lines of its own to both outputs.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Callable, Iterator
from time import monotonic

import numpy as np
from abi import DTYPES, EQUAL_BITS, HOST_MEMORY, KINDS, REDUCTIONS, UNAVAILABLE, Comm, PluginError
from ranks import LARGE, Rank, combine, data, empty, raises, reductions, same

MOVING = ("broadcast", "all_gather", "scatter", "all_to_all", "all_to_all_v", "messages")
REDUCING = ("all_reduce", "reduce", "reduce_scatter")


class XcclRank(Rank):
    """A rank's plugin, store and communicator."""

    def can(self, kind: str, dtype: str, reduction: str | None = None) -> int:
        """What the plugin answers for host memory."""
        number = REDUCTIONS[reduction] if reduction else 0
        return int(self.plugin.table.supports(KINDS[kind], DTYPES[dtype], number, HOST_MEMORY))

    def collectives(self) -> Iterator[tuple[str, Callable[[], None]]]:
        comm = self.comm()
        everything = [(dtype, 7) for dtype in DTYPES]
        everything += [("int16", 0), ("int16", 1), ("float32", LARGE), ("uint8", (1 << 20) + 3)]
        for kind in MOVING:
            for dtype, count in everything:
                assert kind == "messages" or self.can(kind, dtype), f"{kind} of {dtype} is not native"
                for in_place in (False, True) if kind != "messages" else (False,):
                    yield (
                        f"{kind}-{dtype}-{count}-{in_place}",
                        lambda k=kind, d=dtype, n=count, p=in_place: getattr(self, k)(comm, d, n, p),
                    )
        for kind in REDUCING:
            for dtype, reduction, count, in_place in reductions():
                if self.can(kind, dtype, reduction):
                    yield (
                        f"{kind}-{dtype}-{reduction}-{count}-{in_place}",
                        lambda k=kind, d=dtype, r=reduction, n=count, p=in_place: getattr(self, k)(comm, d, n, p, r),
                    )
        for dtype in ("float16", "float32", "float64"):
            for count in (1, 3, 501, 70_001, LARGE):
                yield f"alike-{dtype}-{count}", lambda d=dtype, n=count: self.alike(comm, d, n)
        yield "two_nans", lambda: self.two_nans(comm)
        comm.destroy()

    def reduce_scatter(self, comm: Comm, dtype: str, count: int, in_place: bool, reduction: str) -> None:
        parts = [np.concatenate([data(rank, count, dtype, salt=block) for block in range(self.size)]) for rank in range(self.size)]
        wanted = parts[0]
        for part in parts[1:]:
            wanted = combine(wanted, part, dtype, reduction)
        source = parts[self.rank].copy()
        mine = slice(self.rank * count, (self.rank + 1) * count)
        output = source[mine] if in_place else empty(count, dtype)
        comm.run("reduce_scatter", dtype, input=source, output=output, count=count, reduction=reduction)
        same(output, wanted[mine], "output")
        if not in_place:
            same(source, parts[self.rank], "input")

    def alike(self, comm: Comm, dtype: str, count: int) -> None:
        """The sum of finite numbers has the same bits everywhere."""
        source = np.random.default_rng(self.rank).standard_normal(count).astype(dtype)
        output = empty(count, dtype)
        comm.run("all_reduce", dtype, input=source, output=output, count=count, reduction="SUM")
        gathered = empty(count * self.size, dtype)
        comm.run("all_gather", dtype, input=output, output=gathered, count=count)
        for rank in range(self.size):
            same(gathered[rank * count : (rank + 1) * count], output, f"rank {rank}'s result")

    def two_nans(self, comm: Comm) -> None:
        """Of two NaNs each rank may keep its own, so that equal bits are promised for integers alone."""
        for dtype in DTYPES:
            if self.can("all_reduce", dtype, "SUM"):
                promised = bool(self.can("all_reduce", dtype, "SUM") & EQUAL_BITS)
                assert promised == ("int" in dtype), dtype
        source = np.full(1001, 0x7E01 + self.rank, np.uint16)
        output = empty(1001, "float16")
        comm.run("all_reduce", "float16", input=source.view(np.float16), output=output, count=1001, reduction="SUM")
        assert np.isnan(output).all()

    def worker(self) -> Iterator[tuple[str, Callable[[], None]]]:
        """Ranks whose sizes differ: oneCCL's thread ends on the one that expects less, and not its process."""

        def differ() -> None:
            comm = self.comm()
            memory = np.ones(32, np.float32)
            count = 8 if self.rank else 16
            call = threading.Thread(
                target=lambda: comm.run("all_reduce", "float32", input=memory, output=memory, count=count, reduction="SUM"),
                daemon=True,
            )
            call.start()
            if self.rank == 0:
                call.join(20)
                return
            end = monotonic() + 20
            text = ""
            while not text and monotonic() < end:
                try:
                    comm.run("broadcast", "uint8", input=memory, output=memory, count=0, peer=0)  # calls nothing
                except PluginError as error:
                    text = error.text
            assert "oneCCL's own thread has ended" in text
            again = raises(UNAVAILABLE, lambda: self.comm(name="again"))
            assert "use another backend" in again.text

        yield "differ", differ
        self.meet("the end")


def main() -> int:
    plugin, directory, scenario, rank, size = sys.argv[1:]
    this = XcclRank(plugin, directory, int(rank), int(size))
    for name, body in getattr(this, scenario)():
        error = None
        try:
            body()
        except BaseException as caught:
            error = f"{type(caught).__name__}: {caught}"
        print(json.dumps({"case": name, "error": error}), flush=True)
    return 0


if __name__ == "__main__":
    os.environ.pop("CCL_LOG_LEVEL", None)
    sys.exit(main())
