"""The presets against the attention shapes their models are known to launch."""

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from chunkattn.presets import PRESETS, ModelPreset, get_preset, read_presets

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


# -- a file of one's own ---------------------------------------------------------------------------
NEW = """
[mine]
layers = 2
heads = 8
kv_heads = 4
head_size = 64
frame_tokens = 100
frames_per_span = 3
"""


def test_a_file_adds_models_and_overrides_keys(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(NEW + "[longlive_2_5b]\nwindow_frames = 48\n")
    found = read_presets(path, PRESETS)
    assert found["longlive_2_5b"] == dataclasses.replace(PRESETS["longlive_2_5b"], window_frames=48)
    assert found["mine"].kv_heads == 4
    assert (found["mine"].window_frames, found["mine"].dtype) == (None, "bfloat16")
    assert {**found, "longlive_2_5b": PRESETS["longlive_2_5b"]} == {
        **PRESETS,
        "mine": found["mine"],
    }


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("layers = 2\n", "[layers]: a model must be a table of keys, got 2"),
        (NEW + "windw_frames = 3\n", "[mine]: a key must be one of layers, "),
        (NEW.replace("heads = 8\n", ""), "[mine]: `heads` must be given for a new model, got no"),
        (
            NEW + "sink_frames = -1\n",
            "[mine]: `sink_frames` must be a whole number of at least 0, ",
        ),
        (
            NEW + "cfg_branches = true\n",
            "`cfg_branches` must be a whole number of at least 1, got ",
        ),
        (
            NEW.replace("= 64", "= '64'"),
            "`head_size` must be a whole number of at least 1, got '64'",
        ),
        (NEW.replace("= 4", "= 3"), "[mine]: `kv_heads` must divide the 8 query heads, got 3"),
        (NEW + "window_frames = 2\n", "`window_frames` must be at least frames_per_span 3, got 2"),
        (NEW + "dtype = 'int8'\n", "`dtype` must be one of bfloat16, float16, float32, got 'int8'"),
        ("[longlive_1]\nheads = 13\n", "[longlive_1]: `kv_heads` must divide the 13 query heads"),
        ("[mine\n", "must be a TOML file of presets, got: "),
        (None, "must be a TOML file of presets, got: "),
    ],
)
def test_a_faulty_file_is_refused_by_name(text: str | None, message: str, tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ValueError, match="mine.toml") as caught:
        read_presets(path, PRESETS)
    assert message in str(caught.value)


def test_commands_and_benchmarks_see_the_file(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(NEW + "window_frames = 6\n")
    env = os.environ | {"CHUNKATTN_PRESETS": str(path)}
    root = Path(__file__).resolve().parent.parent

    def run(*command: str) -> "subprocess.CompletedProcess[str]":
        return subprocess.run(
            [sys.executable, *command], env=env, cwd=root, capture_output=True, text=True
        )

    capacity = ("-m", "chunkattn", "capacity", "--memory-gib=1", "--json", "--preset=mine")
    assert json.loads(run(*capacity).stdout)["sessions"] > 0
    assert "mine" in run("-m", "chunkattn", "bench", "attention", "--help").stdout
    path.write_text(NEW + "colour = 1\n")
    done = run(*capacity)
    assert (done.returncode, done.stdout) == (2, "")
    assert len(done.stderr.splitlines()) == 1
    assert done.stderr.startswith(f"chunkattn: {path}: [mine]: a key must be one of layers, ")


def test_kv_heads_are_those_of_the_queries_where_a_new_model_says_nothing(tmp_path):
    path = tmp_path / "mine.toml"
    sizes = "layers = 2\nheads = 4\nhead_size = 8\nframe_tokens = 6\nframes_per_span = 1\n"
    path.write_text(f"[mine]\n{sizes}")
    assert read_presets(path, {})["mine"].kv_heads == 4
