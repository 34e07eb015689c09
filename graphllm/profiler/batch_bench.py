"""Speed of many sequences at once, measured as llama.cpp's llama-batched-bench does.

A test prefills ``prompt`` tokens of each of ``batch`` sequences, which share nothing, and then
decodes ``gen`` tokens of each, through the engine and with sampling. Nothing is tokenized.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any

from ..backends import find
from ..compiler.plan import HOST
from ..engine.request import Sampling
from ..errors import RequestError
from ..system_info import OtherProcesses
from . import machine_load
from .batch_limits import check_batch
from .batch_prediction import predict_prefill, predict_step
from .bench import filler_prompts, step_bytes
from .engine_requests import finish, run_step, submitted
from .speed import Speed, speed

if TYPE_CHECKING:
    from ..engine.engine import Engine
    from ..engine.generation import Generation
    from ..loading.loaded_model import LoadedModel

SAMPLING = Sampling(seed=0)  # the defaults: top-k, top-p, temperature


@dataclass(frozen=True)
class BatchTest:
    """A test: prefill of ``prompt`` and decode of ``gen`` tokens of ``batch`` sequences."""

    prompt: int
    gen: int
    batch: int

    @property
    def name(self) -> str:
        """Name of the test, as in ``pp128 tg32 x 8``."""
        return f"pp{self.prompt} tg{self.gen} x {self.batch}"

    @property
    def context(self) -> int:
        """Tokens of one sequence: a token is sampled in the prefill, and one before the decode."""
        return self.prompt + self.gen + 2

    @property
    def middle_length(self) -> int:
        """Tokens in the cache of a sequence halfway through the decode."""
        return self.prompt + 1 + (self.gen + 1) // 2


@dataclass(frozen=True)
class BatchResult:
    """Measured times of one test.

    Attributes:
        test: the test.
        prefill_ns: wall time of the prefill of each repetition, in nanoseconds.
        decode_ns: wall time of the decode of each repetition, in nanoseconds.
        nbytes: bytes of weights and cache that a decode step moves, by the declared costs.
        date: begin of the test, ISO 8601.
        others: share of the processors' time that other processes used; None if unknown or if
            nothing ran on the host.
    """

    test: BatchTest
    prefill_ns: tuple[int, ...]
    decode_ns: tuple[int, ...]
    nbytes: float
    date: str
    others: float | None = None

    @property
    def prefill(self) -> Speed:
        """Speed of the prefill, of all sequences together."""
        return speed(self.test.batch * self.test.prompt, self.prefill_ns)

    @property
    def decode(self) -> Speed:
        """Speed of the decode, of all sequences together."""
        return speed(self.test.batch * self.test.gen, self.decode_ns)

    @property
    def whole(self) -> Speed:
        """Speed of prefill and decode."""
        both = [a + b for a, b in zip(self.prefill_ns, self.decode_ns)]
        return speed(self.prefill.tokens + self.decode.tokens, both)

    @property
    def load_note(self) -> str:
        """One line on what disturbed the test; empty if nothing did."""
        ran = {
            f"{what} of {self.test.name}": (sum(ns), machine_load.interference_of_samples(ns))
            for what, ns in (("prefill", self.prefill_ns), ("decode", self.decode_ns))
        }
        return machine_load.load_note(self.others, ran)

    @property
    def gb_s(self) -> float:
        """Memory bandwidth of the decode in GB/s."""
        return self.nbytes * self.decode.tok_s / self.test.batch / 1e9

    def as_dict(self) -> dict[str, Any]:
        """Return the JSON form: llama-batched-bench's keys, spreads and samples."""
        return {
            "pp": self.test.prompt,
            "tg": self.test.gen,
            "pl": self.test.batch,
            "n_kv": self.whole.tokens,
            "t_pp": self.prefill.ns / 1e9,
            "speed_pp": self.prefill.tok_s,
            "t_tg": self.decode.ns / 1e9,
            "speed_tg": self.decode.tok_s,
            "t": self.whole.ns / 1e9,
            "speed": self.whole.tok_s,
            "spread_pp": self.prefill.spread,
            "spread_tg": self.decode.spread,
            "passes": len(self.prefill_ns),
            "samples_pp_ns": list(self.prefill_ns),
            "samples_tg_ns": list(self.decode_ns),
            "gb_s": self.gb_s,
            "test_time": self.date,
            "others": self.others,
            "busy": self.load_note,
        }


