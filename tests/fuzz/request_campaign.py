"""Campaign of concurrent requests on one model, each compared with its answer alone.

    PYTHONPATH=tests/support python tests/fuzz/request_campaign.py [COUNT] [SEED]

The requests are complete and streamed answers, streams that are closed, abandoned or continued
after other requests, logits, traces, conversations, and callbacks that begin another request.
"""

from __future__ import annotations

import itertools
import random
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import tiny_models as tiny

import graphllm
from graphllm.errors import RequestError

THREADS = 8
TEXTS = ("hello there", "what is", "a", "and so on and so on", "the quick brown fox", "hello you")
SAMPLINGS = (
    {"temperature": 0.0, "ignore_eos": True},
    {"temperature": 0.9, "seed": 5},
    {"temperature": 1.2, "seed": 6, "top_k": 0, "top_p": 1.0, "ignore_eos": True},
    {"temperature": 0.8, "seed": 7, "repeat_penalty": 1.3, "frequency_penalty": 0.2},
    {"temperature": 0.7, "seed": 8, "min_tokens": 9, "presence_penalty": 0.4},
    {"temperature": 0.9, "seed": 9, "stop": ["e", "th"]},
)
SCOPE = "model.layers.1.mlp"
CHAT = {"chat_template": "zephyr"}


class Campaign:
    """The answers of the model to single requests, and requests that are compared with them."""

    def __init__(self, llm: graphllm.LLM) -> None:
        self.llm = llm
        lengths = (1, 5, 20, 60)
        self.asks = [
            (text, {**sampling, "max_tokens": n})
            for text, sampling, n in itertools.product(TEXTS, SAMPLINGS, lengths)
        ]
        self.alone = [self._alone(lambda a=ask: llm.generate(a[0], **a[1])) for ask in self.asks]
        self.ids = [llm.encode(text) for text in TEXTS]
        self.logits = [self._alone(lambda i=ids: llm.logits(i, last=True)) for ids in self.ids]
        self.values = [self._alone(lambda i=ids: llm.trace(i, SCOPE)[SCOPE]) for ids in self.ids]
        self.answers = self._alone(self._converse)
        self.kinds: list[Callable[[random.Random], None]] = [
            self.complete, self.complete, self.complete, self.by_ids, self.streamed, self.closed,
            self.abandoned, self.continued, self.two_streams, self.called_back, self.one_logits,
            self.one_trace, self.patched, self.conversation,
        ]  # fmt: skip

    def _alone(self, request):
        self.llm.engine.clear_cache()
        return request()

    def _converse(self) -> list[str]:
        talk = self.llm.conversation(max_tokens=6, temperature=0.0, ignore_eos=True)
        return ["".join(talk.ask(text)) for text in TEXTS[:2]]

    def _ask(self, rng: random.Random):
        at = rng.randrange(len(self.asks))
        return *self.asks[at], self.alone[at]

    # -- requests
    def complete(self, rng: random.Random) -> None:
        text, sampling, want = self._ask(rng)
        self._same(self.llm.generate(text, **sampling), want)

    def by_ids(self, rng: random.Random) -> None:
        _, sampling, want = self._ask(rng)
        self._same(self.llm.generate(np.array(want.prompt_ids), **sampling), want)

    def streamed(self, rng: random.Random) -> None:
        text, sampling, want = self._ask(rng)
        assert "".join(self.llm.stream(text, **sampling)) == want.text

    def closed(self, rng: random.Random) -> None:
        text, sampling, want = self._ask(rng)
        stream = self.llm.stream(text, **sampling)
        part = "".join(itertools.islice(stream, rng.randrange(5)))
        stream.close()
        assert want.text.startswith(part)

    def abandoned(self, rng: random.Random) -> None:
        """Abandon a stream in a reference cycle: the garbage collector closes it in any thread."""
        text, sampling, want = self._ask(rng)
        held = [self.llm.stream(text, **sampling)]
        held.append(held)
        part = "".join(itertools.islice(held[0], rng.randrange(1, 5)))
        assert want.text.startswith(part)

    def continued(self, rng: random.Random) -> None:
        text, sampling, want = self._ask(rng)
        stream = self.llm.stream(text, **sampling)
        part = "".join(itertools.islice(stream, rng.randrange(4)))
        self.complete(rng)
        part += "".join(itertools.islice(stream, rng.randrange(4)))
        self.one_logits(rng)
        assert part + "".join(stream) == want.text

    def two_streams(self, rng: random.Random) -> None:
        asked = [self._ask(rng) for _ in range(2)]
        streams = [self.llm.stream(text, **sampling) for text, sampling, _ in asked]
        parts = zip(*itertools.zip_longest(*streams, fillvalue=""), strict=True)
        assert ["".join(part) for part in parts] in ([want.text for *_, want in asked], [])

    def called_back(self, rng: random.Random) -> None:
        text, sampling, want = self._ask(rng)
        other, sampling_of_other, want_of_other = self._ask(rng)

        def seen(done: int, total: int) -> None:
            self._same(self.llm.generate(other, **sampling_of_other), want_of_other)

        self._same(self.llm.generate(text, seen, **sampling), want)

    def one_logits(self, rng: random.Random) -> None:
        at = rng.randrange(len(TEXTS))
        np.testing.assert_array_equal(self.llm.logits(self.ids[at], last=True), self.logits[at])

    def one_trace(self, rng: random.Random) -> None:
        at = rng.randrange(len(TEXTS))
        got = self.llm.trace(self.ids[at], SCOPE)[SCOPE]
        np.testing.assert_array_equal(got, self.values[at])

    def patched(self, rng: random.Random) -> None:
        at = rng.randrange(len(TEXTS))

        def patch(value: np.ndarray) -> np.ndarray:
            list(self.llm.stream("hello"))  # rejected, which ends the trace
            return value

        try:
            self.llm.trace(self.ids[at], SCOPE, {SCOPE: patch})
        except RequestError as error:
            assert "callback" in str(error), error
        else:
            raise AssertionError("a patch has begun a request")

    def conversation(self, rng: random.Random) -> None:
        assert self._converse() == self.answers

    @staticmethod
    def _same(got, want) -> None:
        assert (got.ids, got.text, got.finish_reason) == (want.ids, want.text, want.finish_reason)


