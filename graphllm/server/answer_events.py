"""The events of an answer that is streamed, as bytes."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence

from starlette.requests import Request

from ..api.async_llm import AsyncRequest
from .answers import Answer, Piece
from .bills import bill_field

MAX_TOKENS = 32  # tokens of a choice whose log-probabilities share an event


def answer_events(
    request: Request, answer: Answer, requests: Sequence[AsyncRequest], samples: int
) -> Generator[bytes, None, None]:
    """Yield the events of an answer, of several prompts one after another; see `EventStream`.

    Args:
        request: the request of the client.
        answer: makes the events.
        requests: a request for each prompt.
        samples: number of choices of each prompt.
    """
    prompts = [each.handle.completion for each in requests]
    for event in answer.begin(prompts, samples):
        yield answer.frame(event)
    for index, each in enumerate(requests):  # all are computed meanwhile
        first = index * samples
        for new in _new_pieces(each, first):
            if new:
                yield from filter(None, answer.encoded(new))
            else:
                yield b""
        for sample, done in enumerate(each.completions):
            for event in answer.ended(first + sample, done.finish_reason):
                yield answer.frame(event)
    last = list(answer.finish(prompts))
    if answer.bills:
        last[-1] |= bill_field(request, prompts)
    for event in last:
        yield from answer.framed(event)


def _new_pieces(request: AsyncRequest, first: int) -> Generator[list[Piece], None, None]:
    """Yield the new pieces of a request's samples until it has ended; none: it must wait for them.

    ``first``: number of the choice that is sample 0.
    """
    completions = request.completions
    seen = [(0, 0)] * len(completions)  # characters and log-probabilities
    ended = False
    while not ended:
        _, ended = request.handle.poll()
        pieces: list[Piece] = []
        for sample, done in enumerate(completions):
            text, tokens = done.text[seen[sample][0] :], done.logprobs[seen[sample][1] :]
            if text or tokens:
                seen[sample] = len(done.text), len(done.logprobs)
                *before, piece = _split((first + sample, text, tokens))
                yield from ([each] for each in before)
                pieces.append(piece)
        if pieces:
            yield pieces
        if not ended:
            yield []


def _split(piece: Piece) -> Iterator[Piece]:
    """Yield a piece as pieces with at most `MAX_TOKENS` tokens; the last one has the text."""
    index, text, tokens = piece
    while len(tokens) > MAX_TOKENS:
        yield index, "", tokens[:MAX_TOKENS]
        tokens = tokens[MAX_TOKENS:]
    yield index, text, tokens
