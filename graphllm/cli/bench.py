"""The verb ``bench``: prefill and decode speed, compared with the memory bandwidth ceiling."""

from __future__ import annotations

import gc
import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Annotated

from ..errors import GraphllmError, RequestError
from ..progress import progress_line
from ..terminal import note
from . import bench_batches, bench_load
from .bench_load import LoadTestOptions
from .bench_tables import Column, Row, as_csv, as_json, markdown
from .declarations import Option, verb
from .number_lists import parse_numbers
from .options import ModelSource, PlacementOptions
from .output import show

if TYPE_CHECKING:
    from ..api import LLM
    from ..checkpoints.checkpoint import Checkpoint
    from ..profiler.batch_bench import BatchTest
    from ..profiler.bench import Test
    from ..profiler.roofline import Ceilings

_LIST = "LIST"


@dataclass
class BenchGrid:
    """The tests to run: every combination of the lists."""

    prompts: Annotated[
        str,
        Option("-p", "--n-prompt", metavar=_LIST, help="Prompt length in tokens; 0 skips prefill."),
    ] = "512"
    gens: Annotated[
        str,
        Option(
            "-n", "--n-gen", metavar=_LIST, help="Number of tokens to generate; 0 skips decode."
        ),
    ] = "128"
    depths: Annotated[
        str,
        Option(
            "-d",
            "--n-depth",
            metavar=_LIST,
            help="Number of tokens in the KV cache before each test.",
        ),
    ] = "0"
    batches: Annotated[
        str,
        Option(
            "-b",
            "--batch",
            metavar=_LIST,
            help="Number of sequences that are prefilled and decoded at once.",
            show_default=False,
        ),
    ] = ""
    threads: Annotated[
        str,
        Option(
            "-t",
            "--threads",
            metavar=_LIST,
            help="Number of CPU threads; 0 uses every performance core.",
        ),
    ] = "0"
    kv_types: Annotated[
        str,
        Option(
            "--kv-type", metavar=_LIST, help="Type of the KV cache: f32, f16, q8_0, q4_0 or fp8."
        ),
    ] = ""
    repeat: Annotated[
        int, Option("-r", "--repetitions", help="Number of timed runs of each test.")
    ] = 5

    def tests(self) -> list[Test]:
        """Return the tests: at each depth, prefill before decode.

        RequestError: a list is invalid, or there is nothing to test.
        """
        from ..profiler.bench import Test

        lists = [
            parse_numbers(flag, text) for flag, text in (("-p", self.prompts), ("-n", self.gens))
        ]
        depths = parse_numbers("-d", self.depths)
        if self.repeat < 1:
            raise RequestError(f"-r {self.repeat} must be at least 1")
        found = [
            Test(count, 0, depth) if not kind else Test(0, count, depth)
            for depth in depths
            for kind, counts in enumerate(lists)
            for count in counts
            if count
        ]
        if not found:
            raise RequestError("-p 0 and -n 0: nothing to measure")
        return found

    def batch_tests(self) -> list[BatchTest]:
        """Return the tests of `-b`. RequestError: a list is invalid, or -d is given, too."""
        if parse_numbers("-d", self.depths) != [0]:
            raise RequestError("-d and -b: with -b, -p is the number of tokens in the KV cache")
        if self.repeat < 1:
            raise RequestError(f"-r {self.repeat} must be at least 1")
        lists = (("-p", self.prompts), ("-n", self.gens), ("-b", self.batches))
        return bench_batches.parse_tests(*(parse_numbers(flag, text) for flag, text in lists))

    def setups(self) -> list[tuple[str | None, int]]:
        """Return pairs (KV cache type, threads). The model is loaded once for each."""
        kinds = [kind.strip() or None for kind in self.kv_types.split(",")]
        return list(itertools.product(kinds, parse_numbers("-t", self.threads)))


