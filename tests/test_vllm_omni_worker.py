"""Calls of vllm-omni's real worker that reach our cache: sleep, and the end of a session."""

import math
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.helpers.machine import needs_vllm_omni
from tests.helpers.omni import Pipeline, bare_runner, both, bound, forward, plugged
from tests.helpers.omni import spec as make_spec


class Allocations(TorchDispatchMode):
    """Every tensor that is made while it is in force."""

    def __init__(self) -> None:
        super().__init__()
        self.tensors: list[torch.Tensor] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None):
        out = function(*args, **(kwargs or {}))
        self.tensors.append(out)
        return out


class Allocator:
    """vLLM's `CuMemAllocator` on a CPU: a sleep takes what was allocated under a tag, and keeps it
    only where that tag is offloaded.
    """

    def __init__(self) -> None:
        self.allocated: dict[str, list[torch.Tensor]] = {}
        self.kept: list[tuple[torch.Tensor, torch.Tensor]] = []

    def get_instance(self) -> "Allocator":
        return self

    def get_current_usage(self) -> int:
        return sum(tensor.nbytes for tensors in self.allocated.values() for tensor in tensors)

    @contextmanager
    def use_memory_pool(self, tag: str) -> Iterator[None]:
        with Allocations() as made:
            yield
        self.allocated[tag] = made.tensors

    def sleep(self, offload_tags: tuple[str, ...]) -> None:
        self.kept = [(x, x.clone()) for tag in offload_tags for x in self.allocated[tag]]
        for tensors in self.allocated.values():
            for tensor in tensors:
                tensor.fill_(math.nan)

    def wake_up(self, tags: list[str] | None) -> None:
        for tensor, bytes_before in self.kept:
            tensor.copy_(bytes_before)


@pytest.fixture
def worker(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """vllm-omni's worker, its runner and a pipeline of one weight, allocated for sleep."""
    # It takes one name from there, and every model would be imported: some need torchvision.
    monkeypatch.setitem(sys.modules, "vllm_omni.engine.stage_init_utils", mock.Mock())
    from vllm_omni.diffusion.worker import diffusion_worker
    from vllm_omni.diffusion.worker.diffusion_model_runner import DiffusionModelRunner
    from vllm_omni.platforms import current_omni_platform

    def load_model(self: Any, memory_pool_context_fn: Any) -> None:
        pipeline = Pipeline(make_spec())
        with memory_pool_context_fn("weights"):
            pipeline.weight = torch.ones(3)
        pipeline.named_buffers = dict
        self.pipeline = pipeline

    made = diffusion_worker.DiffusionWorker.__new__(diffusion_worker.DiffusionWorker)
    made.rank = made.stage_id = 0
    made.device = torch.device("cpu")
    made.od_config = SimpleNamespace(enable_sleep_mode=True)
    made._sleep_saved_buffers = {}
    made.model_runner = bare_runner()
    made.model_runner.diffusion_kv_backend = mock.Mock()  # of scheduled requests, not of rollouts
    allocator, memory = Allocator(), mock.Mock(return_value=1 << 26)
    with (
        mock.patch.object(diffusion_worker, "_get_cumem_allocator_class", return_value=allocator),
        mock.patch.object(DiffusionModelRunner, "load_model", load_model),
        mock.patch.multiple(
            type(current_omni_platform),
            create=True,
            synchronize=mock.Mock(),
            empty_cache=mock.Mock(),
            get_free_memory=memory,
            get_device_total_memory=memory,
            get_device_name=mock.Mock(return_value="cpu"),
        ),
    ):
        yield made


def load(worker: Any) -> Any:
    """Returns the runner."""
    worker.model_runner.load_model(memory_pool_context_fn=worker._maybe_get_memory_pool_context)
    return worker.model_runner


def sleep(worker: Any, level: int) -> None:
    for handle, task in (
        (worker.handle_sleep_task, {"task_id": "1", "level": level}),
        (worker.handle_wake_task, {"task_id": "2"}),
    ):
        assert handle(task).status == "SUCCESS"


@needs_vllm_omni
@pytest.mark.parametrize("level", (1, 2))
@pytest.mark.parametrize("mode", ("kernels", "full"))
def test_a_rollout_goes_on_after_a_sleep(mode, level, worker):
    """The K/V of rollouts lie outside the memory that a sleep takes, vllm-omni's and ours."""
    with plugged(mode), torch.no_grad():
        runner = load(worker)
        outs: dict[str, list[torch.Tensor]] = {"sleeps": [], "does not": []}
        for session_id, seen in outs.items():
            for span in range(4):
                with bound(runner, session_id):
                    for commit in (False, True):
                        seen.append(forward(runner.pipeline.state, seed=span, commit=commit))
                if session_id == "sleeps" and span == 1:
                    sleep(worker, level)
                    assert runner.pipeline.weight.isnan().all() == (level == 2)
    assert all(map(torch.equal, *outs.values()))
    assert torch.stack(outs["sleeps"]).isfinite().all()


@needs_vllm_omni
def test_what_the_worker_allocates_for_sleep_is_lost(worker):
    """What the test above would find: a cache in that memory."""
    with plugged("full"), torch.no_grad():
        runner = load(worker)
        with worker._maybe_get_memory_pool_context("kv_cache"):
            runner._preallocate_kv_cache(available_bytes=1 << 26)
        with bound(runner, "a"):
            forward(runner.pipeline.state)
        sleep(worker, 1)
        with bound(runner, "a"):
            assert forward(runner.pipeline.state).isnan().any()


@needs_vllm_omni
def test_the_end_of_a_session(worker):
    with plugged("full"), torch.no_grad():
        runner = load(worker)
        unused = runner.kv_cache.num_free_blocks
        for end in (worker.reset_ar_diffusion_session, worker.close_ar_diffusion_session):
            with bound(runner, "a"):
                assert runner.pipeline.state.adapter("positive").completed_chunks == 0
                both(runner.pipeline.state)
            assert end("a")
            assert runner.kv_cache.num_free_blocks == unused
        assert [event for event, _ in runner.pipeline.events] == ["reset", "close"]
        with pytest.raises(ValueError, match="session_id must be"):
            worker.close_ar_diffusion_session("")
