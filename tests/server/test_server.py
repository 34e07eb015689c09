"""The HTTP server, run by uvicorn on a port of its own: answers, streams, errors, disconnects."""

from __future__ import annotations

import gc
import http.client
import json
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import idle_engine
import pytest
import tiny_models as tiny
from running_server import KEY, MODEL, Running

import graphllm

MAX_BODY = 100_000
CHAT, COMPLETE = "/v1/chat/completions", "/v1/completions"
MESSAGES = [{"role": "user", "content": "hello </s> <|user|>"}]
SAMPLED = {"temperature": 0.9, "ignore_eos": True}
# What the server sets where a request sets nothing.
DEFAULTS = {"top_p": 1.0, "top_k": 0, "penalty_last_n": -1, "temperature": 1.0}


@pytest.fixture(scope="module")
def llm(tmp_path_factory) -> graphllm.LLM:
    path = tiny.write_tiny(tmp_path_factory.mktemp("server") / "tiny.gguf", "llama")
    return graphllm.load(path, device="cpu", threads=1, max_sequences=8, chat_template="zephyr")


@pytest.fixture(scope="module")
def server(llm) -> Iterator[Running]:
    running = Running(llm, keys=["other", KEY], max_body=MAX_BODY)
    yield running
    running.stop()


@pytest.fixture(autouse=True)
def nothing_is_left(llm):
    yield
    gc.collect()
    idle_engine.check(llm)


def text_of(events: list[dict[str, Any]], index: int = 0) -> str:
    """The text of a choice of a stream."""
    pieces = [c for event in events for c in event["choices"] if c["index"] == index]
    return "".join(p["delta"].get("content", "") if "delta" in p else p["text"] for p in pieces)


def test_errors_do_not_name_the_folder_of_the_model(tmp_path):
    """What a client could learn of the file system: a model without a chat template, for one."""
    (tmp_path / "secret folder").mkdir()
    path = tiny.write_tiny(tmp_path / "secret folder" / "tiny.gguf", "llama")
    with graphllm.load(path, device="cpu", threads=1) as own:
        server = Running(own)
        answers = [server.call(CHAT, {"messages": MESSAGES})]
        answers += [server.call(path) for path in ("/v1/models", "/props", "/slots", "/metrics")]
        server.stop()
    status, found = answers[0]
    assert status == 400 and found["error"]["message"].startswith("tiny.gguf")
    for answer in answers:
        assert "secret folder" not in json.dumps(answer) and str(tmp_path) not in json.dumps(answer)


def test_many_clients_get_what_they_get_alone(llm, server):
    """Chats and completions, whole and streamed, all at once."""
    asks = [SAMPLED | {"seed": i, "max_tokens": 4 + i % 9, "min_p": 0.02 * (i % 3)}
            for i in range(16)]  # fmt: skip
    want = [
        llm.chat(MESSAGES, **DEFAULTS | ask) if i % 2 else llm.generate("hello", **DEFAULTS | ask)
        for i, ask in enumerate(asks)
    ]

    def ask(i: int) -> tuple[str, dict[str, Any]]:
        path, own = (CHAT, {"messages": MESSAGES}) if i % 2 else (COMPLETE, {"prompt": "hello"})
        own = {**own, **asks[i], "model": MODEL, "unknown": [1]}
        if i % 4 < 2:
            status, found = server.call(path, own)
            assert status == 200, found
            (choice,) = found["choices"]
            return choice["message"]["content"] if i % 2 else choice["text"], found["usage"]
        events = server.events(path, **own, stream_options={"include_usage": True})
        assert len({event["id"] for event in events}) == 1 and events[-1]["choices"] == []
        assert events[-2]["choices"][0]["finish_reason"] == "length"
        assert all(event["usage"] is None for event in events[:-1])
        return text_of(events), events[-1]["usage"]

    with ThreadPoolExecutor(16) as pool:
        found = list(pool.map(ask, range(16)))
    assert [text for text, _ in found] == [done.text for done in want]
    for (_, usage), done in zip(found, want):
        cached = usage.pop("prompt_tokens_details")["cached_tokens"]
        assert 0 <= cached < len(done.prompt_ids)
        counts = len(done.prompt_ids), len(done.ids)
        names = ("prompt_tokens", "completion_tokens", "total_tokens")
        assert usage == dict(zip(names, (*counts, sum(counts))))


