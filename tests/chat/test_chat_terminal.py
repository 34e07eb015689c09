"""The verb ``chat`` at a pseudo-terminal."""

from __future__ import annotations

import json
import os
import pty
import re
import select
import subprocess
import sys
import time

import pytest
import tiny_models as tiny

TEMPLATE = "{% for m in messages %}{{ m.content + eos_token }}{% endfor %}"


class Terminal:
    """A chat with a tiny model at a pseudo-terminal."""

    def __init__(self, folder):
        model = tiny.write_llama(folder / "tiny.gguf", tiny.llama_weights())
        (folder / "own.jinja").write_text(TEMPLATE)
        self._ours, theirs = pty.openpty()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "graphllm", "chat", str(model), "-n", "3", "--temp", "0",
             "--ignore-eos", "--chat-template", str(folder / "own.jinja")],
            stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True,
            env={**os.environ, "TERM": "xterm"},
        )  # fmt: skip
        os.close(theirs)
        self._unread = b""

    def read_until(self, pattern, seconds=100):
        """Return the output up to and including the first match."""
        end = time.monotonic() + seconds
        while not (found := re.search(pattern, self._unread)):
            ready, _, _ = select.select([self._ours], [], [], max(0, end - time.monotonic()))
            assert ready, f"no {pattern!r} in {self._unread!r}"
            try:
                self._unread += os.read(self._ours, 1000)
            except OSError:  # on Linux a closed terminal raises an error
                pytest.fail(f"no {pattern!r} in {self._unread!r}")
        shown, self._unread = self._unread[: found.end()], self._unread[found.end() :]
        return shown

    def write(self, data):
        os.write(self._ours, data)

    def close(self):
        self.process.kill()
        self.process.wait()
        os.close(self._ours)


@pytest.fixture
def terminal(tmp_path):
    made = Terminal(tmp_path)
    yield made
    made.close()


def test_pasted_lines_are_one_message(terminal, tmp_path):
    if "GNU" not in (pytest.importorskip("readline").__doc__ or ""):
        pytest.skip("needs GNU readline")
    terminal.read_until(rb"\x1b\[\?2004h> ")
    terminal.write(b"\x1b[200~one\rtwo\n\n  three\\\rfour\x1b[201~")
    terminal.read_until(b"four")
    terminal.write(b" five\r")
    shown = terminal.read_until(rb"\x1b\[\?2004h> ")
    assert shown.count(b"tok/s") == 1 and b"\x1b[?2004l" in shown
    saved = tmp_path / "said.json"
    terminal.write(f"/save {saved}\r".encode())
    terminal.read_until(rb"\x1b\[\?2004h> ")
    said = json.loads(saved.read_text())
    assert [m["content"] for m in said if m["role"] == "user"] == [
        "one\ntwo\n\n  three\\\nfour five"
    ]
    terminal.write(b"\x04")
    assert b"\x1b[?2004l" in terminal.read_until(rb"2004l")
    assert terminal.process.wait(30) == 0
