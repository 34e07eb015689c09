"""`bench --load`: requests that arrive over time, and their latencies."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from ..errors import RequestError
from ..progress import progress_line
from .declarations import Option
from .number_lists import parse_numbers
from .options import PlacementOptions

if TYPE_CHECKING:
    from ..checkpoints.checkpoint import Checkpoint
    from ..profiler.load_requests import LoadRequest
    from ..profiler.roofline import Ceilings

SYNTHETIC = "synthetic"
_SEQUENCES = 16  # computed at once, unless -b says otherwise


@dataclass
class LoadTestOptions:
    """Options of a load test."""

    load: Annotated[
        str | None,
        Option(
            "--load",
            metavar="FILE|synthetic",
            help="Load test: requests of a JSON-lines file with the fields arrival_s, "
            "prompt_tokens (or prompt) and max_tokens; or synthetic ones, whose lengths are drawn "
            "from -p and -n.",
            show_default=False,
        ),
    ] = None
    rate: Annotated[
        float,
        Option("--rate", help="Arrivals per second (Poisson); 0 lets all requests arrive at once."),
    ] = 1.0
    requests: Annotated[int, Option("--requests", help="Number of synthetic requests.")] = 32
    seed: Annotated[int, Option("--seed", help="Seed of the requests and the sampling.")] = 0


def run(
    placement: PlacementOptions, file: Checkpoint, setup: tuple[str | None, int],
    options: LoadTestOptions, lists: Mapping[str, str], best: Ceilings | None,
) -> dict[str, Any]:  # fmt: skip
    """Run the load test and return its JSON form.

    Args:
        placement: options of loading.
        file: the model file.
        setup: KV cache type and threads.
        options: options of the load test.
        lists: the lists of -p, -n and -b.
        best: ceilings of the first backend; None to compare with nothing.

    Raises:
        RequestError: an option or the file is invalid, or the requests do not fit the memory.
    """
    from ..backends import Options
    from ..backends.cpu.runtime.cores import thread_count
    from ..engine.request import Sampling
    from ..profiler import bench, load_test

    batches = parse_numbers("-b", lists["-b"]) if lists["-b"] else [_SEQUENCES]
    if len(batches) > 1 or not batches[0]:
        raise RequestError(f"-b {lists['-b']}: --load takes one number of sequences")
    requests = _requests(file, options, lists)
    longest = max(len(each.prompt) + each.max_tokens for each in requests)
    llm = placement.load(
        file,
        context=max(longest, batches[0]),  # a step has no more tokens
        max_sequences=batches[0],
        kv_type=setup[0],
        threads=setup[1],
    )
    if longest > llm.limits.context:
        what = f"a request has {longest} tokens, the model's context is {llm.limits.context}"
        raise RequestError(what, "context")
    for each in requests:
        llm.check_ids(each.prompt)
    count = thread_count(Options(threads=setup[1]))
    with progress_line("load test") as progress:
        result = load_test.run(
            llm, requests, Sampling(seed=options.seed),
            lambda done: progress("load test", done, len(requests)),
        )  # fmt: skip
    roof = best.bytes_s(0 if llm.gpu_offload else count) / 1e9 if best is not None else None
    return {
        **bench.describe(llm, count),
        "load": options.load,
        "rate": options.rate if options.load == SYNTHETIC else None,
        "seed": options.seed,
        "max_sequences": batches[0],
        **result.as_dict(),
        "ceiling_gb_s": roof,
        "share": result.gb_s / roof if roof else None,
    }


def _requests(
    file: Checkpoint, options: LoadTestOptions, lists: Mapping[str, str]
) -> list[LoadRequest]:
    """Return the requests of the file, or synthetic ones. RequestError: an option is invalid."""
    from ..loading.load import build_decoder
    from ..profiler.load_requests import read_requests, synthetic_requests

    vocab = build_decoder(file).cfg.vocab
    if options.load != SYNTHETIC:
        assert options.load is not None
        return read_requests(
            Path(options.load),
            vocab,
            lambda text: file.tokenizer().encode(text, True),
            options.seed,
        )
    if not 0 <= options.rate < float("inf") or options.requests < 1:
        raise RequestError(
            f"--rate {options.rate} must be at least 0, --requests {options.requests} at least 1"
        )
    prompts, outputs = (parse_numbers(flag, lists[flag]) for flag in ("-p", "-n"))
    if 0 in prompts or 0 in outputs:
        raise RequestError("-p 0 or -n 0: a request has a prompt and samples tokens")
    return synthetic_requests(options.requests, options.rate, prompts, outputs, vocab, options.seed)


def lines(found: Mapping[str, Any], output: str) -> Iterator[str]:
    """Yield the lines of the output: ``md`` or ``json``."""
    if output == "json":
        yield json.dumps(found)
        return
    count = len(found["requests"])
    tokens = [sum(each[f"{kind}_tokens"] for each in found["requests"]) for kind in _KINDS]
    yield (
        f"{found['model_type']}, {found['backends']}, {found['n_threads']} threads, KV cache "
        f"{found['type_k']}, at most {found['max_sequences']} sequences at once"
    )
    yield (
        f"{count} requests, {tokens[0]} prompt and {tokens[1]} output tokens in "
        f"{found['wall_s']:.2f} s; steps ran in {found['busy_s'] / found['wall_s']:.0%} of it"
    )
    yield (
        f"{found['requests_s']:.2f} requests/s, {found['output_tok_s']:.1f} output tok/s, "
        f"{found['total_tok_s']:.1f} tok/s in total"
    )
    share = f" ({found['share']:.0%} of the ceiling)" if found["share"] else ""
    yield (
        f"{found['steps']} steps, {found['preemptions']} preemptions, prefix cache hit rate "
        f"{found['hit_rate']:.1%}, {found['gb_s']:.1f} GB/s{share}"
    )
    yield ""
    yield f"{'ms':<20} {'mean':>9} {'p50':>9} {'p90':>9} {'p99':>9}"
    for key, title in _LATENCIES.items():
        values = found[key]
        if values:
            cells = " ".join(f"{1e3 * values[name]:>9.1f}" for name in ("mean", *_COLUMNS))
            yield f"{title:<20} {cells}"


_KINDS, _COLUMNS = ("prompt", "output"), ("p50", "p90", "p99")
_LATENCIES = {
    "ttft_s": "time to first token",
    "itl_s": "inter-token latency",
    "queue_s": "queue time",
    "e2e_s": "end to end",
}
