"""`bench -b`: prefill and decode of many sequences, with the columns of llama-batched-bench."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

from ..errors import RequestError
from ..progress import progress_line
from ..terminal import note
from .bench_tables import Column, Row
from .options import PlacementOptions

if TYPE_CHECKING:
    from ..api import LLM
    from ..checkpoints.checkpoint import Checkpoint
    from ..profiler.batch_bench import BatchTest
    from ..profiler.roofline import Ceilings

Setup = tuple[str | None, int]  # KV cache type and threads


def rows(
    placement: PlacementOptions, file: Checkpoint, setup: Setup, tests: list[BatchTest],
    repeat: int, best: Ceilings | None,
) -> Iterator[Row]:  # fmt: skip
    """Load the model once, run the tests, and yield a row for each.

    Args:
        placement: options of loading.
        file: the model file.
        setup: KV cache type and threads.
        tests: what to run.
        repeat: number of timed runs of each test.
        best: ceilings of the first backend; None to compare with nothing.

    Raises:
        RequestError: a batch does not fit the memory. No weight has been loaded then.
    """
    from ..backends import Options
    from ..backends.cpu.runtime.cores import thread_count
    from ..profiler import batch_bench, bench

    _, threads = setup
    count = thread_count(Options(threads=threads))
    llm = load_for(placement, file, setup, [(t.context, t.batch) for t in tests])
    roof = best.bytes_s(0 if llm.gpu_offload else count) / 1e9 if best is not None else None
    for test in tests:
        with progress_line(test.name) as progress:
            report = partial(_report, progress, test.name, repeat + 1)
            result = batch_bench.run(llm, test, repeat, report)
        took = batch_bench.predict(llm.engine, test, count) if best is not None else (None, None)
        rates = [
            speed.tokens / seconds if seconds else None
            for speed, seconds in zip((result.prefill, result.decode), took)
        ]
        own = {"predicted_pp": rates[0], "predicted_tg": rates[1]}
        own |= {"ceiling_gb_s": roof, "share": result.gb_s / roof if roof else None}
        if result.load_note:
            note(f"note: {test.name}: {result.load_note}")
        yield {**bench.describe(llm, count), **result.as_dict(), **own}
    del llm
    gc.collect()  # free the model before the next one is loaded


def load_for(
    placement: PlacementOptions, file: Checkpoint, setup: Setup, batches: list[tuple[int, int]]
) -> LLM:
    """Load a model whose KV cache holds each of these batches, without preemption.

    Args:
        placement: options of loading.
        file: the model file.
        setup: KV cache type and threads.
        batches: tokens of a sequence, and number of sequences.

    Raises:
        RequestError: a batch does not fit the memory or the context. No weight has been loaded.
    """
    from ..profiler.batch_limits import kv_memory_of

    kind, threads = setup
    limits: dict[str, Any] = {
        "context": max(max(pair) for pair in batches),  # a step has no more tokens
        "max_sequences": max(count for _, count in batches),
        "kv_type": kind,
        "threads": threads,
    }
    needed = kv_memory_of(file, placement.arguments() | limits, batches)
    return placement.load(file, **limits, kv_memory=needed)


def _report(show: Callable[[str, int, int], None], name: str, total: int, done: int) -> None:
    show(name, done, total)


def parse_tests(prompts: list[int], gens: list[int], batches: list[int]) -> list[BatchTest]:
    """Return the tests: every combination. RequestError: a number is 0."""
    from ..profiler.batch_bench import BatchTest

    for flag, numbers in (("-p", prompts), ("-n", gens), ("-b", batches)):
        if 0 in numbers:
            raise RequestError(f"{flag} 0: with -b, both prefill and decode are measured")
    return [BatchTest(p, n, b) for p in prompts for n in gens for b in batches]


def _seconds(key: str) -> Callable[[Row], str]:
    return lambda row: f"{row[key]:.3f}"


def _speed(what: str) -> Callable[[Row], str]:
    return lambda row: f"{row[f'speed_{what}']:.2f} ± {row[f'spread_{what}']:.1%}"


def _predicted(what: str) -> Callable[[Row], str]:
    key = f"predicted_{what}"
    return lambda row: f"{row[key]:.1f}" if row[key] else ""


COLUMNS: tuple[Column, ...] = (
    ("PP:", 6, lambda row: str(row["pp"])),
    ("TG:", 6, lambda row: str(row["tg"])),
    ("B:", 4, lambda row: str(row["pl"])),
    ("N_KV:", 7, lambda row: str(row["n_kv"])),
    ("T_PP s:", 8, _seconds("t_pp")),
    ("S_PP t/s:", 16, _speed("pp")),
    ("predicted:", 9, _predicted("pp")),
    ("T_TG s:", 8, _seconds("t_tg")),
    ("S_TG t/s:", 16, _speed("tg")),
    ("predicted:", 9, _predicted("tg")),
    ("ceiling:", 7, lambda row: f"{row['share']:.0%}" if row["share"] else ""),
    ("T s:", 8, _seconds("t")),
    ("S t/s:", 9, lambda row: f"{row['speed']:.2f}"),
)


def title(row: Row) -> str:
    """Return the line above the table: what the rows have in common."""
    kv, threads = row["type_k"], row["n_threads"]
    return f"{row['model_type']}, {row['backends']}, {threads} threads, KV cache {kv}"
