"""The beams of one request: sequences that run as any other, and wait for each other."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from ..errors import RequestError
from ..model.batch import Limits
from ..tokenizer import Tokenizer
from .beam_search import BeamSearch, Hypothesis, State, advance
from .completion import Answer
from .generation import Generation
from .logits_processors import LogitsProcessor
from .sampler import BIASED
from .scheduler import Scheduler
from .sequence import ActiveSequence
from .sequence_blocks import BlockCopy, SequenceBlocks
from .step_result import StepResult

if TYPE_CHECKING:
    from .grammar import GrammarState


class Beam:
    """A hypothesis that goes on, as a row of steps.

    Attributes:
        group: the beams of the same request.
        sequence: the prompt and the tokens of the hypothesis.
        candidates: the most likely next ids [C] and their log-probabilities [C], best first; None
            before the last token is computed.
    """

    stages = BIASED
    asks_logprobs = False
    asks_candidates = True
    processors: Sequence[LogitsProcessor] = ()
    grammar: GrammarState | None = None

    def __init__(self, group: BeamGroup, sequence: ActiveSequence) -> None:
        self.group, self.sequence, self.sampling = group, sequence, group.generation.sampling
        self.settings: Mapping[str, np.ndarray] = group.settings
        self.candidates: tuple[np.ndarray, np.ndarray] | None = None

    @property
    def count(self) -> int:
        """Number of generated tokens."""
        return len(self.sequence.tokens) - self.sequence.prompt_tokens

    @property
    def blocks(self) -> SequenceBlocks:
        """The cache blocks of a running beam."""
        assert self.sequence.blocks is not None
        return self.sequence.blocks

    def prompt_positions(self, start: int, stop: int) -> range:
        """Return no position: a search has no log-probabilities of the prompt."""
        return range(0)

    def ends_after(self, steps: int) -> bool:
        """True: the host chooses the tokens, so no step is launched ahead."""
        return True

    def receive(self, result: StepResult, row: int) -> None:
        """Take the candidates of the next token from a row of a step."""
        assert result.candidate_ids is not None and result.candidate_logprobs is not None
        self.candidates = result.candidate_ids[row], result.candidate_logprobs[row]


class BeamGroup:
    """A beam search over the sequences of one request.

    It goes on when the candidates of all live hypotheses are known; they may come from different
    steps. Everything is made again from `state` if a step fails.

    Attributes:
        generation: the request.
        rules: the rules of the search.
        state: its state.
        beams: the live hypotheses, in the order of ``state.last``.
        settings: feeds of the settings, see `sampling_row`.
        sequences: all sequences that the scheduler may know.
    """

    def __init__(
        self,
        generation: Generation,
        end_ids: Collection[int],
        tokenizer: Tokenizer | None,
        limits: Limits,
    ) -> None:
        """Begin with the prompt. RequestError: too many beams and end ids.

        Args:
            generation: the request, with ``sampling.beams`` above 1.
            end_ids: ids that end a hypothesis.
            tokenizer: None if only ids are wanted.
            limits: limits of the graph.
        """
        self.generation, self._tokenizer = generation, tokenizer
        sampling, prompt = generation.sampling, generation.sequence.prompt_tokens
        source = generation.sequence.source
        self._has_source = source > 0
        self._sampling = sampling
        self._context = limits.context
        self.rules = BeamSearch(
            beams=sampling.beams,
            most=min(sampling.max_tokens, limits.context + 1 - prompt),
            end_ids=frozenset(end_ids),
            stop_ids=frozenset(sampling.stop_ids),
            min_tokens=sampling.min_tokens,
            length_penalty=sampling.length_penalty,
            early_stopping=sampling.early_stopping,
            groups=sampling.beam_groups,
            diversity_penalty=sampling.diversity_penalty,
            forced_eos_id=sampling.forced_eos_id,
            forced=max(0, prompt - source - 1) if source else 0,
        )
        if self.rules.candidates > limits.candidates:
            raise RequestError(
                f"beams = {sampling.beams} with {len({*end_ids, *sampling.stop_ids})} EOS and stop "
                f"ids needs {self.rules.candidates} candidates for each token; at most "
                f"{limits.candidates} are supported",
                "beams",
            )
        greedy = np.zeros(1, np.float32)  # the sampled ids are not used
        self.settings = {**generation.settings, "temperature": greedy}
        self.state = self.rules.start()
        self.sequences = [generation.sequence]
        self.beams = [Beam(self, generation.sequence)]

    @property
    def ready(self) -> bool:
        """Whether the candidates of all live hypotheses are known."""
        return all(beam.candidates is not None for beam in self.beams)

    def follow(
        self, state: State, scheduler: Scheduler, rows: dict[ActiveSequence, Generation | Beam]
    ) -> list[BlockCopy]:
        """Let the sequences follow the hypotheses of the next state.

        The first continuation of a beam keeps its sequence, the others fork it.

        Args:
            state: the next state.
            scheduler: has the sequences.
            rows: rows of steps by sequence; those of the beams are brought up to date.

        Returns:
            Copies of blocks to make before the next step; until then beams hold their sources.
        """
        self.state = state
        kept = dict[int, int]()  # the first continuation of each beam
        for index, (parent, _) in enumerate(state.last):
            kept.setdefault(parent, index)
        if len(kept) == len(state.last) == len(self.beams):
            forks = dict[int, Beam]()
        else:
            forks = self._forks(kept, scheduler, rows)
        beams = dict(forks)
        for parent, index in kept.items():
            beams[index] = beam = self.beams[parent]
            beam.sequence.tokens.append(state.last[index][1])
            beam.candidates = None
            if beam.sequence.paused:
                scheduler.resume(beam.sequence)
        self.beams = [beams[index] for index in range(len(beams))]
        self.sequences = [beam.sequence for beam in self.beams]
        self.generation.count = state.length if self.beams else self.generation.count
        return [copy for beam in forks.values() for copy in _copies(beam)]

    def _forks(
        self,
        kept: Mapping[int, int],
        scheduler: Scheduler,
        rows: dict[ActiveSequence, Generation | Beam],
    ) -> dict[int, Beam]:
        """Return the beams of all but the first continuation of each beam, by index in the state.

        They take over the sequences of beams that are not continued, if these are as long.

        Args:
            kept: the first continuation of each beam that has one.
            scheduler, rows: see `follow`.
        """
        last, forks = self.state.last, dict[int, Beam]()
        wanted = [index for index, (parent, _) in enumerate(last) if kept[parent] != index]
        ended = [beam for index, beam in enumerate(self.beams) if index not in kept]
        for index, beam in zip(wanted, ended):
            source, tokens = self._origin(*last[index])
            if scheduler.refork(beam.sequence, source, tokens):
                beam.candidates, forks[index] = None, beam
        for beam in ended:
            if beam not in forks.values():
                scheduler.remove(beam.sequence)
                del rows[beam.sequence]
        for index in wanted:
            if index not in forks:
                source, tokens = self._origin(*last[index])
                beam = forks[index] = Beam(self, self._sequence(tokens))
                self.sequences.append(beam.sequence)
                scheduler.fork(source, beam.sequence)
                rows[beam.sequence] = beam
        return forks

    def _origin(self, parent: int, token: int) -> tuple[ActiveSequence, list[int]]:
        """Return the sequence of beam ``parent``, and the tokens of its continuation."""
        source = self.beams[parent].sequence
        return source, [*source.tokens, token]

    def _sequence(self, tokens: list[int]) -> ActiveSequence:
        return replace(
            self.generation.sequence,
            tokens=tokens, computed=0, blocks=None, preemptions=0, paused=False, number=-1,
        )  # fmt: skip

    def restart(self) -> None:
        """Make the beams again from `state`, with new sequences, none of which is scheduled."""
        first = self.generation.sequence
        prompt = first.tokens[: first.prompt_tokens]
        live = self.state.live_tokens()
        self.beams = [Beam(self, self._sequence([*prompt, *tokens])) for tokens in live]
        self.sequences = [beam.sequence for beam in self.beams]

    def finish(self) -> None:
        """End the request with the best hypotheses, or an error if there is none."""
        found = self.state.best(self._sampling.n)
        if not found:
            self.generation.fail(RequestError("all ids are excluded: no token can follow"))
            return
        self.generation.end_search([self._answer(each) for each in found], time.perf_counter())

    def _answer(self, found: Hypothesis) -> Answer:
        ids, text, note = list(found.tokens), "", ""
        length = len(ids)
        forced = self.rules.forces_end(length)
        stopped = not forced and ids[-1] in self.rules.ends(length)
        if forced or stopped:
            ids.pop()
        if not stopped and length < self._sampling.max_tokens:
            note = f"the context of {self._context} tokens is full: the answer is cut off"
        if self._tokenizer is not None:
            stream = self._tokenizer.stream(continuation=not self._has_source)
            text = "".join([*map(stream.push, ids), stream.finish()])
        return Answer(ids, text, "stop" if stopped else "length", found.score, note)


def _copies(fork: Beam) -> Sequence[BlockCopy]:
    """Return the copies of blocks that a fork needs before its next step."""
    if fork.sequence.blocks is None:  # it waits
        return ()
    fork.blocks.private = False
    return fork.blocks.copies


def advance_searches(
    groups: Sequence[BeamGroup],
    scheduler: Scheduler,
    rows: dict[ActiveSequence, Generation | Beam],
) -> list[BlockCopy]:
    """Choose the next tokens of searches that are `BeamGroup.ready`, all together.

    See `BeamGroup.follow` for the other arguments and the result.
    """
    found = [beam.candidates for group in groups for beam in group.beams if beam.candidates]
    ids, logprobs = (np.concatenate(each).reshape(len(found), -1) for each in zip(*found))
    states = advance([(group.rules, group.state) for group in groups], ids, logprobs)
    now = time.perf_counter()
    copies: list[BlockCopy] = []
    for group, state in zip(groups, states):
        group.generation.first = group.generation.first or now
        copies += group.follow(state, scheduler, rows)
    return copies
