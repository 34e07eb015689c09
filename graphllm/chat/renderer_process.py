"""Client of the process that renders chat templates.

Chat templates come with model files and are untrusted. Jinja2's sandbox isolates them from the
interpreter, and the operating system limits the CPU time and memory of the process that renders
them (`renderer/worker.py`). The process is a new interpreter that imports only Jinja2 and the
renderer. It is started on demand, shared by all threads, and replaced when a template exceeds its
limits.
"""

from __future__ import annotations

import atexit
import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from ..errors import RequestError
from .renderer.protocol import LENGTH_BYTES, MAX_CPU_S, MAX_MEMORY_BYTES, OUT_OF_MEMORY

REPLY_TIMEOUT_S = 10.0  # wall time; longer than MAX_CPU_S, since the cores may be busy
START_TIMEOUT_S = 60.0
_BOOT = "import sys; sys.path += sys.argv[1:]; from renderer.worker import main; main()"
# Environment variables that the process inherits.
_INHERITED = ("LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH", "TZ", "TZDIR")
_NO_SIGNAL = getattr(socket, "MSG_NOSIGNAL", 0)


class LimitExceeded(Exception):
    """A template exceeded its limits; the message names the limit."""


class RendererProcess:
    """The rendering process; requests to it are serialized."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None
        self._ready = False

    def start(self) -> None:
        """Start the process if it is not running, without waiting until it is ready."""
        with self._lock, suppress(OSError, StopIteration):  # the next request reports the failure
            self._start(next(_interpreters()))

    def request(self, values: Mapping[str, Any]) -> tuple[dict[str, Any], str]:
        """Send a request and return the header and text of the reply; see `renderer.protocol`.

        LimitExceeded: the template exceeded its limits. RequestError: the process cannot be
        started.
        """
        data = json.dumps(values).encode()
        with self._lock:
            try:
                self._connect()
                self._send(len(data).to_bytes(LENGTH_BYTES, "little") + data)
                header, text = self._receive(REPLY_TIMEOUT_S)
            except (OSError, EOFError) as error:
                raise LimitExceeded(self._end(error)) from None
            except BaseException:  # such as an interrupt: a late reply must not be read
                self.close()
                raise
            if header["last"]:
                self.close()
            return header, text

    def close(self) -> None:
        """End the process."""
        if self._socket is not None:
            self._socket.close()
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        self._socket = self._process = None
        self._ready = False

    def forget(self) -> None:
        """After a fork: leave the process to the parent, which started it."""
        if self._socket is not None:
            self._socket.close()
        if self._process is not None:
            self._process.returncode = 0  # it is no child of this process
        self.__init__()  # type: ignore[misc]

    # -- starting
    def _connect(self) -> None:
        """Start a process and wait until it is ready. RequestError: it cannot be started."""
        if self._process is not None and self._process.poll() is not None:
            self.close()
        if self._ready:
            return
        reason = ""
        for executable in _interpreters():
            try:
                self._start(executable)
                header, _ = self._receive(START_TIMEOUT_S)
                self._ready = bool(header["ready"])
                return
            except (OSError, EOFError, ValueError, KeyError) as error:
                self.close()
                reason = f"{executable}: {error or type(error).__name__}"
        raise RequestError(
            f"chat templates are rendered in a separate process, which cannot be started: {reason}"
        )

    def _start(self, executable: str) -> None:
        if self._process is not None:
            return
        ours, theirs = socket.socketpair()
        with theirs:
            self._socket = ours
            self._process = subprocess.Popen(
                [executable, "-I", "-S", "-c", _BOOT, str(Path(__file__).parent), *_libraries()],
                stdin=theirs.fileno(),
                stdout=theirs.fileno(),
                stderr=subprocess.DEVNULL,
                cwd="/",
                env={name: os.environ[name] for name in _INHERITED if name in os.environ},
                start_new_session=True,  # Ctrl-C at the terminal does not reach it
            )

    # -- messages
    def _send(self, data: bytes) -> None:
        assert self._socket is not None
        self._socket.settimeout(REPLY_TIMEOUT_S)
        self._socket.sendall(data, _NO_SIGNAL)

    def _receive(self, seconds: float) -> tuple[dict[str, Any], str]:
        """Receive the reply, in one call if all of it is there.

        Each call releases the GIL, for which the thread may wait afterwards.
        """
        end, data = time.monotonic() + seconds, bytearray()
        begin = 2 * LENGTH_BYTES
        self._read(data, begin, end)
        middle = begin + int.from_bytes(data[:LENGTH_BYTES], "little")
        stop = middle + int.from_bytes(data[LENGTH_BYTES:begin], "little")
        self._read(data, stop, end)
        return json.loads(data[begin:middle]), data[middle:stop].decode()

    def _read(self, data: bytearray, size: int, end: float) -> None:
        """Receive until ``data`` has at least ``size`` bytes."""
        assert self._socket is not None
        while len(data) < size:
            self._socket.settimeout(max(0.001, end - time.monotonic()))
            piece = self._socket.recv(min(max(size - len(data), 1 << 16), 1 << 20))
            if not piece:
                raise EOFError
            data += piece

    def _end(self, error: Exception) -> str:
        """End the process and return the reason why it did not reply."""
        assert self._process is not None
        status = None
        if not isinstance(error, TimeoutError):
            with suppress(subprocess.TimeoutExpired):
                status = self._process.wait(1)
        self.close()
        if status is None:
            return f"rendering takes more than {REPLY_TIMEOUT_S:.0f} s"
        if status == -signal.SIGPROF:
            return f"rendering takes more than {MAX_CPU_S:.0f} s of CPU time"
        if status == OUT_OF_MEMORY:
            return f"rendering needs more than {MAX_MEMORY_BYTES >> 20} MB of memory"
        by = signal.Signals(-status).name if status < 0 else f"exit status {status}"
        return f"rendering ended the process ({by})"


def _interpreters() -> Iterator[str]:
    """Yield the Python interpreters to try.

    These are the one set for multiprocessing, the running one, and the installed one, for programs
    that embed Python.
    """
    spawn = sys.modules.get("multiprocessing.spawn")
    configured = spawn.get_executable() if spawn is not None else None
    name = f"python{sys.version_info.major}.{sys.version_info.minor}"
    installed = [str(Path(base) / "bin" / name) for base in (sys.prefix, sys.base_prefix)]
    own = [os.fsdecode(each) for each in (configured, sys.executable) if each]
    own.sort(key=lambda path: not Path(path).name.startswith(("python", "pypy")))
    yield from dict.fromkeys([*own, *installed])


def _libraries() -> list[str]:
    """Return the directories that Jinja2 and MarkupSafe are imported from."""
    found = [importlib.util.find_spec(name) for name in ("jinja2", "markupsafe")]
    origins = [spec.origin for spec in found if spec is not None and spec.origin is not None]
    return list(dict.fromkeys(str(Path(origin).parents[1]) for origin in origins))


PROCESS = RendererProcess()
atexit.register(PROCESS.close)
os.register_at_fork(after_in_child=PROCESS.forget)
