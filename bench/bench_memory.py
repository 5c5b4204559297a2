"""What each way of keeping a rollout's K/V holds and copies, for every model: bytes, no times.

    python bench/bench_memory.py --append

The ways of `ways.py` play a rollout with all layers and tokens of a model but one head of 8, and
without attention; a dispatch mode sees every tensor that torch makes or copies into. Bytes are
proportional to the size of a row, so they are given for the model's own heads and dtype, of one
guidance branch. Both are of one span in a full window, its denoise forwards and its commit: the
most that is held, and what is copied, the span's own rows included. That chunkattn's attention
copies nothing is counted by bench_attention.py.
"""

import sys
import weakref
from typing import Any
from unittest import mock

import torch
from rich.progress import track
from timing import arguments, conditions, record, table_of
from torch.utils._python_dispatch import TorchDispatchMode
from ways import Paged, Rows, cache_of, geometry_of, rollout_of, rows_of, ways_of

from chunkattn import scatter_kv
from chunkattn.capacity import ITEMSIZE, block_size_of
from chunkattn.presets import PRESETS, ModelPreset, get_preset

HEAD_SIZE = 8
DENOISE_STEPS = 4
"""Where the model does not say."""


class Ledger(TorchDispatchMode):
    """Sees what torch makes and copies of float32 tensors, which are the rows of K and V here.

    Attributes:
        copied: bytes that were copied.
        live: bytes of the tensors that were made in this mode and still exist.
        peak: the largest ``live`` so far.
    """

    def __init__(self) -> None:
        super().__init__()
        self.copied = self.live = self.peak = 0
        self._seen: set[int] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        written: tuple[Any, ...] = ()
        match func.overloadpacket.__name__:
            case "cat" | "stack" | "clone" | "index" | "index_select":
                written = (result,)
            case "copy_":
                written = args[:1]
            case "index_put_" | "_index_put_impl_":
                written = args[2:3]
            case "scatter_kv":
                written = args[:2]
        self.copied += sum(rows.nbytes for rows in written if rows.dtype == torch.float32)
        if isinstance(result, torch.Tensor) and result.dtype == torch.float32:
            self._watch(result.untyped_storage())
        return result

    def _watch(self, storage: torch.UntypedStorage) -> None:
        address, size = storage.data_ptr(), storage.nbytes()
        if address in self._seen or not size:
            return
        self._seen.add(address)
        self.live += size
        self.peak = max(self.peak, self.live)
        weakref.finalize(storage, self._forget, address, size)

    def _forget(self, address: int, size: int) -> None:
        self._seen.discard(address)
        self.live -= size


class Written(Paged):
    """`Paged` without its attention."""

    def forward(self, layers: list[Rows], commit: bool) -> list[torch.Tensor]:
        with self.planned(layers, commit) as fwd:
            for number, rows in enumerate(layers):
                if commit:
                    pools = self.cache.key_cache(number), self.cache.value_cache(number)
                    scatter_kv(rows.key, rows.value, *pools, fwd.slot_mapping)
                fwd.mark_layer_written(number)
        return []


def measure(name: str, preset: ModelPreset, seed: int) -> dict[str, Any]:
    """Bytes of every way for one model."""
    device = torch.device("cpu")
    geometry = geometry_of(preset, preset.layers, 1, torch.float32, device)
    geometry = geometry._replace(head_size=HEAD_SIZE, kv_heads=1)
    denoise = preset.denoise_forwards or preset.denoise_steps or DENOISE_STEPS
    fill = rollout_of(geometry, geometry.spans_to_fill + 1, 0)
    span = rollout_of(geometry, 1, denoise)[-denoise - 1 :]
    buffers = {step.kind: rows_of(geometry, step) for step in fill + span}
    scale = preset.kv_heads * preset.head_size * ITEMSIZE[preset.dtype] / (HEAD_SIZE * 4)
    chunks = geometry.sink_chunks + geometry.window_chunks
    block_size = block_size_of(geometry.chunk, chunks + geometry.span_chunks)
    held, copied = {}, {}
    for way_name, make in ways_of(device).items():
        with Ledger() as ledger, mock.patch("ways.attend", lambda query, *_: query):
            if make is Paged:
                way: Any = Written(geometry, cache_of(geometry, 1, block_size))
            else:
                way = make(geometry)
            for step in fill:
                way.forward(buffers[step.kind], step.commit)
            before, ledger.peak = ledger.copied, ledger.live
            for step in span:
                way.forward(buffers[step.kind], step.commit)
            held[way_name] = round(scale * ledger.peak)
            copied[way_name] = round(scale * (ledger.copied - before))
            del way
    tokens = chunks * geometry.chunk + geometry.action
    row = 2 * preset.layers * preset.kv_heads * preset.head_size * ITEMSIZE[preset.dtype]
    return {
        "benchmark": "memory",
        "preset": name,
        "layers": preset.layers,
        "dtype": preset.dtype,
        "block_size": block_size,
        "denoise_steps": denoise,
        "visible_bytes": tokens * row,
        "span_bytes": geometry.span * row,
        "held_bytes": held,
        "copied_bytes": copied,
        **conditions(device, seed),
    }


def show(row: dict[str, Any]) -> Any:
    """One result as a table."""
    table = table_of(
        f"{row['preset']}: {row['denoise_steps']} denoise forwards and a commit, one branch",
        *("way", "held GB", "of the visible K/V", "copied GB a span", "of the span's own K/V"),
    )
    for way, held in row["held_bytes"].items():
        copied = row["copied_bytes"][way]
        table.add_row(
            way,
            f"{held / 1e9:.2f}",
            f"{held / row['visible_bytes']:.2f}",
            f"{copied / 1e9:.2f}",
            f"{copied / row['span_bytes']:.2f}",
        )
    return table


def main() -> int:
    parser = arguments(__doc__)
    models = [name for name in PRESETS if PRESETS[name].window_frames]
    parser.add_argument("--preset", choices=sorted(models), nargs="+", default=models)
    args = parser.parse_args()
    with torch.no_grad():
        for name in track(args.preset, "models", transient=True):
            row = measure(name, get_preset(name), args.seed)
            record(row, args, show(row))
    return 0


if __name__ == "__main__":
    sys.exit(main())