def test_samples_prompts_and_stops(llm, server):
    ask = SAMPLED | {"seed": 5, "max_tokens": 12}
    prompts = ["hello", "what"]
    want = llm.generate(prompts, n=3, **DEFAULTS | ask)
    texts = [each.text for done in want for each in done.choices]
    _, found = server.call(COMPLETE, {"prompt": prompts, "n": 3, **ask})
    assert [choice["text"] for choice in found["choices"]] == texts
    assert [choice["index"] for choice in found["choices"]] == list(range(6))
    assert found["usage"]["completion_tokens"] == 72
    assert found["usage"]["prompt_tokens"] == sum(len(done.prompt_ids) for done in want)
    events = server.events(COMPLETE, prompt=[list(done.prompt_ids) for done in want], n=3, **ask)
    assert [text_of(events, index) for index in range(6)] == texts
    stop = texts[0][3:5]
    _, found = server.call(COMPLETE, {"prompt": "hello", "stop": ["nowhere", stop], **ask})
    (choice,) = found["choices"]
    assert (choice["text"], choice["finish_reason"]) == (texts[0].partition(stop)[0], "stop")
    (token,) = {done.ids[0] for done in want[:1]}
    biased = {"prompt": "hello", **ask, "logit_bias": {str(token): -100}, "seed": -1}
    bans = {"logit_bias": {token: -100}, "seed": 2**63 - 1}
    _, found = server.call(COMPLETE, biased)
    assert found["choices"][0]["text"] == llm.generate("hello", **DEFAULTS | ask | bans).text


def test_logprobs_and_echo(llm, server):
    ask = SAMPLED | {"seed": 2, "max_tokens": 6}
    done = llm.generate("hello", logprobs=3, prompt_logprobs=3, **DEFAULTS | ask)
    _, found = server.call(COMPLETE, {"prompt": "hello", "logprobs": 3, "echo": True, **ask})
    (choice,) = found["choices"]
    assert choice["text"] == f"hello{done.text}"
    every = [*done.prompt_logprobs, *done.logprobs]
    assert choice["logprobs"]["token_logprobs"] == [None, *(each.logprob for each in every)]
    assert all(3 <= len(top) <= 4 for top in choice["logprobs"]["top_logprobs"][1:])
    for prompt, most, tokens in (([5], 2, 3), ("hello", 0, len(done.prompt_ids))):
        body = {"prompt": prompt, "logprobs": 1, "echo": True, **ask, "max_tokens": most}
        listed = server.call(COMPLETE, body)[1]["choices"][0]["logprobs"]
        assert [value is None for value in listed["token_logprobs"]] == [True] + [False] * (
            tokens - 1
        )

    chat = llm.chat(MESSAGES, logprobs=2, **DEFAULTS | ask)
    want = [[(llm.tokenizer.piece(i), value) for i, value in [(each.id, each.logprob), *each.top]]
            for each in chat.logprobs]  # fmt: skip
    body = {"messages": MESSAGES, "logprobs": True, "top_logprobs": 2, **ask}
    _, whole = server.call(CHAT, body)
    pieces = [event["choices"][0]["logprobs"] for event in server.events(CHAT, **body)]
    streamed = [token for piece in pieces if piece for token in piece["content"]]
    for tokens in (whole["choices"][0]["logprobs"]["content"], streamed):
        listed = [[token, *token["top_logprobs"]] for token in tokens]
        assert [[(bytes(t["bytes"]), t["logprob"]) for t in row] for row in listed] == want


def test_tools_of_the_tokenizer(llm, server):
    text = "hello </s>"
    ids = llm.tokenizer.encode(text, add_special=True, parse_special=False)
    assert server.call("/tokenize", {"content": text, "add_special": True}) == (
        200, {"tokens": list(ids)}
    )  # fmt: skip
    _, found = server.call("/tokenize", {"content": text, "parse_special": True})
    assert found["tokens"][-1] == llm.tokenizer.eos_id != ids[-1]
    assert server.call("/detokenize", {"tokens": found["tokens"]}) == (200, {"content": text})
    assert server.call("/detokenize", {"tokens": []}) == (200, {"content": ""})
    _, prompt = server.call("/apply-template", {"messages": MESSAGES})
    assert prompt == {"prompt": llm.template.render(MESSAGES)}
    _, models = server.call("/v1/models")
    assert [each["id"] for each in models["data"]] == [MODEL]
    assert server.call(f"/v1/models/{MODEL}")[1] == models["data"][0]
    assert server.call("/health", key=None) == (200, {"status": "ok"})
    status, metrics = server.call("/metrics")
    assert status == 200 and "graphllm_sequences_running 0.0" in metrics
    assert 'graphllm_http_responses_total{path="/tokenize",status="200"}' in metrics


