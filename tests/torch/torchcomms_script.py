"""A script for torchcomms, as a user of it writes one: the calls of its README and its documentation, on the CPU.

It knows nothing of PolyCCL. The tests run it with its import changed and with nothing changed, on one library and on a bridge.
Where the README is wrong it is mended: `new_comm` gets its name, timeouts are timedeltas. ``BACKEND`` names the library, else gloo.
"""

import os
from datetime import timedelta

import torch
import torchcomms
from torchcomms import ReduceOp, TorchComm, new_comm, objcol
from torchcomms.device_mesh import init_device_mesh

BACKEND = os.environ.get("BACKEND", "gloo")


def equal(tensor: torch.Tensor, wanted: object) -> None:
    torch.testing.assert_close(tensor, torch.as_tensor(wanted, dtype=tensor.dtype))


def quick_start(comm: TorchComm) -> None:
    rank, size = comm.get_rank(), comm.get_size()
    target = comm.get_device()
    assert (target.type, target.index) == ("cpu", None)
    tensor = torch.full((1024,), float(rank + 1), dtype=torch.float32, device=target)
    comm.all_reduce(tensor, ReduceOp.SUM, async_op=False)
    equal(tensor, torch.full((1024,), size * (size + 1) / 2))
    tensor = torch.full((1024,), float(rank + 1), device=target)
    work = comm.all_reduce(tensor, ReduceOp.AVG, async_op=True)
    work.wait()
    assert work.is_completed()
    equal(tensor, torch.full((1024,), (size + 1) / 2))
    tensor = torch.ones(4)
    comm.all_reduce(tensor, ReduceOp.PREMUL_SUM(0.5), False, timeout=timedelta(seconds=60))
    equal(tensor, [size / 2] * 4)


def collectives(comm: TorchComm) -> None:
    rank, size = comm.get_rank(), comm.get_size()
    ranks = torch.arange(float(size))
    tensor = torch.full((3,), float(rank))
    comm.broadcast(tensor, 0, False)
    equal(tensor, [0.0] * 3)
    tensor = torch.full((3,), float(rank + 1))
    comm.reduce(tensor, 0, ReduceOp.MAX, False)
    equal(tensor, [float(size if rank == 0 else rank + 1)] * 3)
    parts = [torch.zeros(2) for _ in range(size)]
    comm.all_gather(parts, torch.full((2,), float(rank)), False)
    equal(torch.stack(parts)[:, 0], ranks)
    uneven = [torch.zeros(r + 1) for r in range(size)]
    comm.all_gather_v(uneven, torch.full((rank + 1,), float(rank)), False)
    equal(torch.cat(uneven), ranks.repeat_interleave(torch.arange(size) + 1))
    whole = torch.zeros(2 * size)
    comm.all_gather_single(whole, torch.full((2,), float(rank)), True).wait()
    equal(whole, ranks.repeat_interleave(2))
    part = torch.zeros(2)
    given = [torch.full((2,), float(r)) for r in range(size)]
    comm.reduce_scatter(part, given, ReduceOp.SUM, False)
    equal(part, [float(size * rank)] * 2)
    equal(torch.stack(given)[:, 0], ranks)
    comm.reduce_scatter_single(part, torch.arange(2.0 * size), ReduceOp.SUM, False)
    equal(part, [2.0 * rank * size, (2.0 * rank + 1) * size])
    output = torch.zeros(size)
    comm.all_to_all_single(output, ranks + 10 * rank, False)
    equal(output, 10 * ranks + rank)
    counts = [r + 1 for r in range(size)]
    output = torch.zeros(size * (rank + 1))
    comm.all_to_all_v_single(output, torch.full((sum(counts),), float(rank)), [rank + 1] * size, counts, False)
    equal(output, ranks.repeat_interleave(rank + 1))
    outputs = [torch.zeros(1) for _ in range(size)]
    comm.all_to_all(outputs, [torch.tensor([float(10 * rank + r)]) for r in range(size)], False)
    equal(torch.cat(outputs), 10 * ranks + rank)
    mine = torch.zeros(1)
    comm.scatter(mine, [torch.tensor([float(r)]) for r in range(size)] if rank == 0 else [], 0, False)
    equal(mine, [float(rank)])
    gathered = [torch.zeros(1) for _ in range(size)] if rank == 0 else []
    comm.gather(gathered, mine, 0, False)
    if rank == 0:
        equal(torch.cat(gathered), ranks)
    comm.barrier(False)


