"""Metrics of the server in Prometheus' text format."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from ..api import LLM
from ..engine.bill import Bill
from ..engine.completion import Completion

_SECONDS = (0.005, 0.02, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)


def count_responses(registry: CollectorRegistry) -> Counter:
    """Return a counter of HTTP responses by path and status."""
    return Counter(
        "graphllm_http_responses", "HTTP responses.", ["path", "status"], registry=registry
    )


def metrics_text(registry: Collector) -> bytes:
    """Return all metrics in the text format."""
    return generate_latest(registry)


class Metrics:
    """Counters of one model, and gauges that read the state of its engine.

    Attributes:
        registry: has all of them.
        llm: the model; None for an encoder, which has no engine, and while it is not loaded.
    """

    def __init__(self, llm: LLM | None = None) -> None:
        self.llm = llm
        self.registry = own = CollectorRegistry()
        own.register(_EngineState(self))
        self._prompt = Counter("graphllm_prompt_tokens", "Tokens of prompts.", registry=own)
        self._cached = Counter(
            "graphllm_cached_prompt_tokens",
            "Tokens of prompts that were found in the KV cache.",
            registry=own,
        )
        self._generated = Counter("graphllm_generated_tokens", "Tokens generated.", registry=own)
        self._drafted = Counter("graphllm_draft_tokens", "Draft tokens computed.", registry=own)
        self._accepted = Counter(
            "graphllm_accepted_draft_tokens", "Draft tokens accepted.", registry=own
        )
        self._first = Histogram(
            "graphllm_time_to_first_token_seconds",
            "Time from the request to its first token, waiting included.",
            buckets=_SECONDS,
            registry=own,
        )
        self._ops = {
            kind: Counter(
                f"graphllm_op_{kind}",
                f"{what} of the ops of requests whose steps were recorded.",
                ["op"],
                registry=own,
            )
            for kind, what in (("seconds", "Time"), ("bytes", "Bytes"), ("flops", "Operations"))
        }
        self._waiting = Counter(
            "graphllm_request_seconds",
            "Time of requests whose steps were recorded that is not spent in ops.",
            ["cause"],
            registry=own,
        )
        self._queue = Histogram(
            "graphllm_queue_seconds",
            "Time that a request waits before it is computed.",
            buckets=_SECONDS,
            registry=own,
        )

    def count(self, done: Completion) -> None:
        """Add a prompt and its samples, which have ended or were cancelled."""
        self._prompt.inc(len(done.prompt_ids))
        self._cached.inc(done.cached_tokens)
        self._generated.inc(sum(len(each.ids) for each in done.choices))
        self._drafted.inc(sum(each.timings.drafted_tokens for each in done.choices))
        self._accepted.inc(sum(each.timings.accepted_tokens for each in done.choices))
        if done.ids:
            self._first.observe(done.timings.ttft_s)
            self._queue.observe(done.timings.queue_s)
        if done.bill is not None:
            self._add_bill(done.bill)

    def _add_bill(self, bill: Bill) -> None:
        for name, op in bill.ops.items():
            self._ops["seconds"].labels(name).inc(op.ns / 1e9)
            self._ops["bytes"].labels(name).inc(op.bytes)
            self._ops["flops"].labels(name).inc(op.flops)
        for name, ns in bill.times.items():
            if name != "http":  # known when the answer has been made, after this
                self._waiting.labels(name).inc(max(0.0, ns) / 1e9)


class JoinedMetrics(Collector):
    """The metrics of several models, with a label ``model``.

    ``registries``: those of the models by name.
    """

    def __init__(self, registries: Mapping[str, CollectorRegistry]) -> None:
        self._registries = registries

    def collect(self) -> Iterator[Metric]:
        """Yield each metric once, with the samples of all models."""
        found = dict[str, Metric]()
        for name, registry in self._registries.items():
            for own in registry.collect():
                joined = found.setdefault(own.name, Metric(own.name, own.documentation, own.type))
                for sample in own.samples:
                    joined.add_sample(sample.name, {"model": name, **sample.labels}, sample.value)
        yield from found.values()


class _EngineState(Collector):
    """Gauges of the sequences and of the KV cache, read when they are asked for."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics

    def collect(self) -> Iterator[Metric]:
        """Yield the gauges. They are read without a lock, so they may be a step apart."""
        if self._metrics.llm is None:
            return
        engine = self._metrics.llm.engine
        running, waiting = engine.scheduler.running, engine.scheduler.waiting
        yield GaugeMetricFamily("graphllm_sequences_running", "Sequences computed.", running)
        yield GaugeMetricFamily("graphllm_sequences_waiting", "Sequences that wait.", waiting)
        kinds = {"held": engine.manager.held, "cached": engine.manager.cached}
        gauge = GaugeMetricFamily(
            "graphllm_kv_blocks", "Blocks of the KV cache.", labels=["group", "state"]
        )
        for state, groups in {**kinds, "free": engine.manager.free}.items():
            for group, blocks in groups.items():
                gauge.add_metric([group, state], blocks)
        yield gauge