HELLO = {"messages": MESSAGES}
BAD = [  # path, body, status, param, code
    (COMPLETE, b"{", 400, None, None),
    (COMPLETE, b"[" * 50_000, 400, None, None),
    (COMPLETE, b'{"prompt": "\xff"}', 400, None, None),
    (COMPLETE, b'{"prompt": "a", "temperature": NaN}', 400, None, None),
    (COMPLETE, [], 400, None, None),
    (COMPLETE, {}, 400, "prompt", "missing_required_parameter"),
    (COMPLETE, {"prompt": 3}, 400, "prompt", None),
    (COMPLETE, {"prompt": ["a", 3]}, 400, "prompt", None),
    (COMPLETE, {"prompt": [[]]}, 400, "prompt", None),
    (COMPLETE, {"prompt": [10**6]}, 400, "prompt", None),
    (COMPLETE, {"prompt": "a", "n": 0}, 400, "n", None),
    (COMPLETE, {"prompt": ["a"] * 65, "n": 2}, 400, "n", None),
    (COMPLETE, {"prompt": "a", "suffix": "b"}, 400, "suffix", "unsupported_value"),
    (COMPLETE, {"prompt": "a", "logprobs": True}, 400, "logprobs", None),
    (COMPLETE, {"prompt": "a", "echo": True, "logprobs": 1, "stream": True}, 400, "echo", None),
    (COMPLETE, {"prompt": "hello " * 200}, 400, "prompt", "context_length_exceeded"),
    (COMPLETE, {"prompt": "hello " * 200, "stream": True}, 400, "prompt",
     "context_length_exceeded"),
    (COMPLETE, {"prompt": "a" * MAX_BODY}, 413, None, "request_too_large"),
    (CHAT, {"messages": "hi"}, 400, "messages", None),
    (CHAT, {"messages": [{"role": "user"}]}, 400, "messages", None),
    (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, 400, "messages",
     None),
    (CHAT, HELLO | {"model": "../../etc/passwd"}, 404, "model", "model_not_found"),
    (CHAT, HELLO | {"model": 7}, 400, "model", None),
    (CHAT, HELLO | {"stream": "yes"}, 400, "stream", None),
    (CHAT, HELLO | {"stream_options": {"include_usage": True}}, 400, "stream_options", None),
    (CHAT, HELLO | {"temperature": "hot"}, 400, "temperature", None),
    (CHAT, HELLO | {"temperature": 2.5}, 400, "temperature", None),
    (CHAT, HELLO | {"top_k": 1.5}, 400, "top_k", None),
    (CHAT, HELLO | {"seed": 2**63}, 400, "seed", None),
    (CHAT, HELLO | {"max_tokens": 3, "max_completion_tokens": 3}, 400, "max_completion_tokens",
     None),
    (CHAT, HELLO | {"top_logprobs": 2}, 400, "top_logprobs", None),
    (CHAT, HELLO | {"stop": ["a"] * 10_000}, 400, "stop", None),
    (CHAT, HELLO | {"stop": "a" * 2_000}, 400, "stop", None),
    (CHAT, HELLO | {"logit_bias": {"x": 1}}, 400, "logit_bias", None),
    (CHAT, HELLO | {"logit_bias": {"1": 101}}, 400, "logit_bias", None),
    (CHAT, HELLO | {"logit_bias": {"1": "a"}}, 400, "logit_bias", None),
    (CHAT, HELLO | {"tools": [{"type": "function"}]}, 400, "tools[0].function", None),
    (CHAT, {"messages": ["hi", 7], "tools": [{"type": "function", "function": {"name": "a"}}]}, 400,
     "messages", None),
    (CHAT, HELLO | {"functions": [{"name": "add"}]}, 400, "functions", "unsupported_value"),
    ("/tokenize", {"content": None}, 400, "content", "missing_required_parameter"),
    ("/detokenize", {"tokens": [-1]}, 400, "tokens", None),
    ("/nowhere", {}, 404, None, None),
    ("/health", {}, 405, None, None),
    ("/v1/models/else", None, 404, "model", "model_not_found"),
]  # fmt: skip


