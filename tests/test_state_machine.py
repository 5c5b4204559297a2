"""Random walks over sessions, against a model in plain Python of which token is where."""

import contextlib

import pytest
from hypothesis import event, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from chunkattn import LifecycleError, PoolExhaustedError
from tests.helpers.rollout import (
    Rollout,
    Window,
    make_cache,
    one_thread,  # noqa: F401
    state,
)

LAYERS = 2
indices = st.integers(0, 7)


class Interrupted(Exception):
    """Raised in the middle of a forward."""


class Sessions(RuleBasedStateMachine):
    """Up to two sessions of one or two branches, on a pool that may be too small for both."""

    rollouts: list[Rollout] | None = None
    played = 0

    @initialize(
        policy=st.builds(Window, st.integers(1, 5), st.integers(0, 3), st.booleans()),
        chunk=st.integers(1, 9),
        block=st.integers(1, 9),
        span=st.integers(1, 3),
        branches=st.integers(1, 2),
        spare=st.integers(0, 4),
        history=st.integers(0, 8),
    )
    def build(self, policy, chunk, block, span, branches, spare, history):
        self.policy, self.branches = policy, branches
        span = min(span, policy.window)
        # Enough for one session, which is what the cache asks for, and not always for two.
        tokens = (policy.sink + policy.window + span) * chunk
        self.usable = branches * (-(-tokens // block) + 2) + spare
        self.cache = make_cache(
            chunk,
            block,
            policy,
            span=span,
            layers=LAYERS,
            usable=self.usable,
            local_branches=branches,
            session_capacity=2,
            max_scratch_tokens_per_branch=3,
        )
        self.rollouts = []
        self.opened = 0
        self.open(history)

    def pick(self, index: int) -> Rollout:
        return self.rollouts[index % len(self.rollouts)]

    def missing_blocks(self, rollout: Rollout, num_chunks: int) -> int:
        """Blocks that a forward which needs managed slots must be given."""
        end = (rollout.committed + num_chunks) * rollout.chunk
        owned = {*rollout.live_blocks()}
        return len(
            {*range(rollout.committed * rollout.chunk // rollout.block, -(-end // rollout.block))}
            - owned
        )

    def free(self) -> int:
        return self.usable - sum(len(rollout.live_blocks()) for rollout in self.rollouts)

    @rule(history=st.integers(0, 8))
    def open(self, history):
        if len(self.rollouts) == 2 * self.branches:
            with pytest.raises(PoolExhaustedError, match="`session_capacity` is 2"):
                self.cache.open_session("one too many")
            return
        session = self.cache.open_session(f"robot-{self.opened}")
        for branch in range(self.branches):
            tag = (2 * self.opened + branch) % 7 / 8
            self.rollouts.append(Rollout(session, self.policy, branch=branch, tag=tag))
        self.opened += 1
        for _ in range(history):
            for index in range(self.branches):
                self.forward(len(self.rollouts) - 1 - index, 1, True, 0)

    @precondition(lambda self: self.rollouts)
    @rule(index=indices, num=st.integers(1, 5), action=st.integers(0, 3))
    def commit(self, index, num, action):
        self.forward(index, num, True, action)

    @precondition(lambda self: self.rollouts)
    @rule(index=indices, num=st.integers(1, 5), action=st.integers(0, 3))
    def denoise(self, index, num, action):
        self.forward(index, num, False, action)

    def forward(self, index, num, commit, action):
        """A forward is right to the token, or it has no room and changes nothing."""
        rollout = self.pick(index)
        self.played += 1
        num = min(num, self.policy.window)
        scratch = self.cache.scratch_blocks_per_branch * rollout.block
        managed = commit or num * rollout.chunk + action > scratch
        if managed and self.missing_blocks(rollout, num) > self.free():
            event("exhausted")
            before = state(self.cache)
            with pytest.raises(PoolExhaustedError):
                rollout.open(num, commit=commit, action_len=action).__enter__()
            assert state(self.cache) == before
        else:
            noise = 0 if commit else 1
            rollout.forward(num, commit=commit, action_len=action, noise=noise)

    @precondition(lambda self: self.rollouts)
    @rule(index=indices, commit=st.booleans(), written=st.integers(0, LAYERS))
    def fail(self, index, commit, written):
        """An exception at any layer leaves the history as it was."""
        rollout = self.pick(index)
        if not commit or self.missing_blocks(rollout, 1) <= self.free():
            with contextlib.suppress(Interrupted), rollout.open(commit=commit) as fwd:
                for layer in range(written):
                    rollout.write(fwd, layer, noise=2)
                raise Interrupted

    @precondition(lambda self: self.rollouts)
    @rule(index=indices)
    def forget_a_layer(self, index):
        rollout = self.pick(index)
        if self.missing_blocks(rollout, 1) <= self.free():
            fwd = rollout.open(commit=True).__enter__()
            rollout.write(fwd, LAYERS - 1, noise=2)
            with pytest.raises(LifecycleError, match=r"got none for layers \[0\]"):
                fwd.__exit__(None, None, None)

    @precondition(lambda self: self.rollouts and self.played > 9)  # let windows fill first
    @rule(index=indices, in_flight=st.booleans())
    def reset(self, index, in_flight):
        self.played = 0
        rollout = self.pick(index)
        fwd = rollout.open().__enter__() if in_flight else None
        rollout.session.reset()
        if fwd is not None:
            fwd.__exit__(None, None, None)
        for other in self.rollouts:
            if other.session is rollout.session:
                other.committed = 0

    @precondition(lambda self: self.rollouts and self.played > 9)
    @rule(index=indices)
    def close(self, index):
        self.played = 0
        session = self.pick(index).session
        session.close()
        self.rollouts = [rollout for rollout in self.rollouts if rollout.session is not session]

    @invariant()
    def books_agree(self):
        if self.rollouts is None:
            return
        for rollout in self.rollouts:
            rollout.check_blocks()
            assert rollout.adapter.completed_chunks == rollout.committed
        assert self.cache.num_free_blocks == self.free()
        self.cache.check_integrity()


TestSessions = Sessions.TestCase
TestSessions.settings = settings(
    max_examples=40, stateful_step_count=50, deadline=None, derandomize=True, database=None
)
