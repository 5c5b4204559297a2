"""Ways to keep a rollout's K/V between forwards, all behind the same three methods.

Every way takes the same rows and gives the same outputs; they differ in what they hold and copy.
"""

from typing import Any, NamedTuple

import torch
from cases import attend, bound_of

from chunkattn import ARDiffusionKVCache, ARDiffusionKVConfig, ForwardContext, scatter_kv
from chunkattn.kernels.reference import dense_attention
from chunkattn.presets import ModelPreset


class Geometry(NamedTuple):
    """What a way must know of a model; sizes in tokens."""

    layers: int
    heads: int
    kv_heads: int
    head_size: int
    chunk: int
    span_chunks: int
    first_chunks: int  # of a forward before the spans; 0 where there is none
    window_chunks: int
    sink_chunks: int
    action: int
    dtype: torch.dtype
    device: torch.device

    @property
    def span(self) -> int:
        return self.chunk * self.span_chunks

    @property
    def spans_to_fill(self) -> int:
        """Spans after which the window is full."""
        return -(-(self.sink_chunks + self.window_chunks) // self.span_chunks)

    @property
    def most_history(self) -> int:
        """Chunks that stay after a commit: sink and window less the next span."""
        return self.sink_chunks + self.window_chunks - self.span_chunks


def geometry_of(
    preset: ModelPreset, layers: int, heads: int, dtype: torch.dtype, device: torch.device
) -> Geometry:
    """A model's geometry with fewer layers and heads."""
    if preset.window_frames is None:
        raise SystemExit("this model keeps ranges of its own: it has no window to roll out")
    return Geometry(
        layers=layers,
        heads=heads,
        kv_heads=max(1, heads * preset.kv_heads // preset.heads),
        head_size=preset.head_size,
        chunk=preset.frame_tokens,
        span_chunks=preset.frames_per_span,
        first_chunks=preset.first_frames,
        window_chunks=preset.window_frames,
        sink_chunks=preset.sink_frames,
        action=preset.action_tokens + preset.state_tokens,
        dtype=dtype,
        device=device,
    )


class Rows(NamedTuple):
    """What one layer brings: ``(rows, heads, head_size)``, the action rows last in ``query``."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    action_key: torch.Tensor | None
    action_value: torch.Tensor | None


class Concat:
    """DreamZero upstream: history and new rows become one tensor, in every layer of every forward.

    Every layer hands the next history back, a stack of K and V cropped to the window; a commit
    keeps it. So does DreamZero's transformer in vllm-omni 0.30.0 without a paged cache.
    """

    name = "concat"

    def __init__(self, geometry: Geometry) -> None:
        self.geometry = geometry
        self.reset()

    def reset(self) -> None:
        g = self.geometry
        empty = torch.empty(2, 0, g.kv_heads, g.head_size, dtype=g.dtype, device=g.device)
        self.history = [empty] * g.layers

    def forward(self, layers: list[Rows], commit: bool) -> list[torch.Tensor]:
        outs, updated = [], []
        for (past_key, past_value), rows in zip(self.history, layers, strict=True):
            key = torch.cat([past_key, rows.key])
            value = torch.cat([past_value, rows.value])
            updated.append(self.kept(key, value))
            if rows.action_key is not None and rows.action_value is not None:
                key = torch.cat([key, rows.action_key])
                value = torch.cat([value, rows.action_value])
            outs.append(attend(rows.query, key, value))
        self.history = updated if commit else self.history
        return outs

    def kept(self, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        g = self.geometry
        sink, most = g.sink_chunks * g.chunk, g.most_history * g.chunk
        if len(key) <= most:
            return torch.stack([key, value])
        last = len(key) - (most - sink)
        if not sink:
            return torch.stack([key[last:], value[last:]])
        return torch.stack([torch.cat([x[:sink], x[last:]]) for x in (key, value)])


class Roll:
    """Self-Forcing and its heirs: a contiguous window for each layer, rolled by a clone when full.

    Every forward writes its rows behind the history; a denoise forward is overwritten by the next.
    """

    name = "roll"

    def __init__(self, geometry: Geometry) -> None:
        g = self.geometry = geometry
        rows = (g.most_history + g.span_chunks) * g.chunk + g.action
        shape = (2, rows, g.kv_heads, g.head_size)
        self.window = [torch.empty(shape, dtype=g.dtype, device=g.device) for _ in range(g.layers)]
        self.reset()

    def reset(self) -> None:
        self.length = 0

    def forward(self, layers: list[Rows], commit: bool) -> list[torch.Tensor]:
        g = self.geometry
        new = layers[0].key.shape[0]
        sink, most = g.sink_chunks * g.chunk, g.most_history * g.chunk
        evicted = max(0, self.length - most)
        if evicted:  # at the first forward of a span
            for window in self.window:
                moved = window[:, sink + evicted : self.length].clone()
                window[:, sink : self.length - evicted] = moved
            self.length -= evicted
        end, outs = self.length + new, []
        for window, rows in zip(self.window, layers, strict=True):
            window[0, self.length : end], window[1, self.length : end] = rows.key, rows.value
            last = end
            if rows.action_key is not None and rows.action_value is not None:
                last += len(rows.action_key)
                window[0, end:last], window[1, end:last] = rows.action_key, rows.action_value
            outs.append(attend(rows.query, window[0, :last], window[1, :last]))
        self.length = end if commit else self.length
        return outs


class Paged:
    """A `chunkattn` session: one pool a layer, blocks that stay where they are."""

    name = "chunkattn"

    def __init__(self, geometry: Geometry, cache: ARDiffusionKVCache | None = None) -> None:
        self.geometry = geometry
        self.cache = cache or cache_of(geometry, sessions=1)
        self.session = self.cache.open_session(f"rollout {id(self)}")

    def reset(self) -> None:
        self.session.reset()

    def planned(self, layers: list[Rows], commit: bool) -> ForwardContext:
        """The forward that brings these rows, to be entered."""
        rows = layers[0]
        action = 0 if rows.action_key is None else len(rows.action_key)
        return self.session.forward(seq_len=len(rows.key), commit=commit, action_len=action)

    def forward(self, layers: list[Rows], commit: bool) -> list[torch.Tensor]:
        with self.planned(layers, commit) as fwd:
            return [fwd.write_attend(number, *rows) for number, rows in enumerate(layers)]


def cache_of(
    geometry: Geometry, sessions: int, block_size: int | None = None
) -> ARDiffusionKVCache:
    """A cache for so many sessions of one branch, without scratch.

    Args:
        geometry: the model.
        sessions: how many it holds.
        block_size: None: a chunk.
    """
    g = geometry
    return ARDiffusionKVCache(
        ARDiffusionKVConfig(
            enable=True,
            chunk_size=g.chunk,
            window_chunks=g.window_chunks,
            sink_chunks=g.sink_chunks,
        ),
        num_layers=g.layers,
        num_kv_heads=g.kv_heads,
        head_size=g.head_size,
        dtype=g.dtype,
        block_size=block_size or g.chunk,
        max_model_len=1 << 20,
        available_bytes=1 << 40,
        memory_budget_bytes=1 << 40,
        session_capacity=sessions,
        local_branches=1,
        device=g.device,
        num_frame_per_block=g.span_chunks,
        max_scratch_tokens_per_branch=g.action,
        scratch=False,
    )


class Graphed(Paged):
    """A session whose layers are replayed from a CUDA graph, one for each shape of forward.

    A plan is rewritten in place, so a graph serves every later span; rows must stay where they are.
    """

    name = "chunkattn, graphs"

    def __init__(self, geometry: Geometry, cache: ARDiffusionKVCache | None = None) -> None:
        super().__init__(geometry, cache)
        self.graphs: dict[tuple[int, bool, int], tuple[Any, list[torch.Tensor]]] = {}

    def forward(self, layers: list[Rows], commit: bool) -> list[torch.Tensor]:
        key = (layers[0].query.data_ptr(), commit, layers[0].key.shape[0])
        if key not in self.graphs:
            with self.planned(layers, commit) as fwd:  # kernels compile outside the capture
                outs = [fwd.write_attend(number, *rows) for number, rows in enumerate(layers)]
                fwd.abort()
            graph = torch.cuda.CUDAGraph()
            with self.planned(layers, commit) as fwd:
                with torch.cuda.graph(graph):
                    for number, rows in enumerate(layers):
                        fwd.write_attend(number, *rows, out=outs[number])
                graph.replay()
            self.graphs[key] = graph, outs
            return outs
        graph, outs = self.graphs[key]
        with self.planned(layers, commit) as fwd:
            graph.replay()
            for number in range(len(layers)):
                fwd.mark_layer_written(number)
        return outs


class Gather(Paged):
    """The same blocks, but attention sees a contiguous copy: paging without a paged kernel."""

    name = "gather"

    def forward(self, layers: list[Rows], commit: bool) -> list[torch.Tensor]:
        outs = []
        with self.planned(layers, commit) as fwd:
            past = torch.tensor(fwd.history_block_ids, device=self.geometry.device).long()
            for number, rows in enumerate(layers):
                pools = self.cache.key_cache(number), self.cache.value_cache(number)
                if commit:
                    scatter_kv(rows.key, rows.value, *pools, fwd.slot_mapping)
                fwd.mark_layer_written(number)
                own = ((rows.key, rows.action_key), (rows.value, rows.action_value))
                key, value = (
                    torch.cat([pool[past].flatten(0, 1), *(x for x in new if x is not None)])
                    for pool, new in zip(pools, own, strict=True)
                )
                outs.append(attend(rows.query, key, value))
        return outs


def ways_of(device: torch.device) -> dict[str, type]:
    """Those that run on a device, by name, ours first."""
    graphed = (Graphed,) if device.type == "cuda" else ()
    return {way.name: way for way in (Paged, *graphed, Concat, Roll, Gather)}


# -- a rollout -------------------------------------------------------------------------------------
class Step(NamedTuple):
    """One forward of a rollout."""

    kind: str  # of shape: steps of one kind share their rows
    chunks: int
    commit: bool
    action: int


def rollout_of(geometry: Geometry, spans: int, denoise_steps: int) -> list[Step]:
    """As the models do: each span is denoised, then committed from its clean frames."""
    g = geometry
    steps = []
    if g.first_chunks:
        steps.append(Step("first", g.first_chunks, True, 0))
    for _ in range(spans):
        steps += [Step("denoise", g.span_chunks, False, g.action)] * denoise_steps
        steps.append(Step("commit", g.span_chunks, True, 0))
    return steps


class Oracle:
    """What a layer must return, in float64, of some query rows: the window by its definition."""

    def __init__(self, geometry: Geometry, rows_checked: int = 48) -> None:
        self.geometry, self.rows_checked = geometry, rows_checked
        self.chunks: list[tuple[torch.Tensor, torch.Tensor]] = []

    def fault(self, rows: Rows, out: torch.Tensor) -> str:
        """What is wrong with a forward's result; nothing is an empty string."""
        g = self.geometry
        recent = g.window_chunks - rows.key.shape[0] // g.chunk
        sink, rest = self.chunks[: g.sink_chunks], self.chunks[g.sink_chunks :]
        visible = [*sink, *rest[len(rest) - min(recent, len(rest)) :], (rows.key, rows.value)]
        if rows.action_key is not None and rows.action_value is not None:
            visible.append((rows.action_key, rows.action_value))
        key, value = (torch.cat([pair[i] for pair in visible]) for i in (0, 1))
        count = min(self.rows_checked, len(out))
        picked = torch.linspace(0, len(out) - 1, count).long().to(out.device)
        query = rows.query[picked]
        expected, _ = dense_attention(query, key, value, g.head_size**-0.5, torch.float64)
        own = attend(query, key, value)
        error, own_error = (
            float((found.double() - expected).abs().max()) for found in (out[picked], own)
        )
        right = error <= bound_of(g.dtype, own_error)  # a NaN is wrong too
        return "" if right else f"wrong by {error:.3g}"

    def commit(self, rows: Rows) -> None:
        chunk = self.geometry.chunk
        keys, values = rows.key.clone().split(chunk), rows.value.clone().split(chunk)
        self.chunks += zip(keys, values, strict=True)


def rows_of(geometry: Geometry, step: Step) -> list[Rows]:
    """Buffers for the rows of every layer of a step; see `refill`."""
    g = geometry
    span = step.chunks * g.chunk
    place = {"dtype": g.dtype, "device": g.device}

    def new(rows: int, heads: int) -> torch.Tensor:
        return torch.empty(rows, heads, g.head_size, **place)

    def layer() -> Rows:
        action = [new(step.action, g.kv_heads) if step.action else None for _ in range(2)]
        own = (new(span, g.kv_heads) for _ in range(2))
        return Rows(new(span + step.action, g.heads), *own, *action)

    return [layer() for _ in range(g.layers)]


def refill(layers: list[Rows]) -> None:
    """New random rows in the same buffers."""
    for rows in layers:
        for tensor in rows:
            if tensor is not None:
                tensor.normal_()
