"""`chunkattn plan`: the records are what the manager did, and the command says so."""

import dataclasses
import json
import sys
from pathlib import Path

import pytest

from chunkattn import cli, commands
from chunkattn.policy import HardReset, PerLayer, SlidingWindow
from chunkattn.presets import PRESETS, ModelPreset, get_preset
from tests.helpers.rollout import Timeline, timeline_id, timelines

pytest.importorskip("vllm")

from chunkattn import rollout
from chunkattn.forward import ForwardContext
from chunkattn.timeline import ForwardRecord

# A preset's spans are all alike, after the first frames.
REGULAR = [c for c in timelines() if all(f["num_chunks"] == c.span for f in c.forwards[1:])]
WINDOWED = [name for name in PRESETS if PRESETS[name].window_frames]


def preset_of(case: Timeline, frame_tokens: int) -> ModelPreset:
    """A model with the window of a recorded timeline, two denoise forwards a span."""
    return ModelPreset(
        layers=1,
        heads=1,
        kv_heads=1,
        head_size=8,
        frame_tokens=frame_tokens,
        frames_per_span=case.span,
        window_frames=case.window.window,
        sink_frames=case.window.sink,
        first_frames=case.forwards[0]["num_chunks"] % case.span,
        denoise_steps=2,
    )


@pytest.mark.parametrize(("frame_tokens", "block_size"), [(4, None), (4, 2), (6, 4), (4, 8)])
@pytest.mark.parametrize("case", REGULAR, ids=timeline_id)
def test_the_records_follow_the_recorded_timelines(
    case: Timeline, frame_tokens: int, block_size: int | None
) -> None:
    preset = preset_of(case, frame_tokens)
    spans = len(case.forwards) - bool(preset.first_frames)
    records = rollout.play(
        preset, spans, block_size=block_size, reset_at_boundary=case.window.reset
    )
    commits = [record for record in records if record.commit]
    assert len(commits) == len(case.forwards)
    held: set[int] = set()
    for record, expected in zip(commits, case.forwards, strict=True):
        assert record.first_chunk == expected["first_chunk"]
        assert list(record.visible_chunks) == expected["visible"]
        held = (held | set(record.span)) - set(record.evicted_chunks)
        if frame_tokens % (block_size or frame_tokens) == 0:
            assert sorted(held) == expected["resident_after_commit"]
        else:  # a block that a resident chunk shares keeps its neighbour
            assert held >= set(expected["resident_after_commit"])
    denoise = [record for record in records if not record.commit]
    assert all(record.forwards == 2 for record in denoise)
    seen = {(record.first_chunk, record.visible_chunks) for record in commits}
    assert {(record.first_chunk, record.visible_chunks) for record in denoise} <= seen


