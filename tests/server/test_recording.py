"""Recordings of a server: exact replay, differences that are named, torn and invalid files."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import tiny_models as tiny
from faulty_kernels import inject_fault
from running_server import Running
from typer.testing import CliRunner

import graphllm
from graphllm.api.recording import Recording, read_recording
from graphllm.cli import app
from graphllm.errors import RequestError
from graphllm.server.metrics import Metrics

COMPLETE = "/v1/completions"
OPTIONS = {"device": "cpu", "threads": 1, "context": 128}


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return tiny.write_tiny(tmp_path_factory.mktemp("recording") / "tiny.gguf", "llama")


@pytest.fixture(scope="module")
def lines(model) -> list[str]:
    """A recording of 16 sampled requests at once, some of them streamed, one cut off."""
    file = model.with_name("traffic.jsonl")
    recording = Recording(file, {"model": str(model), "options": OPTIONS}, pytest.fail)
    with graphllm.load(model, **OPTIONS, max_sequences=16) as llm:
        server = Running(llm, recording=recording)

        def ask(i: int) -> None:
            own = {"prompt": "hello " * (i + 1), "max_tokens": 4 + i, "temperature": 1.2,
                   "ignore_eos": i % 2 == 0, "logit_bias": {"7": 2}, "n": 1 + i % 3 // 2, "seed": i,
                   "frequency_penalty": 0.1 * (i % 4)}  # fmt: skip
            if i % 2:
                assert server.call(COMPLETE, own)[0] == 200
            else:
                assert server.events(COMPLETE, **own)

        with ThreadPoolExecutor(16) as pool:
            list(pool.map(ask, range(16)))
        server.stop()
    recording.close()
    assert file.stat().st_mode & 0o077 == 0
    return file.read_text().splitlines()


@pytest.mark.parametrize("stream", [False, True])
def test_requests_whose_step_fails_end_and_are_recorded(model, tmp_path, monkeypatch, stream):
    """All prompts of the request, also after an error that is a defect of the server. Those that
    have not failed by the time of the first failure are cancelled."""
    file = tmp_path / "failed.jsonl"
    recording = Recording(file, {"model": str(model), "options": OPTIONS}, pytest.fail)
    with graphllm.load(model, **OPTIONS, max_sequences=4) as llm:
        server, runner = Running(llm, recording=recording), llm.engine.batcher.runner

        def fail(*step: Any) -> None:
            raise ValueError("a defect")

        counted: list[Any] = []
        monkeypatch.setattr(Metrics, "count", lambda _, done: counted.append(done))
        monkeypatch.setattr(runner, "decode", fail)
        body = {"prompt": ["a", "b", "c"], "max_tokens": 9, "ignore_eos": True, "stream": stream}
        status, found = server.call(COMPLETE, body)
        assert status == (200 if stream else 500) and "server_error" in str(found)
        server.stop()
        assert not llm.engine.batcher.generations and len(counted) == 3
    recording.close()
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    ends = [line.get("error", line["finish_reason"][0]) for line in lines if "answer" in line]
    assert "a defect" in ends[0] and len(ends) == 3
    assert all("a defect" in end or end == "cancelled" for end in ends)


@pytest.fixture
def replayed(tmp_path) -> Iterator[Any]:
    def run(lines: list[str], *flags: str, end: str = "\n") -> tuple[int, Any]:
        file = tmp_path / "copy.jsonl"
        file.write_text("\n".join(lines) + end)
        result = CliRunner().invoke(app, ["replay", str(file), *flags, "--json"])
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            return 1, str(result.exception)
        return result.exit_code, json.loads(result.stdout)

    yield run


def answers(lines: list[str]) -> list[int]:
    return [at for at, line in enumerate(lines) if '"answer"' in line]


@pytest.mark.parametrize("parallel", [1, 5])
def test_a_replay_at_any_batch_size_gives_the_same_tokens(lines, replayed, parallel):
    code, found = replayed(lines, "--parallel", str(parallel))
    assert code == 0 and found["difference"] is None and found["skipped"] == []
    recorded = [json.loads(lines[at])["tokens"] for at in answers(lines)]
    assert found["requests"] == 16
    assert found["tokens"] == sum(len(ids) for samples in recorded for ids in samples) > 100


def test_a_changed_token_is_named(lines, replayed):
    at = answers(lines)[3]
    answer = json.loads(lines[at])
    was = answer["tokens"][0][2]
    answer["tokens"][0][2] = was + 1
    code, found = replayed([*lines[:at], json.dumps(answer), *lines[at + 1 :]])
    own = found["difference"]
    assert code == 1
    assert (own["position"], own["recorded"], own["replayed"]) == (2, was + 1, was)
    number = next(n for n, line in enumerate(lines, 1) if f'"request":{answer["answer"]},' in line)
    assert own["where"].endswith(f"copy.jsonl:{number}")
    assert own["lines"][0].startswith(f"recorded: {was + 1}, logit ")
    assert "no op of cpu diverges from reference" in own["lines"][-1]
    answer["tokens"][0] = answer["tokens"][0][:2]  # ends too early
    own = replayed([*lines[:at], json.dumps(answer), *lines[at + 1 :]])[1]["difference"]
    assert (own["position"], own["recorded"], own["replayed"]) == (2, None, was)


def test_the_op_that_differs_is_named(lines, replayed, monkeypatch):
    inject_fault(monkeypatch, "linear", "model.layers.1.self_attn.o_proj", "w", factor=5)
    code, found = replayed(lines, "--no-fuse", "all")
    text = "\n".join(found["difference"]["lines"])
    assert code == 1 and "first divergence" in text and "cpu kernel faulty" in text
    assert "model.layers.1.self_attn.o_proj: linear" in text
    assert "no_fuse = ['all'], recorded with None" in text


def test_another_device_and_drafts_are_named(lines, replayed):
    head = json.loads(lines[0]) | {"device": "cuda", "speculate": "auto"}
    code, found = replayed([json.dumps(head), *lines[1:]])
    assert code == 0 and found["difference"] is None
    at = answers(lines)[3]
    answer = json.loads(lines[at])
    answer["tokens"][0][2] += 1
    code, found = replayed([json.dumps(head), *lines[1:at], json.dumps(answer), *lines[at + 1 :]])
    said = found["difference"]["lines"][:2]
    assert said == [
        "speculate = off, recorded with auto",
        "device in use = cpu, recorded with cuda",
    ]
    other = json.dumps(head | {"device": "cpu"})
    assert "another model, device" in replayed([json.dumps(head), other])[1]


def test_torn_and_invalid_lines(lines, replayed):
    """What a killed process leaves is reported; anything else is an error that names the line."""
    torn = lines[-1][: len(lines[-1]) // 2]
    code, found = replayed([*lines[:-1], torn], end="")
    assert code == 0 and found["requests"] == 15
    first, second = found["skipped"]
    assert first.endswith(f"copy.jsonl:{len(lines)}: the line is cut off")
    assert second == "1 of 16 requests: no answer, the server ended first"
    code, found = replayed([*lines[:-1], torn, *lines])  # the server was started again
    assert code == 0 and found["requests"] == 31
    for wrong, message in {
        "{}": "not a new request", "[]": "not an object", "1 1": "not JSON",
        '{"request": 99, "prompt": [1.5]}': "no prompt and sampling",
        '{"request": 99, "prompt": [1], "sampling": {"top_k": -1, "seed": 1}}': "top_k = -1",
        '{"request": 99, "prompt": [1], "sampling": {}}': "no seed",
        '{"answer": 99}': "nor the answer to one",
        '{"answer": 1, "tokens": [["x"]], "finish_reason": ["stop"]}': "lists of token ids",
    }.items():  # fmt: skip
        code, error = replayed([*lines[:1], lines[1], wrong, *lines[2:]])
        assert code == 1 and "copy.jsonl:3: " in error and message in error
    assert "not the head" in replayed(lines[1:])[1]
    assert "the file is empty" in replayed([], end="")[1]


def test_a_recording_is_bounded_and_never_replaces_another(tmp_path, model):
    file, head, said = tmp_path / "r.jsonl", {"model": "m", "options": {}}, []
    recording = Recording(file, head, said.append, limit=600)
    numbers = [recording.request([1, 2], {"seed": 3}, 0) for _ in range(20)]
    assert numbers == list(range(1, 21)) and file.stat().st_size <= 600
    assert len(said) == 1 and "it has reached 600 bytes" in said[0]
    found = read_recording(file)
    assert 0 < len(found.requests) < 20 and found.requests[0].sampling.seed == 3
    with pytest.raises(RequestError, match="has a recording with model = 'm', not 'other'"):
        Recording(file, head | {"model": "other"}, said.append)
    Recording(file, head, said.append).close()
    assert len(read_recording(file).requests) == len(found.requests)
    file.write_text("some text")
    with pytest.raises(RequestError, match=r"r.jsonl:1: the line is cut off"):
        Recording(file, head, said.append)
    Recording(Path("/dev/full"), head, said.append).request([1], {"seed": 1}, 0)
    assert "--record /dev/full: the recording ends: No space left" in said[-1] and len(said) == 2


@pytest.mark.long
def test_a_killed_server_starts_again_and_its_recording_is_replayed(model, tmp_path, replayed):
    """Kills while the model is loaded, with an empty cache of kernels, and while answers stream."""
    file = tmp_path / "killed.jsonl"
    flags = ["--port", "0", "-c", "128", "--device", "cpu", "--record", str(file)]
    command = [sys.executable, "-m", "graphllm", "serve", str(model), *flags]
    env = {**os.environ, "GRAPHLLM_CACHE": str(tmp_path / "cache")}

    def post(process: subprocess.Popen[str], **body: Any) -> Any:
        assert process.stderr is not None
        line = next(line for line in process.stderr if "is served at" in line)
        data = json.dumps({"prompt": "hello", "ignore_eos": True, **body}).encode()
        head = {"Content-Type": "application/json"}
        url = line.split(" at ")[1].strip() + "/completions"
        return urllib.request.urlopen(urllib.request.Request(url, data, head), timeout=60)

    for seconds in (0.5, 1.0, 1.5, 2.0, 3.0):
        with subprocess.Popen(command, stderr=subprocess.DEVNULL, env=env) as process:
            time.sleep(seconds)
            os.kill(process.pid, signal.SIGKILL)
    for _ in range(2):
        with (
            subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=env) as process,
            post(process, max_tokens=110, n=4, stream=True) as stream,
        ):
            assert stream.readline().startswith(b"data: ")
            os.kill(process.pid, signal.SIGKILL)
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=env) as process:
        post(process, max_tokens=40, n=4, seed=5).read()
        process.terminate()
        assert process.wait(30) == 0
    code, found = replayed(file.read_text().splitlines(), "--parallel", "3")
    assert code == 0 and found["difference"] is None
    assert found["requests"] == 1 and found["tokens"] == 4 * 40
    assert found["skipped"][-1] == "2 of 3 requests: no answer, the server ended first"


def test_a_killed_server_leaves_a_recording(model, tmp_path, replayed):
    file = tmp_path / "killed.jsonl"
    flags = ["--port", "0", "-c", "128", "--device", "cpu", "--record", str(file)]
    command = [sys.executable, "-m", "graphllm", "serve", str(model), *flags]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        line = next(line for line in process.stderr if "is served at" in line)
        url = line.split(" at ")[1].strip() + "/completions"

        def post(**body: Any) -> Any:
            data = json.dumps({"prompt": "hello", **body}).encode()
            head = {"Content-Type": "application/json"}
            return urllib.request.urlopen(urllib.request.Request(url, data, head), timeout=60)

        post(max_tokens=5, n=2).read()
        with post(max_tokens=100, ignore_eos=True, stream=True) as stream:
            stream.readline()
            os.kill(process.pid, signal.SIGKILL)
    code, found = replayed(file.read_text().splitlines())
    assert code == 0 and found["requests"] == 1
    assert found["skipped"] == ["1 of 2 requests: no answer, the server ended first"]
