"""Runner: the feeds and plans of a step, and the decode loop of a batch that stays the same."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Rows
from typing import NamedTuple

import numpy as np

from ..compiler.plan import Plan
from ..errors import RequestError
from ..graph.tensor import Tensor
from ..model.batch import ENCODED, CacheSpec, Limits, source_tokens
from ..runtime.decode_loop import DecodeLoop
from ..runtime.executor import Executor
from .block_copies import COPIED, FEW_COPIES, MAX_COPIES, copy_feeds
from .block_manager import BlockManager
from .decode_feeds import DecodeFeeds, live_values
from .forward_feeds import Feeds, Span, block_tables, forward_feeds
from .held_settings import MASK, HeldSettings
from .logits_processors import process_logits
from .prompt_logprobs import prompt_logprobs, prompt_plan
from .sampler import PROCESSED, STAGES, fed_rows
from .sampling_feeds import Row, sampling_feeds, token_feeds
from .sequence import Chunk, StepRecorder, one_token_chunks
from .sequence_blocks import BlockCopy
from .step_result import (
    CANDIDATES,
    LOGPROBS,
    StepResult,
    TokenLogprobs,
    candidate_outputs,
    if_asked,
    result_outputs,
    stages_of,
)

_MAX_KEPT = 32  # decode loops, of more numbers of rows than draft tokens give one sequence
_NOTHING = StepResult(np.zeros(0, np.int32))  # of a step that samples no sequence


class _Loop(NamedTuple):
    """A decode loop over a fixed number of rows.

    Attributes:
        settings: leaves of the plan that the settings of requests set.
        feeds: what the host feeds.
        counts: facts of the next step for the costs of its ops.
    """

    outputs: list[str]
    recorder: StepRecorder | None
    steps: DecodeLoop
    settings: set[str]
    feeds: DecodeFeeds
    counts: dict[str, int]


class Runner:
    """Runs steps of several sequences.

    A step that continues the one before it (the same sequences in the same order, each by the token
    sampled last) needs no feeds: the device has advanced the step variables. Devices that support
    it then run ahead: the next step is launched before the sampled ids of this one are read.

    Args:
        executor: executor of the placed graph.
        outputs: outputs of the graph by name.
        caches: KV cache groups.
        limits: limits of the graph.
        manager: blocks of the sequences.
    """

    def __init__(
        self,
        executor: Executor,
        outputs: dict[str, Tensor],
        caches: Rows[CacheSpec],
        limits: Limits,
        manager: BlockManager,
    ) -> None:
        self.executor, self.outputs, self.limits = executor, outputs, limits
        self.caches, self.manager = [c.name for c in caches], manager
        self.pools = [name for name in outputs if name.startswith("kv.")]
        vocab = outputs["logits"].meta.inner[0]
        self._fed_rows = fed_rows(limits, vocab)
        self.encoded = {n: node for n, node in outputs.items() if n.startswith(ENCODED)}
        self._loop: _Loop | None = None  # the present one
        self._kept: dict[tuple[int | str, ...], _Loop] = {}  # by number of rows and outputs
        self._recorder: StepRecorder | None = None  # of these
        self._advanced: list[Row] = []  # requests whose next step needs no feeds
        self._settings = HeldSettings(executor.buffers, limits.step_sequences, vocab)

    @property
    def logits_outputs(self) -> list[str]:
        """Names of the outputs of a step without sampling: the logits and the KV pools."""
        return ["logits", *self.pools]

    # -- plans
    def plan(self, outputs: Rows[str], tokens: int, sequences: int = 1, rows: int = 1) -> Plan:
        """Return the plan of steps with at most this many tokens, sequences and rows of logits."""
        q = (2, sequences + 1)
        bounds = {"T": (1, tokens), "S": (1, sequences), "Q": q, "N": (1, rows)}
        return self.executor.compile({name: self.outputs[name] for name in outputs}, bounds)

    def largest_plans(self) -> list[Plan]:
        """Return plans that need at least the memory that any plan of several sequences needs."""
        last, most = STAGES[-1], self.limits.step_sequences
        names = [f"sampled{last}", f"logprobs{last}", *LOGPROBS[1:], *CANDIDATES, "hidden"]
        forward = [self.plan(names, self.limits.tokens, most, most)] if most > 1 else []
        fed = self._fed_plan(["sampled", *LOGPROBS], self._fed_rows)
        encode = [self.encode_plan(most)] if self.encodes else []
        return [*forward, *encode, fed, prompt_plan(self.executor, self.outputs)]

    @property
    def encodes(self) -> bool:
        """Whether the model is an encoder-decoder."""
        return bool(self.encoded)

    def encode_plan(self, sequences: int = 1) -> Plan:
        """Return the plan that encodes the sources of at most this many sequences."""
        bounds = {"T": (1, self.limits.tokens), "Q": (2, sequences + 1)}
        return self.executor.compile(self.encoded, bounds)

    def _fed_plan(self, names: Rows[str], rows: int) -> Plan:
        """Return the plan that samples from at most ``rows`` rows that the host has changed."""
        outputs = {f"{name}.fed": self.outputs[f"{name}.fed"] for name in names}
        return self.executor.compile(outputs, {"S": (1, rows), "R": (1, rows)})

    def bucket(self, sequences: int) -> int:
        """Return the upper bound of sequences of the plan that runs this many: a power of two."""
        return min(self.limits.step_sequences, 1 << (sequences - 1).bit_length())

    # -- one step with feeds from the host
    def run(
        self, chunks: Rows[Chunk], rows: list[Row], recorder: StepRecorder | None
    ) -> StepResult:
        """Run one step fed by the host; the chunks that sample come first.

        Args:
            chunks: what to compute.
            rows: the requests of the chunks.
            recorder: recorder of the step.
        """
        self._forget_step()
        chunks, rows = self._encode_sources(chunks, rows, recorder)
        if not chunks:
            return _NOTHING
        size, sampling = self.bucket(len(chunks)), sum(chunk.samples for chunk in chunks)
        processing = any(row.processors for row in rows[:sampling])
        chosen = candidate_outputs(rows[:sampling])
        every = sampling == len(rows) and not processing
        if processing:
            outputs = ["processed", *if_asked(rows[:sampling], ["logits"]), *chosen]
        else:
            outputs = (
                result_outputs("ids" if every else "sampled", rows[:sampling]) if sampling else []
            )
        prompts = [row.prompt_positions(c.start, c.stop) for c, row in zip(chunks, rows)]
        hidden = ["hidden"] if any(prompts) else []
        decodes = processing and all(c.stop - c.start == 1 for c in chunks)
        tokens = self.limits.plan_tokens(sum(chunk.stop - chunk.start for chunk in chunks))
        plan = self.plan(
            [*(outputs or self.pools), *hidden],
            size if decodes else tokens, size, size if sampling else 1,
        )  # fmt: skip
        feeds, env = self.feeds(plan, chunks, rows)
        if recorder is not None:
            recorder.begin_step(chunks)
        found = self.executor.run(plan, feeds, env, recorder, [*outputs, *hidden])
        if processing:
            result = self._process(found, rows[:sampling])
        else:
            result = StepResult.of({n: found[n] for n in outputs}) if outputs else _NOTHING
        if hidden:
            entries = self._prompt_logprobs(found["hidden"], chunks, rows, prompts)
            result = result._replace(prompts=entries)
        self._advanced = rows if every else []
        return result

    def _encode_sources(
        self, chunks: Rows[Chunk], rows: list[Row], recorder: StepRecorder | None
    ) -> tuple[list[Chunk], list[Row]]:
        """Encode the sources in ``chunks``; return the chunks of targets, and their rows."""
        sources = [(c, row) for c, row in zip(chunks, rows) if c.start < c.sequence.prefix]
        if not self.encodes or not sources:
            return [*chunks], rows
        parts = [Chunk(c.sequence, 0, c.sequence.prefix, False) for c, _ in sources]
        if recorder is not None:
            recorder.begin_step(parts)
        self.encode(
            [
                Span(part.sequence.tokens[: part.stop], 0, part.stop, row.blocks)
                for part, (_, row) in zip(parts, sources)
            ],
            recorder,
        )
        targets = [
            chunk._replace(start=max(chunk.start, chunk.sequence.prefix)) for chunk in chunks
        ]
        left = [(c, row) for c, row in zip(targets, rows) if c.start < c.stop]
        return [chunk for chunk, _ in left], [row for _, row in left]

    def encode(self, sources: Rows[Span], recorder: StepRecorder | None = None) -> None:
        """Compute the sources of encoder-decoders, whose keys and values the targets attend to."""
        feeds, env = self.encode_feeds(sources)
        plan = self.encode_plan(self.bucket(len(sources)))
        self.executor.run(plan, feeds, env, recorder, fetch=())

    def encode_feeds(self, sources: Rows[Span]) -> tuple[Feeds, dict[str, int]]:
        """Return the feeds of a step over sources, and the number of its (query, key) pairs."""
        spans = [span._replace(tokens=source_tokens(span.tokens)) for span in sources]
        feeds, _ = forward_feeds(self.manager, spans)
        return feeds, {"kv_sum": sum(len(span.tokens) ** 2 for span in spans)}

    def _process(self, found: Mapping[str, np.ndarray], rows: Rows[Row]) -> StepResult:
        """Apply the logits processors of ``rows``, and sample.

        ``found``: the outputs ``processed`` and, if a row asks for them, ``logits`` (for
        log-probabilities) and candidates.
        """
        errors, parts = dict[int, RequestError](), list[list[np.ndarray]]()
        for index, row in enumerate(rows):
            own, target = found["processed"][index], row.sequence.tokens[row.sequence.source :]
            try:
                own[:] = process_logits(row.processors, target, own)
            except RequestError as error:
                errors[index] = error
        names, most = ["sampled", *if_asked(rows, [*LOGPROBS])], self._fed_rows
        for at in range(0, len(rows), most):
            some = rows[at : at + most]
            plan = self._fed_plan(names, min(most, self.bucket(len(some))))
            feeds = {f"fed.{name}": values[at : at + most] for name, values in found.items()}
            feeds |= sampling_feeds(self.limits, some, plan.leaves, history=False)
            self._settings.forget(masks=False)
            values = self.executor.run(plan, feeds)
            parts.append([values[f"{name}.fed"] for name in names])
        arrays = dict(zip(names, map(np.concatenate, zip(*parts))))
        arrays |= {name: found[name] for name in CANDIDATES if name in found}
        return StepResult.of(arrays)._replace(errors=errors)

    def _prompt_logprobs(
        self, hidden: np.ndarray, chunks: Rows[Chunk], rows: Rows[Row],
        positions: Rows[range],
    ) -> dict[int, list[TokenLogprobs]]:  # fmt: skip
        """Return log-probabilities of tokens of prompts, by the index of the chunk.

        ``hidden``: hidden states [T, dim]. ``positions``: those of each chunk that are needed.
        """
        found, first = dict[int, list[TokenLogprobs]](), 0
        for index, (chunk, row, own) in enumerate(zip(chunks, rows, positions)):
            if own:
                at = first - chunk.start
                ids = np.array(row.sequence.tokens[own.start + 1 : own.stop + 1], np.int32)
                states, count = hidden[at + own.start : at + own.stop], row.sampling.prompt_logprobs
                found[index] = prompt_logprobs(self.executor, self.outputs, states, ids, count or 0)
            first += chunk.stop - chunk.start
        return found

    def feeds(
        self, plan: Plan, parts: Rows[Chunk], rows: Rows[Row]
    ) -> tuple[Feeds, dict[str, int]]:
        """Return the feeds of a step, and the number of its (query, key) pairs."""
        spans = [
            Span(c.sequence.tokens[c.start : c.stop], c.start, c.sequence.prefix, row.blocks)
            for c, row in zip(parts, rows)
        ]
        feeds, env = forward_feeds(self.manager, spans)
        feeds["rows"] = feeds["rows"][: max(1, sum(chunk.samples for chunk in parts))]
        feeds |= token_feeds(self.limits, rows, stages_of(rows) >= PROCESSED)
        return feeds | self._settings.feeds({*plan.leaves}, rows), env

    def copy_blocks(self, copies: Rows[BlockCopy]) -> None:
        """Copy KV cache blocks on the device, behind the steps that were launched."""
        copied = {n: node for n, node in self.outputs.items() if n.startswith(COPIED)}
        most = FEW_COPIES if len(copies) <= FEW_COPIES else MAX_COPIES
        plan = self.executor.compile(copied, {"M": (1, most)})
        for feeds in copy_feeds(copies, self.caches):
            self.executor.run(plan, feeds, fetch=())

    # -- decode steps of one batch
    @property
    def waiting(self) -> int:
        """Number of steps that were launched and not taken."""
        return self._loop.steps.waiting if self._loop else 0

    def decode(self, chunks: Rows[Chunk], rows: list[Row], recorder: StepRecorder | None) -> None:
        """Launch a decode step: one token of each sequence, and its draft tokens, all sampled.

        Args:
            chunks: what to compute.
            rows: the requests of the chunks.
            recorder: recorder of the steps.
        """
        drafts = sum([len(chunk.drafts) for chunk in chunks])
        if drafts or self._advanced != rows:
            self._loop = self._fed(chunks, rows, recorder)
            self._advanced = [] if drafts else rows
            self._launch(self._loop, chunks)
            return
        if self._loop is None or self._loop.recorder is not recorder:
            self._loop = self._new_loop(rows, recorder, advanced=True)
            self._loop.counts["prefix_sum"] = sum(row.sequence.prefix for row in rows)
        self.launch(chunks)

    def _fed(self, chunks: Rows[Chunk], rows: list[Row], recorder: StepRecorder | None) -> _Loop:
        """Return the loop of a step, fed with the values of the step."""
        own = [row for chunk, row in zip(chunks, rows) for _ in range(len(chunk.drafts) + 1)]
        key: tuple[int | str, ...] = len(own), *result_outputs("ids", rows)
        if recorder is not self._recorder or len(self._kept) == _MAX_KEPT:
            self._recorder, self._kept = recorder, {}
        loop = self._kept[key] = self._kept.get(key) or self._new_loop(own, recorder)
        self._settings.write(loop.settings, own)
        loop.counts.update(loop.feeds.fill(chunks, [row.blocks for row in rows]))
        loop.steps.feed()
        return loop

    def _new_loop(
        self, rows: list[Row], recorder: StepRecorder | None, advanced: bool = False
    ) -> _Loop:
        """Return a new decode loop; ``advanced``: whether the device has the values of the rows."""
        count, outputs, size = len(rows), result_outputs("ids", rows), self.bucket(len(rows))
        plan = self.plan(outputs, size, size, size)
        names = {"rows", "q_start"} if advanced else {*plan.leaves}
        history = self.limits.history if stages_of(rows) >= PROCESSED else 0
        settings = set[str]() if advanced else self.write_settings(plan, rows)
        feeds = DecodeFeeds(self.manager, count, names, history)
        counts = dict[str, int]()
        steps = self.executor.decode_loop(
            plan, feeds.arrays, live_values(count), outputs[0], recorder, lambda: counts,
            others=outputs[1:],
        )  # fmt: skip
        return _Loop(outputs, recorder, steps, settings, feeds, counts)

    def write_settings(self, plan: Plan, rows: Rows[Row]) -> set[str]:
        """Bind ``plan``, write the settings of ``rows`` that it reads, and return their names."""
        self.executor.bind(plan)
        names = plan.leaves.keys() & {MASK, *rows[0].settings}
        self._settings.forget_unwritten(names)
        self._settings.write(names, rows)
        return names

    @property
    def lookahead(self) -> int | None:
        """How many steps of the present decode loop may be launched ahead; None: there is none."""
        return self._loop.steps.lookahead if self._loop else None

    @property
    def can_run_ahead(self) -> bool:
        """Whether the device takes another step before the oldest launched one is taken."""
        return self._loop is not None and self.waiting <= self._loop.steps.lookahead

    def launch(self, chunks: Rows[Chunk]) -> None:
        """Launch the next step of the decode loop, whose blocks are reserved.

        The updated block tables are written in stream order, behind the steps already launched.
        """
        loop, block, rows = self._loop, self.limits.block, self._advanced
        assert loop is not None
        states, chosen = Feeds(), CANDIDATES[0] in loop.outputs  # by the host, as are their blocks
        lengths = [chunk.stop for chunk in chunks]
        if chosen:
            states["ids"] = np.array([c.sequence.tokens[-1] for c in chunks], np.int32)
        if chosen or any(length % block <= 1 for length in lengths):
            blocks = [row.blocks for row in rows]
            states |= {f"table.{name}": block_tables(blocks, name) for name in self.caches}
        if any(row.grammar for row in rows):
            states[MASK] = self._settings.masks(rows)
        if states:
            self.executor.buffers.write(states)
        loop.counts["kv_sum"] = sum(lengths)
        self._launch(loop, chunks)

    def _launch(self, loop: _Loop, chunks: Rows[Chunk]) -> None:
        if loop.recorder is not None:
            loop.recorder.begin_step(one_token_chunks(chunks))
        loop.steps.launch()

    def take(self) -> StepResult:
        """Wait for the oldest launched step, and return its result."""
        loop = self._loop
        assert loop is not None
        ids = loop.steps.take()
        if len(loop.outputs) == 1:
            return StepResult(ids)
        return StepResult.of(dict(zip(loop.outputs, [ids, *loop.steps.take_others()])))

    def reset(self) -> None:
        """Forget all decode loops and what was fed: the next step is fed by the host."""
        self._forget_step()
        self._recorder, self._kept = None, {}

    def leave_loop(self) -> None:
        """Forget the present decode loop, whose steps were taken: the next step is fed."""
        self._loop, self._advanced = None, []

    def _forget_step(self) -> None:
        self.leave_loop()
        self._settings.forget()
