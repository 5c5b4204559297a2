"""The presets against the attention shapes their models are known to launch."""

import dataclasses
import subprocess
import sys

import pytest

from chunkattn.presets import PRESETS, ModelPreset, get_preset

# (preset, query rows, visible keys) of calls seen in the models' own code and traces.
FULL_WINDOW_CALLS = [
    ("dreamzero_14b", 1785, 7945),
    ("dreamzero_5b", 125, 475),
    ("lingbot_world_v2", 4680, 28080),
    ("lingbot_world_720p", 10800, 75600),
    ("self_forcing_1_3b", 4680, 32760),
    ("longlive_1", 4680, 18720),
    ("longlive_2_5b", 7040, 28160),
    ("krea_realtime_14b", 4680, 9360),
    ("matrix_game_2", 2640, 5280),
]


@pytest.mark.parametrize(("name", "queries", "keys"), FULL_WINDOW_CALLS)
def test_full_window_call(name: str, queries: int, keys: int) -> None:
    preset = get_preset(name)
    extra = preset.action_tokens + preset.state_tokens
    assert preset.frames_per_span * preset.frame_tokens + extra == queries
    assert preset.window_frames is not None
    assert (preset.window_frames + preset.sink_frames) * preset.frame_tokens + extra == keys


def test_dreamzero_kv_bytes_of_a_frame() -> None:
    preset = get_preset("dreamzero_14b")
    row = preset.kv_heads * preset.head_size * 2  # bfloat16
    assert 2 * preset.layers * preset.frame_tokens * row == 720_896_000  # 721 MB a frame


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_is_sound(name: str) -> None:
    preset = get_preset(name)
    assert preset.heads % preset.kv_heads == 0
    assert preset.window_frames is None or preset.window_frames >= preset.frames_per_span
    assert preset.dtype in {"bfloat16", "float16", "float32"}
    assert all(
        value is None or isinstance(value, str) or value >= 0
        for value in dataclasses.astuple(preset)
    )


def test_presets_cannot_be_changed_by_accident() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        get_preset("dreamzero_14b").layers = 1  # type: ignore[misc]


@pytest.mark.parametrize("name", ["dreamzero", "", "DREAMZERO_14B"])
def test_unknown_preset_is_refused_by_name(name: str) -> None:
    with pytest.raises(ValueError, match=r"`preset` must be one of dreamzero_14b, .*got '"):
        get_preset(name)


def test_presets_need_only_the_standard_library() -> None:
    code = (
        "import sys, importlib.util as u\n"
        "spec = u.spec_from_file_location('presets', sys.argv[1])\n"
        "module = u.module_from_spec(spec); sys.modules['presets'] = module\n"
        "spec.loader.exec_module(module)\n"
        "print(len(module.PRESETS), 'torch' in sys.modules)"
    )
    path = sys.modules[ModelPreset.__module__].__file__
    run = subprocess.run([sys.executable, "-c", code, str(path)], capture_output=True, text=True)
    assert run.stdout.split() == [str(len(PRESETS)), "False"], run.stderr
