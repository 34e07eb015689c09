"""Prefill and decode speed, measured as llama.cpp's llama-bench does.

A test prefills ``prompt`` tokens or decodes ``gen`` tokens after ``depth`` tokens that are in the
cache already and are not timed. Nothing is tokenized. A decoded token is one run of the decode plan
of `generate`, with greedy sampling. (llama-bench feeds random tokens instead; greedy sampling costs
one pass over the logits.)
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any

from ..backends import find
from ..checkpoints.model_shapes import FILE_TYPES
from ..compiler.plan import HOST
from ..engine.request import Sampling
from ..errors import RequestError
from ..graph.rewrite import root
from ..graph.tensor import Meta, Tensor
from ..ops import get
from ..system_info import OtherProcesses
from ..version import __version__
from . import machine_load
from .roofline import cpu_name
from .speed import Speed, speed

if TYPE_CHECKING:
    from ..checkpoints.checkpoint import Checkpoint
    from ..compiler.plan import Plan
    from ..engine.engine import Engine
    from ..loading.loaded_model import LoadedModel
    from ..weights import Weights

GREEDY = Sampling(temperature=0.0, seed=0)


@dataclass(frozen=True)
class Test:
    """A test: prefill of ``prompt`` tokens or decode of ``gen`` tokens, at ``depth``."""

    __test__ = False  # not a test class of pytest

    prompt: int
    gen: int
    depth: int = 0

    @property
    def name(self) -> str:
        """Name as in llama-bench: ``pp512``, ``tg128 @ d4096``."""
        what = f"pp{self.prompt}" if self.prompt else f"tg{self.gen}"
        return f"{what} @ d{self.depth}" if self.depth else what

    @property
    def tokens(self) -> int:
        """Number of timed tokens."""
        return self.prompt or self.gen

    @property
    def middle_length(self) -> int:
        """Tokens in the cache halfway through a decode test."""
        return max(self.depth, 1) + (self.gen + 1) // 2

    @property
    def context(self) -> int:
        """Number of tokens that the cache must hold."""
        return self.tokens + max(self.depth, 1)


@dataclass(frozen=True)
class Result:
    """Measured times of one test.

    Attributes:
        test: the test.
        samples_ns: wall time of each repetition in nanoseconds.
        nbytes: bytes of weights and cache that a decode step moves, by the declared costs; 0 for
            prefill, which is bound by arithmetic.
        date: begin of the test, ISO 8601.
        others: share of the processors' time that other processes used; None if unknown or if
            nothing ran on the host.
    """

    test: Test
    samples_ns: tuple[int, ...]
    nbytes: float
    date: str
    others: float | None = None

    @property
    def speed(self) -> Speed:
        """Speed, computed as for a profile."""
        return speed(self.test.tokens, self.samples_ns)

    @property
    def load_note(self) -> str:
        """One line on what disturbed the test; empty if nothing did."""
        ran = sum(self.samples_ns), machine_load.interference_of_samples(self.samples_ns)
        return machine_load.load_note(self.others, {self.test.name: ran})

    @property
    def rates(self) -> list[float]:
        """Tokens per second of each repetition."""
        return [self.test.tokens * 1e9 / ns for ns in self.samples_ns]

    @property
    def gb_s(self) -> float | None:
        """Memory bandwidth of a decode test in GB/s; None for prefill."""
        return self.nbytes * self.speed.tok_s / 1e9 if self.nbytes else None

    def as_dict(self) -> dict[str, Any]:
        """Return the JSON form: llama-bench's keys and means, the `speed`, and the machine load."""
        return {
            "n_prompt": self.test.prompt,
            "n_gen": self.test.gen,
            "n_depth": self.test.depth,
            "test_time": self.date,
            "avg_ns": round(statistics.mean(self.samples_ns)),
            "stddev_ns": round(_deviation(self.samples_ns)),
            "avg_ts": statistics.mean(self.rates),
            "stddev_ts": _deviation(self.rates),
            "samples_ns": list(self.samples_ns),
            "samples_ts": self.rates,
            **self.speed.as_dict(),
            "gb_s": self.gb_s,
            "others": self.others,
            "busy": self.load_note,
        }


