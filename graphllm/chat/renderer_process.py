"""The process that renders chat templates: started when needed, used by all threads, replaced when
a template exceeds its limits.

Templates come with model files. Jinja2's sandbox keeps them from the interpreter's internals, and
the kernel bounds the time and memory of the process that renders them (`renderer/worker.py`). The
process is a fresh interpreter that imports nothing but Jinja2 and the renderer.
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

REPLY_TIMEOUT_S = (
    10.0  # for an answer; longer than the limit, since other processes may have the cores
)
START_TIMEOUT_S = 60.0
_BOOT = "import sys; sys.path += sys.argv[1:]; from renderer.worker import main; main()"
_KEPT = ("LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH", "TZ", "TZDIR")  # of the environment
_NO_SIGNAL = getattr(socket, "MSG_NOSIGNAL", 0)


class LimitExceeded(Exception):
    """A template needs more than its limits allow; the text says which."""


class RenderingProcess:
    """One process, and the requests to it, one at a time."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None
        self._ready = False

    def start(self) -> None:
        """Start the process if there is none, without waiting for it."""
        with self._lock, suppress(OSError, StopIteration):  # a request reports what fails
            self._start(next(_interpreters()))

    def request(self, values: Mapping[str, Any]) -> tuple[dict[str, Any], str]:
        """The header and the text that the process answers. LimitExceeded, RequestError."""
        data = json.dumps(values).encode()
        with self._lock:
            try:
                self._connect()
                self._send(len(data).to_bytes(LENGTH_BYTES, "little") + data)
                header, text = self._receive(REPLY_TIMEOUT_S)
            except (OSError, EOFError) as error:
                raise LimitExceeded(self._end(error)) from None
            except BaseException:  # as an interrupt: what is answered later belongs to nobody
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
        """Leave the process to the parent that started it, after a fork."""
        if self._socket is not None:
            self._socket.close()
        if self._process is not None:
            self._process.returncode = 0  # not this process's child
        self.__init__()  # type: ignore[misc]

    # -- starting
    def _connect(self) -> None:
        """Have a process that answers. RequestError if none can be started."""
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
            "chat templates are rendered in a process of their own, which cannot be started: "
            f"{reason}"
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
                env={name: os.environ[name] for name in _KEPT if name in os.environ},
                start_new_session=True,  # a terminal's Ctrl-C is not for it
            )

    # -- messages
    def _send(self, data: bytes) -> None:
        assert self._socket is not None
        self._socket.settimeout(REPLY_TIMEOUT_S)
        self._socket.sendall(data, _NO_SIGNAL)

    def _receive(self, seconds: float) -> tuple[dict[str, Any], str]:
        end = time.monotonic() + seconds
        sizes = self._read(2 * LENGTH_BYTES, end)
        head = int.from_bytes(sizes[:LENGTH_BYTES], "little")
        text = int.from_bytes(sizes[LENGTH_BYTES:], "little")
        header = json.loads(self._read(head, end))
        return header, self._read(text, end).decode()

    def _read(self, size: int, end: float) -> bytes:
        assert self._socket is not None
        data = bytearray()
        while len(data) < size:
            self._socket.settimeout(max(0.001, end - time.monotonic()))
            piece = self._socket.recv(min(size - len(data), 1 << 20))
            if not piece:
                raise EOFError
            data += piece
        return bytes(data)

    def _end(self, error: Exception) -> str:
        """End the process, and say why it did not answer."""
        assert self._process is not None
        status = None
        if not isinstance(error, TimeoutError):
            with suppress(subprocess.TimeoutExpired):
                status = self._process.wait(1)
        self.close()
        if status is None:
            return f"it takes more than {REPLY_TIMEOUT_S:.0f} s"
        if status == -signal.SIGPROF:
            return f"it takes more than {MAX_CPU_S:.0f} s"
        if status == OUT_OF_MEMORY:
            return f"it needs more than {MAX_MEMORY_BYTES >> 20} MB of memory"
        by = signal.Signals(-status).name if status < 0 else f"exit status {status}"
        return f"it ended the process that renders it ({by})"


def _interpreters() -> Iterator[str]:
    """Python interpreters to try: the one that multiprocessing was told of, this one, and the one
    of the installation, for programs that embed Python."""
    spawn = sys.modules.get("multiprocessing.spawn")
    told = spawn.get_executable() if spawn is not None else None
    name = f"python{sys.version_info.major}.{sys.version_info.minor}"
    installed = [str(Path(base) / "bin" / name) for base in (sys.prefix, sys.base_prefix)]
    own = [os.fsdecode(each) for each in (told, sys.executable) if each]
    own.sort(key=lambda path: not Path(path).name.startswith(("python", "pypy")))
    yield from dict.fromkeys([*own, *installed])


def _libraries() -> list[str]:
    """The folders that Jinja2 and what it needs are imported from."""
    found = [importlib.util.find_spec(name) for name in ("jinja2", "markupsafe")]
    origins = [spec.origin for spec in found if spec is not None and spec.origin is not None]
    return list(dict.fromkeys(str(Path(origin).parents[1]) for origin in origins))


PROCESS = RenderingProcess()
atexit.register(PROCESS.close)
os.register_at_fork(after_in_child=PROCESS.forget)
