"""Scheduler of continuous batching: chooses the tokens that each step computes."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from operator import attrgetter

from .block_manager import BlockManager
from .sequence import ActiveSequence, Chunk
from .sequence_blocks import BlockCopy, SequenceBlocks

_order = attrgetter("order")


class Scheduler:
    """Chooses the tokens of each step, and the sequences that hold blocks.

    A step computes the next token of every sequence that decodes; what is left of the token budget
    goes to prompts, those of running sequences first, in chunks that end at multiples of ``chunk``
    in the sequence's own positions or at its end. A bidirectional prefix is computed in one chunk.
    If what decoding leaves is too small for the first prompt's next chunk, the step after that one
    begins with the prompts, so prompts and decoding alternate and neither waits for long.

    Sequences are admitted in the order of (priority, arrival); if the first waiting one cannot be,
    none behind it is. It waits while another sequence is about to compute a block that it can use,
    so that a common prefix is computed once, and until there are blocks for its whole prompt. A
    bidirectional prefix, such as the source of an encoder-decoder, is shared with a running
    sequence that has the same one: the blocks that both write to are copied. Until that sequence
    has computed it, those behind go first.

    If a running sequence needs a block and there is none, the running sequence of the lowest
    priority, and among those the one with the least computed tokens, is preempted: it gives up its
    blocks and waits again, in its old place, to be computed again from what is still cached. The
    first running sequence in the order of (priority, arrival) is never preempted, so it always
    makes progress; since it ends some time, all sequences do.

    A running sequence may be idle: all of its tokens are computed, and the next one is chosen later
    (beam search). It gives up its blocks as soon as another sequence waits, and is paused: it
    neither runs nor waits until `resume`.

    Args:
        manager: blocks of the KV cache; nobody else may hold any while sequences run.
        tokens: maximum number of tokens of a step.
        sequences: maximum number of running sequences; no more than ``tokens`` run.
        context: maximum number of tokens of a sequence.
        chunk: chunk borders are multiples of this number.

    Attributes:
        preempted: number of preemptions.

    Raises:
        ValueError: a pool cannot hold one sequence, or a chunk does not fit a step.
    """

    def __init__(
        self, manager: BlockManager, tokens: int, sequences: int, context: int, chunk: int
    ) -> None:
        if min(tokens, sequences, context, chunk) < 1 or chunk > tokens < context:
            raise ValueError(f"{tokens=} {sequences=} {context=} {chunk=}")
        for name, missing in manager.missing(context, tokens).items():
            if missing:
                raise ValueError(f"the pool of {name} needs {missing} more blocks for one sequence")
        self.tokens, self.context, self.chunk = tokens, context, chunk
        self.sequences = min(sequences, tokens)
        self.preempted = 0
        self._manager = manager
        self._running: list[ActiveSequence] = []  # in the order of admission
        self._waiting: list[ActiveSequence] = []  # in the order of admission to come
        self._added = 0
        # Of the step being scheduled
        self._left = 0  # tokens of the budget
        self._chunks: dict[ActiveSequence, Chunk] = {}
        self._forks: list[SequenceBlocks] = []
        self._prompts = 0  # chunks of prompts
        self._prompts_first = False  # in the next step
        # The first waiting sequence that could not be admitted, with the key of the block that it
        # waits for, or else the manager's count of releases, without which nothing has changed.
        self._refused: tuple[ActiveSequence, bytes | None, int] | None = None

    @property
    def running(self) -> int:
        """Number of sequences that hold blocks."""
        return len(self._running)

    @property
    def waiting(self) -> int:
        """Number of sequences that wait for admission, preempted ones included."""
        return len(self._waiting)

    def add(self, sequence: ActiveSequence) -> None:
        """Queue a new sequence. ValueError: it is not new, or can never be computed."""
        length, prefix = len(sequence.tokens), sequence.prefix
        if sequence.number >= 0 or sequence.blocks is not None or sequence.computed:
            raise ValueError("the sequence has been added before")
        if not 0 < length <= self.context or not 0 <= prefix <= length:
            raise ValueError(f"{length} tokens with a prefix of {prefix}")
        if -(-prefix // self.chunk) * self.chunk > self.tokens < self.context:
            raise ValueError(f"a prefix of {prefix} tokens for steps of {self.tokens}")
        sequence.number = self._added
        self._added += 1
        insort(self._waiting, sequence, key=_order)

    def remove(self, sequence: ActiveSequence) -> bool:
        """Remove a sequence in any state, and release its blocks.

        Its chunks of steps that have not completed are ignored by `complete`.

        Returns:
            False if the sequence is not known, or removed already.
        """
        if sequence.blocks is not None:
            self._running.remove(sequence)
            self._release(sequence)
            return True
        if sequence.paused:
            sequence.paused = False
            return True
        at = bisect_left(self._waiting, sequence.order, key=_order)
        while at < len(self._waiting) and self._waiting[at].order == sequence.order:
            if self._waiting[at] is sequence:  # others may have the same order, see `fork`
                del self._waiting[at]
                return True
            at += 1
        return False

    def fork(self, sequence: ActiveSequence, other: ActiveSequence) -> Sequence[BlockCopy]:
        """Add ``other``, whose tokens but the last are computed tokens of ``sequence``.

        It gets the same place in the order. If ``sequence`` holds blocks and another sequence may
        run, it runs at once, in shared blocks; otherwise it waits.

        Returns:
            Copies of blocks to make before a sequence is removed or another step is scheduled. The
            caller then resets ``other.blocks.private``: nobody else finds the copies before.
        """
        other.number = sequence.number
        if sequence.blocks is None or len(self._running) >= self.sequences:
            insort(self._waiting, other, key=_order)
            return ()
        common = min(sequence.computed, len(other.tokens) - 1)
        blocks = self._manager.fork(sequence.blocks, other.tokens[:common], copy=True)
        blocks.private = bool(blocks.copies)
        other.blocks, other.computed = blocks, blocks.cached
        self._running.append(other)
        return blocks.copies

    def refork(self, sequence: ActiveSequence, source: ActiveSequence, tokens: list[int]) -> bool:
        """Give a running sequence that is not needed any more the tokens of a fork of ``source``.

        Returns:
            False, and nothing has changed, if it must be removed, and another one forked. Otherwise
            the copies ``sequence.blocks.copies`` are made as those of `fork`.
        """
        blocks, other = sequence.blocks, source.blocks
        if blocks is None or other is None or not self._manager.refork(blocks, other, tokens):
            return False
        blocks.private = bool(blocks.copies)
        sequence.tokens = tokens
        return True

    def resume(self, sequence: ActiveSequence) -> None:
        """Queue a sequence whose next token is known if it is paused."""
        if sequence.paused:
            sequence.paused = False
            insort(self._waiting, sequence, key=_order)

    def preempt_all(self) -> None:
        """Take the blocks of all running sequences, which are computed again later."""
        for sequence in self._running[:]:
            self._preempt(sequence)

    def complete(self, chunks: Sequence[Chunk]) -> None:
        """Record that a step ran: the keys and values of its chunks are in the cache.

        Call it before tokens sampled by later steps are appended. A step that failed is not
        completed: `schedule` returns its chunks again.
        """
        commit = self._manager.commit
        for sequence, start, stop, *_ in chunks:
            blocks = sequence.blocks
            if blocks is None:
                continue
            if sequence.computed != start:
                raise ValueError(f"tokens {start} to {stop} after {sequence.computed}")
            sequence.computed = stop
            commit(blocks, sequence.tokens, stop)

    def schedule(self) -> list[Chunk]:
        """Choose the next step. All steps before must have completed or failed.

        Returns:
            One chunk for each sequence in the step; those that sample come first, in the order in
            which the sequences were admitted. Empty if no sequence has a token to compute. Before
            the step is launched, the caller makes the copies of `take_copies`.
        """
        if self._waiting:
            for sequence in filter(_is_idle, self._running[:]):
                self._preempt(sequence)
        self._left, self._chunks, self._prompts = self.tokens, {}, 0
        preempted = self.preempted
        prompts_first, self._prompts_first = self._prompts_first, False
        if not prompts_first:
            self._decode()
        may_admit = self._continue_prompts(may_starve=not prompts_first)
        if may_admit and self.preempted == preempted:
            self._admit(may_starve=not prompts_first)
        if prompts_first:
            self._decode()
        if not self._prompts:
            return list(self._chunks.values())
        chunks = [self._chunks[s] for s in self._running if s in self._chunks]
        return [c for c in chunks if c.samples] + [c for c in chunks if not c.samples]

    def take_copies(self) -> list[BlockCopy]:
        """Return the copies of blocks that the step last scheduled needs."""
        forks, self._forks = self._forks, []
        for blocks in forks:
            blocks.private = False
        return [copy for blocks in forks for copy in blocks.copies]

    def following(self, chunks: Sequence[Chunk]) -> list[Chunk] | None:
        """Return the decode step after ``chunks``, to be launched before they complete.

        Returns:
            One more token for each sequence, in the same order, or None if the next step is not
            that: a sequence has reached the context or computes its prompt, another one may be
            admitted, or blocks run out. Then complete ``chunks`` and call `schedule`.
        """
        if not chunks or len(chunks) != len(self._running) or self._may_admit_next():
            return None
        found = []
        for sequence, _, start, samples, _ in chunks:
            if not samples or sequence.blocks is None or start >= self.context:
                return None
            if not self._manager.reserve(sequence.blocks, start, min(start + 2, self.context)):
                return None
            found.append(Chunk(sequence, start, start + 1, True))
        return found

    def extend(self, chunk: Chunk, count: int) -> bool:
        """Reserve blocks for draft tokens behind ``chunk``; return whether there are enough."""
        blocks, stop = chunk.sequence.blocks, min(chunk.stop + count + 1, self.context)
        return blocks is not None and self._manager.reserve(blocks, chunk.start, stop)

    # -- phases of a step
    def _decode(self) -> None:
        """Add the sequences that have one token to compute."""
        reserve, context, chunks = self._manager.reserve, self.context, self._chunks
        for sequence in self._running[:]:
            start, blocks = sequence.computed, sequence.blocks
            if len(sequence.tokens) != start + 1 or blocks is None or sequence in chunks:
                continue
            if not self._left:
                break
            if start >= context:
                raise ValueError(f"a sequence is longer than the context of {context} tokens")
            if reserve(blocks, start, min(start + 2, context)):
                chunks[sequence] = Chunk(sequence, start, start + 1, True)
                self._left -= 1
            else:
                self._add_chunk(sequence, blocks, start + 1)

    def _continue_prompts(self, may_starve: bool) -> bool:
        """Add chunks of running sequences' prompts; return whether none of them lacks budget."""
        left = [s for s in self._running if s not in self._chunks and _has_prompt(s)]
        for sequence in sorted(left, key=_order):
            if sequence.blocks is None:
                continue  # preempted for one before it
            stop = self._chunk_stop(sequence, sequence.computed)
            if stop == sequence.computed:
                self._prompts_first = may_starve and not self._prompts
                return False
            self._prompts += self._add_chunk(sequence, sequence.blocks, stop)
        return True

    def _admit(self, may_starve: bool) -> None:
        """Admit waiting sequences, and add their first chunks."""
        at = 0
        while self._left and self._may_admit_next(at):
            sequence = self._waiting[at]
            blocks = self._manager.begin(sequence.tokens, sequence.prefix, sequence.reuse)
            if not blocks.cached and (origin := self._same_prefix(sequence)) is not None:
                self._manager.release(blocks)
                if origin.blocks is None or origin.computed < sequence.prefix:
                    at += 1
                    continue
                prefix = sequence.tokens[: sequence.prefix]
                blocks = self._manager.fork(origin.blocks, prefix, copy=True)
                blocks.private = bool(blocks.copies)
            stop = self._chunk_stop(sequence, blocks.cached)
            key = self._manager.awaited(blocks) if sequence.reuse else None
            if key is not None or stop == blocks.cached or not self._fits(sequence, blocks):
                self._manager.release(blocks)
                if key is None and stop == blocks.cached:
                    self._prompts_first = may_starve and not self._prompts
                else:
                    self._refused = sequence, key, self._manager.releases
                return
            del self._waiting[at]
            self._running.append(sequence)
            if blocks.private:
                self._forks.append(blocks)
            sequence.blocks, sequence.computed = blocks, blocks.cached
            self._prompts += self._add_chunk(sequence, blocks, stop)

    def _same_prefix(self, sequence: ActiveSequence) -> ActiveSequence | None:
        """Return a running sequence with the same bidirectional prefix, of which it is to be used.

        The one that has computed it, if there is one.
        """
        length, prefix = sequence.prefix, sequence.tokens[: sequence.prefix]
        if not length or not sequence.reuse:
            return None
        found = [s for s in self._running if s.prefix == length and s.tokens[:length] == prefix]
        return max(found, key=attrgetter("computed"), default=None)

    def _may_admit_next(self, at: int = 0) -> bool:
        """Whether a waiting sequence may be admitted, as far as can be seen quickly."""
        if at >= len(self._waiting) or len(self._running) >= self.sequences:
            return False
        if self._refused is None or self._refused[0] is not self._waiting[at]:
            return True
        _, key, releases = self._refused
        if key is not None:
            return not self._manager.is_computing(key)
        return releases != self._manager.releases

    # -- one sequence
    def _chunk_stop(self, sequence: ActiveSequence, start: int) -> int:
        """Return where a chunk from ``start`` ends; ``start`` if the budget left is too small."""
        length = len(sequence.tokens)
        stop = min(length, start + self._left)
        if stop < length:
            stop -= stop % self.chunk
        return stop if stop >= max(start, sequence.prefix) else start

    def _fits(self, sequence: ActiveSequence, blocks: SequenceBlocks) -> bool:
        """Whether the whole prompt fits beside the prompts of running sequences.

        One block for each running sequence is left free, since those that decode need one soon,
        unless it has the blocks of the whole context. Pools for all sequences at full length thus
        admit all of them.
        """
        wanted = [(blocks, min(len(sequence.tokens) + 1, self.context))]
        for other in filter(_has_prompt, self._running):
            if other.blocks is not None:
                wanted.append((other.blocks, min(len(other.tokens) + 1, self.context)))
        growing = sum(not other.blocks.complete for other in self._running if other.blocks)
        return self._manager.can_hold(wanted, self.tokens, spare=growing)

    def _add_chunk(self, sequence: ActiveSequence, blocks: SequenceBlocks, stop: int) -> bool:
        """Add a chunk to the step; return False if the sequence had to be preempted instead."""
        samples = stop == len(sequence.tokens)
        end = min(stop + samples, self.context)
        while not self._manager.reserve(blocks, sequence.computed, end):
            victim = self._victim()
            self._preempt(victim)
            if victim is sequence:
                return False
        self._chunks[sequence] = Chunk(sequence, sequence.computed, stop, samples)
        self._left -= stop - sequence.computed
        return True

    def _victim(self) -> ActiveSequence:
        """Return the running sequence to preempt: an idle one, else any but the first in order."""
        if idle := [s for s in self._running if _is_idle(s)]:
            return max(idle, key=_order)
        first = min(self._running, key=_order)
        others = [s for s in self._running if s is not first]
        if not others:
            raise RuntimeError("one sequence alone does not fit the KV cache")
        return max(others, key=lambda s: (s.priority, -s.computed, s.order))

    def _preempt(self, sequence: ActiveSequence) -> None:
        """Take the blocks of a running sequence, which then waits in its place or is paused."""
        sequence.paused = _is_idle(sequence)
        self._running.remove(sequence)
        self._release(sequence)
        sequence.computed = 0
        sequence.preemptions += 1
        self.preempted += 1
        self._chunks.pop(sequence, None)
        if not sequence.paused:
            insort(self._waiting, sequence, key=_order)

    def _release(self, sequence: ActiveSequence) -> None:
        if sequence.blocks is not None:
            self._manager.release(sequence.blocks)
            sequence.blocks = None


def _is_idle(sequence: ActiveSequence) -> bool:
    """Whether all tokens of a running sequence are computed."""
    return len(sequence.tokens) == sequence.computed


def _has_prompt(sequence: ActiveSequence) -> bool:
    """Whether more than the last sampled token is to be computed."""
    return len(sequence.tokens) > sequence.computed + 1