@pytest.mark.parametrize("case", range(len(BAD)))
def test_bad_requests(server, case):
    """Each is refused with the right status, field and code, and nothing is computed."""
    path, body, status, param, code = BAD[case]
    found, answer = server.call(path, body)
    assert found == status, answer
    error = answer["error"]
    assert (error["param"], error["code"]) == (param, code), error
    assert error["type"] == "not_found_error" if path == "/nowhere" else "invalid_request_error"
    assert 0 < len(error["message"]) < 400 and "\n" not in error["message"]


def test_other_values_that_are_accepted(server):
    """Null is absent; a response format of text, and a lone surrogate, are no errors."""
    body = HELLO | {"n": None, "stop": None, "seed": None, "tools": [], "max_tokens": 1,
                    "response_format": {"type": "text"}, "top_p": 0}  # fmt: skip
    assert server.call(CHAT, body)[0] == 200
    assert server.call(COMPLETE, {"prompt": "\ud800", "max_tokens": 0, "echo": True})[0] == 200


def test_keys_and_content_types(server):
    body = {"content": "a"}
    for key in (None, "", "secre", "secrets", "s\xe9cret"):
        status, answer = server.call("/tokenize", body, key)
        assert (status, answer["error"]["code"]) == (401, "invalid_api_key")
    basic = {"Authorization": f"Basic {KEY}"}
    assert server.call("/tokenize", body, None, **basic)[0] == 401
    assert server.call("/tokenize", body, "other")[0] == 200
    kinds = {"Content-Type": "application/json; charset=utf-8"}
    assert server.call("/tokenize", body, **kinds)[0] == 200
    for kind in ("text/plain", ""):
        assert server.call("/tokenize", body, **{"Content-Type": kind})[0] == 415


def test_a_chunked_body_is_bounded_while_it_is_read(server):
    connection = server.connect()
    head = f"POST {COMPLETE} HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer {KEY}\r\n"
    head += "Content-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n"
    connection.connect()
    connection.sock.sendall(head.encode())
    chunk = b"2710\r\n" + b" " * 10_000 + b"\r\n"
    sent = 0
    while not (answer := peek(connection.sock)):
        connection.sock.sendall(chunk)
        sent += 10_000
        assert sent < 100 * MAX_BODY
    assert answer.startswith(b"HTTP/1.1 413")
    connection.close()


def peek(own: socket.socket) -> bytes:
    """What has come on a socket."""
    own.settimeout(0.01)
    try:
        return own.recv(100)
    except TimeoutError:
        return b""
    finally:
        own.settimeout(60)


@pytest.fixture
def slow(llm, monkeypatch):
    """Each decode step takes at least 5 ms."""
    runner = llm.engine.batcher.runner
    decode = runner.decode
    monkeypatch.setattr(runner, "decode", lambda *step: (time.sleep(0.005), decode(*step)))


def begin(
    server: Running, path: str = COMPLETE, **body: Any
) -> tuple[http.client.HTTPConnection, Any]:
    """A connection on which a long request runs."""
    connection = server.connect()
    body = {"prompt": "hello", "max_tokens": 120, **SAMPLED, **body}
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {KEY}"}
    connection.request("POST", path, json.dumps(body), headers)
    response = connection.getresponse() if body.get("stream") else None
    return connection, response


def wait_until(condition) -> None:
    for _ in range(2000):
        if condition():
            return
        time.sleep(0.005)
    raise AssertionError("never true")


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_disconnects_cancels_its_request(llm, server, slow, stream):
    """Of 12 requests, 8 run and 4 wait; all of their clients vanish."""
    engine = llm.engine
    before = engine.batcher.steps
    connections = [begin(server, stream=stream, seed=i) for i in range(12)]
    wait_until(lambda: len(engine.batcher.generations) == 12)
    for connection, response in connections:
        if response is not None:
            response.close()
        connection.close()
    wait_until(lambda: not engine.batcher.generations)
    assert engine.batcher.steps - before < 120, "no request was computed to its end"


