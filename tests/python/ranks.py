"""A function of a test as the ranks of a process group, each in a process of its own."""

import os
import tempfile

import torch
import torch.distributed as dist


def join_group(rank, world, device_type, path):
    """Makes this process a rank; `path` is a file that does not exist yet, the same for all."""
    if device_type == "cuda":
        torch.cuda.set_device(rank)
    backend = "nccl" if device_type == "cuda" else "gloo"
    dist.init_process_group(backend, init_method=f"file://{path}", rank=rank, world_size=world)


def _run_rank(rank, world, device_type, path, body, arguments):
    join_group(rank, world, device_type, path)
    body(rank, *arguments)
    dist.barrier()
    # All that the test looks at has been seen. The way out of the interpreter, where torch takes
    # its process groups and their threads down, has once ended a rank with std::terminate.
    os._exit(0)


def run_ranks(world, device_type, body, *arguments):
    """Calls body(rank, *arguments), body a function of a module, in `world` processes. Raises what
    one of them raised."""
    with tempfile.TemporaryDirectory() as directory:
        path = os.path.join(directory, "rendezvous")
        torch.multiprocessing.spawn(
            _run_rank, (world, device_type, path, body, arguments), nprocs=world
        )
