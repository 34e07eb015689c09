"""Engine of one decoder: chunked prefill, then the decode loop."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress

import numpy as np

from ..compiler.plan import Plan
from ..errors import GraphError, RequestError
from ..graph.rewrite import toposort
from ..graph.scopes import record_scope_values
from ..model.decoder import Batch, CacheSpec, Decoder, Limits
from ..runtime.decode_loop import DecodeLoop
from ..runtime.executor import Executor
from ..runtime.gpu_offload import AUTO, GpuOffload, plan_gpu_offload
from ..runtime.recorder import Recorder
from .finite_check import non_finite_error
from .kv_cache import BlockTable
from .request import Sampling
from .request_lock import RequestLock
from .sampler import sampling_outputs
from .sampling_feeds import sampling_feeds

MAX_LOGITS_BYTES = 64 << 20  # upper bound of the logits that one step computes

PrefillCallback = Callable[[int, int], None]  # (tokens prefilled so far, tokens to prefill)


class Engine:
    """A decoder, its executor and the KV cache of one sequence.

    The engine knows the tokens in the cache: a prompt that shares a prefix with the last one
    computes only the rest. A bidirectional prefix (`Decoder.bidirectional_prefix`) is computed in
    one step, and is reused only by a prompt that begins with the same bidirectional prefix.

    Attributes:
        outputs: outputs of the decoder's graph by name; see `Decoder.build`.
        scope_values: the values that its scopes return, by scope; see `record_scope_values`.
        lock: to be held for each step where several threads use the engine.
        requested_gpu_layers: the argument of `offload_layers`.
        gpu_offload: the outcome of `offload_layers`; None without a device with its own memory.
        prefill_tokens: tokens of the last prompt that were computed, not found in the cache.
    """

    def __init__(self, decoder: Decoder, executor: Executor, limits: Limits) -> None:
        self.executor, self.limits = executor, limits
        with record_scope_values() as values:
            batch = Batch(decoder.caches, limits)
            self.outputs = decoder.build(batch)
        self.outputs |= sampling_outputs(self.outputs["logits"], batch)
        used = set(toposort(self.outputs.values()))
        self.scope_values = {scope: node for scope, node in values.items() if node in used}
        executor.place_model(self.outputs)
        self.requested_gpu_layers: int | str = AUTO
        self.gpu_offload: GpuOffload | None = None
        self._pools = [name for name in self.outputs if name.startswith("kv.")]
        self._vocab = decoder.cfg.vocab
        self._bidirectional_prefix = decoder.bidirectional_prefix
        self._prefix = 0  # length of the current prompt's bidirectional prefix
        self._tables = {c.name: self._table(c) for c in decoder.caches}
        self._cached: list[int] = []  # tokens whose keys and values are in the KV pools
        self.lock = RequestLock()
        self._request_number = 0  # of the request that owns the cache
        self._steps: DecodeLoop | None = None  # decode loop of the current request
        self._launched_length = 0  # tokens in the cache once all launched steps have finished
        self.prefill_tokens = 0

    def _table(self, group: CacheSpec) -> BlockTable:
        kept = self.limits.kept(group.window)
        free = list(range(kept))
        return BlockTable(free, self.limits.block, self.limits.blocks, kept, group.window)

    # -- plans
    def _plan(self, outputs: Sequence[str], tokens: int, rows: int = 1) -> Plan:
        bounds = {"T": (1, tokens), "S": (1, 1), "Q": (2, 2), "N": (1, rows)}
        return self.executor.compile({name: self.outputs[name] for name in outputs}, bounds)

    def decode_plan(self, output: str = "ids") -> Plan:
        """Return the decode plan: compute one token, sample the next, advance the state."""
        return self._plan([output], 1)

    def offload_layers(self, gpu_layers: int | str) -> None:
        """Choose the layers to offload to a device with its own memory. Call before `prepare`."""
        self.requested_gpu_layers = gpu_layers
        self.gpu_offload = plan_gpu_offload(
            self.executor, self.outputs, self.generation_plans, gpu_layers
        )

    def prepare(self) -> None:
        """Bind the plans of prefill and decode: pack their weights and compile their kernels."""
        for plan in self.generation_plans():
            self.executor.bind(plan)

    def generation_plans(self) -> list[Plan]:
        """Return the prefill plan and the decode plan."""
        return [self._plan(["ids"], self.limits.tokens), self.decode_plan()]

    def close(self) -> None:
        """Refuse all further requests, and free buffers and weights."""
        self.lock.close()
        with suppress(GraphError):  # raised if no plan was ever bound
            self.executor.get_state("ids")  # waits for a step that was launched ahead
        self._steps = None
        del self._bidirectional_prefix  # a bound method: it would keep the decoder and file alive
        self.executor.close()

    # -- steps
    def _feeds(self, tokens: Sequence[int], rows: np.ndarray) -> dict[str, np.ndarray]:
        """Return the feeds of a step that appends ``tokens``; ``rows``: see `Batch`."""
        start, stop = len(self._cached), len(self._cached) + len(tokens)
        if stop < self._prefix:
            raise RequestError(
                f"the first {self._prefix} tokens of the prompt are a bidirectional prefix, which "
                f"must be computed in one step; this step has {len(tokens)} tokens"
            )
        feeds = {
            "ids": np.asarray(tokens, np.int32),
            "pos": np.arange(start, stop, dtype=np.int32),
            "q_start": np.array([0, len(tokens)], np.int32),
            "kv_len": np.array([stop], np.int32),
            "prefix_len": np.array([self._prefix], np.int32),
            "rows": rows.astype(np.int32),
        }
        for name, table in self._tables.items():
            table.grow(min(stop + 1, self.limits.context))  # the step computes the next slot, too
            feeds[f"slot.{name}"] = table.slots(start, stop)
            feeds[f"table.{name}"] = table.table[None]
        return feeds

    def reuse_cache(self, tokens: Sequence[int], prefix: int | None = None) -> int:
        """Truncate the cache to the longest prefix that it shares with ``tokens``.

        Args:
            tokens: the sequence to compute next.
            prefix: length of its bidirectional prefix; that of the prompt ``tokens`` by default.

        Returns:
            Number of tokens left in the cache, less than ``len(tokens)``. It is 0 if a sliding
            window layer has dropped keys that the next token needs, or if the cache has another
            bidirectional prefix.

        Raises:
            RequestError: see `Decoder.bidirectional_prefix`.
        """
        common = 0
        prefix = self._bidirectional_prefix(tokens) if prefix is None else prefix
        for a, b in zip(self._cached, tokens[:-1]):
            if a != b:
                break
            common += 1
        if not all(table.holds(common) for table in self._tables.values()):
            common = 0
        if prefix != self._prefix or common < prefix:
            common = 0
        if common == 0:
            self._clear(prefix)
            return 0
        del self._cached[common:]
        self._begin_request()
        return common

    def clear_cache(self) -> None:
        """Clear the cache, so that the next prompt is computed from its first token."""
        self._clear(0)

    def _clear(self, prefix: int) -> None:
        """Clear the cache for a prompt with a bidirectional prefix of ``prefix`` tokens."""
        for table in self._tables.values():
            table.release()
        self._cached.clear()
        self._prefix = prefix
        self._begin_request()

    def _begin_request(self) -> None:
        self._request_number += 1
        self._steps = None

    def generate(
        self,
        tokens: Sequence[int],
        sampling: Sampling,
        eos_ids: Sequence[int],
        seen: PrefillCallback | None = None,
        profile: tuple[Recorder, Recorder] | None = None,
    ) -> Iterator[int]:
        """Yield sampled token ids after the prompt ``tokens`` until the context is full.

        If another request takes the cache between two ids, the next step computes the prompt and
        the ids so far again, and the same ids follow: a token's logits do not depend on the
        chunking of the tokens before it, and the sampler's state is a function of the ids.

        Args:
            tokens: ids of the prompt.
            sampling: sampling settings, with a seed.
            eos_ids: ids that ``min_tokens`` and ``ignore_eos`` forbid. The caller stops at one of
                them; this generator does not.
            seen: called after each chunk of the first prefill.
            profile: recorders of prefill and of decode.

        Raises:
            RequestError: the prompt is empty or does not fit the context.
            NumericError: the logits are not finite.
        """
        if not tokens:
            raise RequestError("the prompt is empty")
        if len(tokens) > self.limits.context:
            raise RequestError(
                f"the prompt has {len(tokens)} tokens, the context holds {self.limits.context}",
                "context",
            )
        prefill, decode = profile or (None, None)
        output = "ids.penalised" if sampling.changes_logits else "ids"
        prefix, known = self._bidirectional_prefix(tokens), list(tokens)
        while len(known) <= self.limits.context:
            count = len(known) - len(tokens)
            feeds = sampling_feeds(self.limits, known, sampling, eos_ids, count)
            first = self._prefill(known, prefix, output, feeds, seen, prefill)
            seen, request_number = None, self._request_number
            for token in self._decode(output, first, decode):
                known.append(token)
                yield token
                if self._request_number != request_number:
                    break
            else:
                return

    def _prefill(
        self, tokens: Sequence[int], prefix: int, output: str,
        sampler_feeds: Mapping[str, np.ndarray], seen: PrefillCallback | None,
        profile: Recorder | None,
    ) -> int:  # fmt: skip
        """Compute the tokens that are not in the cache; return the id sampled after the last."""
        at = self.reuse_cache(tokens, prefix)
        self.prefill_tokens = len(tokens) - at
        while at < len(tokens):
            chunk = tokens[at : at + self.limits.tokens]
            at += len(chunk)
            feeds = self._feeds(chunk, np.array([len(chunk) - 1]))
            wanted = [output] if at == len(tokens) else self._pools
            plan = self._plan(wanted, self.limits.tokens)
            env = {"kv_sum": _kv_sum(len(self._cached), len(chunk))}
            out = self.executor.run(plan, {**feeds, **sampler_feeds}, env, profile, (output,))
            self._cached += chunk
            if seen is not None:
                seen(at, len(tokens))
        return self._check_sampled(out[output])

    def _decode(self, output: str, token: int, profile: Recorder | None) -> Iterator[int]:
        """Yield ``token``, sampled by the prefill, and the ids of the decode steps after it.

        The engine owns all buffers, so that an abandoned generator keeps none of them alive.
        """
        self._launched_length = len(self._cached)
        following: int | None = token
        while following is not None:
            yield following
            following = self._step(output, following, profile)

    def _step(self, output: str, token: int, profile: Recorder | None) -> int | None:
        """Return the id sampled after ``token``; None if the context is full.

        If the device supports it, the next step is launched before the id of this one is read. The
        last launched step is never read when generation ends; it writes past the cached tokens.
        """
        steps = self._steps = self._steps or self._decode_loop(output, profile)
        while steps.waiting <= steps.lookahead and self._launched_length < self.limits.context:
            self._launched_length += 1
            self._grow(self._launched_length)
            steps.launch()
        if not steps.waiting:
            return None
        ids = steps.take()
        self._cached.append(token)
        return self._check_sampled(ids)

    def _check_sampled(self, ids: np.ndarray) -> int:
        """Return the sampled id. NumericError: the sampler found no finite logits (id -1)."""
        token = int(ids[0])
        if token < 0:
            raise non_finite_error(self, list(self._cached))
        return token

    def _decode_loop(self, output: str, profile: Recorder | None) -> DecodeLoop:
        """Return the decode loop, which records its steps with ``profile``."""
        feeds = {"q_start": np.array([0, 1], np.int32), "rows": np.zeros(1, np.int32)}
        env = {"T": 1, "S": 1, "Q": 2, "N": 1}
        plan = self.decode_plan(output)
        return self.executor.decode_loop(
            plan, feeds, env, output, profile, lambda: {"kv_sum": self._launched_length}
        )

    def _grow(self, length: int) -> None:
        """Take the blocks for a step that ends with ``length`` tokens in the cache.

        The step computes the slot of the next token, too. The updated block tables are written in
        stream order, behind the steps already launched.
        """
        for name, table in self._tables.items():
            if table.grow(min(length + 1, self.limits.context)):
                self.executor.set_state(f"table.{name}", table.table[None])

    def begin(self, tokens: Sequence[int]) -> None:
        """Clear the cache for a request that computes all of ``tokens``.

        RequestError: ``tokens`` is empty or does not fit the context.
        """
        if not tokens:
            raise RequestError("the prompt is empty")
        if len(tokens) > self.limits.context:
            raise RequestError(
                f"{len(tokens)} tokens do not fit a context of {self.limits.context}", "context"
            )
        self._clear(self._bidirectional_prefix(tokens))

    def logits(self, tokens: Sequence[int], last: bool = False) -> Iterator[np.ndarray]:
        """Yield logits [rows, vocab] of successive chunks of ``tokens``, or of the last token."""
        self.begin(tokens)
        size, at = self.limits.tokens if last else self._logits_rows, 0
        while at < len(tokens):
            chunk = tokens[at : max(at + size, self._prefix)]
            at += len(chunk)
            logits = self.step_logits(chunk, last)
            if not last or at == len(tokens):
                yield logits

    @property
    def _logits_rows(self) -> int:
        """Maximum number of rows of logits that one step computes."""
        return max(1, min(self.limits.tokens, MAX_LOGITS_BYTES // (4 * self._vocab)))

    @property
    def logits_outputs(self) -> list[str]:
        """Names of the outputs of a step without sampling: the logits and the KV pools."""
        return ["logits", *self._pools]

    def single_step(
        self, tokens: Sequence[int]
    ) -> tuple[dict[str, tuple[int, int]], dict[str, np.ndarray], dict[str, int]]:
        """Prepare one step that computes all of ``tokens`` and their logits with an empty cache.

        Returns:
            The bounds to compile the step for, its feeds, and the values of its Vars.

        Raises:
            RequestError: ``tokens`` is empty or does not fit one step.
        """
        most = min(self.limits.tokens, self._logits_rows)
        if not tokens or len(tokens) > most:
            raise RequestError(f"{len(tokens)} tokens: one step takes 1 to {most}")
        self._clear(self._bidirectional_prefix(tokens))
        count = len(tokens)
        bounds = {"T": (1, count), "S": (1, 1), "Q": (2, 2), "N": (1, count)}
        env = {"T": count, "S": 1, "Q": 2, "N": count, "kv_sum": _kv_sum(0, count)}
        return bounds, self._feeds(tokens, np.arange(count)), env

    def step_logits(self, tokens: Sequence[int], last: bool = False) -> np.ndarray:
        """Append ``tokens`` to the cache in one step and return logits [rows, vocab].

        ``last``: return the logits of the last token only. A step with more tokens than
        `MAX_LOGITS_BYTES` allows rows of logits (a long bidirectional prefix) is run several times.
        """
        rows = np.array([len(tokens) - 1]) if last else np.arange(len(tokens))
        most = 1 if last else self._logits_rows
        wide = last or len(tokens) > most
        plan = self._plan(self.logits_outputs, self.limits.tokens if wide else most, most)
        parts = [rows[at : at + most] for at in range(0, len(rows), most)]
        logits = [self._run(plan, tokens, part, ("logits",))["logits"] for part in parts]
        self._cached += tokens
        return logits[0] if len(logits) == 1 else np.concatenate(logits)

    def append(
        self, plan: Plan, tokens: Sequence[int], rows: np.ndarray, fetch: Collection[str]
    ) -> dict[str, np.ndarray]:
        """Append ``tokens`` to the cache in one step of ``plan`` and return the outputs ``fetch``.

        ``rows``: indices of the tokens whose logits are computed.
        """
        out = self._run(plan, tokens, rows, fetch)
        self._cached += tokens
        return out

    def _run(
        self, plan: Plan, tokens: Sequence[int], rows: np.ndarray, fetch: Collection[str]
    ) -> dict[str, np.ndarray]:
        """Run a step as `append` does, but do not add ``tokens`` to the cached tokens."""
        env = {"kv_sum": _kv_sum(len(self._cached), len(tokens))}
        return self.executor.run(plan, self._feeds(tokens, rows), env, fetch=fetch)


def _kv_sum(start: int, count: int) -> int:
    """Return the number of (query, key) pairs of ``count`` tokens after ``start`` cached ones."""
    return count * start + count * (count + 1) // 2
