"""A sequence that is being generated, its part of a step, and recorders of steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

from ..runtime.recorder import Recorder
from .sequence_blocks import SequenceBlocks


@dataclass(eq=False)
class ActiveSequence:
    """A prompt and the tokens sampled after it.

    Attributes:
        tokens: prompt and sampled tokens; only appended to.
        prompt_tokens: number of tokens of the prompt.
        computed: number of tokens whose keys and values are in the KV cache.
        prefix: length of the prompt's bidirectional prefix.
        priority: sequences with a lower number go first.
        arrival: among equal priorities, sequences with a lower number go first.
        blocks: the KV cache blocks while the sequence runs; None otherwise.
        preemptions: number of times the sequence had to give up its blocks.
        reuse: whether a cached prefix may be used. False for prompts whose logits are all needed;
            set it to True once they are computed, so that they are not after a preemption.
        paused: whether it neither runs nor waits, see `Scheduler`.
        number: order of `Scheduler.add`, which decides between equal arrivals; -1 before.
        account: what a `StepRecorder` charges the sequence to, if anything.
        origin: the sequence of which this is a copy with draft tokens, if it is one.
    """

    tokens: list[int]
    prompt_tokens: int
    computed: int = 0
    prefix: int = 0
    priority: int = 0
    arrival: int = 0
    blocks: SequenceBlocks | None = None
    preemptions: int = 0
    reuse: bool = True
    paused: bool = False
    number: int = -1
    account: object = None
    origin: ActiveSequence | None = None

    @property
    def source(self) -> int:
        """Number of tokens of the source, 0 unless the model is an encoder-decoder."""
        return self.prefix if self.tokens[0] < 0 else 0

    @property
    def order(self) -> tuple[int, int, int]:
        """Sort key: the sequence with the lowest one goes first."""
        return self.priority, self.arrival, self.number


class Chunk(NamedTuple):
    """Tokens ``start`` to ``stop - 1`` of a sequence, computed in one step.

    Attributes:
        samples: whether the chunk ends with the sequence's last token, so that the step samples the
            next one.
        drafts: predicted next tokens, which the step computes, too; afterwards the accepted ones,
            which ``stop`` then includes.
    """

    sequence: ActiveSequence
    start: int
    stop: int
    samples: bool
    drafts: tuple[int, ...] = ()


def is_decode_step(chunks: Sequence[Chunk]) -> bool:
    """Whether a step computes one token of each sequence, and samples from it."""
    return all(c.samples and c.stop - c.start == 1 for c in chunks)


def has_drafts(chunks: Sequence[Chunk]) -> bool:
    """Whether a step computes draft tokens."""
    return any(chunk.drafts for chunk in chunks)


def one_token_chunks(chunks: Sequence[Chunk]) -> list[Chunk]:
    """Return a chunk for each row of a decode step; those with draft tokens have their own."""
    found = list[Chunk]()
    for chunk in chunks:
        if not chunk.drafts:
            found.append(chunk)
            continue
        tokens = [*chunk.sequence.tokens, *chunk.drafts]
        sequence = replace(chunk.sequence, tokens=tokens, origin=chunk.sequence)
        for start in range(chunk.start, chunk.stop + len(chunk.drafts)):
            found.append(Chunk(sequence, start, start + 1, True))
    return found


class StepRecorder(Recorder, Protocol):
    """A recorder of steps that knows which sequences they compute."""

    def begin_step(self, chunks: Sequence[Chunk]) -> None:
        """Note the chunks that the next run computes."""