def messages(comm: TorchComm) -> None:
    rank, size = comm.get_rank(), comm.get_size()
    after, before = (rank + 1) % size, (rank - 1) % size
    received = torch.zeros(3)
    if rank == 0:
        comm.send(torch.full((3,), 7.0), 1, False)
    elif rank == 1:
        comm.recv(received, 0, False)
        equal(received, [7.0] * 3)
    batch = comm.batch_op_create()
    batch.send(torch.full((3,), float(rank)), after)
    batch.recv(received, before)
    assert [op.type for op in batch.ops] == [torchcomms.P2POpType.SEND, torchcomms.P2POpType.RECV]
    assert [op.peer for op in batch.ops] == [after, before]
    options = torchcomms.BatchP2POptions()
    options.timeout = timedelta(seconds=60)
    batch.issue(True, options).wait()
    equal(received, [float(before)] * 3)


def objects(comm: TorchComm) -> None:
    rank, size = comm.get_rank(), comm.get_size()
    gathered = [None] * size
    objcol.all_gather_object(comm, gathered, {"rank": rank})
    assert gathered == [{"rank": r} for r in range(size)]
    shared = ["from 0"] if rank == 0 else [None]
    objcol.broadcast_object_list(comm, shared, 0, timedelta(seconds=60))
    assert shared == ["from 0"]


def splits(comm: TorchComm) -> None:
    rank, size = comm.get_rank(), comm.get_size()
    backwards = list(range(size))[::-1]
    other = comm.split(backwards, "backwards")
    assert isinstance(other, TorchComm)
    assert other.get_rank() == size - 1 - rank
    assert other.get_options().timeout == comm.get_options().timeout
    tensor = torch.full((2,), float(rank))
    other.broadcast(tensor, 0, False)
    equal(tensor, [float(size - 1)] * 2)
    other.finalize()
    alone = comm.split([rank] if rank == 0 else [], "alone")
    assert (alone is None) == (rank != 0)


def mesh_and_wrapper(comm: TorchComm) -> None:
    from torch import distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    mesh = init_device_mesh((comm,), ("main",))
    tensor = torch.ones(2)
    dist.all_reduce(tensor, group=mesh.get_group("main"))
    equal(tensor, [float(comm.get_size())] * 2)
    torch.manual_seed(comm.get_rank())
    model = DistributedDataParallel(torch.nn.Linear(2, 1), process_group=mesh.get_group("main"))
    model(torch.full((4, 2), float(comm.get_rank()))).sum().backward()
    weight = model.module.weight.grad
    equal(weight, torch.full((1, 2), 4.0 * (comm.get_size() - 1) / 2))
    group = torchcomms._comms._BackendWrapper(comm)
    group.allreduce(tensor).wait()
    equal(tensor, [float(comm.get_size()) ** 2] * 2)
    dist.destroy_process_group()


def main() -> None:
    device = torch.device("cpu")
    comm = new_comm(BACKEND, device, name="main_comm", timeout=timedelta(seconds=60), hints={"is_high_priority_stream": "true"})
    assert comm.get_name() == "main_comm"
    for part in (quick_start, collectives, messages, objects, splits):
        part(comm)
    mesh_comm = new_comm(BACKEND, device, name="mesh")
    mesh_and_wrapper(mesh_comm)
    print(f"rank {comm.get_rank()} of {comm.get_size()} went well on {comm.get_backend()}")
    comm.finalize()


if __name__ == "__main__":
    main()
