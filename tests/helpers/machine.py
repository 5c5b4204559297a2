"""What tests need of the machine, as marks."""

import importlib.util

import pytest
import torch

TRITON_DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
"""Where the Triton backend runs: without a GPU in Triton's interpreter."""


def has(*packages: str) -> bool:
    return all(importlib.util.find_spec(name) for name in packages)


needs_triton = pytest.mark.skipif(not has("triton"), reason="triton is not installed")
needs_interpreter = pytest.mark.skipif(
    not has("triton") or torch.cuda.is_available(),
    reason="kernels on the CPU's tensors: Triton's interpreter, where there is no GPU",
)
needs_vllm = pytest.mark.skipif(not has("vllm"), reason="vllm is not installed")
needs_vllm_omni = pytest.mark.skipif(
    not has("vllm", "vllm_omni"), reason="vllm-omni is not installed"
)
