"""The verb ``serve`` as a process: ready line, exit codes, one line for each failure."""

from __future__ import annotations

import ctypes
import http.client
import json
import platform
import re
import signal
import socket
import stat
import struct
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import tiny_models as tiny

from graphllm.server.time_slice import shorten_time_slice

OPTIONS = ("--device", "reference", "--port", "0")


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return tiny.write_tiny(tmp_path_factory.mktemp("serve") / "tiny.gguf", "llama")


def serve(*words: object) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "graphllm", "serve", *map(str, words)]
    return subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def test_a_server_until_it_is_terminated(model, tmp_path):
    keys = tmp_path / "keys"
    keys.write_text("first\n\nsecond \n")
    process = serve(model, *OPTIONS, "--api-key-file", keys, "--alias", "mine")
    ready = process.stderr.readline()
    found = re.fullmatch(r"mine is served at http://127\.0\.0\.1:(\d+)/v1\n", ready)
    assert found, ready
    connection = http.client.HTTPConnection("127.0.0.1", int(found[1]), timeout=60)
    headers = {"Authorization": "Bearer second", "Content-Type": "application/json"}
    body = json.dumps({"prompt": "hello", "max_tokens": 2, "model": "mine", "ignore_eos": True})
    connection.request("POST", "/v1/completions", body, headers)
    response = connection.getresponse()
    assert response.status == 200 and json.load(response)["usage"]["completion_tokens"] == 2
    process.send_signal(signal.SIGTERM)  # an idle connection is open
    out, rest = process.communicate(timeout=30)
    assert (process.returncode, out, rest) == (0, "", "")


class UnixConnection(http.client.HTTPConnection):
    """A connection to a Unix socket, whose path is the host."""

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(60)
        self.sock.connect(self.host)


def test_two_models_on_a_unix_socket(model, tmp_path):
    """The file of a killed server is replaced, and that of a running one is not."""
    path = tmp_path / "socket"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    words = (model, "--model", f"other={model}", "--model-memory", "1GB", "--unix-socket", path)
    process = serve(*words, "--device", "reference", "--alias", "first")
    lines = [process.stderr.readline(), process.stderr.readline()]
    assert re.fullmatch(r"note: the model first was loaded in \d+\.\d s\n", lines[0])
    assert lines[1] == f"first, other are served at the Unix socket {path}\n"
    assert stat.filemode(path.stat().st_mode) == "srw-rw----"
    for name in ("other", "first"):
        connection = UnixConnection(str(path))
        body = json.dumps({"prompt": "hello", "max_tokens": 2, "model": name})
        connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
        assert json.load(connection.getresponse())["model"] == name
    _, error = serve(model, "--unix-socket", path).communicate(timeout=60)
    assert error == f"error: another server listens on {path} (--unix-socket)\n"
    process.send_signal(signal.SIGTERM)
    _, rest = process.communicate(timeout=30)
    assert process.returncode == 0 and rest.startswith("note: the model other was loaded in")
    assert not path.exists()


def test_failures_are_one_line(model, tmp_path):
    (tmp_path / "bad.gguf").write_bytes(b"no model")
    (tmp_path / "none").write_text("\n")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        cases = {
            rf"cannot listen on 127\.0\.0\.1, port {port}: Address already in use \(--port\)": (
                model, "--port", port),
            r"port = 70000 must be in 0\.\.2\^16-1 \(--port\)": (model, "--port", 70000),
            r".*bad\.gguf.*": (tmp_path / "bad.gguf", "--port", 0),
            r".*none exists and is no socket \(--unix-socket\)": (
                model, "--unix-socket", tmp_path / "none"),
            r"two models have the name 'a' \(--model\)": (
                "--model", f"a={model}", "--model", f"a={model}"),
            r"/nowhere/m\.gguf: no such file \(--model\)": (model, "--model", "a=/nowhere/m.gguf"),
            r"give a MODEL, or --model NAME=MODEL": (),
            r"temperature = -1\.0 must be .* \(--temp\)": (model, *OPTIONS, "--temp", "-1"),
            r".*a second --alias.*": (
                model, "--alias", "a", "--alias", "b", "--model", f"c={model}"),
            r".*none has no API key": (model, *OPTIONS, "--api-key-file", tmp_path / "none"),
        }  # fmt: skip
        processes = [serve(*words) for words in cases.values()]
        for process, line in zip(processes, cases):
            try:
                out, error = process.communicate(timeout=60)
            finally:
                process.kill()
            assert (process.returncode, out) == (1, "")
            assert re.fullmatch(rf"error: {line}\n", error), error


def test_other_verbs_do_not_import_the_server(model):
    code = (
        "import sys; from graphllm.cli import main; sys.argv[1:] = sys.argv[2:]; main(); "
        "print(*sorted({'starlette', 'uvicorn', 'prometheus_client'} & set(sys.modules)))"
    )
    words = [sys.executable, "-c", code, "x", "tokenize", str(model), "hello", "--ids"]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[1:] == [""]


def test_a_time_slice_is_shortened_without_a_change_of_priority():
    """The kernel knows the length, from Linux 6.12; no other attribute of the thread changes."""
    release = tuple(map(int, re.findall(r"\d+", platform.release())[:2]))
    if platform.machine() != "x86_64" or release < (6, 12):
        pytest.skip("the kernel has no time slices of threads")

    def attributes() -> tuple[int, ...]:
        found = ctypes.create_string_buffer(48)
        assert ctypes.CDLL(None).syscall(315, 0, found, 48, 0) == 0  # sched_getattr
        return struct.unpack("=IIQiIQQQ", found.raw)

    def both() -> tuple[tuple[int, ...], tuple[int, ...]]:
        before = attributes()
        shorten_time_slice(200_000)
        return before, attributes()

    with ThreadPoolExecutor(1) as thread:
        before, after = thread.submit(both).result()
    assert after == (*before[:5], 200_000, *before[6:])