@verb
def bench(
    placement: PlacementOptions,
    grid: BenchGrid,
    source: ModelSource,
    load_test: LoadTestOptions,
    ceiling: Annotated[
        bool,
        Option("--ceiling/--no-ceiling", help="Compare with the memory bandwidth ceiling."),
    ] = True,
    output: Annotated[str, Option("-o", "--output", help="Output format: md, json or csv.")] = "md",
) -> None:
    """Measure prefill and decode speed; tests and JSON keys are those of llama-bench.

    A LIST is comma-separated values or ranges: first-last, first-last+step or
    first-last*factor. Each test has a warm-up run. t/s: median of the runs and
    their relative standard deviation. predicted: t/s predicted as by `plan`.
    GB/s: bytes of weights and KV cache read per generated token. ceiling: GB/s
    as a share of the highest memory bandwidth measured on this machine with
    at most as many threads; it is measured at most once a day.

    With -b, the columns are those of llama-batched-bench: each of B sequences
    has a prompt of PP tokens of its own and decodes TG tokens, with sampling.

    graphllm bench demo -p 128,512 -n 64 -d 0,4096 -t 1,2

    graphllm bench demo -p 128 -n 32 -b 1,8,32

    graphllm bench demo --load rate=4,prompt=16-256,output=64

    graphllm bench demo --load rate=4,prompt=128,output=64 --url http://127.0.0.1:8080

    graphllm bench --random qwen2-1.5b --type q4_0 -o json
    """
    if output not in ("md", "json", "csv"):
        raise RequestError(f"-o {output} must be md, json or csv")
    setups = grid.setups()
    if load_test.load is None and (load_test.url or load_test.api_key):
        raise RequestError("--url and --api-key need --load")
    if load_test.api_key and not load_test.url:
        raise RequestError("--api-key needs --url")
    if load_test.load is not None:
        _bench_load(placement, grid, source, load_test, ceiling, output)
        return
    if grid.batches:
        _bench_batches(placement, grid, source, ceiling, output)
        return
    tests = grid.tests()
    file = _open(source, placement)
    best = _ceiling(placement.device) if ceiling else None
    rows = itertools.chain.from_iterable(
        _rows(partial(placement.load, file, kv_type=kv, threads=t), t, tests, grid.repeat, best)
        for kv, t in setups
    )
    formats = {"json": as_json, "csv": as_csv}
    for line in formats[output](rows) if output in formats else as_table(rows, bool(grid.kv_types)):
        show(line)


def _open(source: ModelSource, placement: PlacementOptions, data: bool = True) -> Checkpoint:
    """Open the model; for ``data`` see `ModelSource.open`. RequestError: it is an encoder."""
    from ..loading.load import model_spec

    file = source.open(placement, data)
    spec = model_spec(file, placement.model_def)
    if spec.is_encoder:
        what = "which has no prefill and decode to measure; graphllm profile measures its steps"
        raise RequestError(f"{file.path}: {spec.name} is an encoder, {what}")
    return file


def _bench_load(
    placement: PlacementOptions, grid: BenchGrid, source: ModelSource, options: LoadTestOptions,
    ceiling: bool, output: str,
) -> None:  # fmt: skip
    """Run a load test and print its result."""
    setups = grid.setups()
    if len(setups) > 1 or output == "csv":
        raise RequestError("--load takes one --kv-type, one -t, and -o md or json")
    default = BenchGrid()
    for flag in ("prompts", "gens", "depths", "repeat"):
        if getattr(grid, flag) != getattr(default, flag):
            raise RequestError("-p, -n, -d and -r have no use with --load, which has the lengths")
    named = source.model is not None or source.random is not None
    if options.url and not named and placement != PlacementOptions():
        raise RequestError("options of loading need MODEL: --url alone loads none")
    file = _open(source, placement, options.url is None) if named or not options.url else None

    def encode(text: str) -> list[int]:
        if file is None:
            raise RequestError("a prompt that is a text needs MODEL, whose tokenizer encodes it")
        return file.tokenizer().encode(text, True)

    load = options.read(grid.batches, encode)
    if options.url is not None:
        found = bench_load.run_http(placement, file, setups[0], options, load)
    else:
        best = _ceiling(placement.device) if ceiling else None
        assert file is not None
        found = bench_load.run(placement, file, setups[0], load, best)
    for line in bench_load.lines(found, output):
        show(line)
    if not found.get("requests"):
        raise RequestError("no request was answered")


