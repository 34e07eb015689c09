"""The events of an answer with a given text, served to the client of an API."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer

from graphllm.engine.completion import Completion
from graphllm.server.block_answer import BlockAnswer
from graphllm.tokenizer import Tokenizer


def completion(tokenizer: Tokenizer, text: str, finish: str = "stop") -> Completion:
    """A completion of a prompt of 9 tokens, of which 4 were cached."""
    ids = tokenizer.encode("\n" + text)[len(tokenizer.encode("\n")) :]
    assert tokenizer.decode(ids, continuation=True) == text
    return Completion(list(range(9)), ids, text, finish, cached_tokens=4)


def frames(answer: BlockAnswer, done: Completion, size: int) -> bytes:
    """The stream of an answer whose text comes in pieces of ``size`` characters."""
    events = list(answer.begin([done], 1))
    for at in range(0, len(done.text), size):
        events += answer.pieces([(0, done.text[at : at + size], ())])
    events += [*answer.ended(0, done.finish_reason), *answer.finish([done])]
    return b"".join(map(answer.frame, events)) + answer.last


@contextmanager
def served(stream: bytes) -> Iterator[str]:
    """The URL of a server whose answer to every POST is a stream of events."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["content-length"]))
            self.send_response(200)
            self.send_header("content-type", "text/event-stream")
            self.send_header("content-length", str(len(stream)))
            self.end_headers()
            self.wfile.write(stream)

        def log_message(self, *arguments: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()
