"""vllm-omni's DreamZero transformer on one CPU, with chunkattn under its paged-attention op.

The model code is vllm-omni's own ``CausalWanModel`` with random weights and few layers. This module
gives it what a server normally would: a process group of one, an attention backend for its
cross-attention, a picture to work on. Imported by the demo only; it loads vllm and vllm-omni.
"""

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import matplotlib.cbook
import numpy as np
import torch
from PIL import Image
from torch import Tensor
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed import (
    destroy_distributed_environment,
    destroy_model_parallel,
    init_distributed_environment,
    initialize_model_parallel,
)
from vllm_omni.diffusion.attention.backends.sdpa import SDPABackend, SDPAImpl
from vllm_omni.diffusion.models.dreamzero.action_encoder import CategorySpecificLinear
from vllm_omni.diffusion.models.dreamzero.causal_wan_model import CausalWanModel
from vllm_omni.platforms import current_omni_platform

from chunkattn.presets import get_preset

DREAMZERO = get_preset("dreamzero_14b")
LATENT_CHANNELS = 16
TEXT_TOKENS, TEXT_FEATURES = 512, 64
ACTION_FEATURES, STATE_FEATURES = 32, 64
PHOTO = "grace_hopper.jpg"  # a sample picture inside matplotlib's wheel
PIXELS_PER_LATENT = 8  # along each side, as in the model's own video encoder


@dataclass(frozen=True)
class Geometry:
    """Sizes of the demo's model and rollout; all that decides token counts is DreamZero's.

    Attributes:
        grid: patch tokens of one frame, rows and columns.
        frames_per_span: frames one forward generates.
        window_frames: frames visible to a forward, the span in flight counted in.
        action_tokens: action rows that ride along with a denoise forward.
        state_tokens: robot-state rows, likewise.
        spans: spans of one cycle, after its first frame.
        cycles: rollouts from a first frame to a hard reset.
        denoise_steps: forwards of a span before the one that commits it.
        branches: classifier-free-guidance branches.
    """

    layers: int
    heads: int
    grid: tuple[int, int] = (22, 40)  # 880 tokens
    head_size: int = DREAMZERO.head_size
    frames_per_span: int = DREAMZERO.frames_per_span
    window_frames: int = 9
    action_tokens: int = DREAMZERO.action_tokens
    state_tokens: int = DREAMZERO.state_tokens
    denoise_steps: int = 2
    spans: int = 4
    cycles: int = 2
    branches: int = DREAMZERO.cfg_branches

    @property
    def frame_tokens(self) -> int:
        return self.grid[0] * self.grid[1]

    @property
    def extra_tokens(self) -> int:
        """Action and state rows of one denoise forward."""
        return self.action_tokens + self.state_tokens

    @property
    def latent_size(self) -> tuple[int, int]:
        """Height and width of a latent frame; a token is a patch of 2 x 2 of it."""
        return 2 * self.grid[0], 2 * self.grid[1]


@contextmanager
def one_process() -> Iterator[None]:
    """Give vLLM's parallel layers the group of one process they expect, and take it away again."""
    with tempfile.TemporaryDirectory() as folder, set_current_vllm_config(VllmConfig()):
        init_distributed_environment(1, 0, f"file://{folder}/rendezvous", 0, "gloo")
        initialize_model_parallel(1)
        try:
            yield
        finally:
            destroy_model_parallel()
            destroy_distributed_environment()


def cpu_attention() -> None:
    """Give the models' other attention vllm-omni's own SDPA backend: it knows no CPU platform."""
    platform: Any = type(current_omni_platform)
    path = f"{SDPABackend.__module__}.{SDPABackend.__qualname__}"
    platform.get_diffusion_attn_backend_cls = classmethod(lambda cls, **_: path)
    backend: Any = SDPAImpl
    backend.forward = SDPAImpl.forward_cuda


def build_model(
    geometry: Geometry, seed: int, load: Callable[[torch.nn.Module], None] = lambda model: None
) -> Any:
    """Build the transformer with random weights, in float32 on the CPU, ready to run.

    Args:
        geometry: sizes.
        seed: of the weights.
        load: reads or writes the weights, before they take the layout that they run in.
    """
    cpu_attention()
    torch.manual_seed(seed)
    width = geometry.heads * geometry.head_size
    model = CausalWanModel(
        model_type="t2v",
        in_dim=LATENT_CHANNELS,
        out_dim=LATENT_CHANNELS,
        dim=width,
        ffn_dim=width * 27 // 10,  # DreamZero: 13824 for 5120
        num_heads=geometry.heads,
        num_layers=geometry.layers,
        frame_seqlen=geometry.frame_tokens,
        num_frame_per_block=geometry.frames_per_span,
        max_chunk_size=(geometry.window_frames - 1) // geometry.frames_per_span,
        text_len=TEXT_TOKENS,
        text_dim=TEXT_FEATURES,
        action_dim=ACTION_FEATURES,
        max_state_dim=STATE_FEATURES,
        hidden_size=64,
        num_action_per_block=geometry.action_tokens,
        num_state_per_block=geometry.state_tokens,
    )
    model = model.float().eval()
    # A fresh model's head is zero and its action layers are tiny, and so would be every difference.
    torch.nn.init.normal_(model.head.head.weight, std=0.1)
    for module in model.modules():
        if isinstance(module, CategorySpecificLinear):
            torch.nn.init.normal_(module.W, std=module.W.shape[1] ** -0.5)
    load(model)
    for module in model.modules():
        method = getattr(module, "quant_method", None)
        if method is not None:
            method.process_weights_after_loading(module)
    return model


def photo_latents(geometry: Geometry, frames: int, seed: int) -> Tensor:
    """Encode a slow pan over a real photograph.

    The camera starts at the top of matplotlib's sample portrait and slides down. Every 8 x 8
    patch of a frame, three colours deep, is projected on 16 fixed random orthogonal directions:
    a linear stand-in for the model's video encoder, scaled to unit variance as that one's are.

    Returns:
        ``(1, 16, frames, height, width)`` float32, in latent pixels.
    """
    height, width = (PIXELS_PER_LATENT * size for size in geometry.latent_size)
    with Image.open(matplotlib.cbook.get_sample_data(PHOTO, asfileobj=False)) as file:
        photo = file.convert("RGB")
    view_width = photo.width * 0.9
    view_height = min(view_width * height / width, photo.height * 0.9)
    views = []
    for frame in range(frames):
        part = frame / max(frames - 1, 1)
        left = (photo.width - view_width) * part
        top = (photo.height - view_height) * part
        box = (left, top, left + view_width, top + view_height)
        views.append(photo.resize((width, height), Image.Resampling.BICUBIC, box=box))
    pixels = torch.from_numpy(np.stack([np.asarray(view) for view in views])).float()
    patches = pixels.unfold(1, PIXELS_PER_LATENT, PIXELS_PER_LATENT)
    patches = patches.unfold(2, PIXELS_PER_LATENT, PIXELS_PER_LATENT)  # [frames, h, w, 3, 8, 8]
    patches = patches.flatten(3)
    generator = torch.Generator().manual_seed(seed)
    basis: Tensor
    basis, _ = torch.linalg.qr(torch.randn(patches.shape[-1], LATENT_CHANNELS, generator=generator))
    latents = (patches - patches.mean()) @ basis  # [frames, h, w, channels]
    latents = (latents / latents.std()).permute(3, 0, 1, 2).unsqueeze(0)
    return latents.contiguous()
