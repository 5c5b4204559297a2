"""Random walks over sessions, against a model in plain Python of which token is where.

Caches with scratch and without, in float32 and fp8: 10,000 steps in all, or ``CHUNKATTN_STEPS``.
"""

import contextlib
import itertools
import math
import os
from collections.abc import Iterator

import pytest
import torch
from hypothesis import event, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from chunkattn import LifecycleError, PoolExhaustedError, Session
from tests.helpers.rollout import FP8, Rollout, Window, make_cache, page_bytes, state

pytestmark = pytest.mark.usefixtures("one_thread")

LAYERS, CAPACITY, STEPS_OF_A_WALK = 2, 3, 50
STEPS = int(os.environ.get("CHUNKATTN_STEPS", "10000"))
indices = st.integers(0, 7)


class Interrupted(Exception):
    """Raised in the middle of a forward."""


class Tracked(Rollout):
    """A branch, its resident chunks, the take of each, and a name for each block that it owns.

    Blocks are numbered on the time line. Two branches that share a block have the same name for it.
    """

    def __init__(self, session: Session, policy: Window, branch: int, names: Iterator[int]) -> None:
        super().__init__(session, policy, branch=branch)
        self.names = names
        self.resident: set[int] = set()
        self.take: dict[int, float] = {}
        self.next_take = next(names) % 64 / 8
        self.owned: dict[int, int] = {}
        self.ran = False

    def values(self, tokens, layer=0, noise=0.0):
        takes = [self.take.get(t // self.chunk, self.next_take) for t in tokens]
        offset = torch.tensor(takes, dtype=torch.float32).view(-1, 1, 1)
        return super().values(tokens, layer, noise) + offset

    def needed(self, num_chunks: int, others: set[int]) -> list[int]:
        """Blocks that a forward in managed slots takes: new ones, and a copy of a shared one."""
        start, end = self.committed * self.chunk, (self.committed + num_chunks) * self.chunk
        span = range(start // self.block, -(-end // self.block))
        return [b for b in span if b not in self.owned or self.owned[b] in others]

    def take_blocks(self, blocks: list[int], *, keep_new: bool) -> None:
        """What is left of `needed` blocks: all, or after an abort the one that is being filled."""
        end = self.committed * self.chunk
        self.owned |= {b: next(self.names) for b in blocks if keep_new or b * self.block < end}

    def commit(self, num_chunks: int, blocks: list[int]) -> None:
        self.take_blocks(blocks, keep_new=True)
        span = {*range(self.committed, self.committed + num_chunks)}
        self.take |= dict.fromkeys(span, self.next_take)
        self.next_take = next(self.names) % 64 / 8
        # Rollout.forward has moved the position already.
        end = self.committed + num_chunks
        self.resident = (self.resident | span) & {*self.policy.resident(end)}
        filling, rest = divmod(end * self.chunk, self.block)
        live = {t // self.block for t in self.tokens(sorted(self.resident))}
        live |= {filling} if rest else set()
        self.owned = {b: name for b, name in self.owned.items() if b in live}

    def rollback(self, num_chunks: int) -> None:
        if num_chunks == self.committed:
            return
        self.committed = num_chunks
        self.resident = {c for c in self.resident if c < num_chunks}
        self.take = {c: take for c, take in self.take.items() if c < num_chunks}
        end = -(-num_chunks * self.chunk // self.block)
        self.owned = {b: name for b, name in self.owned.items() if b < end}

    def check_tokens(self) -> dict[int, int]:
        """Each resident token lies where the model says; returns the block of each name."""
        table = self.cache.block_table(self.adapter)
        assert len(table) == len(set(table)) == len(self.owned)
        assert self.cache.null_block_id not in table
        place = dict(zip(sorted(self.owned), table, strict=True))
        self.check_pools(self.tokens(sorted(self.resident)), place)
        assert self.adapter.completed_chunks == self.committed
        assert {c for run in self.adapter.resident for c in run} == self.resident
        return {self.owned[b]: block for b, block in place.items()}


class Robot:
    """A session and its branches."""

    def __init__(self, session: Session, branches: list[Tracked]) -> None:
        self.session, self.branches, self.swapped = session, branches, False


class Sessions(RuleBasedStateMachine):
    """Up to three sessions of one or two branches, on a pool that may be too small for all."""

    scratch, dtype = True, torch.float32
    robots: list[Robot] | None = None
    played = 0

    @initialize(
        policy=st.builds(Window, st.integers(1, 5), st.integers(0, 3), st.booleans()),
        chunk=st.integers(1, 9),
        block=st.integers(1, 9),
        span=st.integers(1, 3),
        branches=st.integers(1, 2),
        spare=st.integers(0, 9),
        history=st.integers(0, 8),
    )
    def build(self, policy, chunk, block, span, branches, spare, history):
        self.policy, self.local_branches = policy, branches
        self.span = min(span, policy.window)
        # Enough for one session, which is what the cache asks for, and not always for more.
        tokens = (policy.sink + policy.window + self.span) * chunk
        self.usable = branches * (-(-tokens // block) + 2) + spare
        page = page_bytes(block, LAYERS)
        if self.dtype == FP8:  # and a scale for each part of a block
            page = page // 4 + 2 * LAYERS * 4 * (block // math.gcd(block, chunk))
        self.cache = make_cache(
            chunk,
            block,
            policy,
            span=self.span,
            layers=LAYERS,
            dtype=self.dtype,
            scratch=self.scratch,
            available_bytes=(self.usable + 1) * page,
            local_branches=branches,
            session_capacity=CAPACITY,
            max_scratch_tokens_per_branch=3,
        )
        self.robots = []
        self.names, self.opened = itertools.count(), 0
        self.open(history)

    # -- the model ------------------------------------------------------------------------------
    def robot(self, index: int) -> Robot:
        return self.robots[index % len(self.robots)]

    def all_names(self, *but: Tracked) -> set[int]:
        tracked = [b for robot in self.robots for b in robot.branches if b not in but]
        return {name for branch in tracked for name in branch.owned.values()}

    def free(self) -> int:
        return self.usable - len(self.all_names())

    def track(self, session: Session) -> Robot:
        branches = [
            Tracked(session, self.policy, b, self.names) for b in range(self.local_branches)
        ]
        self.opened += 1
        self.robots.append(Robot(session, branches))
        return self.robots[-1]

    @contextlib.contextmanager
    def refused(self, error: type[Exception], match: str) -> Iterator[None]:
        """The call is refused, and nothing has changed."""
        event(match)
        before = state(self.cache)
        with pytest.raises(error, match=match):
            yield
        assert state(self.cache) == before

    # -- open, run ------------------------------------------------------------------------------
    @rule(history=st.integers(0, 8))
    def open(self, history):
        if len(self.robots) == CAPACITY:
            with self.refused(PoolExhaustedError, "`session_capacity` is 3"):
                self.cache.open_session("one too many")
            return
        robot = self.track(self.cache.open_session(f"robot-{self.opened}"))
        for _ in range(history):
            for branch in robot.branches:
                self.forward(robot, branch, 1, True, 0)

    @precondition(lambda self: self.robots)
    @rule(index=indices, num=st.integers(1, 5), action=st.integers(0, 3))
    def span_of_every_branch(self, index, num, action):
        """The usual order: denoise and commit, on each branch."""
        robot = self.robot(index)
        for branch in robot.branches:
            self.forward(robot, branch, num, False, action)
            self.forward(robot, branch, num, True, action)

    @precondition(lambda self: self.robots)
    @rule(
        index=indices,
        side=st.integers(0, 1),
        num=st.integers(1, 5),
        commit=st.booleans(),
        action=st.integers(0, 3),
        catch_up=st.booleans(),
    )
    def span_of_one_branch(self, index, side, num, commit, action, catch_up):
        robot = self.robot(index)
        branch = robot.branches[side % self.local_branches]
        behind = max(b.committed for b in robot.branches) - branch.committed
        self.forward(robot, branch, behind if behind and catch_up else num, commit, action)

    def forward(self, robot, branch, num, commit, action):
        """A forward is right to the token, or it is refused and changes nothing."""
        self.played += 1
        num = min(num, self.policy.window)
        first, end = branch.committed, branch.committed + num
        scratch = self.cache.scratch_blocks_per_branch * branch.block
        managed = commit or 0 < scratch < num * branch.chunk + action
        blocks = branch.needed(num, self.all_names(branch)) if managed else []
        visible = self.policy.visible(first, num)
        others = [b for b in robot.branches if b is not branch and b.ran]

        def enter():
            branch.open(num, commit=commit, action_len=action).__enter__()

        if robot.swapped:
            with self.refused(LifecycleError, "is swapped out"):
                enter()
        elif any(other.committed not in (first, end) for other in others):
            with self.refused(LifecycleError, "branches must agree"):
                enter()
        elif {c for c in visible if c < first} - branch.resident:
            with self.refused(LifecycleError, "which have left"):
                enter()
        elif len(blocks) > self.free():
            with self.refused(PoolExhaustedError, "free blocks are too few"):
                enter()
        else:
            branch.ran = True
            noise = 0 if commit else 1
            branch.forward(num, commit=commit, action_len=action, noise=noise)
            branch.committed = first
            if commit:
                branch.commit(num, blocks)
                branch.committed = end
            else:
                branch.take_blocks(blocks, keep_new=False)

    def may_run(self, robot: Robot, branch: Tracked, num: int = 1) -> bool:
        """A commit of ``num`` chunks would be accepted."""
        first = branch.committed
        others = [b for b in robot.branches if b is not branch and b.ran]
        return (
            not robot.swapped
            and all(other.committed in (first, first + num) for other in others)
            and not {c for c in self.policy.visible(first, num) if c < first} - branch.resident
            and len(branch.needed(num, self.all_names(branch))) <= self.free()
        )

    @precondition(lambda self: self.robots)
    @rule(index=indices, side=st.integers(0, 1), commit=st.booleans(), written=st.integers(0, 2))
    def fail(self, index, side, commit, written):
        """An exception at any layer, or a layer forgotten, leaves the history as it was."""
        robot = self.robot(index)
        branch = robot.branches[side % self.local_branches]
        if not self.may_run(robot, branch):
            return
        blocks = branch.needed(1, self.all_names(branch)) if commit else []
        branch.ran = True
        error = Interrupted if written or not commit else LifecycleError

        def forward():
            with branch.open(commit=commit) as fwd:
                for layer in range(written):
                    branch.write(fwd, layer, noise=2)
                if error is Interrupted:
                    raise Interrupted

        with pytest.raises(error):
            forward()
        branch.take_blocks(blocks, keep_new=False)

    # -- the rest of a session's life -----------------------------------------------------------
    @precondition(lambda self: self.robots)
    @rule(index=indices, num=st.integers(0, 4))
    def rollback(self, index, num):
        robot = self.robot(index)
        position = max(b.committed for b in robot.branches)
        if robot.swapped:
            with self.refused(LifecycleError, "is swapped out"):
                robot.session.rollback(num)
            return
        if num > position:
            with self.refused(ValueError, "`num_chunks` must be from 0 to"):
                robot.session.rollback(num)
            return
        targets = [min(b.committed, position - num) for b in robot.branches]
        for branch, target in zip(robot.branches, targets, strict=True):
            seen = {c for c in self.policy.visible(target, self.span) if c < target}
            if seen - branch.resident:
                with self.refused(LifecycleError, "which have left"):
                    robot.session.rollback(num)
                return
        robot.session.rollback(num)
        for branch, target in zip(robot.branches, targets, strict=True):
            branch.rollback(target)

    @precondition(lambda self: self.robots)
    @rule(index=indices)
    def fork(self, index):
        robot = self.robot(index)
        if robot.swapped or len(self.robots) == CAPACITY:
            error = LifecycleError if robot.swapped else PoolExhaustedError
            with self.refused(error, "is swapped out" if robot.swapped else "`session_capacity`"):
                robot.session.fork("one too many")
            return
        child = self.track(robot.session.fork(f"robot-{self.opened}"))
        for mine, theirs in zip(child.branches, robot.branches, strict=True):
            mine.committed, mine.ran = theirs.committed, theirs.ran
            mine.resident, mine.owned = set(theirs.resident), dict(theirs.owned)
            mine.take = dict(theirs.take)

    @precondition(lambda self: self.robots)
    @rule(index=indices)
    def swap(self, index):
        """Out, or in again where there is room."""
        robot = self.robot(index)
        if not robot.swapped:
            robot.session.swap_out()
            robot.away = [list(branch.owned) for branch in robot.branches]
            for branch in robot.branches:
                branch.owned = {}
        elif sum(map(len, robot.away)) > self.free():
            with self.refused(PoolExhaustedError, "of what was swapped out"):
                robot.session.swap_in()
            return
        else:
            robot.session.swap_in()
            for branch, blocks in zip(robot.branches, robot.away, strict=True):
                branch.owned = {block: next(self.names) for block in blocks}
        robot.swapped = not robot.swapped

    @precondition(lambda self: self.robots)
    @rule(index=indices, fail=st.booleans())
    def recache(self, index, fail):
        """Replay what is resident, with other K/V in the same slots."""
        robot = self.robot(index)
        if robot.swapped or len({b.committed for b in robot.branches}) > 1:
            return
        copies = [
            [b for b, name in branch.owned.items() if name in self.all_names(branch)]
            for branch in robot.branches
        ]
        if sum(map(len, copies)) > self.free():
            with self.refused(PoolExhaustedError, "of blocks shared with a fork"):
                robot.session.switch_prompt("recache")
            return
        chunks = robot.session.switch_prompt("recache")
        assert chunks == sorted(robot.branches[0].resident)
        for branch, shared in zip(robot.branches, copies, strict=True):
            branch.owned |= {block: next(self.names) for block in shared}
        committed = robot.branches[0].committed
        for chunk, branch in itertools.product(chunks, robot.branches):
            branch.ran, branch.committed = True, chunk
            branch.take[chunk] = next(self.names) % 64 / 8
            if fail:
                with contextlib.suppress(Interrupted), branch.open(commit=True) as fwd:
                    branch.write(fwd, 0, noise=2)
                    raise Interrupted
            before = {c for c in branch.resident if c < chunk}
            seen = before & {*self.policy.visible(chunk, 1)} | {chunk}
            branch.forward(commit=True, visible=sorted(seen))
            branch.committed = committed

    @precondition(lambda self: self.robots and self.played > 9)  # let windows fill first
    @rule(index=indices, in_flight=st.booleans(), how=st.sampled_from(["reset", "switch_prompt"]))
    def reset(self, index, in_flight, how):
        self.played = 0
        robot = self.robot(index)
        branch = robot.branches[0]
        if how == "switch_prompt":
            if not robot.swapped:
                robot.session.switch_prompt("reset")
        else:
            opens = in_flight and self.may_run(robot, branch)
            fwd = branch.open().__enter__() if opens else None
            robot.session.reset()
            if fwd is not None:
                fwd.__exit__(None, None, None)
        if how == "reset" or not robot.swapped:
            robot.swapped = False
            for branch in robot.branches:
                branch.rollback(0)
                branch.ran = False

    @precondition(lambda self: self.robots and self.played > 9)
    @rule(index=indices)
    def close(self, index):
        self.played = 0
        robot = self.robot(index)
        robot.session.close()
        self.robots.remove(robot)

    @invariant()
    def books_agree(self):
        if self.robots is None:
            return
        block_of: dict[int, int] = {}
        for robot in self.robots:
            if not robot.swapped:
                for branch in robot.branches:
                    for name, block in branch.check_tokens().items():
                        assert block_of.setdefault(name, block) == block
        assert len(set(block_of.values())) == len(block_of)
        assert self.cache.num_free_blocks == self.free()
        self.cache.check_integrity()


class WithoutScratch(Sessions):
    scratch = False


class Fp8(Sessions):
    dtype = FP8


class Fp8WithoutScratch(WithoutScratch, Fp8):
    pass


MACHINES = Sessions, WithoutScratch, Fp8, Fp8WithoutScratch
TestSessions, TestWithoutScratch, TestFp8, TestFp8WithoutScratch = (m.TestCase for m in MACHINES)
for machine in MACHINES:
    machine.TestCase.settings = settings(
        max_examples=STEPS // STEPS_OF_A_WALK // len(MACHINES),
        stateful_step_count=STEPS_OF_A_WALK,
        deadline=None,
        derandomize=True,
        database=None,
    )