def _deviation(values: Sequence[float]) -> float:
    """Sample standard deviation, as llama-bench computes it; 0 for one value."""
    return statistics.stdev(values) if len(values) > 1 else 0.0


def check_context(llm: LoadedModel, test: Test) -> None:
    """Raise RequestError if the context cannot hold the test."""
    have = llm.limits.context
    if test.context > have:
        what = f"{test.name} needs a context of {test.context} tokens, not {have}"
        raise RequestError(what, "context")


def run(llm: LoadedModel, test: Test, repeat: int, seen: Callable[[int], None]) -> Result:
    """Time a test ``repeat`` times, after one run as warm-up.

    Args:
        llm: the model; no other request runs meanwhile.
        test: what to time.
        repeat: number of repetitions.
        seen: callback with the number of finished runs.

    Raises:
        RequestError: the context cannot hold the test.
    """
    check_context(llm, test)
    date = datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")
    samples, tokens = [], filler_tokens(test.context, llm.decoder.cfg.vocab)
    watch = OtherProcesses()
    with llm.engine.lock.hold("a benchmark"):
        for done in range(repeat + 1):
            seen(done)
            samples.append(time_once(llm.engine, test, tokens, done))
    seen(repeat + 1)
    nbytes = 0.0
    if test.gen:
        nbytes = step_bytes(llm.engine.decode_plan(), test.middle_length)
    on_host = any(find(name).memory == HOST for name in llm.placement())
    return Result(test, tuple(samples[1:]), nbytes, date, watch.share() if on_host else None)


def filler_tokens(count: int, vocab: int) -> list[int]:
    """Return ``count`` arbitrary token ids; a shorter list is a prefix of a longer one."""
    return [(i * 7919 + 1) % vocab for i in range(count)]


