"""What grammar masks cost: decode steps of a batch with a JSON schema against steps without one.

    pip install 'graphllm[structured,demo]'
    python benchmarks/masks.py demo -b 16 -n 48 -t 2 -r 4

Each round computes ``-b`` requests of ``-n`` tokens twice, first without a schema and then with it.
The time of a step is that of a request from its first token to its last one, by its number of
tokens; the median of the requests counts. The schemas allow no answer of fewer tokens, so all
batches remain full. The ratio is that of the same round. Column ``mask``: the time per step in
which the bitmaps are computed. A ratio below 1 means that sampling gains more, as it reads only the
logits of allowed tokens.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from statistics import median
from typing import Any, NamedTuple
from unittest import mock

import graphllm
from graphllm.backends.cpu.runtime.isa import isa
from graphllm.engine import held_settings
from graphllm.profiler.roofline import cpu_name


def _array(items: Mapping[str, Any]) -> dict[str, Any]:
    return {"type": "array", "minItems": 500, "items": items}


def _object(**properties: Any) -> dict[str, Any]:
    return {
        "type": "object", "properties": properties, "required": list(properties),
        "additionalProperties": False,
    }  # fmt: skip


_STRING, _INTEGER = {"type": "string"}, {"type": "integer"}
SCHEMAS = {
    "records": _array(
        _object(name=_STRING, age=_INTEGER, tags={"type": "array", "items": _STRING})
    ),
    "short strings": _array(
        _object(name={"type": "string", "maxLength": 40}, kind={"enum": ["a", "b", "c"]})
    ),
    "numbers": _array({"type": "integer", "minimum": 0, "maximum": 99999}),
    "a string": {"type": "string", "minLength": 2000},
}
SAMPLING = {
    "greedy": {"temperature": 0.0},
    "top-k 40": {"temperature": 0.8, "top_k": 40, "top_p": 0.95},
    "no limit": {"temperature": 1.0, "top_k": 0, "top_p": 1.0},  # defaults of OpenAI's API
}


class Steps(NamedTuple):
    """Milliseconds of a step, and of its masks in the engine's thread."""

    step_ms: float
    mask_ms: float


@contextmanager
def mask_clock() -> Iterator[list[float]]:
    """Add the seconds of each mask of a step to a list."""
    made, spent = held_settings.mask_feed, list[float]()

    def timed(*args: Any) -> Any:
        start = time.perf_counter()
        try:
            return made(*args)
        finally:
            spent.append(time.perf_counter() - start)

    with mock.patch.object(held_settings, "mask_feed", timed):
        yield spent


def compute(
    llm: graphllm.LLM, count: int, tokens: int, schema: Mapping[str, Any] | None,
    sampling: Mapping[str, Any],
) -> Steps:  # fmt: skip
    """Compute a batch."""
    with mask_clock() as spent:
        done = llm.generate(
            [f"Write JSON number {index}:\n" for index in range(count)], max_tokens=tokens, seed=1,
            json_schema=schema, ignore_eos=schema is None, **sampling,
        )  # fmt: skip
    if any(len(each.ids) < tokens for each in done):
        raise SystemExit(f"error: an answer ends before {tokens} tokens")
    step = median(each.timings.decode_s for each in done) / (tokens - 1)
    return Steps(1e3 * step, 1e3 * median(spent) if spent else 0.0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("model", nargs="?", default="demo")
    parser.add_argument("-b", dest="sequences", type=int, default=16)
    parser.add_argument("-n", dest="tokens", type=int, default=96)
    parser.add_argument("-t", dest="threads", type=int, default=2)
    parser.add_argument("-r", dest="rounds", type=int, default=5)
    opts = parser.parse_args()
    print(f"{cpu_name()}; {isa()}; {opts.threads} threads, {opts.sequences} sequences")
    print("sampling | schema        | step, ms: without | with   | ratio               | mask, ms")
    with graphllm.load(
        opts.model, context=512, max_sequences=opts.sequences, threads=opts.threads
    ) as llm:
        for name, sampling in SAMPLING.items():
            for title, schema in SCHEMAS.items():
                pairs = [
                    [compute(llm, opts.sequences, opts.tokens, each, sampling)
                     for each in (None, schema)]
                    for _ in range(opts.rounds + 1)
                ][1:]  # fmt: skip
                without, masked = (Steps(*map(median, zip(*each))) for each in zip(*pairs))
                ratios = [b.step_ms / a.step_ms for a, b in pairs]
                print(
                    f"{name:<8} | {title:<13} | {without.step_ms:17.2f} | {masked.step_ms:6.2f} | "
                    f"{median(ratios):.3f} ({min(ratios):.3f}-{max(ratios):.3f}) | "
                    f"{masked.mask_ms:.2f}",
                    flush=True,
                )


if __name__ == "__main__":
    main()
