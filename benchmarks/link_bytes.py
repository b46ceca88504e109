"""Each operation once over a bridge: what crosses the link, against the planner's prediction and the lower bound."""

from __future__ import annotations

import sys

import numpy as np
import numpy.typing as npt

import polyccl
from common import bridge, interface_bytes, parser, say
from polyccl import Kind, Reduction
from polyccl.planner import payload
from polyccl.planner.task import Request
from polyccl.planner.topology import Topology

HEADERS = 66 / 1448
"""Ethernet, IP and TCP headers of a full segment, for each byte of its payload."""
ALLOWANCE = 0.02
SLACK = 16 << 10
"""Bytes of barriers, of acknowledgements and of the messages that open a large one."""

Array = npt.NDArray[np.float32]
ORDER = (
    Kind.ALL_REDUCE,
    Kind.REDUCE_SCATTER,
    Kind.REDUCE_SCATTER_V,
    Kind.ALL_GATHER,
    Kind.ALL_GATHER_V,
    Kind.BROADCAST,
    Kind.REDUCE,
    Kind.GATHER,
    Kind.SCATTER,
    Kind.ALL_TO_ALL,
    Kind.ALL_TO_ALL_V,
)


def call(comm: polyccl.Comm, kind: Kind, full: int) -> payload.Counts:
    """Run one operation whose full buffer has about ``full`` elements. Returns the counts, as the planner wants them."""
    size, me = comm.get_size(), comm.get_rank()
    block = full // size
    ones = np.ones

    def lists(counts: list[int]) -> list[Array]:
        return [ones(count, np.float32) for count in counts]

    ragged = [block + 16 * (rank - size // 2) for rank in range(size)]
    match kind:
        case Kind.ALL_REDUCE:
            comm.all_reduce(ones(full, np.float32))
            return full
        case Kind.REDUCE:
            comm.reduce(ones(full, np.float32), 0)
            return full
        case Kind.BROADCAST:
            comm.broadcast(ones(full, np.float32), 0)
            return full
        case Kind.REDUCE_SCATTER:
            comm.reduce_scatter_single(ones(block, np.float32), ones(block * size, np.float32))
        case Kind.ALL_GATHER:
            comm.all_gather_single(ones(block * size, np.float32), ones(block, np.float32))
        case Kind.GATHER:
            comm.gather(lists([block] * size), ones(block, np.float32), 0)
        case Kind.SCATTER:
            comm.scatter(ones(block, np.float32), lists([block] * size), 0)
        case Kind.ALL_TO_ALL:
            comm.all_to_all_single(ones(block * size, np.float32), ones(block * size, np.float32))
        case Kind.ALL_GATHER_V:
            comm.all_gather_v(lists(ragged), ones(ragged[me], np.float32))
            return ragged
        case Kind.REDUCE_SCATTER_V:
            comm.reduce_scatter_v(ones(ragged[me], np.float32), lists(ragged))
            return ragged
        case _:
            matrix = [[block + 16 * ((a + 2 * b) % 3) for b in range(size)] for a in range(size)]
            comm.all_to_all([*lists([row[me] for row in matrix])], lists(matrix[me]))
            return matrix
    return block


def crossed(comm: polyccl.Comm, sent: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Payload from each island (rows) to each (columns), from what this rank ``sent`` to each rank."""
    index = {rank: i for i, ranks in enumerate(comm.islands) for rank in ranks}
    table = np.zeros((len(comm.islands), len(comm.islands)), np.int64)
    for peer, sent_bytes in enumerate(sent):
        table[index[comm.get_rank()], index[peer]] += sent_bytes
    np.fill_diagonal(table, 0)
    comm.all_reduce(table.reshape(-1))
    return table


def main() -> int:
    options = parser(__doc__)
    options.add_argument("--bytes", type=int, default=4 << 20, help="of the full buffer")
    options.add_argument("--interface", help="the uplink of this rank's island, to read the bytes of")
    arguments = options.parse_args()
    comm = bridge(arguments, "link-bytes")
    topology = Topology(tuple(tuple(ranks) for ranks in comm.islands))
    planner_options = comm.get_options().planner_options()
    mine = next(i for i, ranks in enumerate(comm.islands) if comm.get_rank() in ranks)
    say(
        comm, f"islands {[len(ranks) for ranks in comm.islands]}, {arguments.bytes >> 10} KiB, float32. MB out / in of each island."
    )
    width = 12 * len(comm.islands) + 2
    say(
        comm,
        f"{'operation':18}{'payload':>{width}}{'predicted':>{width}}{'bound':>{width}}"
        + ("   wire / payload" if arguments.interface else ""),
    )
    wrong = 0
    for kind in ORDER:
        call(comm, kind, arguments.bytes // 4)  # connections are made on first use
        comm.barrier()
        wire = interface_bytes(arguments.interface) if arguments.interface else (0, 0)
        comm.barrier()  # nobody begins before all have read
        before = comm.payload_sent()
        counts = call(comm, kind, arguments.bytes // 4)
        sent = np.subtract(comm.payload_sent(), before)
        comm.barrier()
        after = interface_bytes(arguments.interface) if arguments.interface else (0, 0)
        comm.barrier()
        table = crossed(comm, sent)
        reduction = Reduction.SUM if "REDUCE" in kind.name else Reduction.NONE
        root = 0 if kind in (Kind.BROADCAST, Kind.REDUCE, Kind.GATHER, Kind.SCATTER) else -1
        request = Request(kind, "float32", reduction, root)
        plan = payload.payload(topology, request, counts, planner_options)
        predicted = np.array([[plan.get((a, b), 0) for b in range(len(table))] for a in range(len(table))])
        least = payload.bound(topology, request, counts)
        flows = np.stack([table.sum(1), table.sum(0)])
        limits = np.array([[float(bound.leave) for bound in least], [float(bound.enter) for bound in least]])
        good = bool((table == predicted).all()) and bool((flows <= limits * (1 + ALLOWANCE)).all())
        shares = wire_shares(comm, mine, flows, (wire, after)) if arguments.interface else ""
        good &= "!" not in shares
        wrong += not good
        say(comm, f"{kind.name.lower():18}{show(flows):>{width}}{show(np.stack([predicted.sum(1), predicted.sum(0)])):>{width}}"
            f"{show(limits):>{width}}   {shares}{'' if good else '  WRONG'}")  # fmt: skip
    return 1 if wrong else 0


def wire_shares(comm: polyccl.Comm, mine: int, flows: npt.NDArray[np.int64], reads: tuple[tuple[int, int], tuple[int, int]]) -> str:
    """Bytes on each island's uplink, over its payload: out / in. ``!`` marks more than the allowance and headers."""
    (rx0, tx0), (rx1, tx1) = reads
    wire = np.zeros((2, flows.shape[1]), np.int64)
    if comm.get_rank() == comm.islands[mine][0]:
        wire[:, mine] = tx1 - tx0, rx1 - rx0
    comm.all_reduce(wire.reshape(-1))
    total = flows + flows[::-1] * HEADERS  # a direction carries the other's acknowledgements
    bad = wire > total * (1 + ALLOWANCE + HEADERS) + SLACK
    ratios = [[f"{w / f:.3f}" if f else "-" for w, f in zip(*pair, strict=True)] for pair in zip(wire, flows, strict=True)]
    return " ".join(f"{out}/{into}{'!' if bad[:, i].any() else ''}" for i, (out, into) in enumerate(zip(*ratios, strict=True)))


def show(flows: npt.NDArray[np.int64]) -> str:
    """Out and in of each island in MB (10^6 bytes)."""
    return " ".join(f"{out / 1e6:.2f}/{into / 1e6:.2f}" for out, into in zip(flows[0], flows[1], strict=True))


if __name__ == "__main__":
    sys.exit(main())
