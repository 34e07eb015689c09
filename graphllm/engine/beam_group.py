"""The beams of one request: sequences that run as any other, and wait for each other."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from ..errors import RequestError
from ..model.batch import Limits
from ..tokenizer import Tokenizer
from .beam_search import BeamSearch, Candidates, Hypothesis, Tokens, best, live_tokens
from .generation import Answer, Generation
from .logits_processors import LogitsProcessor
from .scheduler import Scheduler
from .sequence import ActiveSequence
from .sequence_blocks import BlockCopy, SequenceBlocks
from .step_result import StepResult

if TYPE_CHECKING:
    from .grammar import GrammarState

Copy = Callable[[Sequence[BlockCopy]], None]


class Beam:
    """A hypothesis that goes on, as a row of steps.

    Attributes:
        group: the beams of the same request.
        sequence: the prompt and the tokens of the hypothesis.
        candidates: what may follow; None before its last token is computed.
    """

    stages = 0
    asks_logprobs = False
    asks_candidates = True
    processors: Sequence[LogitsProcessor] = ()
    grammar: GrammarState | None = None

    def __init__(self, group: BeamGroup, sequence: ActiveSequence) -> None:
        self.group, self.sequence, self.sampling = group, sequence, group.generation.sampling
        self.settings: Mapping[str, np.ndarray] = group.settings
        self.candidates: Candidates | None = None

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
        ids, logprobs = result.candidate_ids[row], result.candidate_logprobs[row]
        self.candidates = self.group.biased(ids, logprobs, self.count)


class BeamGroup:
    """A beam search over the sequences of one request.

    It goes on when the candidates of all live hypotheses are known; they may come from different
    steps. Everything is made again from `state` if a step fails.

    Attributes:
        generation: the request.
        state: see `BeamSearch`.
        beams: the live hypotheses, by their tokens.
        settings: feeds of the settings, see `sampling_row`.
        sequences: all sequences that the scheduler may know.
    """

    def __init__(
        self,
        generation: Generation,
        eos_ids: Collection[int],
        end_ids: Collection[int],
        tokenizer: Tokenizer | None,
        limits: Limits,
    ) -> None:
        """Begin with the prompt. RequestError: too many beams and end ids.

        Args:
            generation: the request, with ``sampling.beams`` above 1.
            eos_ids: ids that ``min_tokens`` and ``ignore_eos`` forbid.
            end_ids: ids that end a hypothesis.
            tokenizer: None if only ids are wanted.
            limits: limits of the graph.
        """
        self.generation, self._tokenizer = generation, tokenizer
        sampling, prompt = generation.sampling, generation.sequence.prompt_tokens
        source = generation.sequence.source
        self._has_source = source > 0
        self._sampling = sampling
        self._excluded = frozenset(sampling.banned_ids)
        self._excluded_early = self._excluded | frozenset(eos_ids)  # before ``min_tokens``
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
        self._candidates = self.rules.candidates
        if self._candidates > limits.candidates:
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
        self.beams: dict[Tokens, Beam] = {(): Beam(self, generation.sequence)}

    def biased(self, ids: np.ndarray, logprobs: np.ndarray, count: int) -> Candidates:
        """Return candidates with the biases of `ops.bias_logits`, which do not normalise again."""
        sampling, allowed = self._sampling, self._sampling.allowed_ids
        early = sampling.ignore_eos or count < sampling.min_tokens
        excluded = self._excluded_early if early else self._excluded
        if not (allowed or sampling.logit_bias):  # the best ones suffice
            needed = self._candidates + len(excluded)
            ids, logprobs = ids[:needed], logprobs[:needed]
        values = logprobs.copy()
        for token, bias in sampling.logit_bias.items():
            values[ids == token] += np.float32(bias)
        if excluded or allowed:
            out = [i in excluded or bool(allowed and i not in allowed) for i in ids.tolist()]
            if any(out):
                values[np.array(out) & ~np.isnan(values)] = -np.inf
        return Candidates(ids, values)

    @property
    def ready(self) -> bool:
        """Whether the candidates of all live hypotheses are known."""
        return all(beam.candidates is not None for beam in self.beams.values())

    @property
    def faulty(self) -> Beam | None:
        """A beam whose logits are not finite; None if there is none."""
        for beam in self.beams.values():
            if beam.candidates is not None and math.isnan(beam.candidates.logprobs[0]):
                return beam
        return None

    def advance(
        self, scheduler: Scheduler, rows: dict[ActiveSequence, Generation | Beam], copy: Copy
    ) -> None:
        """Choose the next tokens of the live hypotheses.

        The first continuation of a beam keeps its sequence, the others fork it.

        Args:
            scheduler: has the sequences.
            rows: rows of steps by sequence; those of the beams are brought up to date.
            copy: takes copies of blocks, which are made before the next step.
        """
        self.generation.first = self.generation.first or time.perf_counter()
        found = {t: beam.candidates for t, beam in self.beams.items() if beam.candidates}
        self.state = self.rules.advance(self.state, found)
        children: dict[Tokens, list[Tokens]] = {}
        for tokens in live_tokens(self.state):
            children.setdefault(tokens[:-1], []).append(tokens)
        beams = {c[0]: self.beams[tokens] for tokens, c in children.items()}
        forks = self._forks(children, scheduler, rows)
        copies = [c for beam in forks.values() if beam.sequence.blocks for c in beam.blocks.copies]
        if copies:
            copy(copies)
        for beam in forks.values():
            rows[beam.sequence] = beam
            if beam.sequence.blocks:
                beam.blocks.private = False
        for tokens, beam in beams.items():
            beam.sequence.tokens.append(tokens[-1])
            beam.candidates = None
            scheduler.resume(beam.sequence)
        self.beams = {**beams, **forks}
        self.sequences = [beam.sequence for beam in self.beams.values()]
        if self.beams:
            self.generation.count = len(next(iter(self.beams)))

    def _forks(
        self,
        children: Mapping[Tokens, Sequence[Tokens]],
        scheduler: Scheduler,
        rows: dict[ActiveSequence, Generation | Beam],
    ) -> dict[Tokens, Beam]:
        """Return the beams of all but the first continuation of each beam.

        They take over the sequences of beams that are not continued, if these are as long.
        """
        wanted = [(origin, t) for origin, own in children.items() for t in own[1:]]
        ended = [beam for tokens, beam in self.beams.items() if tokens not in children]
        found = {}
        for (origin, tokens), beam in zip(wanted, ended):
            source = self.beams[origin].sequence
            if scheduler.refork(beam.sequence, source, [*source.tokens, tokens[-1]]):
                beam.candidates, found[tokens] = None, beam
        kept = {*found.values()}
        for beam in ended:
            if beam not in kept:
                scheduler.remove(beam.sequence)
                del rows[beam.sequence]
        for origin, tokens in wanted:
            if tokens not in found:
                found[tokens] = self._fork(origin, tokens, scheduler)
        return found

    def _fork(self, origin: Tokens, tokens: Tokens, scheduler: Scheduler) -> Beam:
        """Return a beam with ``tokens``, one more than the beam of ``origin``."""
        sequence = self.beams[origin].sequence
        fork = self._sequence(tokens)
        self.sequences.append(fork)
        scheduler.fork(sequence, fork)
        return Beam(self, fork)

    def _sequence(self, tokens: Tokens) -> ActiveSequence:
        first = self.generation.sequence
        ids = [*first.tokens[: first.prompt_tokens], *tokens]
        return replace(
            first, tokens=ids, computed=0, blocks=None, preemptions=0, paused=False, number=-1
        )

    def restart(self) -> None:
        """Make the beams again from `state`, with new sequences, none of which is scheduled."""
        self.beams = {t: Beam(self, self._sequence(t)) for t in live_tokens(self.state)}
        self.sequences = [beam.sequence for beam in self.beams.values()]

    def finish(self) -> None:
        """End the request with the best hypotheses, or an error if there is none."""
        found = best(self.state, self._sampling.n)
        if not found:
            self.generation.fail(RequestError("all ids are excluded: no token can follow"))
            return
        self.generation.end_search([self._answer(each) for each in found], time.perf_counter())

    def _answer(self, found: Hypothesis) -> Answer:
        ids, text, note = list(found.tokens), "", ""
        length = len(ids)
        forced = self.rules.forced_eos_id is not None and length == self.rules.most
        stopped = not forced and ids[-1] in self.rules.ends(length)
        if forced or stopped:
            ids.pop()
        if not stopped and length < self._sampling.max_tokens:
            note = f"the context of {self._context} tokens is full: the answer is cut off"
        if self._tokenizer is not None:
            stream = self._tokenizer.stream(continuation=not self._has_source)
            text = "".join([*map(stream.push, ids), stream.finish()])
        return Answer(ids, text, "stop" if stopped else "length", found.score, note)
