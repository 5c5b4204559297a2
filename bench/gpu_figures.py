"""The figures of bench/gpu_model.py: a roofline, and predicted time against the window's length."""

from collections.abc import Iterator
from pathlib import Path

import matplotlib
from gpu_predict import (
    FACTS,
    HBM_SHARE,
    Call,
    Card,
    Counts,
    calls_of,
    card_of,
    chosen_split,
    predict_call,
)

from chunkattn.presets import get_preset

matplotlib.use("Agg")
from matplotlib import pyplot

# Okabe and Ito's colours.
COLOURS = {"H100": "#0072B2", "H200": "#E69F00", "A100": "#009E73", "B200": "#CC79A7"}
MARKERS = {"H100": "o", "H200": "s", "A100": "^", "B200": "D"}
SHAPES = (  # of the roofline
    ("dreamzero_14b", "action rows alone", "DreamZero:\naction rows"),
    ("dreamzero_14b", "first frame, commit", "DreamZero:\nfirst frame"),
    ("dreamzero_14b", "span 4, denoise", "DreamZero:\nfull window"),
    ("krea_realtime_14b", "full window", "Krea\nrealtime"),
    ("longlive_2_5b", "full window", "Long-\nLive 2"),
    ("lingbot_world_720p", "full window", "LingBot\n720p"),
)


def draw(counts: Counts, directory: Path) -> None:
    """Write ``gpu_model_roofline.png`` and ``gpu_model_window.png``."""
    directory.mkdir(parents=True, exist_ok=True)
    with pyplot.rc_context({"font.size": 10, "axes.spines.top": False, "axes.spines.right": False}):
        draw_roofline(counts, directory / "gpu_model_roofline.png")
        draw_window(counts, directory / "gpu_model_window.png")


def seconds_of(card: Card, counts: Counts, call: Call) -> dict[str, float]:
    """As the kernels choose to launch the call."""
    return predict_call(card, counts, call, chosen_split(card, call)).seconds


def draw_roofline(counts: Counts, path: Path) -> None:
    figure, axes = pyplot.subplots(figsize=(8, 5.4), layout="constrained")
    intensities = [10.0 ** (x / 50) for x in range(60, 221)]
    for name in FACTS:
        card = card_of(name)
        slope = HBM_SHARE * card.hbm_tbs
        roof = [min(card.matmul_tflops, slope * x) for x in intensities]
        style = {"color": COLOURS[name], "linestyle": "--" if name == "H200" else "-"}
        axes.plot(intensities, roof, linewidth=1.5, **style)
        for preset, what, label in SHAPES:
            call = next(c for c in calls_of(preset) if c.what == what)
            x = call.flop / (call.query_bytes + call.kv_heads * call.head_bytes)
            y = call.flop / seconds_of(card, counts, call)["serial"] / 1e12
            point = {"marker": MARKERS[name], "color": COLOURS[name], "linestyle": "none"}
            if name == "H200":
                point |= {"markerfacecolor": "none", "markersize": 9}
            axes.plot(x, y, label=name if what == SHAPES[0][1] else None, **point)
            if name == "H100":
                axes.axvline(x, color="0.9", zorder=0, linewidth=1)
                axes.text(x, 2500, label, ha="center", va="bottom", fontsize=8)
    axes.set(xscale="log", yscale="log", xlim=(14, 16000), ylim=(20, 2300))
    axes.set_xlabel("arithmetic intensity, FLOP per byte of query, result, K and V")
    axes.set_ylabel("TFLOP/s")
    axes.legend(loc="lower right", frameon=False, title="line: roof; point: call")
    axes.set_title("Only the action rows are near memory's roof\n(model, not measured)", pad=38)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def windows_of(name: str, most: int) -> Iterator[tuple[int, Call]]:
    """Frames that are visible, and the call of a span that sees them."""
    preset = get_preset(name)
    extra = preset.action_tokens + preset.state_tokens
    rows = preset.frames_per_span * preset.frame_tokens + extra
    heads = (preset.heads, preset.kv_heads, preset.head_size)
    for frames in range(preset.frames_per_span, most + 1):
        keys = frames * preset.frame_tokens + extra
        yield frames, Call(name, rows, keys, preset.frame_tokens, *heads)


def draw_window(counts: Counts, path: Path) -> None:
    figure, panels = pyplot.subplots(1, 2, figsize=(8, 4.4), layout="constrained")
    titles = {"dreamzero_14b": "DreamZero", "lingbot_world_v2": "LingBot-World v2"}
    for axes, (preset, title), most in zip(panels, titles.items(), (18, 27), strict=True):
        for name, style in (("H100", "-"), ("H200", "--")):
            calls = dict(windows_of(preset, most))
            seconds = [seconds_of(card_of(name), counts, call) for call in calls.values()]
            low, high = ([1e3 * s[bound] for s in seconds] for bound in ("overlapped", "serial"))
            axes.fill_between(list(calls), low, high, color="0.9", linewidth=0)
            axes.plot(
                list(calls), high, color=COLOURS[name], linestyle=style, label=f"{name}, serial"
            )
        axes.plot(list(calls), low, color="0.4", linestyle=":", label="both, overlapped")
        axes.set(title=title, xlabel="visible frames, the span's own among them")
        axes.set(xlim=(0, most), ylim=(0, None), xticks=range(0, most + 1, 3))
        axes.legend(loc="upper left", frameon=False)
    panels[0].set_ylabel("attention of one layer, ms")
    figure.suptitle("Time grows in step with the window (model, not measured)")
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