def test_a_slow_reader_does_not_stall_the_others(llm, server):
    """Its response is larger than all buffers between server and client."""
    body = HELLO | {"n": 24, "max_tokens": 80, "logprobs": True, "top_logprobs": 20, "stream": True}
    connection, response = begin(server, CHAT, **body)
    want = llm.generate("hello", seed=3, max_tokens=20, **DEFAULTS | SAMPLED).text
    body = {"prompt": "hello", "seed": 3, "max_tokens": 20, **SAMPLED}
    for _ in range(4):
        assert server.call(COMPLETE, body)[1]["choices"][0]["text"] == want
    text = response.read().decode()
    assert text.endswith("data: [DONE]\n\n") and len(text) > 2_000_000
    connection.close()


def test_a_failure_of_the_server_is_not_explained_to_the_client(llm, server, monkeypatch, capfd):
    def fail(*arguments: Any) -> None:
        raise ValueError("a secret\nof the server")

    monkeypatch.setattr(llm, "encode_chat", fail)
    status, answer = server.call(CHAT, HELLO)
    assert (status, answer["error"]["type"]) == (500, "server_error")
    assert "secret" not in str(answer)
    assert capfd.readouterr().err == "error: ValueError: a secret\\nof the server\n"


@pytest.mark.parametrize("shutdown_s", [30, 0])
def test_shutdown(llm, slow, shutdown_s):
    """Running requests end, or are cancelled after the timeout; others are refused meanwhile."""
    server = Running(llm, shutdown_s)
    streaming, stream = begin(server, stream=True, max_tokens=100)
    waiting, _ = begin(server, max_tokens=100)
    wait_until(lambda: len(llm.engine.batcher.generations) == 2)
    server.server.should_exit = True
    *_, last, end = stream.read().decode().split("\n\n")
    answer = waiting.getresponse()
    body = json.load(answer)
    if shutdown_s:
        assert last == "data: [DONE]" and answer.status == 200
        assert body["usage"]["completion_tokens"] == 100
    else:
        assert answer.status == 503 and body["error"]["code"] == "server_stopping"
        assert json.loads(last.removeprefix("data: ")) == body
    assert not end
    streaming.close()
    waiting.close()
    server.stop()
    with pytest.raises(ConnectionRefusedError):
        server.call("/health")


def test_a_request_has_its_bill(server):
    """By field and by header, whole and streamed; the rows add up to the time of the request."""
    ask = {"prompt": "hello", "max_tokens": 6, "ignore_eos": True}
    start = time.perf_counter_ns()
    status, found = server.call(COMPLETE, ask | {"x_profile": True, "n": 2})
    around = time.perf_counter_ns() - start
    assert status == 200 and found["x_profile"]["wall_ns"] <= around  # nothing is counted twice
    streamed = server.events(CHAT, messages=MESSAGES, max_tokens=6, x_profile=True)
    by_header = server.call(COMPLETE, ask, **{"X-Profile": "1"})[1]
    assert all("x_profile" not in event for event in streamed[:-1])
    other = {"input": "hello", "max_output_tokens": 6, "x_profile": True}
    response = server.call("/v1/responses", other)[1]
    for answer in (found, streamed[-1], by_header, response):
        bill = answer["x_profile"]
        times = {row["name"]: row["ns"] for row in bill["rows"]}
        assert sum(times.values()) == pytest.approx(bill["wall_ns"], rel=0.001)
        assert min(times[cause] for cause in ("http", "host", "prompt", "queue")) > 0
        assert sum(row.get("flops", 0) for row in bill["rows"]) > 0
    assert "x_profile" not in server.call(COMPLETE, ask)[1]
    for refused in ({"x_profile": 3}, {"x_profile": True, "prompt": ["a", "b"]}):
        status, error = server.call(COMPLETE, ask | refused)
        assert status == 400 and error["error"]["param"] == "x_profile"
    text = server.call("/metrics")[1]
    assert 'graphllm_op_seconds_total{op="linear' in text
    assert 'graphllm_request_seconds_total{cause="queue"}' in text
