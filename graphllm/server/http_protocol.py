"""Connections whose streams are written without uvicorn's and h11's work for each event."""

from __future__ import annotations

from collections.abc import Callable

from starlette.types import Scope
from uvicorn.protocols.http.h11_impl import H11Protocol

_MOST_TRAILING = 1 << 16  # bytes after a request that are read before its response has ended
_WRITE_CHUNK = "graphllm.write_chunk"  # in the scope of a request
WriteChunk = Callable[[bytes], bool]


class StreamingProtocol(H11Protocol):
    """uvicorn's protocol, which lets the application write chunks of a response by itself.

    h11 checks each part of a body and wraps it in a chunk, which takes longer than the rest of an
    event. The first and the last part of a response must be sent as usual.
    """

    def connection_lost(self, exc: Exception | None) -> None:
        """Note that the connection is closed."""
        super().connection_lost(exc)
        self._give_writer(None)  # a cycle would be left to the garbage collector

    def handle_events(self) -> None:
        """Handle what has been read, and read on while a request runs.

        uvicorn stops reading at bytes that follow a request, and then does not notice that the
        client disconnects. They are kept for the next request, up to a bound.
        """
        super().handle_events()
        self._give_writer(self.write_chunk)
        is_read = self.cycle is not None and not self.cycle.more_body
        if self.flow.read_paused and is_read and len(self.conn.trailing_data[0]) < _MOST_TRAILING:
            self.flow.resume_reading()

    def _give_writer(self, writer: WriteChunk | None) -> None:
        """Set what `chunk_writer` returns for the last request; its task runs after this."""
        scope: Scope | None = self.scope  # type: ignore[assignment]
        if scope is not None:
            scope[_WRITE_CHUNK] = writer

    def write_chunk(self, data: bytes) -> bool:
        """Write a chunk of the current response; return False if it must be sent as usual.

        That is so while the client reads too slowly, and after it has disconnected.
        """
        if self.flow.write_paused or self.transport.is_closing():
            return False
        self.transport.write(b"%x\r\n%b\r\n" % (len(data), data))
        return True


def chunk_writer(scope: Scope) -> WriteChunk | None:
    """Return `StreamingProtocol.write_chunk` for a response without ``content-length``.

    None: the client has no chunks (HTTP/1.0), or another protocol is in use.
    """
    return scope.get(_WRITE_CHUNK) if scope["http_version"] == "1.1" else None
