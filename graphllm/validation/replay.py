"""Replay of recorded requests: the first token that differs, and the op that made it differ."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

from ..api.recording import RecordedRequest, RecordedTraffic
from ..engine.completion import Completion
from ..engine.generation import CANCELLED
from ..errors import GraphllmError, RequestError

if TYPE_CHECKING:
    from ..api import LLM
    from ..api.request_handle import RequestHandle

Seen = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Difference:
    """The first token that differs from the recording.

    Attributes:
        where: name of the file and number of the line of the request.
        sample: number of the sample.
        position: number of the token in the answer, from 0.
        recorded, replayed: the ids; None where the answer has ended.
        ids: the prompt and the tokens before; empty for an encoder-decoder.
        lines: what is known about the cause.
    """

    where: str
    sample: int
    position: int
    recorded: int | None
    replayed: int | None
    ids: tuple[int, ...]
    lines: tuple[str, ...] = ()


@dataclass(frozen=True)
class Replay:
    """Result of a replay.

    Attributes:
        requests: number of requests that were compared, the one that differs included.
        tokens: number of their tokens that are the same.
        skipped: what was not compared, one line each.
        difference: the first token that differs; None if all are the same.
    """

    requests: int
    tokens: int
    skipped: Sequence[str]
    difference: Difference | None

    def as_dict(self) -> dict[str, Any]:
        """Return the JSON form."""
        return asdict(self)


def replay(llm: LLM, traffic: RecordedTraffic, parallel: int, seen: Seen) -> Replay:
    """Compute recorded requests again, and compare the tokens up to the first that differs.

    Args:
        llm: the model.
        traffic: the recording.
        parallel: number of requests that are submitted before the first one is awaited.
        seen: progress callback.

    Raises:
        GraphllmError: a request cannot be computed.
    """
    asked = [each for each in traffic.requests if each.tokens is not None and not each.error]
    count = tokens = 0
    for request, done in _completions(llm, asked, parallel):
        seen("replay", count, len(asked))
        same, found = _compare(request, done, llm.seq2seq is None)
        count, tokens = count + 1, tokens + same
        if found is not None:
            return Replay(count, tokens, _skipped(traffic), found)
    return Replay(count, tokens, _skipped(traffic), None)


def _skipped(traffic: RecordedTraffic) -> list[str]:
    """Return what is not compared, and why."""
    kinds = {
        "no answer, the server ended first": [r.tokens is None for r in traffic.requests],
        "they ended with an error": [bool(r.error) for r in traffic.requests],
    }
    lines = [f"{where}: the line is cut off" for where in traffic.torn]
    count = len(traffic.requests)
    lines += [f"{n} of {count} requests: {what}" for what, own in kinds.items() if (n := sum(own))]
    return lines


def _completions(
    llm: LLM, requests: Sequence[RecordedRequest], parallel: int
) -> Iterator[tuple[RecordedRequest, Completion]]:
    """Yield the requests in order, each with its completion."""
    running: deque[tuple[RecordedRequest, RequestHandle]] = deque()
    rest = iter(requests)
    try:
        while True:
            while len(running) < parallel and (request := next(rest, None)) is not None:
                try:
                    handle = llm.submit(request.prompt, sampling=request.sampling)
                except GraphllmError as error:
                    raise RequestError(f"{request.where}: {error}") from None
                running.append((request, handle))
            if not running:
                return
            request, handle = running.popleft()
            yield request, handle.result()
    finally:
        for _, handle in running:
            handle.cancel()


def _compare(
    request: RecordedRequest, done: Completion, decoder: bool
) -> tuple[int, Difference | None]:
    """Return the number of tokens that are the same, and the first one that is not."""
    assert request.tokens is not None
    total = 0
    for sample, (want, each) in enumerate(zip_longest(request.tokens, done.choices)):
        if want is None or each is None:
            text = f"{len(request.tokens)} samples are recorded, {len(done.choices)} are asked for"
            raise RequestError(f"{request.where}: {text}")
        # The client of a cancelled request left at a time that a replay does not know.
        cancelled = request.finish_reasons[sample] == CANCELLED
        got = each.ids[: len(want)] if cancelled else each.ids
        for position, pair in enumerate(zip_longest(want, got)):
            if pair[0] != pair[1]:
                ids = (*done.prompt_ids, *got[:position]) if decoder else ()
                return total, Difference(request.where, sample, position, *pair, ids)
            total += 1
    return total, None


# ------------------------------------------------------------------------------------- explanation


def logit_lines(llm: LLM, found: Difference) -> list[str]:
    """Return lines on the logits of the two tokens, which the replaying side computes."""
    pair = {"recorded": found.recorded, "replayed": found.replayed}
    known = {what: token for what, token in pair.items() if token is not None}
    if not found.ids:
        return []
    logits = llm.logits(list(found.ids), last=True)
    lines = []
    for what, token in known.items():
        if not 0 <= token < len(logits):
            lines.append(f"{what}: {token} is no id of the model")
            continue
        rank = int((logits > logits[token]).sum()) + 1
        lines.append(f"{what}: {token}, logit {logits[token]:.6g}, rank {rank}")
    return lines


def cause_lines(
    model: str, found: Difference, backends: tuple[str, str], options: dict[str, Any]
) -> list[str]:
    """Return lines on the op that made the token differ.

    The step of the token runs on both backends, op by op (`graphllm.diff`).

    Args:
        model: the model.
        found: the difference.
        backends: of the replay, and that of the recording or the reference.
        options: arguments of `graphllm.diff` for loading.
    """
    from ..profiler.diff.comparison import diff

    if not found.ids:
        return ["the op is not searched for: the model is an encoder-decoder"]
    try:
        compared = diff(model, backends, ids=found.ids, **options)
    except GraphllmError as error:
        return [f"the op is not searched for: {error}"]
    if compared.first is not None:
        return compared.verdict()
    return [
        f"no op of {backends[0]} diverges from {backends[1]}: the token was recorded with another "
        "model, build or setting, by rounding at a near tie, or the recording was changed"
    ]