@pytest.mark.parametrize("block_size", [None, 220, 100, 2000])
def test_the_blocks_are_those_of_the_plan(
    block_size: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Against the block lists of each forward; a block of two chunks stays with the later one.

    Chunks that lost some blocks and kept others once counted as held until the last was free.
    """
    planned: list[tuple[set[int], set[int]]] = []
    add = rollout.Recorder.add

    def spy(self: rollout.Recorder, forward: ForwardContext) -> None:
        planned.append((set(forward.history_block_ids), set(forward.span_block_ids)))
        add(self, forward)

    monkeypatch.setattr(rollout.Recorder, "add", spy)
    preset = dataclasses.replace(get_preset("dreamzero_14b"), denoise_forwards=1)
    records = rollout.play(preset, 20, block_size=block_size)
    assert len(records) == len(planned) == 41
    held: dict[int, set[int]] = {}
    for record, (history, span) in zip(records, planned, strict=True):
        ids = {chunk: set(blocks) for chunk, blocks in record.block_ids.items()}
        assert set().union(*(ids[chunk] for chunk in record.span)) == span
        assert set().union(*(b for c, b in ids.items() if c not in record.span)) == history
        if record.commit:
            held |= ids
        for chunk in record.evicted_chunks:
            del held[chunk]
        oldest = min(set(held) - set(record.visible_chunks), default=record.first_chunk)
        assert oldest >= record.first_chunk - 9 - 2  # one that shares a block may stay behind


def test_a_policy_decides() -> None:
    records = rollout.play(get_preset("dreamzero_14b"), 6, policy=HardReset(9))
    assert [r.visible_chunks for r in records if r.commit][-3:] == [
        tuple(range(9)),
        (9, 10),
        (9, 10, 11, 12),
    ]
    assert [r.evicted_chunks for r in records if r.evicted_chunks] == [tuple(range(9))]


def test_layers_that_see_different_windows() -> None:
    """The record holds what any layer sees."""
    preset = dataclasses.replace(get_preset("longlive_1"), layers=2)
    policy = PerLayer((SlidingWindow(3, sink_chunks=1), SlidingWindow(6)), (0, 1))
    last = rollout.play(preset, 6, policy=policy)[-1]
    assert last.visible_chunks == (0, *range(12, 18))


# -- the command ---------------------------------------------------------------------------------
def records_of(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[dict]:
    assert cli.main(["plan", *arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("name", WINDOWED)
def test_json_of_every_preset(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    rows = records_of(capsys, "--preset", name, "--spans", "6")
    played: list[ForwardRecord] = rollout.play(get_preset(name), 6)
    assert rows == json.loads(json.dumps([dataclasses.asdict(record) for record in played]))
    assert rows[-1]["commit"]


def test_the_text_says_what_leaves(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", "--preset", "longlive_2_5b", "--spans", "5"]) == 0
    out = capsys.readouterr().out
    assert out.endswith(
        "commit of chunks 32-39\n"
        "  sees           chunks 0-7, 16-39\n"
        "  sink           0-7 in blocks 1-8\n"
        "  window         16-31 in blocks 17-32\n"
        "  in flight      32-39 in blocks 33-40\n"
        "  leaves         8-15 in blocks 9-16\n"
    )


def test_the_window_can_be_changed(capsys: pytest.CaptureFixture[str]) -> None:
    change = ["--sink-frames=0", "--window-frames=8", "--block-size=440"]
    rows = records_of(capsys, "--preset=longlive_2_5b", "--spans=3", *change)
    assert rows[-1]["visible_chunks"] == list(range(16, 24))
    assert [len(ids) for ids in rows[-1]["block_ids"].values()] == [2] * 8
    rows = records_of(capsys, "--preset=longlive_2_5b", "--spans=3", "--reset-at-boundary")
    assert rows[-1]["visible_chunks"] == [*range(8), *range(16, 24)]
    rows = records_of(capsys, "--preset=magi_1_24b", "--spans=2", "--window-frames=12")
    assert rows[-1]["visible_chunks"] == list(range(12))


def test_a_policy_of_ones_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = "from chunkattn.policy import HardReset\nMINE = HardReset(4)\nOTHER = 3\n"
    (tmp_path / "my_policies.py").write_text(text)
    monkeypatch.chdir(tmp_path)
    before = list(sys.path)
    rows = records_of(capsys, "--preset=krea_realtime_14b", "--policy=my_policies:MINE")
    assert rows[-1]["visible_chunks"] == [33, 34, 35]
    assert sys.path == before
    for wrong, message in [
        ("my_policies:OTHER", "`--policy` must name an object of a Policy, got 3"),
        ("my_policies:NONE", "`--policy` must be hard-reset or module:NAME, got module "),
        ("no_such_module:X", "`--policy` must be hard-reset or module:NAME, got No module named"),
        ("soft-reset", "`--policy` must be hard-reset or module:NAME, got No module named"),
    ]:
        assert cli.main(["plan", "--preset=krea_realtime_14b", f"--policy={wrong}"]) == 2
        assert f"chunkattn plan: {message}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--window-frames=2"], "`window_frames` must be at least frames_per_span 8, got 2"),
        (["--preset=magi_1_24b"], "`window_frames` must be given for a model with ranges"),
        (
            ["--policy=hard-reset", "--sink-frames=1"],
            "`--policy` must be given without --sink-frames",
        ),
        (["--spans=51", "--out=x.png"], "`--out` must be given at most 100 forwards, got 102 of"),
        (["--out=/proc/no/x.html"], "/proc/no"),
    ],
)
def test_what_cannot_be_played_is_refused_in_one_line(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["plan", "--preset=longlive_2_5b", "--spans=2", *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert len(captured.err.splitlines()) == 1
    assert message in captured.err


@pytest.mark.parametrize(("missing", "extras"), [("vllm", "vllm-cpu"), ("matplotlib", "demo")])
def test_a_missing_package_is_named_in_one_line(
    missing: str, extras: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(commands, "is_installed", lambda name: name != missing)
    assert cli.main(["plan", "--preset=longlive_1", "--out=x.png"]) == 2
    assert capsys.readouterr() == (
        "",
        f"chunkattn plan: needs {missing}: pip install 'chunkattn[{extras}]'\n",
    )


def test_the_files_are_drawn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    files = [tmp_path / "new" / name for name in ("timeline.png", "timeline.html")]
    arguments = ["plan", "--preset=lingbot_world_v2", "--spans=7", "--out", *map(str, files)]
    assert cli.main(arguments) == 0
    captured = capsys.readouterr()
    assert (captured.out, captured.err.splitlines()) == ("", [f"wrote {file}" for file in files])
    assert files[0].read_bytes().startswith(b"\x89PNG")
    page = files[1].read_text()
    assert "3 frames a span, a sink of 9 and a window of 9 frames." in page
    assert '<tr><th scope="row">0-2</th>' in page  # the chunks of a span share a row
    assert "<dd>9-11 in blocks 10-12</dd>" in page