def run(llm: LoadedModel, test: BatchTest, repeat: int, seen: Callable[[int], None]) -> BatchResult:
    """Time a test ``repeat`` times, after one run as warm-up.

    Args:
        llm: the model; no other request runs meanwhile, and its cache is cleared.
        test: what to time.
        repeat: number of repetitions.
        seen: callback with the number of finished runs.

    Raises:
        RequestError: the context, the KV cache or the engine's limit cannot hold the test.
    """
    one = test.prompt, test.gen + 2
    check_batch(llm.decoder.caches, llm.limits, [one] * test.batch)
    date = datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")
    watch, samples = OtherProcesses(), []
    with llm.engine.lock.hold("a benchmark"):
        for done in range(repeat + 1):
            seen(done)
            samples.append(time_once(llm.engine, test, done))
    seen(repeat + 1)
    prefill, decode = zip(*samples[1:])
    plan = llm.engine.decode_plan(test.batch)
    nbytes = step_bytes(plan, test.middle_length, test.batch)
    on_host = any(find(name).memory == HOST for name in llm.placement())
    return BatchResult(test, prefill, decode, nbytes, date, watch.share() if on_host else None)


def time_once(engine: Engine, test: BatchTest, number: int) -> tuple[int, int]:
    """Run a test once; return the nanoseconds of its prefill and of its decode.

    A prompt whose prefill ends early waits for the others, so that both phases are pure: its
    request ends with the first token, and another one continues it, with the cached prompt.

    Args:
        engine: the engine; its cache is cleared.
        test: what to time.
        number: number of the repetition.
    """
    engine.clear_cache()
    prompts = filler_prompts(test.batch, test.prompt, engine.vocab, number)
    start = time.perf_counter_ns()
    with submitted(engine, prompts, SAMPLING, 1) as first:
        finish(engine, first)
        prefill = time.perf_counter_ns() - start
    _check(test, first, test.prompt)
    decode = time_decode(engine, test, [each.sequence.tokens for each in first], SAMPLING)
    return prefill, decode


def time_decode(
    engine: Engine, test: BatchTest, texts: Sequence[Sequence[int]], sampling: Sampling
) -> int:
    """Decode ``test.gen`` tokens of each sequence; return the nanoseconds.

    Args:
        engine: the engine; its lock is held.
        test: what to time.
        texts: the token ids of each sequence, of which all but the last are cached.
        sampling: how tokens are sampled.

    Raises:
        RequestError: not all sequences decode at once, or more than their last tokens are computed.
    """
    with submitted(engine, texts, sampling, test.gen + 1) as rest:
        while not all(each.count for each in rest):
            run_step(engine, rest)
        _check(test, rest, 1)
        if not all(each.count == 1 for each in rest):
            raise RequestError(f"{test.name}: the engine does not run all sequences at once")
        start = time.perf_counter_ns()
        finish(engine, rest)
        return time.perf_counter_ns() - start


def _check(test: BatchTest, generations: Sequence[Generation], computed: int) -> None:
    """Raise RequestError if a request computed another number of tokens of its prompt."""
    for each in generations:
        if each.prefill_tokens != computed:
            raise RequestError(
                f"{test.name}: a prompt of {each.sequence.prompt_tokens} tokens computed "
                f"{each.prefill_tokens} of them, not {computed}"
            )


def predict(engine: Engine, test: BatchTest, threads: int) -> tuple[float | None, float | None]:
    """Predict the seconds of the prefill and of the decode; None if a measurement is missing.

    Args:
        engine: the engine that the test runs on.
        test: the test.
        threads: number of CPU threads.
    """
    prefill = predict_prefill(engine, [test.prompt] * test.batch, threads)
    step = predict_step(engine, [test.middle_length - 1] * test.batch, threads)
    return prefill, None if step is None else step * test.gen
