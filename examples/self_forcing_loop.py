"""A Self-Forcing style loop in plain PyTorch: a few frames at a time, denoised over a paged window.

Run it: ``python examples/self_forcing_loop.py``. The model is small and its weights are random.
"""

import torch
from torch import nn

import chunkattn

HEADS, HEAD_SIZE, LAYERS = 4, 32, 3
FRAME, FRAMES_PER_SPAN, WINDOW, SINK = 64, 3, 9, 1  # tokens of a frame, then frames
WIDTH = HEADS * HEAD_SIZE
TIMES = (1.0, 0.75, 0.5, 0.25)


class Block(nn.Module):
    """One layer of a DiT: attention over the window, then a feed-forward."""

    def __init__(self, layer: int):
        super().__init__()
        self.layer, self.norm = layer, nn.LayerNorm(WIDTH)
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        up, down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.LayerNorm(WIDTH), up, nn.GELU(), down)

    def forward(self, x: torch.Tensor, forward: chunkattn.ForwardContext) -> torch.Tensor:
        query, key, value = self.qkv(self.norm(x)).unflatten(-1, (3, HEADS, HEAD_SIZE)).unbind(1)
        x = x + self.proj(forward.write_attend(self.layer, query, key, value).flatten(1))
        return x + self.mlp(x)


class VideoModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.time = nn.Linear(1, WIDTH)
        self.blocks = nn.ModuleList(Block(layer) for layer in range(LAYERS))

    def forward(self, x: torch.Tensor, time: float, forward: chunkattn.ForwardContext):
        x = x + self.time(torch.full((1, 1), time))
        for block in self.blocks:
            x = block(x, forward)
        return x


@torch.no_grad()
def roll_out(model: VideoModel, session: chunkattn.Session, spans: int) -> torch.Tensor:
    """The latents of all frames: each span is denoised, then committed once it is clean."""
    video, length = [], FRAMES_PER_SPAN * FRAME
    for _ in range(spans):
        x = torch.randn(length, WIDTH)
        for time, next_time in zip(TIMES, (*TIMES[1:], 0.0), strict=True):
            with session.forward(seq_len=length) as forward:  # sees the window, leaves nothing
                clean = x - time * model(x, time, forward)
            x = clean + next_time * torch.randn_like(x)
        with session.forward(seq_len=length, commit=True) as forward:  # its K/V become history
            model(x, 0.0, forward)
        video.append(x)
    return torch.cat(video)


def main(spans: int = 6) -> torch.Tensor:
    torch.manual_seed(0)
    config = chunkattn.ARDiffusionKVConfig(True, FRAME, window_chunks=WINDOW, sink_chunks=SINK)
    sizes = {"num_layers": LAYERS, "num_kv_heads": HEADS, "head_size": HEAD_SIZE}
    memory = {"block_size": FRAME, "max_model_len": 1 << 20, "available_bytes": 1 << 28}
    place = {"dtype": torch.float32, "device": torch.device("cpu"), "local_branches": 1}
    options = sizes | memory | place | {"num_frame_per_block": FRAMES_PER_SPAN}
    session = chunkattn.ARDiffusionKVCache(config, **options).open_session("film")
    video = roll_out(VideoModel().eval(), session, spans)
    print(f"{spans} spans of {FRAMES_PER_SPAN} frames: {tuple(video.shape)}")
    return video


if __name__ == "__main__":
    main()
