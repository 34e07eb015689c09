"""Random loads for a scheduler and its block manager, checked against models of both."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from kv_content import KvContent, groups

from graphllm.engine.block_manager import BlockManager, SequenceBlocks
from graphllm.engine.scheduler import Scheduler
from graphllm.engine.sequence import ActiveSequence, Chunk


class CheckedManager(BlockManager):
    """Compares the prefix that each sequence finds with the longest one that the pools contain."""

    content: KvContent
    found = 0  # number of calls that found a prefix

    def begin(self, tokens: Sequence[int], prefix: int = 0, reuse: bool = True) -> SequenceBlocks:
        expected = self.longest(tokens, prefix) if reuse else 0
        blocks = super().begin(tokens, prefix, reuse)
        assert blocks.cached == expected, (blocks.cached, expected)
        self.found += expected > 0
        return blocks

    def longest(self, tokens: Sequence[int], prefix: int) -> int:
        """Try all lengths against what the rows contain; keys and references play no part."""
        numbers = tuple(self.content.numbers(tokens, prefix).tolist())
        offered = {name: self._offered(name) for name in self.pools}
        for length in range(len(tokens) - 1, max(prefix, 1) - 1, -1):
            full, part = divmod(length, self.block)
            ends = [numbers[j * self.block : (j + 1) * self.block] for j in range(full)]
            last = numbers[full * self.block : length]
            for name, pool in self.pools.items():
                blocks, starts = offered[name]
                first = max(0, length - pool.window + 1) // self.block if pool.window else 0
                if not blocks.issuperset(ends[first:]) or (part and last not in starts):
                    break
            else:
                return length
        return 0

    def _offered(self, name: str) -> tuple[set[tuple[int, ...]], set[tuple[int, ...]]]:
        """The content of the blocks that may be shared; what those to take over begin with."""
        pool, rows = self.pools[name], self.content.rows[name].reshape(-1, self.block).tolist()
        parents = {entry.parent for entry in pool.entries if entry}
        blocks, starts = set(), set()
        for block, entry in enumerate(pool.entries):
            if entry is not None:
                have = tuple(rows[block][: len(entry.tokens) // 4])
                blocks.add(have)
                if not pool.counts[block] and (self._take_continued or entry.key not in parents):
                    starts.update(have[:count] for count in range(1, len(have) + 1))
        return blocks, starts


class Simulation:
    """A random configuration and a random load, reproducible by its seed.

    Steps run, fail, or are launched before the one before them has completed; sequences arrive, are
    cancelled and end at any time. ``scale`` multiplies all lengths.
    """

    def __init__(self, seed: int, scale: int = 1) -> None:
        self.rng = rng = np.random.default_rng(seed)
        windows = {"full": {"full": 0}, "window": {"a": scale * int(rng.integers(1, 20))}}
        windows["mixed"] = {
            **windows["full"],
            **windows["window"],
            "b": scale * int(rng.integers(1, 60)),
        }
        chosen = windows[str(rng.choice(["full", "window", "mixed"], p=[0.3, 0.3, 0.4]))]
        self.block = scale * int(rng.integers(1, 9))
        self.chunk = scale * int(rng.choice([1, 4, 6, 8]))
        self.context = scale * int(rng.integers(8, 70))
        self.bidirectional = bool(rng.random() < 0.3)
        least = max(self.chunk, self.context if self.bidirectional else 1)
        self.tokens = least + scale * int(rng.integers(0, 20))
        self.longest_prompt = self.context // int(rng.choice([1, 3, 10]))
        self.longest_prompt = max(1, self.longest_prompt)
        self.sequences = int(rng.integers(1, 9))
        specs = groups(**chosen)
        width = -(-self.context // self.block)
        spare = float(rng.choice([0, 0.3, 1, 2]))
        sizes = {}
        for spec in specs:
            need = width
            if spec.window:
                need = min(width, -(-(spec.window + self.tokens) // self.block) + 1)
            sizes[spec.name] = need + int(rng.integers(0, spare * need + 1))
        self.manager = CheckedManager(
            specs, sizes, self.block, width, take_continued=bool(rng.random() < 0.5)
        )
        self.content = self.manager.content = KvContent(specs, sizes, self.block)
        self.scheduler = Scheduler(
            self.manager, self.tokens, self.sequences, self.context, self.chunk
        )
        self.common = [self._random_tokens(self.context) for _ in range(3)]
        self.live: list[ActiveSequence] = []
        self.limits: dict[ActiveSequence, int] = {}  # length at which a sequence ends
        self.device: dict[ActiveSequence, list[int]] = {}  # with tokens that are not read yet
        self.load = float(rng.choice([0.05, 0.3, 1.0]))
        self.cancelling = float(rng.choice([0, 0.02, 0.2]))
        self.failing = float(rng.choice([0, 0.02, 0.2]))
        self.steps = self.ended = 0
        self.longest_wait = self._wait = self._wait_bound = 0  # steps
        self._first: ActiveSequence | None = None  # of all sequences
        self._left_out: set[ActiveSequence] = set()  # of the last step

    def _random_tokens(self, count: int) -> list[int]:
        return [int(i) for i in self.rng.integers(0, 3, count)]

    # -- events
    def submit(self) -> None:
        """Add a sequence that may begin as others do."""
        length = int(self.rng.integers(1, self.longest_prompt + 1))
        common = self.common[self.rng.integers(3)][: self.rng.integers(0, length + 1)]
        tokens = [*common, *self._random_tokens(length - len(common))]
        if self.live and self.rng.random() < 0.3:  # the next turn of a conversation, or a fork
            other = self.live[self.rng.integers(len(self.live))].tokens
            tokens = [*other, *self._random_tokens(3)][: max(1, self.context - 4)]
        prefix = 0
        if self.bidirectional and self.rng.random() < 0.7:
            prefix = min(len(tokens), int(self.rng.choice([3, 6, 7 * self.block, self.context])))
        if self.live and self.bidirectional and self.rng.random() < 0.3:  # another sample
            other = self.live[self.rng.integers(len(self.live))]
            tokens, prefix = other.tokens[: other.prompt_tokens], other.prefix
        sequence = ActiveSequence(
            tokens, len(tokens), prefix=prefix,
            priority=int(self.rng.choice([0, 0, 0, 1, 2])), arrival=int(self.rng.integers(3)),
            reuse=bool(self.rng.random() < 0.9),
        )  # fmt: skip
        self.scheduler.add(sequence)
        self.live.append(sequence)
        self.device[sequence] = tokens[:]
        self.limits[sequence] = int(self.rng.integers(len(tokens) + 1, self.context + 2))

    def remove(self, sequence: ActiveSequence) -> None:
        assert self.scheduler.remove(sequence)
        assert not self.scheduler.remove(sequence)
        self.live.remove(sequence)
        del self.limits[sequence], self.device[sequence]
        self.ended += 1

    def cancel(self) -> None:
        while self.live and self.rng.random() < self.cancelling:
            self.remove(self.live[self.rng.integers(len(self.live))])

    # -- one step
    def step(self, submitting: bool = True) -> None:
        """Schedule, launch and complete a step, with events in between."""
        while submitting and len(self.live) < 20 and self.rng.random() < self.load:
            self.submit()
        self.cancel()
        running = sorted(self.scheduler._running, key=lambda s: s.order)
        waiting = list(self.scheduler._waiting)
        preempted = self.scheduler.preempted
        chunks = self.scheduler.schedule()
        self.content.copy(self.scheduler.take_copies())
        self.manager.check()
        self.check_chunks(chunks)
        self.check_order(chunks, waiting, running, self.scheduler.preempted > preempted)
        if self.rng.random() < self.failing:
            self.write_rubbish(chunks)
            return self.fail(chunks)
        self.launch(chunks)
        while chunks:
            self.cancel()
            following = None
            if self.rng.random() < 0.7:
                following = self.scheduler.following(chunks)
            if following:
                self.check_chunks(following)
                if self.rng.random() < self.failing:
                    self.write_rubbish(following)
                    if self.rng.random() < 0.5:
                        return self.fail(chunks)  # both
                    self.complete(chunks)
                    return self.fail(following)
                self.launch(following)
            self.complete(chunks)
            self.manager.check()
            chunks = following or []
        return None

    def launch(self, chunks: list[Chunk]) -> None:
        """Compute the chunks on the device: write all keys, then read what is attended to."""
        self.steps += bool(chunks)
        numbers = {}
        for sequence, start, stop, *_ in chunks:
            tokens = self.device[sequence][:stop]
            assert len(tokens) == stop
            numbers[sequence] = self.content.numbers(tokens, sequence.prefix)
            self.content.write(sequence.blocks, start, numbers[sequence][start:])
        for sequence, start, _, samples, *_ in chunks:
            self.content.read(sequence.blocks, start, numbers[sequence])
            if samples:
                self.device[sequence] += self._random_tokens(1)

    def complete(self, chunks: list[Chunk]) -> None:
        """Read the sampled tokens; sequences that reach their limits end."""
        self.scheduler.complete(chunks)
        for sequence, _, stop, samples, *_ in chunks:
            if sequence not in self.limits:
                continue  # cancelled
            assert sequence.computed == stop
            if samples:
                assert len(sequence.tokens) == stop
                sequence.tokens.append(self.device[sequence][stop])
                if len(sequence.tokens) >= self.limits[sequence]:
                    self.remove(sequence)

    def write_rubbish(self, chunks: list[Chunk]) -> None:
        """Write into some of the rows, as a step that fails."""
        for sequence, start, stop, *_ in chunks:
            written = int(self.rng.integers(start, stop + 1))
            self.content.write(sequence.blocks, start, -np.arange(2, written - start + 2))

    def fail(self, chunks: list[Chunk]) -> None:
        """End some of the sequences of a step that failed; the others are retried."""
        everything = self.rng.random() < 0.3
        for sequence in [c.sequence for c in chunks if c.sequence in self.limits]:
            self.device[sequence] = sequence.tokens[:]
            if everything or self.rng.random() < 0.3:
                self.remove(sequence)
        self.manager.check()
        if everything and not self.scheduler.running and self.rng.random() < 0.5:
            self.manager.clear()

    # -- what must hold
    def check_chunks(self, chunks: list[Chunk]) -> None:
        """Budget, borders, rows."""
        assert sum(c.stop - c.start for c in chunks) <= self.tokens
        assert len({c.sequence for c in chunks}) == len(chunks) <= self.sequences
        samples = [c.samples for c in chunks]
        assert samples == sorted(samples, reverse=True)
        for sampling in (True, False):
            rows = [self.scheduler._running.index(c.sequence) for c in chunks
                    if c.samples == sampling]  # fmt: skip
            assert rows == sorted(rows)
        for sequence, start, stop, samples_next, *_ in chunks:
            length = len(self.device[sequence])
            assert start < stop <= min(length, self.context)
            assert samples_next == (stop == length)
            assert stop == length or stop % self.chunk == 0
            assert stop >= sequence.prefix
            if samples_next and stop < self.context:  # the step computes the next token's slot
                at = stop // self.block
                assert all(table[at] >= 0 for table in sequence.blocks.tables.values())

    def _awaits_prefix(self, sequence: ActiveSequence) -> bool:
        """Whether a running sequence has, or will have, the bidirectional prefix of another one."""
        own = sequence.tokens[: sequence.prefix]
        others = (s.tokens[: s.prefix] for s in self.scheduler._running)
        return bool(own) and sequence.reuse and own in others

    def check_order(
        self, chunks: list[Chunk], waiting: list[ActiveSequence], running: list[ActiveSequence],
        preempted: bool,
    ) -> None:  # fmt: skip
        """Admission in order; the first sequence, and all sequences in the end, make progress."""
        scheduler = self.scheduler
        assert sorted(s.number for s in self.live) == sorted(
            s.number for s in [*scheduler._running, *scheduler._waiting]
        )
        admitted = [s for s in waiting if s.blocks is not None]
        may = [s for s in waiting if s.blocks is not None or not self._awaits_prefix(s)]
        assert admitted == may[: len(admitted)]
        assert not (admitted and preempted)
        assert all(s.blocks is None and s.computed == 0 for s in scheduler._waiting)
        in_step = {c.sequence for c in chunks}
        assert chunks or not self.live
        kept = [s for s in running if s.blocks is not None]  # not preempted
        assert kept[:1] == running[:1]
        rest = {s: len(s.tokens) - s.computed for s in kept}
        prompts = [s for s in kept if rest[s] > 1]
        must = {*kept[:1], *prompts[:1], *(s for s in kept if rest[s] == 1)}
        assert not self._left_out & must - in_step, "left out of two steps"
        self._left_out = must - in_step
        self.check_waiting(in_step)

    def check_waiting(self, in_step: set[ActiveSequence]) -> None:
        """The first of all sequences is admitted when those that run have ended, at the latest."""
        if not self.live:
            return
        first = min(self.live, key=lambda s: s.order)
        if first in in_step:
            self._wait = 0
        elif first is not self._first or not self._wait:
            running = [s for s in self.live if s.blocks is not None]
            self._wait_bound = 2 + 4 * sum(self.limits[s] for s in running)
            self._wait = 1
        else:
            self._wait += 1
            assert self._wait <= self._wait_bound, "starvation"
        self._first = first
        self.longest_wait = max(self.longest_wait, self._wait)

    def drain(self) -> None:
        """Let all sequences end; nothing may be left."""
        self.failing = self.cancelling = 0.0
        remaining = sum(self.limits[s] for s in self.live) + len(self.live)
        for _ in range(4 * remaining + 10):
            if not self.live:
                break
            self.step(submitting=False)
        assert not self.live, f"{len(self.live)} sequences do not end"
        assert self.scheduler.running == self.scheduler.waiting == 0
        assert self.scheduler.schedule() == []
        assert not any(self.manager.held.values()) and not self.manager._computing
        self.manager.check()
        for pool in self.manager.pools.values():
            assert len(pool._index) <= pool.size and len(pool._children) <= pool.size
        self.manager.clear()
        self.manager.check()
        assert self.manager.free == {name: p.size for name, p in self.manager.pools.items()}
