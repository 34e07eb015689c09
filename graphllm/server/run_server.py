"""Serving an application with uvicorn: socket, signals, graceful shutdown."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable
from types import FrameType

import uvicorn
from starlette.types import ASGIApp

from ..arguments import Integer
from ..errors import RequestError

_BACKLOG = 1024  # connections that wait to be accepted


def bind(host: str, port: int) -> socket.socket:
    """Return a socket bound to an address, which does not listen yet.

    ``port``: 0 chooses a free one. RequestError: the address is invalid or taken.
    """
    Integer(0, 65535)("port", port)  # getaddrinfo would take it modulo 65536
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, kind, protocol, _, address = found[0]
        own = socket.socket(family, kind, protocol)
        try:
            own.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            own.bind(address)
        except OSError:
            own.close()
            raise
    except (OSError, UnicodeError) as error:
        raise _bind_error(host, port, error) from None
    return own


def _bind_error(host: str, port: int, error: Exception) -> RequestError:
    why = error.strerror if isinstance(error, OSError) else str(error)
    return RequestError(f"cannot listen on {host}, port {port}: {why}", "port")


class Server(uvicorn.Server):
    """A uvicorn server of one application on one socket.

    SIGINT and SIGTERM stop it: it accepts no more connections, and running requests have
    ``shutdown_s`` seconds to end before they are cancelled. A second signal cancels them at once.

    Args:
        app: the application.
        bound: a bound socket, see `bind`.
        ready: called when connections are accepted.
        shutdown_s: see above.
    """

    def __init__(
        self,
        app: ASGIApp,
        bound: socket.socket,
        ready: Callable[[], None] = lambda: None,
        shutdown_s: int = 30,
    ) -> None:
        config = uvicorn.Config(
            app,
            access_log=False,
            lifespan="off",
            log_config=None,
            proxy_headers=False,
            server_header=False,
            timeout_graceful_shutdown=shutdown_s,
            ws="none",
        )
        super().__init__(config)
        self._bound, self._ready = bound, ready

    def run_until_stopped(self) -> None:
        """Serve until a signal, or until ``should_exit`` is set.

        RequestError: another process listens on the address by now.
        """
        logging.getLogger("uvicorn").setLevel(logging.CRITICAL)  # the application reports errors
        try:
            self._bound.listen(_BACKLOG)
        except OSError as error:
            host, port = self._bound.getsockname()[:2]
            raise _bind_error(host, port, error) from None
        asyncio.run(self.serve(sockets=[self._bound]))

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begin to accept connections."""
        await super().startup(sockets)
        self._ready()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Stop the server after a signal; after a second one at once."""
        self.force_exit, self.should_exit = self.should_exit, True
