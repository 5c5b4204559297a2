"""Policies: which chunks a span sees and which stay after a commit, as functions of chunk indices.

A policy knows neither blocks nor tensors; the plan turns what it says into a block table, so no
kernel changes with it. A new one is a class with `visible`, `kept` and ``capacity_chunks``.
"""

import sys
from dataclasses import dataclass, field

from chunkattn.window import Runs, common, count, merged, runs, union, visible_history


class Policy:
    """What a branch sees and keeps. Chunks are counted on the time line, in `window.Runs`.

    A chunk that is shown but has left is refused when that span is planned.

    Attributes:
        capacity_chunks: the most chunks that are kept after a commit; sizes the pool.
        positional: `visible` and `kept` depend on positions alone and not on ``resident``. Others
            cannot be rolled back behind a commit after which a chunk has left.
        retrieved_chunks: the most chunks that `Session.retrieve` may show beside the visible ones.
        archive_chunks: the most chunks that have left and are kept in host memory to be retrieved;
            None for all.
        longest_span: the most chunks of a span: the window that counts it in, if there is one.
        layers: for each layer of the model its group, an index into `views`; None where all layers
            see the same.
    """

    capacity_chunks: int
    positional: bool = False
    retrieved_chunks: int = 0
    archive_chunks: int | None = None
    longest_span: int = sys.maxsize
    layers: tuple[int, ...] | None = None

    def visible(self, resident: Runs, span: range) -> Runs:
        """History that ``span`` sees, the same in its denoise and commit forwards.

        Args:
            resident: committed chunks that are still there.
            span: the chunks of the forward; they follow everything committed.
        """
        raise NotImplementedError

    def kept(self, resident: Runs, span: range) -> Runs:
        """Chunks that stay when ``span`` has been committed. What is left out never comes back.

        Args:
            resident: committed chunks that were there before.
            span: the chunks of the forward that has ended, whose first ``committed(len(span))`` are
                history now. It does not matter what is said of the others.
        """
        raise NotImplementedError

    def committed(self, num_chunks: int) -> int:
        """How many of a span's first chunks a commit makes history."""
        return num_chunks

    def most_visible(self, num_chunks: int) -> int:
        """The most chunks that a span of up to ``num_chunks`` sees, itself counted in."""
        return self.capacity_chunks + num_chunks

    def views(self) -> "tuple[Policy, ...]":
        """One policy for each group of layers that see the same."""
        return (self,)

    def view_of(self, layer: int) -> int:
        """The group of a layer, an index into `views`."""
        return self.layers[layer] if self.layers else 0


@dataclass(frozen=True)
class SlidingWindow(Policy):
    """The first ``sink_chunks`` for ever, and the last ``window_chunks``, the span counted in.

    With ``reset_at_boundary`` everything but the sink leaves at each commit.
    """

    window_chunks: int
    sink_chunks: int = 0
    reset_at_boundary: bool = False
    positional = True

    def __post_init__(self) -> None:
        _check_least(1, window_chunks=self.window_chunks)
        _check_least(0, sink_chunks=self.sink_chunks)

    @property
    def capacity_chunks(self) -> int:  # type: ignore[override]
        return self.sink_chunks + self.window_chunks

    @property
    def longest_span(self) -> int:  # type: ignore[override]
        return self.window_chunks

    def most_visible(self, num_chunks: int) -> int:
        return self.capacity_chunks

    def visible(self, resident: Runs, span: range) -> Runs:
        return self._seen(span.start, span.stop)

    def kept(self, resident: Runs, span: range) -> Runs:
        return self._seen(span.stop, span.stop)  # as much as a span of no chunks sees

    def _seen(self, first: int, stop: int) -> Runs:
        sink, recent = visible_history(
            first,
            stop - first,
            window_chunks=self.window_chunks,
            sink_chunks=self.sink_chunks,
            reset_at_boundary=self.reset_at_boundary,
        )
        if sink.stop == recent.start:
            return (range(recent.stop),) if first else ()
        return tuple(run for run in (sink, recent) if run)