def run(llm: graphllm.LLM, count: int, seed: int = 0) -> tuple[Counter[str], list[str]]:
    """Make ``count`` requests from `THREADS` threads; return their number by kind, and failures."""
    campaign, numbers = Campaign(llm), iter(range(count))
    counts, wrong, lock = Counter[str](), list[str](), threading.Lock()

    def work() -> None:
        while True:
            with lock:
                index = next(numbers, None)
            if index is None:
                return
            rng = random.Random(seed * 1_000_003 + index)
            kind = rng.choice(campaign.kinds)
            try:
                kind(rng)
            except BaseException as error:
                wrong.append(f"request {index}, {kind.__name__}: {type(error).__name__}: {error}")
            with lock:
                counts[kind.__name__] += 1

    threads = [threading.Thread(target=work, daemon=True) for _ in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(3600)
    if any(thread.is_alive() for thread in threads):
        wrong.append("some threads did not end")
    return counts, wrong


def main() -> None:
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 10_000
    seed = int(sys.argv[2]) if len(sys.argv) > 2 else 0
    bad = False
    with tempfile.TemporaryDirectory() as folder:
        for arch in ("llama", "gemma3"):
            file = tiny.write_tiny(Path(folder) / f"{arch}.gguf", arch)
            start = time.perf_counter()
            with graphllm.load(file, device="cpu", **CHAT) as llm:
                counts, wrong = run(llm, count // 2, seed)
            print(
                f"{arch}: {sum(counts.values())} requests in {time.perf_counter() - start:.0f} s,"
            )
            print(f"  {len(wrong)} wrong; {dict(counts)}")
            print(*wrong[:10], sep="\n")
            bad |= bool(wrong)
    sys.exit(bad)


if __name__ == "__main__":
    main()
