"""A function in several processes of one gloo group, none of which can outlive its time."""

import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing

PRELOAD = ("chunkattn.session", "chunkattn.testing", "chunkattn.cache")
COLLECTIVE = timedelta(seconds=60)


def run(function: Callable, folder: Path, *, processes: int = 2, seconds: float = 300) -> list[Any]:
    """What ``function(rank)`` returned, in the order of the ranks.

    Args:
        function: of a module; the processes are new and import it.
        folder: empty, for the rendezvous and the results.
        processes: the size of the group.
        seconds: after which all are killed.

    Raises:
        Exception: that of a rank, with its trace; the others are ended.
        TimeoutError: they took longer.
    """
    deadline = time.monotonic() + seconds
    # Processes are forked off a server that has imported what all of them need, once.
    torch.multiprocessing.get_context("forkserver").set_forkserver_preload([__name__, *PRELOAD])
    ranks = torch.multiprocessing.start_processes(
        _rank, (processes, folder, function), processes, join=False, start_method="forkserver"
    )
    try:
        while not ranks.join(timeout=1):
            if time.monotonic() > deadline:
                raise TimeoutError(f"{function.__name__} took more than {seconds} s")
    finally:
        for process in ranks.processes:
            process.kill()
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(processes)]


def _rank(rank: int, processes: int, folder: Path, function: Callable) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder / 'rendezvous'}",
        rank=rank,
        world_size=processes,
        timeout=COLLECTIVE,
    )
    torch.save(function(rank), folder / f"{rank}.pt")
    if dist.is_initialized():
        dist.destroy_process_group()