@dataclass(frozen=True)
class HardReset(Policy):
    """DreamZero's: history grows to ``window_chunks``; the span that no longer fits begins anew."""

    window_chunks: int

    def __post_init__(self) -> None:
        _check_least(1, window_chunks=self.window_chunks)

    @property
    def capacity_chunks(self) -> int:  # type: ignore[override]
        return self.window_chunks

    @property
    def longest_span(self) -> int:  # type: ignore[override]
        return self.window_chunks

    def visible(self, resident: Runs, span: range) -> Runs:
        return resident if count(resident) + len(span) <= self.window_chunks else ()

    def kept(self, resident: Runs, span: range) -> Runs:
        return merged((*self.visible(resident, span), span))


@dataclass(frozen=True)
class FloatingSink(Policy):
    """A window and a sink that moves: the first ``sink_chunks`` of the latest period that has them.

    A period is ``period_chunks`` long, a shot of a film for example. Until a period has a whole
    sink, that of the period before stays.
    """

    window_chunks: int
    sink_chunks: int
    period_chunks: int
    positional = True

    def __post_init__(self) -> None:
        if not 0 < self.sink_chunks <= min(self.window_chunks, self.period_chunks):
            raise ValueError(
                "`sink_chunks` must be from 1 to the shorter of window_chunks and period_chunks, "
                f"got {self.sink_chunks}"
            )

    @property
    def capacity_chunks(self) -> int:  # type: ignore[override]
        return self.sink_chunks + self.window_chunks

    @property
    def longest_span(self) -> int:  # type: ignore[override]
        return self.window_chunks

    def visible(self, resident: Runs, span: range) -> Runs:
        periods = max(0, span.start - self.sink_chunks) // self.period_chunks
        start = periods * self.period_chunks
        recent = range(max(0, span.stop - self.window_chunks), span.start)
        return runs([*range(start, min(start + self.sink_chunks, span.start)), *recent])

    def kept(self, resident: Runs, span: range) -> Runs:
        return self.visible(resident, range(span.stop, span.stop))


class _Around(Policy):
    """Another policy, changed in one respect."""

    inner: Policy

    @property
    def capacity_chunks(self) -> int:  # type: ignore[override]
        return self.inner.capacity_chunks

    @property
    def positional(self) -> bool:  # type: ignore[override]
        return self.inner.positional

    @property
    def retrieved_chunks(self) -> int:  # type: ignore[override]
        return self.inner.retrieved_chunks

    @property
    def archive_chunks(self) -> int | None:  # type: ignore[override]
        return self.inner.archive_chunks

    @property
    def longest_span(self) -> int:  # type: ignore[override]
        return self.inner.longest_span

    @property
    def layers(self) -> tuple[int, ...] | None:  # type: ignore[override]
        return self.inner.layers

    def visible(self, resident: Runs, span: range) -> Runs:
        return self.inner.visible(resident, span)

    def kept(self, resident: Runs, span: range) -> Runs:
        return self.inner.kept(resident, span)

    def committed(self, num_chunks: int) -> int:
        return self.inner.committed(num_chunks)

    def views(self) -> tuple[Policy, ...]:
        return self.inner.views()

    def view_of(self, layer: int) -> int:
        return self.inner.view_of(layer)


@dataclass(frozen=True)
class PinnedChunks(_Around):
    """``inner``, and any chunks pinned: once committed they are kept and seen for ever."""

    inner: Policy
    pinned: tuple[int, ...]

    def __post_init__(self) -> None:
        _check_least(0, pinned=min(self.pinned, default=0))

    @property
    def capacity_chunks(self) -> int:  # type: ignore[override]
        return self.inner.capacity_chunks + len(set(self.pinned))

    def visible(self, resident: Runs, span: range) -> Runs:
        return union(self.inner.visible(resident, span), self._before(span.start))

    def kept(self, resident: Runs, span: range) -> Runs:
        return union(self.inner.kept(resident, span), self._before(span.stop))

    def views(self) -> tuple[Policy, ...]:
        return tuple(
            PinnedChunks(view, self.pinned) if view is not self.inner else self
            for view in self.inner.views()
        )

    def _before(self, stop: int) -> Runs:
        return common(runs(self.pinned), (range(stop),))


