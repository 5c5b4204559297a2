"""Token geometries of published chunk-wise autoregressive video and world models.

Facts of each model, read from its public code and configuration: how many tokens a frame has, how
many frames one forward generates, how far its window reaches. Tests, benchmarks and planning use
them by name::

    preset = get_preset("dreamzero_14b")
    preset.frame_tokens, preset.window_frames  # 880, 9
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class ModelPreset:
    """What decides the shapes of one model's attention over its window.

    Attributes:
        layers: transformer blocks, each with K and V of its own.
        heads: query heads.
        kv_heads: K/V heads; fewer than ``heads`` means grouped-query attention.
        head_size: elements of one head.
        frame_tokens: tokens of one latent frame. A frame is one chunk.
        frames_per_span: frames generated together, by one forward.
        window_frames: last frames that stay visible, the span in flight counted in. ``None``
            where the model keeps ranges of its own instead of one window.
        sink_frames: first frames that stay visible for ever, on top of the window.
        denoise_steps: denoise forwards of a span; ``None`` where no source states it.
        action_tokens: action rows that ride along with a span.
        state_tokens: robot-state rows that ride along with a span.
        cfg_branches: classifier-free-guidance branches, each with a history of its own.
        dtype: name of the torch dtype to plan with. Stated by the source for ``dreamzero_14b``
            and assumed for the others.
    """

    layers: int
    heads: int
    kv_heads: int
    head_size: int
    frame_tokens: int
    frames_per_span: int
    window_frames: int | None
    sink_frames: int
    denoise_steps: int | None
    action_tokens: int = 0
    state_tokens: int = 0
    cfg_branches: int = 1
    dtype: str = "bfloat16"


PRESETS: dict[str, ModelPreset] = {
    # 16 steps as configured; its step cache runs 4 of them through the transformer. Reset by hand
    # when the window is full or the prompt changes.
    "dreamzero_14b": ModelPreset(
        layers=40,
        heads=40,
        kv_heads=40,
        head_size=128,
        frame_tokens=880,
        frames_per_span=2,
        window_frames=9,
        sink_frames=0,
        denoise_steps=16,
        action_tokens=24,
        state_tokens=1,
        cfg_branches=2,
    ),
    # Action, state and guidance as in its larger sister: about 125 = 2 * 50 + 24 + 1 queries.
    "dreamzero_5b": ModelPreset(
        layers=30,
        heads=24,
        kv_heads=24,
        head_size=128,
        frame_tokens=50,
        frames_per_span=2,
        window_frames=9,
        sink_frames=0,
        denoise_steps=None,
        action_tokens=24,
        state_tokens=1,
        cfg_branches=2,
    ),
    "lingbot_world_v2": ModelPreset(
        layers=40,
        heads=40,
        kv_heads=40,
        head_size=128,
        frame_tokens=1560,
        frames_per_span=3,
        window_frames=9,
        sink_frames=9,
        denoise_steps=4,
    ),
    "lingbot_world_720p": ModelPreset(
        layers=40,
        heads=40,
        kv_heads=40,
        head_size=128,
        frame_tokens=3600,
        frames_per_span=3,
        window_frames=18,
        sink_frames=3,
        denoise_steps=4,
    ),
    "self_forcing_1_3b": ModelPreset(
        layers=30,
        heads=12,
        kv_heads=12,
        head_size=128,
        frame_tokens=1560,
        frames_per_span=3,
        window_frames=21,
        sink_frames=0,
        denoise_steps=4,
    ),
    "longlive_1": ModelPreset(
        layers=30,
        heads=12,
        kv_heads=12,
        head_size=128,
        frame_tokens=1560,
        frames_per_span=3,
        window_frames=9,
        sink_frames=3,
        denoise_steps=4,
    ),
    "longlive_2_5b": ModelPreset(
        layers=30,
        heads=24,
        kv_heads=24,
        head_size=128,
        frame_tokens=880,
        frames_per_span=8,
        window_frames=24,
        sink_frames=8,
        denoise_steps=4,
    ),
    "krea_realtime_14b": ModelPreset(
        layers=40,
        heads=40,
        kv_heads=40,
        head_size=128,
        frame_tokens=1560,
        frames_per_span=3,
        window_frames=6,
        sink_frames=0,
        denoise_steps=4,
    ),
    "matrix_game_2": ModelPreset(
        layers=30,
        heads=12,
        kv_heads=12,
        head_size=128,
        frame_tokens=880,
        frames_per_span=3,
        window_frames=6,
        sink_frames=0,
        denoise_steps=3,
    ),
    "magi_1_24b": ModelPreset(
        layers=48,
        heads=48,
        kv_heads=8,
        head_size=128,
        frame_tokens=3600,
        frames_per_span=6,
        window_frames=None,
        sink_frames=0,
        denoise_steps=None,
    ),
}


def get_preset(name: str) -> ModelPreset:
    """Look a preset up by its name in ``PRESETS``.

    Raises:
        ValueError: there is no preset of that name.
    """
    if name not in PRESETS:
        raise ValueError(f"`preset` must be one of {', '.join(sorted(PRESETS))}, got {name!r}")
    return PRESETS[name]
