"""``chunkattn capacity``."""

import argparse
import json
import math
from typing import Any

from chunkattn.capacity import ITEMSIZE, preset_capacity
from chunkattn.commands import MODEL, CannotRunError, add_parser, positive
from chunkattn.presets import PRESETS, get_preset

_COUNTS = ("sessions", "blocks_per_session", "num_blocks", "block_size", "blocks_per_chunk")


def add(commands: Any) -> None:
    parser = add_parser(
        commands,
        "capacity",
        help="how many sessions of a model one GPU holds, and what takes the memory",
        description=(
            "Divide a GPU's memory among sessions of a model: bytes of K/V, of the null block and "
            "of what else a session holds. Needs no GPU."
        ),
        found="not one session fits",
    )
    parser.add_argument(
        "--preset", choices=sorted(PRESETS), metavar="NAME", required=True, help=MODEL
    )
    parser.add_argument(
        "--memory-gib",
        type=_amount,
        metavar="N",
        required=True,
        help="of one GPU, for K/V and sessions' state",
    )
    parser.add_argument(
        "--tp", type=positive, metavar="N", default=1, help="ranks that share the K/V heads"
    )
    parser.add_argument(
        "--cfg", type=positive, metavar="N", default=1, help="ranks that share the branches"
    )
    parser.add_argument(
        "--kv-dtype",
        choices=sorted(ITEMSIZE),
        help="of the pools (default: the preset's)",
    )
    parser.add_argument(
        "--block-size",
        type=positive,
        metavar="N",
        help="tokens (default: the largest with a null block of at most 2 %% of a session)",
    )
    parser.add_argument(
        "--cross-attention-mib",
        type=_amount,
        metavar="N",
        default=0,
        help="of one session, on one GPU",
    )
    parser.add_argument(
        "--model-owned-mib", type=_amount, metavar="N", default=0, help="of one session, on one GPU"
    )
    parser.add_argument("--json", action="store_true", help="print JSON, not a table")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    try:
        report = preset_capacity(
            get_preset(args.preset),
            int(args.memory_gib * 2**30),
            tp=args.tp,
            cfg=args.cfg,
            kv_dtype=args.kv_dtype,
            block_size=args.block_size,
            cross_attention_bytes=int(args.cross_attention_mib * 2**20),
            model_owned_bytes=int(args.model_owned_mib * 2**20),
        )
    except ValueError as error:
        raise CannotRunError(error) from error
    status = int(not report["sessions"])
    if args.json:
        print(json.dumps(report))
        return status
    print(f"{args.preset}: {report['sessions']} session(s) in {args.memory_gib:g} GiB")
    for name, value in report.items():
        in_bytes = isinstance(value, int) and name not in _COUNTS
        shown = f"{value / 2**30:,.3f} GiB" if in_bytes else str(value)
        print(f"  {name.replace('_', ' '):22} {shown:>16}")
    return status


def _amount(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"must be a number from 0, got {text!r}")
    return value