def filler_prompts(count: int, length: int, vocab: int, number: int = 0) -> list[list[int]]:
    """Return ``count`` prompts of ``length`` arbitrary token ids.

    Those of one call differ in one of the first two ids, and so do those of calls with different
    ``number``s. The very first one is `filler_tokens`.
    """
    found = []
    for i in range(number * count, (number + 1) * count):
        first, *rest = filler_tokens(length, vocab)
        found.append([(first + i) % vocab, *((each + i // vocab) % vocab for each in rest)])
    return found


def time_once(engine: Engine, test: Test, tokens: list[int], number: int) -> int:
    """Run a test once; return its nanoseconds.

    Args:
        engine: the engine; its cache is changed.
        test: what to time.
        tokens: ids from `filler_tokens`, at least ``test.context``.
        number: number of the repetition.
    """
    if test.prompt:
        return _time_prefill(engine, test, tokens, number)
    return _time_decode(engine, test, tokens)


def _time_prefill(engine: Engine, test: Test, tokens: list[int], number: int) -> int:
    """Return the nanoseconds of the prefill.

    The tokens after ``test.depth`` differ from those of all other repetitions, so that they are not
    found in the cache.
    """
    before, rest = tokens[: test.depth], tokens[test.depth : test.depth + test.prompt]
    prompt = before + [(token + 1 + number) % engine.vocab for token in rest]
    if engine.cached_tokens(prompt) != test.depth:  # a shorter test may have left more in the cache
        engine.clear_cache()
        if before:
            next(engine.generate(before, GREEDY, []))
            engine.settle()
    start = time.perf_counter_ns()
    sampled = engine.generate(prompt, GREEDY, [])
    next(sampled)
    took = time.perf_counter_ns() - start
    sampled.close()
    engine.settle()
    if engine.prefill_tokens != test.prompt:
        raise RequestError(f"{test.name}: the cache did not keep {test.depth} tokens")
    return took


def _time_decode(engine: Engine, test: Test, tokens: list[int]) -> int:
    """Return the nanoseconds of the decode steps.

    The last token of the cache is computed again before, to sample the first token.
    """
    sampled = engine.generate(tokens[: max(test.depth, 1)], GREEDY, [])
    next(sampled)
    start = time.perf_counter_ns()
    for _ in range(test.gen):
        next(sampled)
    took = time.perf_counter_ns() - start
    sampled.close()
    engine.settle()
    return took


# ------------------------------------------------------------------------------------------- bytes


def step_bytes(plan: Plan, length: int, sequences: int = 1) -> float:
    """Return the bytes of weights and state that a decode step moves.

    Intermediates do not count, since they stay in the processor's caches.

    Args:
        plan: the decode plan.
        length: tokens of each sequence in the cache.
        sequences: number of sequences that decode one token each.
    """
    env = {"T": sequences, "S": sequences, "Q": sequences + 1, "N": sequences}
    env["kv_sum"] = sequences * length
    return sum(leaf_bytes(step.node, env) for step in plan.steps)


def step_flops(plan: Plan, start: int, count: int) -> float:
    """Return the operations of a prefill step, by the declared costs.

    The logits of the last token are computed.

    Args:
        plan: the prefill plan.
        start: cached tokens of the sequence.
        count: tokens that the step computes.
    """
    env = {"T": count, "S": 1, "Q": 2, "N": 1}
    env["kv_sum"] = count * start + count * (count + 1) // 2
    return sum(get(step.node.op).node_cost(step.node, env).flops for step in plan.steps)


def leaf_bytes(node: Tensor, env: Mapping[str, int]) -> float:
    """Return the bytes that the op must move, by its declared cost, without intermediates."""
    between = {each for each in (*node.sources, node) if not root(each).is_leaf}
    passing = sum(each.meta.at(env).nbytes for each in between)
    return max(0.0, get(node.op).node_cost(node, env).bytes - passing)


# --------------------------------------------------------------------------------------- the model


def describe(llm: LoadedModel, threads: int) -> dict[str, Any]:
    """Return machine, model and settings under llama-bench's keys."""
    kind = llm.limits.kv_dtype
    return {
        "version": __version__,
        "cpu_info": cpu_name(),
        "backends": ",".join(llm.placement()),
        **describe_model(llm.file, llm.decoder.weights),
        "n_batch": llm.limits.tokens,
        "n_ubatch": llm.limits.tokens,
        "n_threads": threads,
        "n_gpu_layers": offloaded_layers(llm),
        "type_k": kind,
        "type_v": kind,
    }


def describe_model(file: Checkpoint, weights: Weights) -> dict[str, Any]:
    """Return the keys of `describe` on a model file."""
    return {
        "model_filename": str(file.path),
        "model_type": model_type(file, weights),
        "model_size": sum(meta.nbytes for meta in _weight_metas(weights)),
        "model_n_params": parameters(weights),
    }


def offloaded_layers(llm: LoadedModel) -> int:
    """Return the number of layers on a device with its own memory, the output counted as one."""
    return llm.gpu_offload.layers + llm.gpu_offload.output if llm.gpu_offload else 0


def _weight_metas(weights: Weights) -> list[Meta]:
    """Return the shapes and formats of all weights, as they are run."""
    metas = map(weights.meta, weights.names())
    return [meta for meta in metas if meta is not None]


def parameters(weights: Weights) -> int:
    """Return the number of elements of all weights."""
    return sum(meta.size for meta in _weight_metas(weights))


def model_type(file: Checkpoint, weights: Weights) -> str:
    """Model type, size and format, as ``qwen2 1.5B Q4_K - Medium``."""
    count = parameters(weights)
    size = f"{count / 1e9:.1f}B" if count >= 999.5e6 else f"{count / 1e6:.0f}M"
    return f"{file.architecture} {size} {_weight_format(file, weights)}"


def _weight_format(file: Checkpoint, weights: Weights) -> str:
    """Return the file type that the file declares, else the format with the most bytes."""
    sizes: dict[str, int] = {}
    for meta in _weight_metas(weights):
        sizes[meta.dtype.name] = sizes.get(meta.dtype.name, 0) + meta.nbytes
    most = max(sizes, key=lambda name: sizes[name])
    declared = file.metadata.get("general.file_type")
    stored = {t.dtype.name for t in file.tensors.values()}
    if isinstance(declared, int) and declared in FILE_TYPES and most in stored:
        return FILE_TYPES[declared]
    return most.upper()
