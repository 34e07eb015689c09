"""`bench --load`: requests that arrive over time, and their latencies."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from ..errors import RequestError
from ..progress import progress_line
from ..terminal import escape_control
from .declarations import Option
from .load_spec import SPEC, SPEC_HELP, capacity_line, load_table, parse_load
from .number_lists import parse_numbers
from .options import PlacementOptions

if TYPE_CHECKING:
    from ..checkpoints.checkpoint import Checkpoint
    from ..profiler.load_requests import Load
    from ..profiler.roofline import Ceilings

_SEQUENCES = 16  # computed at once by a load from a file, unless -b says otherwise


@dataclass
class LoadTestOptions:
    """Options of a load test."""

    load: Annotated[
        str | None,
        Option(
            "--load",
            metavar=f"FILE|{SPEC}",
            help="Load test: requests of a JSON-lines file with the fields arrival_s, "
            f"prompt_tokens (or prompt) and max_tokens; or {SPEC_HELP}",
            show_default=False,
        ),
    ] = None
    url: Annotated[
        str | None,
        Option(
            "--url",
            help="With --load: test the OpenAI-compatible server at this address. With MODEL, the "
            "prediction for it is shown, too.",
            show_default=False,
        ),
    ] = None
    api_key: Annotated[
        str | None, Option("--api-key", help="API key of the server.", show_default=False)
    ] = None

    def read(self, batch: str, encode: Callable[[str], list[int]]) -> Load:
        """Return the load.

        Args:
            batch: the list of -b.
            encode: returns the ids of a prompt that is a text.

        Raises:
            RequestError: an option or the file is invalid.
        """
        from ..profiler.load_requests import Load, read_requests

        assert self.load is not None
        if "=" in self.load and not Path(self.load).is_file():
            if batch:
                raise RequestError("-b has no use with --load rate=...: give parallel=N in it")
            return parse_load(self.load)
        batches = parse_numbers("-b", batch) if batch else [_SEQUENCES]
        if len(batches) > 1 or not batches[0]:
            raise RequestError(f"-b {batch}: --load takes one number of sequences")
        return Load(read_requests(Path(self.load), encode, 0), batches[0])


def run(
    placement: PlacementOptions, file: Checkpoint, setup: tuple[str | None, int], load: Load,
    best: Ceilings | None,
) -> dict[str, Any]:  # fmt: skip
    """Run the load test and return its JSON form, with the prediction.

    Args:
        placement: options of loading.
        file: the model file.
        setup: KV cache type and threads.
        load: the load.
        best: ceilings of the first backend; None to compare with nothing.

    Raises:
        RequestError: the requests do not fit the context or the memory.
    """
    from ..backends import Options
    from ..backends.cpu.runtime.cores import thread_count
    from ..engine.request import Sampling
    from ..profiler import bench, load_test
    from ..profiler.load_prediction import predict_load
    from ..system_info import OtherProcesses

    llm = placement.load(
        file, context=load.context, max_sequences=load.parallel, kv_type=setup[0], threads=setup[1]
    )
    if load.context > llm.limits.context:
        what = f"a request has {load.context} tokens, the model's context is {llm.limits.context}"
        raise RequestError(what, "context")
    for each in load.requests:
        llm.check_ids(each.prompt)
    count, watch = thread_count(Options(threads=setup[1])), OtherProcesses()
    with progress_line("load test") as progress:
        result = load_test.run(
            llm, load.requests, Sampling(seed=load.seed),
            lambda done: progress("load test", done, len(load.requests)),
        )  # fmt: skip
    others, predicted = watch.share(), None
    if best is not None:
        with llm.engine.lock.hold("a prediction"):
            predicted = predict_load(llm.engine, llm.decoder.caches, load.requests, count)
    roof = best.bytes_s(0 if llm.gpu_offload else count) / 1e9 if best is not None else None
    return {
        **bench.describe(llm, count),
        "max_sequences": load.parallel,
        **result.as_dict(),
        "others": others,
        "ceiling_gb_s": roof,
        "share": result.gb_s / roof if roof else None,
        "predicted": predicted and predicted.as_dict(),
    }


def run_http(
    placement: PlacementOptions, file: Checkpoint | None, setup: tuple[str | None, int],
    options: LoadTestOptions, load: Load,
) -> dict[str, Any]:  # fmt: skip
    """Run the load test against a server and return its JSON form, with the prediction.

    ``file``: the model file; None predicts nothing. For the rest see `run`.
    """
    from ..profiler import http_load
    from ..profiler.prediction import dry_run

    server = http_load.OpenAiServer(options.url or "", options.api_key)
    predicted = None
    if file is not None:
        own = placement.arguments() | {"context": load.context, "max_sequences": load.parallel}
        local = replace(load, over_http=server.is_local)
        predicted = dry_run(file, **own, kv_type=setup[0], threads=setup[1], load=local).load
    with progress_line("load test") as progress:
        result = http_load.run(
            server, load.requests, load.parallel, load.seed,
            lambda done: progress("load test", done, len(load.requests)),
        )  # fmt: skip
    return {
        "url": options.url,
        "max_sequences": load.parallel,
        **result.as_dict(),
        "predicted": predicted and predicted.as_dict(),
    }


def lines(found: Mapping[str, Any], output: str) -> Iterator[str]:
    """Yield the lines of the output: ``md`` or ``json``."""
    if output == "json":
        yield json.dumps(found)
        return
    from ..profiler.machine_load import load_note

    answered, steps = found.get("requests", []), found.get("steps")
    tokens = [sum(each[f"{kind}_tokens"] for each in answered) for kind in ("prompt", "output")]
    if "url" in found:
        yield f"{found['server_model']} at {found['url']}"
    else:
        yield (
            f"{found['model_type']}, {found['backends']}, {found['n_threads']} threads, KV cache "
            f"{found['type_k']}, at most {found['max_sequences']} sequences at once"
        )
    if answered:
        shown = f"; steps ran in {found['busy_s'] / found['wall_s']:.0%} of it" if steps else ""
        yield (
            f"{len(answered)} requests, {tokens[0]} prompt and {tokens[1]} output tokens in "
            f"{found['wall_s']:.2f} s{shown}"
        )
    if steps:
        share = f" ({found['share']:.0%} of the ceiling)" if found["share"] else ""
        yield (
            f"{found['steps']} steps, {found['preemptions']} preemptions, prefix cache hit rate "
            f"{found['hit_rate']:.1%}, {found['gb_s']:.1f} GB/s{share}"
        )
    yield from map(escape_control, found.get("failures", ()))
    if busy := load_note(found.get("others"), {}):
        yield f"note: {busy}"
    yield ""
    predicted = found["predicted"]
    yield from load_table({"measured": found if answered else None, "predicted": predicted})
    if predicted is not None:
        yield f"predicted: {capacity_line(predicted['capacity'])}"
        if (http := predicted["http"]) is not None:
            yield (
                f"predicted: HTTP takes {1e6 * http['token_s']:.0f} us per token and "
                f"{1e3 * http['request_s']:.1f} ms per request of the engine's cores"
            )