@dataclass(frozen=True)
class PartialCommit(_Around):
    """``inner``, but only the first ``num_chunks`` of a span become history.

    A planner predicts a long span and executes its beginning. What the span sees goes by its whole
    length; what stays is what ``inner`` keeps of that, and of the part that is committed.
    """

    inner: Policy
    num_chunks: int

    def __post_init__(self) -> None:
        _check_least(1, num_chunks=self.num_chunks)

    def kept(self, resident: Runs, span: range) -> Runs:
        return self.inner.kept(self.inner.visible(resident, span), span[: self.num_chunks])

    def committed(self, num_chunks: int) -> int:
        return min(num_chunks, self.num_chunks)


@dataclass(frozen=True)
class Retrieval(_Around):
    """``inner``, and up to ``num_chunks`` others that `Session.retrieve` shows beside the window.

    Any committed chunk may be named: one that leaves the window is copied to host memory first.
    With ``archive_chunks`` a branch keeps as many there, and the oldest go: what is shown stays.
    """

    inner: Policy
    num_chunks: int
    archive_chunks: int | None = None

    def __post_init__(self) -> None:
        _check_least(0, num_chunks=self.num_chunks)
        if self.archive_chunks is not None:
            _check_least(0, archive_chunks=self.archive_chunks)

    @property
    def capacity_chunks(self) -> int:  # type: ignore[override]
        return self.inner.capacity_chunks + self.num_chunks

    @property
    def retrieved_chunks(self) -> int:  # type: ignore[override]
        return self.inner.retrieved_chunks + self.num_chunks


@dataclass(frozen=True)
class PerLayer(Policy):
    """Layers that see different windows of one history, which holds what any of them sees.

    Args:
        windows: the different policies. A commit and a retrieval are those of all layers:
            `PartialCommit` and `Retrieval` go around this one.
        layers: for each layer of the model, the index of its policy in ``windows``.
    """

    windows: tuple[Policy, ...]
    layers: tuple[int, ...] = field()  # without the default that it has elsewhere

    def __post_init__(self) -> None:
        if not self.windows:
            raise ValueError(f"`windows` must name at least one policy, got {self.windows}")
        for window in self.windows:
            longest = window.longest_span
            if window.retrieved_chunks or window.committed(longest) < longest:
                raise ValueError(
                    "`windows` must neither commit in part nor retrieve, which goes around "
                    f"PerLayer, got {window}"
                )

    @property
    def capacity_chunks(self) -> int:  # type: ignore[override]
        sliding = [w for w in self.windows if isinstance(w, SlidingWindow)]
        if len(sliding) == len(self.windows):
            return max(w.sink_chunks for w in sliding) + max(w.window_chunks for w in sliding)
        return sum(w.capacity_chunks for w in self.windows)

    @property
    def positional(self) -> bool:  # type: ignore[override]
        return all(window.positional for window in self.windows)

    @property
    def longest_span(self) -> int:  # type: ignore[override]
        return min(window.longest_span for window in self.windows)

    def visible(self, resident: Runs, span: range) -> Runs:
        return union(*(window.visible(resident, span) for window in self.windows))

    def kept(self, resident: Runs, span: range) -> Runs:
        return union(*(window.kept(resident, span) for window in self.windows))

    def views(self) -> tuple[Policy, ...]:
        return self.windows


def _check_least(least: int, **numbers: int) -> None:
    for name, number in numbers.items():
        if number < least:
            raise ValueError(f"`{name}` must be at least {least}, got {number}")
