"""Policies: which chunks a span sees and which stay after a commit, as functions of chunk indices.

A policy knows neither blocks nor tensors; the plan turns what it says into a block table, so no
kernel changes with it. A new one is a class with `visible`, `kept` and ``capacity_chunks``.
"""

from dataclasses import dataclass

from chunkattn.window import Runs, merged, visible_history


class Policy:
    """What a branch sees and keeps. Chunks are counted on the time line, in `window.Runs`.

    Attributes:
        capacity_chunks: the most chunks that are kept after a commit.
        positional: `visible` and `kept` depend on positions alone and not on ``resident``, so that
            the state at any earlier position is known.
    """

    capacity_chunks: int
    positional: bool = False

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
            span: the chunks just committed.
        """
        raise NotImplementedError


@dataclass(frozen=True)
class SlidingWindow(Policy):
    """The first ``sink_chunks`` for ever, and the last ``window_chunks``, the span counted in.

    With ``reset_at_boundary`` everything but the sink leaves at each commit.
    """

    window_chunks: int
    sink_chunks: int = 0
    reset_at_boundary: bool = False
    positional = True

    @property
    def capacity_chunks(self) -> int:  # type: ignore[override]
        return self.sink_chunks + self.window_chunks

    def visible(self, resident: Runs, span: range) -> Runs:
        both = visible_history(
            span.start,
            len(span),
            window_chunks=self.window_chunks,
            sink_chunks=self.sink_chunks,
            reset_at_boundary=self.reset_at_boundary,
        )
        return merged(both)

    def kept(self, resident: Runs, span: range) -> Runs:
        # As much as a span of no chunks would see.
        return self.visible(resident, range(span.stop, span.stop))
