"""Serving an application with uvicorn: socket, signals, graceful shutdown."""

from __future__ import annotations

import logging
import os
import socket
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType

import uvicorn
import uvloop
from starlette.types import ASGIApp

from ..arguments import Integer
from ..errors import RequestError
from .http_protocol import StreamingProtocol
from .time_slice import shorten_time_slice

_BACKLOG = 1024  # connections that wait to be accepted
_TIME_SLICE_NS = 100_000  # of the event loop, which shares the cores with the engine's threads


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


@contextmanager
def bind_unix(path: Path) -> Iterator[socket.socket]:
    """Open a Unix socket, whose file is removed at the end.

    It listens at once, since a server that starts takes the file of a socket that does not listen
    for that of a server that was killed, and replaces it. Only the user and the group of the
    process can connect.

    RequestError: a server listens there, the path is no socket, or it cannot be used.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as own:
        _remove_dead_socket(path)
        before = os.umask(0o117)
        try:
            own.bind(str(path))
            own.listen(_BACKLOG)
            made = path.lstat().st_ino
        except (OSError, ValueError) as error:
            raise _unix_error(path, error) from None
        finally:
            os.umask(before)
        try:
            yield own
        finally:
            with suppress(OSError):
                if path.lstat().st_ino == made:  # not that of a server that replaced this one
                    path.unlink()


def _remove_dead_socket(path: Path) -> None:
    """Remove a socket on which no server listens. RequestError: the path has something else."""
    try:
        if not stat.S_ISSOCK(path.lstat().st_mode):
            raise RequestError(f"{path} exists and is no socket (--unix-socket)")
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
            client.settimeout(1)  # the server's backlog may be full
            client.connect(str(path))
        raise RequestError(f"another server listens on {path} (--unix-socket)")
    except FileNotFoundError:
        pass
    except ConnectionRefusedError:
        path.unlink(missing_ok=True)
    except (OSError, ValueError) as error:
        raise _unix_error(path, error) from None


def _unix_error(path: Path, error: Exception) -> RequestError:
    why = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return RequestError(f"cannot listen on {path}: {why} (--unix-socket)")


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
            # Of h11: httptools, which uvicorn prefers, does not bound the size of headers, and
            # loses the body of a request with "Upgrade: h2c", which clients in Java send.
            http=StreamingProtocol,
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
        """Serve in the calling thread until a signal, or until ``should_exit`` is set.

        RequestError: another process listens on the address by now.
        """
        logging.getLogger("uvicorn").setLevel(logging.CRITICAL)  # the application reports errors
        try:
            self._bound.listen(_BACKLOG)
        except OSError as error:
            host, port = self._bound.getsockname()[:2]
            raise _bind_error(host, port, error) from None
        shorten_time_slice(_TIME_SLICE_NS)
        uvloop.run(self.serve(sockets=[self._bound]))

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begin to accept connections."""
        await super().startup(sockets)
        self._ready()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Stop the server after a signal; after a second one at once."""
        self.force_exit, self.should_exit = self.should_exit, True
