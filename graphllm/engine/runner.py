"""Runner: the feeds and plans of a step, and the decode loop of a batch that stays the same."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Rows
from dataclasses import dataclass

import numpy as np

from ..compiler.plan import Plan
from ..errors import RequestError
from ..graph.tensor import Tensor
from ..model.batch import ENCODED, CacheSpec, Limits, source_tokens
from ..ops.sampling import mask_words
from ..runtime.decode_loop import DecodeLoop
from ..runtime.executor import Executor
from .block_copies import COPIED, FEW_COPIES, MAX_COPIES, copy_feeds
from .block_manager import BlockManager
from .forward_feeds import Feeds, Span, block_tables, decode_feeds, forward_feeds
from .logits_processors import process_logits
from .prompt_logprobs import prompt_logprobs, prompt_plan
from .sampler import PROCESSED, STAGES, fed_rows
from .sampling_feeds import Row, mask_feed, sampling_feeds
from .sequence import Chunk, StepRecorder
from .sequence_blocks import BlockCopy
from .step_result import StepResult, TokenLogprobs

LOGPROBS = ("logprobs", "top_ids", "top_logprobs")  # fields of `StepResult`
CANDIDATES = ["candidate_ids", "candidate_logprobs"]  # fields of `StepResult`, and outputs
_NOTHING = StepResult(np.zeros(0, np.int32))  # of a step that samples no sequence


@dataclass
class _Loop:
    """A decode loop over fixed rows.

    Attributes:
        lengths: computed tokens of each row once all steps have run.
        chosen: whether the host chooses tokens of some rows, and blocks to go with them.
    """

    rows: list[Row]
    outputs: list[str]
    recorder: StepRecorder | None
    steps: DecodeLoop
    lengths: list[int]
    chosen: bool


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
        self._masks = np.empty((limits.step_sequences, mask_words(vocab)), np.int32)
        self.encoded = {n: node for n, node in outputs.items() if n.startswith(ENCODED)}
        self._open_masks = 0  # rows of the device's masks that allow all ids, from the first on
        self._loop: _Loop | None = None
        self._advanced: list[Row] = []  # rows whose next step needs no feeds
        self._settings: list[Mapping[str, np.ndarray]] = []  # of the rows that were fed last
        self._held: set[str] = set()  # leaves that have the values of these settings

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
        self.reset()
        chunks, rows = self._encode_sources(chunks, rows, recorder)
        if not chunks:
            return _NOTHING
        size, sampling = self.bucket(len(chunks)), sum(chunk.samples for chunk in chunks)
        processing = any(row.processors for row in rows[:sampling])
        chosen = _candidates(rows[:sampling])
        every = sampling == len(rows) and not processing
        if processing:
            outputs = ["processed", *_if_asked(rows[:sampling], ["logits"]), *chosen]
        else:
            outputs = _outputs("ids" if every else "sampled", rows[:sampling]) if sampling else []
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
        names, most = ["sampled", *_if_asked(rows, [*LOGPROBS])], self._fed_rows
        for at in range(0, len(rows), most):
            some = rows[at : at + most]
            plan = self._fed_plan(names, min(most, self.bucket(len(some))))
            feeds = {f"fed.{name}": values[at : at + most] for name, values in found.items()}
            feeds |= sampling_feeds(self.limits, some, plan.leaves, history=False)
            self._held = set()
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
        return feeds | self._sampling_feeds({*plan.leaves}, rows), env

    def _sampling_feeds(self, names: set[str], rows: Rows[Row]) -> Feeds:
        """Return the feeds of the sampling program that are among ``names``."""
        feeds = sampling_feeds(self.limits, rows, names, _stages(rows) >= PROCESSED)
        if fed := names & rows[0].settings.keys():
            self._settings = [row.settings for row in rows]
            self._held |= fed
        if "mask" in names:
            feeds["mask"] = mask_feed(rows, self._masks)
            self._open_masks = 0 if any(row.grammar for row in rows) else len(rows)
        return feeds

    def _held_settings(self, rows: Rows[Row]) -> set[str]:
        """Return the settings that need not be fed for ``rows``."""
        known = len(rows) <= len(self._settings) and all(
            row.settings is last for row, last in zip(rows, self._settings)
        )
        if not known:
            self._held = set()
        open_masks = len(rows) <= self._open_masks and not any(row.grammar for row in rows)
        held = self._held | {"mask"} if open_masks else self._held
        return {name for name in held if self.executor.buffers.written(name)}

    def copy_blocks(self, copies: Rows[BlockCopy]) -> None:
        """Copy KV cache blocks on the device, behind the steps that were launched."""
        names = [name for name in self.outputs if name.startswith(COPIED)]
        copied = {name: self.outputs[name] for name in names}
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
        """Launch a decode step: one token of each sequence, all sampled.

        Args:
            chunks: what to compute.
            rows: the requests of the chunks.
            recorder: recorder of the steps.
        """
        loop = self._loop
        if loop is None or loop.rows != rows or loop.recorder is not recorder:
            self._loop = self._new_loop(chunks, rows, recorder)
        self.launch(chunks)

    def _new_loop(
        self, chunks: Rows[Chunk], rows: list[Row], recorder: StepRecorder | None
    ) -> _Loop:
        count, outputs = len(rows), _outputs("ids", rows)
        size = self.bucket(count)
        plan = self.plan(outputs, size, size, size)
        index = np.arange(count + 1, dtype=np.int32)
        feeds = {"rows": index[:-1], "q_start": index}
        if self._advanced != rows:
            self.executor.bind(plan)
            feeds = self._sampling_feeds({*plan.leaves} - self._held_settings(rows), rows)
            feeds |= decode_feeds(self.manager, chunks, [row.blocks for row in rows])
        env = {"T": count, "S": count, "Q": count + 1, "N": count}
        lengths: list[int] = []
        prefix = sum(row.sequence.prefix for row in rows)
        steps = self.executor.decode_loop(
            plan, feeds, env, outputs[0], recorder,
            lambda: {"kv_sum": sum(lengths), "prefix_sum": prefix}, others=outputs[1:],
        )  # fmt: skip
        return _Loop(rows, outputs, recorder, steps, lengths, bool(_candidates(rows)))

    @property
    def can_run_ahead(self) -> bool:
        """Whether the device takes another step before the oldest launched one is taken."""
        return self._loop is not None and self.waiting <= self._loop.steps.lookahead

    def launch(self, chunks: Rows[Chunk]) -> None:
        """Launch the next step of the decode loop, whose blocks are reserved.

        The updated block tables are written in stream order, behind the steps already launched.
        """
        loop, block = self._loop, self.limits.block
        assert loop is not None
        loop.lengths[:] = [chunk.stop for chunk in chunks]
        states = Feeds()
        if loop.chosen:
            states["ids"] = np.array([c.sequence.tokens[-1] for c in chunks], np.int32)
        if loop.chosen or any(length % block <= 1 for length in loop.lengths):
            blocks = [row.blocks for row in loop.rows]
            states |= {f"table.{name}": block_tables(blocks, name) for name in self.caches}
        if any(row.grammar for row in loop.rows):
            states["mask"] = mask_feed(loop.rows, self._masks)
            self._open_masks = 0
        if states:
            self.executor.buffers.write(states)
        if loop.recorder is not None:
            loop.recorder.begin_step(chunks)
        loop.steps.launch()

    def take(self) -> StepResult:
        """Wait for the oldest launched step, and return its result."""
        loop = self._loop
        assert loop is not None
        ids = loop.steps.take()
        self._advanced = loop.rows
        if len(loop.outputs) == 1:
            return StepResult(ids)
        return StepResult.of(dict(zip(loop.outputs, [ids, *loop.steps.take_others()])))

    def reset(self) -> None:
        """Forget the decode loop and what was fed: the next step is fed by the host."""
        self._loop, self._advanced, self._held, self._open_masks = None, [], set(), 0


def _stages(rows: Rows[Row]) -> int:
    """Return the number of stages of the sampling program that the rows need."""
    return max(row.stages for row in rows)


def _outputs(name: str, rows: Rows[Row]) -> list[str]:
    """Return the names of the outputs of a `StepResult`; ``name``: that of the sampled ids."""
    suffix = STAGES[_stages(rows)]
    asked = _if_asked(rows, ["logprobs" + suffix, "top_ids", "top_logprobs"])
    return [name + suffix, *asked, *_candidates(rows)]


def _candidates(rows: Rows[Row]) -> list[str]:
    """Return the outputs of which the host chooses the tokens of a row, if there is such a row."""
    return CANDIDATES if any(row.asks_candidates for row in rows) else []


def _if_asked(rows: Rows[Row], names: list[str]) -> list[str]:
    """Return ``names`` if a row asks for log-probabilities."""
    return names if any(row.asks_logprobs for row in rows) else []
