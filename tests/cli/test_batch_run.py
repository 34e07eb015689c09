"""``run -f FILE.jsonl -o FILE``: requests in lines, answers in lines, interrupted and continued."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import tiny_models as tiny
from pseudo_terminal import at_terminal, without_progress

import graphllm
from graphllm.cli.answer_file import AnswerFile
from graphllm.cli.batch_run import run_batch
from graphllm.cli.output import OutputError
from graphllm.cli.prompt_lines import PromptFile
from graphllm.engine.request import Sampling
from graphllm.errors import RequestError

COMMAND = [sys.executable, "-m", "graphllm", "run"]
FLAGS = ["-n", "5", "--temp", "0.9", "--ignore-eos", "-t", "1"]
DEFAULTS = Sampling(max_tokens=5, temperature=0.9, ignore_eos=True)
TEXTS = ["hello", "what is", "a", "hello there", "the quick brown fox"]
MESSAGES = [{"role": "user", "content": "hello"}]


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return tiny.write_llama(tmp_path_factory.mktemp("batch") / "tiny.gguf", tiny.llama_weights())


@pytest.fixture(scope="module")
def llm(path):
    return graphllm.load(path, device="cpu", threads=1, chat_template="zephyr", max_sequences=4)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write(lines: list, name: str = "p.jsonl") -> Path:
    """Write lines, each a string of JSON or a value."""
    texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    Path(name).write_text("".join(f"{text}\n" for text in texts))
    return Path(name)


def read(name: str = "a.jsonl") -> list[dict]:
    return [json.loads(line) for line in Path(name).read_text().splitlines()]


def check_length(llm, ids) -> None:
    if len(ids) > llm.limits.context:
        raise RequestError(f"the prompt has {len(ids)} tokens", "context")


def run(llm, prompts: Path, output: str | None = "a.jsonl", parallel: int = 2, **more) -> None:
    file = PromptFile(prompts, more.pop("sampling", DEFAULTS), **more)
    run_batch(file, Path(output) if output else None, parallel, lambda: llm, check_length)


def many(count: int) -> list:
    return [{"prompt": TEXTS[i % 5] + str(i), "seed": i, "max_tokens": 2 + i % 7, "id": f"r{i}"}
            for i in range(count)]  # fmt: skip


# ------------------------------------------------------------------------------------------- lines


def test_lines_of_all_kinds(llm, folder):
    lines = [
        '"hello"',
        "  ",
        {"prompt": "what is", "temp": 0, "max_tokens": 3, "id": 7},
        {"prompt": [5, 6, 7], "seed": 3, "logit_bias": {"8": 100}, "max_new_tokens": 2},
        {"messages": MESSAGES, "seed": 1, "stop": ["e", "a"], "id": "chat"},
        {"prompt": "hello", "seed": 2**40, "allowed_ids": [5, 6]},
    ]
    run(llm, write(lines))
    found = read()
    assert [each["index"] for each in found] == [0, 1, 2, 3, 4]
    assert [each.get("id") for each in found] == [None, 7, None, "chat", None]
    base = {"sampling": DEFAULTS}
    seed = found[0]["seed"]
    for have, want in zip(found, [
        llm.generate("hello", **base, seed=seed),
        llm.generate("what is", **base, temp=0, max_tokens=3),
        llm.generate([5, 6, 7], **base, seed=3, logit_bias={8: 100}, max_tokens=2),
        llm.chat(MESSAGES, **base, seed=1, stop=["e", "a"]),
        llm.generate("hello", **base, seed=2**40, allowed_ids=[5, 6]),
    ]):  # fmt: skip
        assert (have["tokens"], have["text"]) == (want.ids, want.text)
        assert have["finish_reason"] == want.finish_reason
        assert have["prompt_tokens"] == len(want.prompt_ids)
    assert found[2]["tokens"] == [8, 8] and seed != found[1]["seed"]


def test_chats_with_a_system_message(llm, folder):
    system = {"role": "system", "content": "Be brief."}
    own = {"role": "system", "content": "Be long."}
    lines = ['"hello"', {"messages": MESSAGES}, {"messages": [own, *MESSAGES]}, {"prompt": [5]}]
    run(llm, write(lines), chat=True, system="Be brief.", sampling=Sampling(temperature=0))
    want = [llm.chat([first, *MESSAGES], temperature=0) for first in (system, system, own)]
    want.append(llm.generate([5], temperature=0))
    assert [each["text"] for each in read()] == [done.text for done in want]


LONG = "hello " * 300
BAD_LINES = [
    ("{", "is not JSON: Expecting property name"),
    ("hello", "is not JSON: Expecting value"),
    ("5", "5 must be a string or an object"),
    ('["a"]', "['a'] must be a string or an object"),
    ("{}", "the line must have either a prompt or messages"),
    ({"prompt": "a", "messages": MESSAGES}, "the line must have either a prompt or messages"),
    ({"prompt": None}, "prompt = None must be a string or token ids"),
    ({"prompt": ["a", "b"]}, "takes one prompt"),
    ({"prompt": []}, "the prompt is empty"),
    ({"prompt": [1.5]}, "the element 1.5, which is not a token id"),
    ({"messages": "hello"}, "takes a list of messages"),
    ({"messages": [{"role": "user"}]}, "message 0 has no content"),
    ({"messages": []}, "needs at least one message"),
    ({"prompt": "a", "id": 1.5}, "id = 1.5 must be a string or an integer"),
    ({"prompt": "a", "id": True}, "id = True must be a string or an integer"),
    ({"prompt": "a", "temprature": 1}, "the line has no argument 'temprature'; nearest: temp"),
    ({"prompt": "a", "sampling": {}}, "the line has no argument 'sampling'"),
    ({"prompt": "a", "temp": -1}, "temperature = -1 must be at least 0"),
    ({"prompt": "a", "temp": 1, "temperature": 1}, "temp and temperature are the same argument"),
    ({"prompt": "a", "logit_bias": {"x": 1}}, "must be a mapping of token ids to numbers"),
    ({"prompt": "a", "logit_bias": {"9" * 5000: 1}}, "must be a mapping of token ids to numbers"),
    ('{"prompt": "a", "prompt": "b"}', "the key 'prompt' is given twice"),
    ('"\\ud800"', "a string has half of a surrogate pair"),
    ("[" * 100_000, "the JSON is nested too deeply"),
    ('{"prompt": "a", "temp": NaN}', "temperature = nan must be a finite number"),
]  # fmt: skip


@pytest.mark.parametrize(("line", "message"), BAD_LINES, ids=lambda x: str(x)[:40])
def test_a_bad_line_is_reported_before_the_model_is_loaded(folder, line, message):
    prompts = write(['"hello"', "", line, "{"])
    with pytest.raises(RequestError) as caught:
        run(None, prompts)  # would fail if it were used
    assert str(caught.value).startswith("p.jsonl:3: ") and message in str(caught.value)
    assert "\n" not in str(caught.value) and not Path("a.jsonl").exists()


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (LONG, "the prompt has"),
        ({"prompt": [400]}, "token id 400 is not in 0..399"),
        ({"prompt": "a", "stop_ids": [400]}, "token id 400 is not in 0..399"),
    ],
)
def test_a_prompt_that_the_model_cannot_take(llm, folder, line, message):
    before = llm.engine.batcher.steps
    with pytest.raises(RequestError, match=rf"^p.jsonl:2: {message}"):
        run(llm, write(['"hello"', json.dumps(line)]))
    assert llm.engine.batcher.steps == before and not Path("a.jsonl").exists()


def test_bytes_that_are_no_text(folder):
    Path("p.jsonl").write_bytes(b'"a"\n"b\xff"\n')
    with pytest.raises(RequestError, match=r"p.jsonl:2: byte 2 is not valid UTF-8"):
        run(None, Path("p.jsonl"))
    Path("p.jsonl").write_bytes(b"\n \n")
    with pytest.raises(RequestError, match=r"p.jsonl: has no prompts"):
        run(None, Path("p.jsonl"))


# ------------------------------------------------------------------------------------------ answers


@pytest.mark.parametrize("parallel", [1, 3])
def test_a_window_of_requests_gives_the_answers_of_each_alone(llm, folder, monkeypatch, parallel):
    """The file is read as answers are written: few requests are in memory."""
    monkeypatch.setattr("graphllm.cli.batch_run._SUBMITTED", 2)
    lines, waiting = many(40), []
    submit = llm.submit

    def submitted(*request, **settings):
        waiting.append(len(llm.engine.batcher.generations))
        return submit(*request, **settings)

    monkeypatch.setattr(llm, "submit", submitted)
    run(llm, write(lines), parallel=parallel)
    found = read()
    assert [each["id"] for each in found] == [line["id"] for line in lines]
    assert len(waiting) == 40 and max(waiting) < 2 * parallel
    for have, line in zip(found, lines):
        settings = {name: line[name] for name in ("seed", "max_tokens")}
        assert have["tokens"] == llm.generate(line["prompt"], sampling=DEFAULTS, **settings).ids


def test_answers_that_there_are_already_are_kept(llm, folder, capfd):
    prompts = write(many(12))
    run(llm, prompts, "whole.jsonl")
    whole = Path("whole.jsonl").read_bytes()
    lines = whole.splitlines(keepends=True)
    texts = [each["text"] for each in read("whole.jsonl")]
    for kept, torn in ((0, b""), (5, b""), (5, lines[5][:-1]), (11, lines[11][:9]), (3, b"{")):
        Path("a.jsonl").write_bytes(b"".join(lines[:kept]) + torn)
        before = llm.engine.batcher.steps
        run(llm, prompts)
        assert Path("a.jsonl").read_bytes().startswith(b"".join(lines[:kept]))
        assert [each["text"] for each in read()] == texts
        assert llm.engine.batcher.steps > before
    run(None, prompts)
    assert capfd.readouterr().err == "note: a.jsonl has all 12 answers\n"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda p, a: (p, [a[1], *a[1:]]),
            "-o a.jsonl:1: is the answer to another prompt than p.js",
        ),
        (
            lambda p, a: ([{**p[0], "id": "x"}, *p[1:]], a),
            "(id = 'r0', not 'x'); give another file",
        ),
        (lambda p, a: ([p[0], {**p[1], "prompt": "x"}, p[2]], a), "-o a.jsonl:2: is the answer to"),
        (lambda p, a: (p[:2], a), "-o a.jsonl:3: there are more answers than prompts in p.jsonl"),
        (lambda p, a: (p, [a[0], "notes", a[2]]), "-o a.jsonl:2: is not an answer of this command"),
        (lambda p, a: (p, [a[0], "{}"]), "-o a.jsonl:2: is not an answer of this command"),
        (lambda p, a: (p, [a[0], "7"]), "-o a.jsonl:2: is not an answer of this command"),
    ],
)
def test_answers_to_other_prompts_are_an_error(llm, folder, change, message):
    asked = many(3)
    run(llm, write(asked))
    asked, answers = change(asked, read())
    write(answers, "a.jsonl")
    before = Path("a.jsonl").read_bytes()
    with pytest.raises(OutputError) as caught:
        run(None, write(asked))
    assert message in str(caught.value) and Path("a.jsonl").read_bytes() == before


def test_a_file_that_is_no_answer_is_never_overwritten(folder):
    prompts = write(['"hello"'])
    for text in ("notes without a newline", '{"index": 1, ', "\n", '["'):
        Path("notes").write_text(text)
        with pytest.raises(OutputError, match="-o notes:1: is not an answer of this command"):
            AnswerFile(Path("notes"), PromptFile(prompts, DEFAULTS))
        assert Path("notes").read_text() == text
    with pytest.raises(RequestError, match=r"-o p.jsonl: is the file of the prompts"):
        run(None, prompts, "p.jsonl")
    with pytest.raises(OutputError, match=r"-o none/a.jsonl: No such file or directory"):
        run(None, prompts, "none/a.jsonl")


def test_a_request_that_fails_leaves_the_answers_before_it(folder, tmp_path):
    weights = tiny.llama_weights()
    weights["model.embed_tokens.weight"][42, 9] = float("nan")
    bad = graphllm.load(tiny.write_llama(tmp_path / "nan.gguf", weights), device="cpu", threads=1)
    prompts = write([{"prompt": [5, 6], "allowed_ids": [8]}, {"prompt": [42]}, {"prompt": [7]}])
    for _ in range(2):
        with pytest.raises(RequestError, match=r"^p.jsonl:2: the logits of position 0 are not fin"):
            run(bad, prompts)
        assert [each["index"] for each in read()] == [0]


# --------------------------------------------------------------------------------- the command line


def call(path, *words: str) -> tuple[int, str, str]:
    done = subprocess.run(
        [*COMMAND, str(path), *words], capture_output=True, timeout=120, text=True
    )
    return done.returncode, done.stdout, without_progress(done.stderr)


def test_a_batch_on_the_command_line(llm, path, folder):
    write(many(6))
    code, shown, errors = call(path, "-f", "p.jsonl", *FLAGS)
    assert (code, errors) == (0, "")
    found = [json.loads(line) for line in shown.splitlines()]
    for have, line in zip(found, many(6), strict=True):
        settings = {name: line[name] for name in ("seed", "max_tokens")}
        assert have["text"] == llm.generate(line["prompt"], sampling=DEFAULTS, **settings).text
    words = [*COMMAND, str(path), "-f", "p.jsonl", "-o", "a.jsonl", "--parallel", "2", *FLAGS]
    code, shown, _ = at_terminal(*words, errors=True)
    assert code == 0 and b"[6 answers, 27 tokens, " in shown
    assert [each["tokens"] for each in read()] == [each["tokens"] for each in found]


def test_ctrl_c_keeps_what_is_finished(path, folder):
    """Several times; then the file has the answers of a run that was not interrupted."""
    lines = [{**line, "max_tokens": 100} for line in many(60)]
    write(lines)
    words = ["-f", "p.jsonl", "--parallel", "2", *FLAGS]

    def answers() -> int:
        """Return the number of complete lines."""
        file = Path("a.jsonl")
        return file.read_bytes().count(b"\n") if file.exists() else 0

    for _ in range(2):
        had = answers()
        process = subprocess.Popen(
            [*COMMAND, str(path), *words, "-o", "a.jsonl"],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            env={**os.environ, "GRAPHLLM_DEBUG": ""},
        )  # fmt: skip
        end = time.monotonic() + 60
        while answers() <= had + 2:
            assert time.monotonic() < end and process.poll() is None
            time.sleep(0.002)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)
        assert (process.returncode, without_progress(errors.decode())) == (130, "interrupted\n")
        Path("a.jsonl").write_bytes(Path("a.jsonl").read_bytes() + b'{"index": ')
        assert had + 3 <= answers() < 60
    assert call(path, *words, "-o", "a.jsonl")[0] == 0
    code, shown, _ = call(path, *words)
    assert code == 0
    assert [e["tokens"] for e in read()] == [json.loads(x)["tokens"] for x in shown.splitlines()]
