"""The examples run, stay short, and attend to what the window says: against plain attention."""

import importlib.util
from pathlib import Path

import pytest
import torch

pytest.importorskip("vllm")
EXAMPLES = Path(__file__).resolve().parent.parent / "examples"


def load(name: str):
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.name)
def test_short(path):
    assert len(path.read_text().splitlines()) < 80


class Dense:
    """Stands in for a session: the whole history, and a window cut out of it by hand."""

    def __init__(self, frame: int, window: int, sink: int):
        self.frame, self.window, self.sink = frame, window, sink
        self.history: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def forward(self, seq_len: int, commit: bool = False):
        self.commit = commit
        return self

    def __enter__(self):
        return self

    def __exit__(self, *_):
        return None

    def write_attend(self, layer, query, key, value, softmax_scale=None):
        past = self.history.get(layer, (key[:0], value[:0]))
        keys, values = (torch.cat([old, new]) for old, new in zip(past, (key, value), strict=True))
        if self.commit:
            self.history[layer] = keys, values
        first_recent = len(keys) - self.window * self.frame
        at = torch.arange(len(keys))
        seen = (at < self.sink * self.frame) | (at >= first_recent)
        out = torch.nn.functional.scaled_dot_product_attention(
            *(x.transpose(0, 1) for x in (query, keys[seen], values[seen])), scale=softmax_scale
        )
        return out.transpose(0, 1)


def test_self_forcing_loop():
    """Six spans: the window slides, and every frame equals that of the dense loop."""
    example = load("self_forcing_loop")
    video = example.main(spans=6)
    torch.manual_seed(0)
    dense = Dense(example.FRAME, example.WINDOW, example.SINK)
    expected = example.roll_out(example.VideoModel().eval(), dense, 6)
    torch.testing.assert_close(video, expected, rtol=0, atol=2e-4)


def test_diffusers_processor(monkeypatch):
    """Four spans of one frame, window 3 and sink 1, under diffusers' own modules."""
    pytest.importorskip("diffusers")
    example = load("diffusers_processor")
    outs = example.main(spans=5)
    dense = Dense(example.FRAME, 3, 1)
    monkeypatch.setattr(example.chunkattn, "ARDiffusionKVCache", lambda *_, **__: DenseCache(dense))
    expected = example.main(spans=5)
    for out, wanted in zip(outs, expected, strict=True):
        torch.testing.assert_close(out, wanted, rtol=0, atol=2e-5)


class DenseCache:
    def __init__(self, session: Dense):
        self.session = session
        session.history_block_ids = []

    def open_session(self, session_id: str) -> Dense:
        return self.session