def _bench_batches(
    placement: PlacementOptions, grid: BenchGrid, source: ModelSource, ceiling: bool, output: str
) -> None:
    """Run the tests of `-b` and print them; a table for each KV cache type and thread count."""
    tests = grid.batch_tests()
    file = _open(source, placement)
    best = _ceiling(placement.device) if ceiling else None
    found = [
        bench_batches.rows(placement, file, setup, tests, grid.repeat, best)
        for setup in grid.setups()
    ]
    if output != "md":
        formats = {"json": as_json, "csv": as_csv}
        for line in formats[output](itertools.chain.from_iterable(found)):
            show(line)
        return
    for rows in found:
        first = next(rows)
        show(bench_batches.title(first))
        for line in markdown(itertools.chain([first], rows), bench_batches.COLUMNS):
            show(line)


def _ceiling(device: str) -> Ceilings | None:
    """Return the ceilings of the first backend; None, with a note, if they are unknown."""
    from ..backends import find, names
    from ..profiler import roofline

    usable = [name for name in names() if find(name).available()[0]]
    backend = usable[0] if device == "auto" else device
    before = roofline.load_cached(backend)
    try:
        with progress_line("measuring memory bandwidth") as progress:
            found = roofline.load_or_measure(backend, progress)
    except GraphllmError as error:
        note(f"note: no ceiling: {error}")
        return None
    if found is not None:
        how = "cached: " if found == before else ""
        note(f"ceiling: {found.bytes_s() / 1e9:.1f} GB/s, {how}{found.provenance()}")
    return found


def _report(show: Callable[[str, int, int], None], name: str, total: int, done: int) -> None:
    show(name, done, total)


def _rows(
    load: Callable[..., LLM], threads: int, tests: list[Test], repeat: int, best: Ceilings | None
) -> Iterator[Row]:
    """Load the model, run the tests, and yield a row for each, with the keys of llama-bench."""
    from ..backends import Options
    from ..backends.cpu.runtime.cores import thread_count
    from ..profiler import bench, prediction

    llm = load(context=max(test.context for test in tests))
    count = thread_count(Options(threads=threads))
    for test in tests:
        bench.check_context(llm, test)
    threads_matter = not llm.gpu_offload  # not for a device with its own memory
    roof = best.bytes_s(count if threads_matter else 0) / 1e9 if best is not None else None
    for test in tests:
        with progress_line(test.name) as progress:
            report = partial(_report, progress, test.name, repeat + 1)
            result = bench.run(llm, test, repeat, report)
        share = result.gb_s / roof if result.gb_s and roof else None
        took = prediction.predict_test(llm.engine, test, count) if best is not None else None
        predicted = test.tokens / took if took else None
        own = {"ceiling_gb_s": roof, "share": share, "predicted_ts": predicted}
        if result.load_note:
            note(f"note: {test.name}: {result.load_note}")
        yield {**bench.describe(llm, count), **result.as_dict(), **own}
    del llm
    gc.collect()  # free the model before the next one is loaded


# ------------------------------------------------------------------------------------------ output


def _rate(row: Row) -> str:
    return f"{row['tok_s']:.2f} ± {row['spread']:.1%}"


def _test(row: Row) -> str:
    from ..profiler.bench import Test

    return Test(row["n_prompt"], row["n_gen"], row["n_depth"]).name


def _params(row: Row) -> str:
    count = row["model_n_params"]
    return f"{count / 1e9:.2f} B" if count >= 1e9 else f"{count / 1e6:.2f} M"


def _size(row: Row) -> str:
    size = row["model_size"]
    return f"{size / 2**30:.2f} GiB" if size >= 2**30 else f"{size / 2**20:.2f} MiB"


COLUMNS: tuple[Column, ...] = (
    ("model", 30, lambda row: row["model_type"]),
    ("size:", 10, _size),
    ("params:", 10, _params),
    ("backend", 10, lambda row: row["backends"]),
    ("threads:", 7, lambda row: str(row["n_threads"])),
    ("kv", 5, lambda row: row["type_k"]),
    ("test:", 15, _test),
    ("t/s:", 16, _rate),
    ("predicted:", 9, lambda row: f"{row['predicted_ts']:.1f}" if row["predicted_ts"] else ""),
    ("GB/s:", 6, lambda row: f"{row['gb_s']:.1f}" if row["gb_s"] else ""),
    ("ceiling:", 7, lambda row: f"{row['share']:.0%}" if row["share"] else ""),
)


def as_table(rows: Iterable[Row], kv: bool) -> Iterator[str]:
    """Yield the lines of a Markdown table. ``kv``: include the type of the KV cache."""
    return markdown(rows, [column for column in COLUMNS if kv or column[0] != "kv"])
