"""Runs steps of one decoder: prefill in chunks, then one token after another."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress

import numpy as np

from ..compiler.plan import Plan
from ..errors import GraphError, RequestError
from ..graph.rewrite import toposort
from ..graph.scopes import noted
from ..model.decoder import CacheSpec, Decoder, Limits
from ..runtime.decode_loop import Repeat
from ..runtime.executor import Executor
from ..runtime.gpu_offload import AUTO, Fit, fit
from ..runtime.recorder import Recorder
from .finite_check import non_finite_error
from .kv_cache import BlockTable
from .request import Sampling
from .request_lock import RequestLock

INT32_MAX = 2**31 - 1  # more tokens than any sequence has
MAX_LOGITS_BYTES = 64 << 20  # of logits that one step may produce

PrefillCallback = Callable[[int, int], None]  # tokens prefilled so far, tokens to prefill


class Engine:
    """A decoder, its executor and the cache of one sequence.

    ``outputs``: of its graph; ``values``: what its scopes return, see `noted`. The cache remembers
    its tokens: a prompt that begins like the last one prefills only the rest. Where a model's
    prompts begin with a part that sees all of itself, that part is read in one step, and only a
    prompt that begins with the same one goes on from it.
    """

    def __init__(self, decoder: Decoder, executor: Executor, limits: Limits) -> None:
        self.executor, self.limits = executor, limits
        with noted() as values:
            self.outputs = decoder.build(limits)
        used = set(toposort(self.outputs.values()))
        self.scope_values = {scope: node for scope, node in values.items() if node in used}
        executor.adopt(self.outputs)
        self.requested_gpu_layers: int | str = AUTO  # of `fit`
        self.gpu_offload: Fit | None = None  # its answer
        self._pools = [name for name in self.outputs if name.startswith("kv.")]
        self._vocab = decoder.cfg.vocab
        self._bidirectional_prefix = decoder.prefix
        self._prefix = 0  # how many tokens see one another, of those cached and those to come
        self._tables = {c.name: self._table(c) for c in decoder.caches}
        self._cached: list[int] = []  # tokens whose keys and values are in the pools
        self.lock = RequestLock()  # whoever serves several threads takes it for each step
        self._request_number = 0  # counts requests: the cache belongs to the last one
        self._steps: Repeat | None = None  # the decode steps of the last request
        self._launched_length = 0  # tokens in the cache when the last step that was begun is over
        self.prefill_tokens = (
            0  # tokens of the last prompt that were computed, not found in the cache
        )

    def _table(self, group: CacheSpec) -> BlockTable:
        kept = self.limits.kept(group.window)
        free = list(range(kept))
        return BlockTable(free, self.limits.block, self.limits.blocks, kept, group.window)

    # -- plans
    def _plan(self, outputs: Sequence[str], tokens: int, rows: int = 1) -> Plan:
        bounds = {"T": (1, tokens), "S": (1, 1), "Q": (2, 2), "N": (1, rows)}
        return self.executor.compile({name: self.outputs[name] for name in outputs}, bounds)

    def decode_plan(self, output: str = "ids") -> Plan:
        """The plan of one token: sample, and advance the step's state."""
        return self._plan([output], 1)

    def offload_layers(self, gpu_layers: int | str) -> None:
        """Choose the layers of a device with a memory of its own. Call it before `prepare`."""
        self.requested_gpu_layers = gpu_layers
        self.gpu_offload = fit(self.executor, self.outputs, self.generation_plans, gpu_layers)

    def prepare(self) -> None:
        """Bind the plans that every generation needs: pack weights, compile kernels."""
        for plan in self.generation_plans():
            self.executor.bind(plan)

    def generation_plans(self) -> list[Plan]:
        """Of a prompt, and of one token."""
        return [self._plan(["ids"], self.limits.tokens), self.decode_plan()]

    def close(self) -> None:
        """Refuse all requests from now on, and let go of buffers and weights."""
        self.lock.close()
        with suppress(GraphError):  # where nothing is bound, nothing runs
            self.executor.get_state("ids")  # waits for a step that was begun ahead
        self._steps = None
        del self._bidirectional_prefix  # the decoder's, and so its file's
        self.executor.close()

    # -- steps
    def _feeds(self, tokens: Sequence[int], rows: np.ndarray) -> dict[str, np.ndarray]:
        """Feeds of a step that appends ``tokens`` to the cached ones."""
        start, stop = len(self._cached), len(self._cached) + len(tokens)
        if stop < self._prefix:
            raise RequestError(
                f"the first {self._prefix} tokens of the prompt see one another, so that they are "
                f"one step; here a step takes {len(tokens)}"
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
            table.grow(min(stop + 1, self.limits.context))  # the step finds the next token's slot
            feeds[f"slot.{name}"] = table.slots(start, stop)
            feeds[f"table.{name}"] = table.table[None]
        return feeds

    def _sampling_feeds(
        self, tokens: Sequence[int], sampling: Sampling, stops: Sequence[int], count: int
    ) -> dict[str, np.ndarray]:
        """What the sampler reads: settings, and the state of a sequence of ``tokens``, of which the
        last ``count`` were sampled."""
        if len(stops) > self.limits.stops:
            raise RequestError(f"{len(stops)} end tokens are too many (most: {self.limits.stops})")
        stop = np.full(self.limits.stops, -1, np.int32)
        stop[: len(stops)] = list(stops)
        floats = {
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "min_p": sampling.min_p,
            "repeat": sampling.repeat_penalty,
            "presence": sampling.presence_penalty,
            "frequency": sampling.frequency_penalty,
        }
        least = INT32_MAX if sampling.ignore_eos else sampling.min_tokens
        ints = {"top_k": sampling.top_k, "min_tokens": least, "count": count, "done": 0}
        return {
            **{name: np.array([value], np.float32) for name, value in floats.items()},
            **{name: np.array([value], np.int32) for name, value in ints.items()},
            "seed": np.array([sampling.seed or 0], np.int64),
            "stop": stop,
            "history": self._history(tokens),
        }

    def _history(self, tokens: Sequence[int]) -> np.ndarray:
        """The ring of the last ids [1, W]: the one at position p in column p % W, -1 where none."""
        width = self.limits.history
        ring = np.full((1, width), -1, np.int32)
        first = max(0, len(tokens) - width)
        ring[0, np.arange(first, len(tokens)) % width] = tokens[first:]
        return ring

    def reuse_cache(self, tokens: Sequence[int], prefix: int | None = None) -> int:
        """Forget what the cache holds beyond the tokens with which ``tokens`` begins, too.

        Returns how many these are; at least the last token is always left to compute. It is 0
        where layers with a window have lost what comes before their end, and where the tokens that
        see one another (the first ``prefix``, by default those of a prompt ``tokens``) are not all
        the same. RequestError: `Decoder.prefix`.
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
        """Begin anew: the next prompt is computed from its first token."""
        self._clear(0)

    def _clear(self, prefix: int) -> None:
        """As `clear_cache`, for a prompt whose first ``prefix`` tokens see one another."""
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
        stops: Sequence[int],
        seen: PrefillCallback | None = None,
        profile: tuple[Recorder, Recorder] | None = None,
    ) -> Iterator[int]:
        """Ids one by one, the first after the prompt ``tokens``, until the context is full.

        When another request has taken the cache between two ids, the next step computes the prompt
        and the ids so far again, and the answer goes on as if nothing had happened: a token's
        logits do not depend on how its text was cut into steps, and the sampler's state follows
        from the ids. ``stops``: the ids that ``min_tokens`` and ``ignore_eos`` forbid; whoever
        takes the ids ends at one of them. ``seen`` is told of the first prefill. ``profile``: where
        the times of prefill and of decode are recorded.
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
            feeds = self._sampling_feeds(known, sampling, stops, len(known) - len(tokens))
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
        sampling_feeds: Mapping[str, np.ndarray], seen: PrefillCallback | None,
        profile: Recorder | None,
    ) -> int:  # fmt: skip
        """Compute what the cache does not hold of ``tokens``; the id sampled after them."""
        at = self.reuse_cache(tokens, prefix)
        self.prefill_tokens = len(tokens) - at
        while at < len(tokens):
            chunk = tokens[at : at + self.limits.tokens]
            at += len(chunk)
            feeds = self._feeds(chunk, np.array([len(chunk) - 1]))
            wanted = [output] if at == len(tokens) else self._pools
            plan = self._plan(wanted, self.limits.tokens)
            env = {"kv_sum": _kv_sum(len(self._cached), len(chunk))}
            out = self.executor.run(plan, {**feeds, **sampling_feeds}, env, profile, (output,))
            self._cached += chunk
            if seen is not None:
                seen(at, len(tokens))
        return self._check_sampled(out[output])

    def _decode(self, output: str, token: int, profile: Recorder | None) -> Iterator[int]:
        """``token``, and those after it, for a prefill that has advanced the step's state already.

        A generator left half way keeps no buffer alive: what a step needs is the engine's.
        """
        self._launched_length = len(self._cached)
        following: int | None = token
        while following is not None:
            yield following
            following = self._step(output, following, profile)

    def _step(self, output: str, token: int, profile: Recorder | None) -> int | None:
        """The id after ``token``, the last one that was sampled; None where the context is full.

        Where the device can, the next step is begun before the id of this one is read. Whoever
        ends here leaves a step behind that nobody reads: it writes behind the cached tokens.
        """
        steps = self._steps = self._steps or self._repeat(output, profile)
        while steps.waiting <= steps.ahead and self._launched_length < self.limits.context:
            self._launched_length += 1
            self._grow(self._launched_length)
            steps.launch()
        if not steps.waiting:
            return None
        ids = steps.take()
        self._cached.append(token)
        return self._check_sampled(ids)

    def _check_sampled(self, ids: np.ndarray) -> int:
        """The id sampled after the cached tokens. NumericError where there was none to choose."""
        token = int(ids[0])
        if token < 0:
            raise non_finite_error(self, list(self._cached))
        return token

    def _repeat(self, output: str, profile: Recorder | None) -> Repeat:
        """Steps of one token, timed with ``profile``."""
        feeds = {"q_start": np.array([0, 1], np.int32), "rows": np.zeros(1, np.int32)}
        env = {"T": 1, "S": 1, "Q": 2, "N": 1}
        plan = self.decode_plan(output)
        return self.executor.repeat(
            plan, feeds, env, output, profile, lambda: {"kv_sum": self._launched_length}
        )

    def _grow(self, length: int) -> None:
        """Have the blocks of a step that ends with ``length`` tokens: for the next token, too,
        whose slot it finds. New ones are written in order with the steps that were begun."""
        for name, table in self._tables.items():
            if table.grow(min(length + 1, self.limits.context)):
                self.executor.set_state(f"table.{name}", table.table[None])

    def begin(self, tokens: Sequence[int]) -> None:
        """Forget the cache for a request that computes all of ``tokens``. RequestError."""
        if not tokens:
            raise RequestError("the prompt is empty")
        if len(tokens) > self.limits.context:
            raise RequestError(
                f"{len(tokens)} tokens do not fit a context of {self.limits.context}", "context"
            )
        self._clear(self._bidirectional_prefix(tokens))

    def logits(self, tokens: Sequence[int], last: bool = False) -> Iterator[np.ndarray]:
        """Logits [rows, vocab] of consecutive pieces of ``tokens``, or of the last token only."""
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
        """How many rows of logits one step may produce."""
        return max(1, min(self.limits.tokens, MAX_LOGITS_BYTES // (4 * self._vocab)))

    @property
    def logits_outputs(self) -> list[str]:
        """Names of the outputs that a step without sampling has: the logits and the pools."""
        return ["logits", *self._pools]

    def single_step(
        self, tokens: Sequence[int]
    ) -> tuple[dict[str, tuple[int, int]], dict[str, np.ndarray], dict[str, int]]:
        """One step that reads all of ``tokens`` from an empty cache, with every token's logits:
        the bounds to compile it for, its feeds, and the values of its Vars. RequestError."""
        most = min(self.limits.tokens, self._logits_rows)
        if not tokens or len(tokens) > most:
            raise RequestError(f"{len(tokens)} tokens are not between 1 and {most}, one step's")
        self._clear(self._bidirectional_prefix(tokens))
        count = len(tokens)
        bounds = {"T": (1, count), "S": (1, 1), "Q": (2, 2), "N": (1, count)}
        env = {"T": count, "S": 1, "Q": 2, "N": count, "kv_sum": _kv_sum(0, count)}
        return bounds, self._feeds(tokens, np.arange(count)), env

    def step_logits(self, tokens: Sequence[int], last: bool = False) -> np.ndarray:
        """Append ``tokens`` to the cache in one step: their logits, or the last one's, as rows.

        The step is repeated where it has more tokens than one may give rows of logits, as happens
        where they see one another.
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
        """Append ``tokens`` to the cache in one step of ``plan``: its outputs ``fetch``. ``rows``:
        the tokens that the logits' rows are of."""
        out = self._run(plan, tokens, rows, fetch)
        self._cached += tokens
        return out

    def _run(
        self, plan: Plan, tokens: Sequence[int], rows: np.ndarray, fetch: Collection[str]
    ) -> dict[str, np.ndarray]:
        """A step that writes ``tokens`` behind the cached ones, as `append`, but counts none."""
        env = {"kv_sum": _kv_sum(len(self._cached), len(tokens))}
        return self.executor.run(plan, self._feeds(tokens, rows), env, fetch=fetch)


def _kv_sum(start: int, count: int) -> int:
    """Keys at or before each of ``count`` queries after ``start`` cached tokens, summed."""
    return count * start + count * (count + 1) // 2
