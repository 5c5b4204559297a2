"""Token geometries of published chunk-wise autoregressive video and world models.

Facts of each model: how many tokens a frame has, how many frames one forward generates, how far its
window reaches. Tests, benchmarks and every command use them by name::

    preset = get_preset("dreamzero_14b")
    preset.frame_tokens, preset.window_frames  # 880, 9

They lie in ``presets.toml``. A file of the same form that the environment variable
``CHUNKATTN_PRESETS`` names adds models, or overrides keys of those that are there::

    [longlive_2_5b]      # the rest stays as it was
    window_frames = 48

    [mine]               # a new model: all keys without a default
    layers = 30
    ...
"""

import os
import tomllib
from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, fields
from pathlib import Path
from typing import Any

ENV = "CHUNKATTN_PRESETS"
DTYPES = ("bfloat16", "float16", "float32")


@dataclass(frozen=True, kw_only=True)
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
        first_frames: frames that are committed before the first span, such as a picture to start
            from.
        denoise_steps: denoise forwards of a span; ``None`` where no source states it.
        denoise_forwards: those of them that run the transformer, where a cache of steps skips
            others; ``None``: all.
        action_tokens: action rows that ride along with a span.
        state_tokens: robot-state rows that ride along with a span.
        cfg_branches: classifier-free-guidance branches, each with a history of its own.
        dtype: name of the torch dtype to plan with. Stated by the source for ``dreamzero_14b``
            and assumed for the others.

    Raises:
        ValueError: a value does not fit.
    """

    layers: int
    heads: int
    kv_heads: int
    head_size: int
    frame_tokens: int
    frames_per_span: int
    window_frames: int | None = None
    sink_frames: int = 0
    first_frames: int = 0
    denoise_steps: int | None = None
    denoise_forwards: int | None = None
    action_tokens: int = 0
    state_tokens: int = 0
    cfg_branches: int = 1
    dtype: str = "bfloat16"

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if field.type is str or (value is None and field.default is None):
                continue
            least = 0 if field.default == 0 else 1
            if type(value) is not int or value < least:
                must = f"must be a whole number of at least {least}"
                raise ValueError(f"`{field.name}` {must}, got {value!r}")
        if self.heads % self.kv_heads:
            raise ValueError(
                f"`kv_heads` must divide the {self.heads} query heads, got {self.kv_heads}"
            )
        if self.window_frames is not None and self.window_frames < self.frames_per_span:
            raise ValueError(
                f"`window_frames` must be at least frames_per_span {self.frames_per_span}, got "
                f"{self.window_frames}"
            )
        if self.dtype not in DTYPES:
            raise ValueError(f"`dtype` must be one of {', '.join(DTYPES)}, got {self.dtype!r}")


def read_presets(path: Path, known: Mapping[str, ModelPreset]) -> dict[str, ModelPreset]:
    """Read a file of presets.

    Args:
        path: TOML: a table for each model, its keys the fields of `ModelPreset`.
        known: what there is already; a table of the same name overrides the keys that it has.

    Returns:
        ``known`` and the models of the file.

    Raises:
        ValueError: the file cannot be read, or a model of it does not fit: file, model and key are
            named.
    """
    try:
        tables: dict[str, Any] = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{path}: must be a TOML file of presets, got: {error}") from error
    presets = dict(known)
    for name, table in tables.items():
        try:
            presets[name] = _preset(table, known.get(name))
        except ValueError as error:
            raise ValueError(f"{path}: [{name}]: {error}") from error
    return presets


def _preset(table: Any, base: ModelPreset | None) -> ModelPreset:
    if not isinstance(table, dict):
        raise ValueError(f"a model must be a table of keys, got {table!r}")
    every = {field.name: field for field in fields(ModelPreset)}
    if unknown := sorted(set(table) - set(every)):
        raise ValueError(f"a key must be one of {', '.join(every)}, got `{unknown[0]}`")
    values = (asdict(base) if base else {}) | table
    if "heads" in values:
        values.setdefault("kv_heads", values["heads"])
    for name, field in every.items():
        if name not in values and field.default is MISSING:
            raise ValueError(f"`{name}` must be given for a new model, got no such key")
    return ModelPreset(**values)


PRESETS: dict[str, ModelPreset] = read_presets(Path(__file__).with_name("presets.toml"), {})
if os.environ.get(ENV):
    PRESETS = read_presets(Path(os.environ[ENV]), PRESETS)


def get_preset(name: str) -> ModelPreset:
    """Look a preset up by its name in ``PRESETS``.

    Raises:
        ValueError: there is no preset of that name.
    """
    if name not in PRESETS:
        raise ValueError(f"`preset` must be one of {', '.join(sorted(PRESETS))}, got {name!r}")
    return PRESETS[name]
