"""The command line, run in a subprocess."""

from __future__ import annotations

import io
import json
import os
import re
import select
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import gguf
import pytest
import tiny_models as tiny
from cpu_time import children_cpu_seconds, cpu_seconds
from pseudo_terminal import without_progress

from graphllm.cli.encoder_options import text_lines

COMMAND = [sys.executable, "-m", "graphllm"]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = tmp_path_factory.mktemp("cli") / "tiny.gguf"
    return str(tiny.write_llama(path, tiny.llama_weights()))


def call(*words: str, **options) -> subprocess.CompletedProcess:
    done = subprocess.run([*COMMAND, *words], capture_output=True, timeout=120, **options)
    done.stdout, done.stderr = done.stdout.decode(), without_progress(done.stderr.decode())
    return done


def test_json_has_everything(model):
    done = call("run", model, "-p", "hello", "-n", "4", "--temp", "0", "--ignore-eos", "--json")
    assert (done.returncode, done.stderr) == (0, "")
    result = json.loads(done.stdout)
    assert len(result["tokens"]) == 4 and result["finish_reason"] == "length"
    assert result["prompt_tokens"] > 0 and result["device"] == "cpu"
    assert set(result["timings"]) == {
        "load_s",
        "queue_s",
        "ttft_s",
        "prefill_tok_s",
        "decode_tok_s",
        "drafted_tokens",
        "accepted_tokens",
    }
    assert set(result["placement"]) == {"cpu"} and result["fallbacks"] == []


def test_several_prompts_one_after_another(model):
    rest = ("-n", "3", "--temp", "0", "--ignore-eos")
    alone = [call("run", model, "-p", text, *rest).stdout for text in ("hello", "what")]
    both = call("run", model, "-p", "hello", "-p", "what", *rest)
    assert both.returncode == 0 and both.stdout == "".join(alone)
    lines = call("run", model, "-p", "hello", "-p", "what", *rest, "--json").stdout.splitlines()
    assert [json.loads(line)["text"] for line in lines] == [
        text.removesuffix("\n").removeprefix(word) for text, word in zip(alone, ("hello", "what"))
    ]


def test_flags_reach_the_sampler(model):
    """Both spellings of each flag; test_generation tests their effect."""
    ask = ("run", model, "-p", "hello", "--temp", "0", "--json")
    free = json.loads(call(*ask, "-n", "9", "--ignore-eos").stdout)
    stop = free["text"][3:5]
    ours = ("-n", "9", "--ignore-eos", "--repeat-penalty", "1.4", "--stop", stop, "--min-p", "0.1")
    theirs = (
        "--max-new-tokens", "9", "--ignore-eos", "--repetition-penalty", "1.4",
        "--stop-strings", stop, "--min-p", "0.1",
    )  # fmt: skip
    a, b = (json.loads(call(*ask, *words).stdout) for words in (ours, theirs))
    assert a["tokens"] == b["tokens"] != free["tokens"]
    cut = json.loads(call(*ask, "-n", "9", "--ignore-eos", "--stop", stop).stdout)
    assert cut["text"] == free["text"][: free["text"].index(stop)]
    assert cut["finish_reason"] == "stop"
    ended = json.loads(call(*ask, "-n", "9", "--stop-id", str(free["tokens"][0])).stdout)
    assert ended["tokens"] == []


def test_several_samples_and_logprobs(model):
    ask = ("run", model, "-p", "hello", "-n", "4", "-s", "3", "--ignore-eos", "--logit-bias", "7=2")
    found = json.loads(call(*ask, "--n", "2", "--json", "--logprobs", "1").stdout)
    (other,) = found["alternatives"]
    assert len(found["logprobs"]) == 4 and other["tokens"] != found["tokens"]
    ids = [found["tokens"][0], *other["tokens"][:0:-1]]
    forced = [word for i in ids for word in ("--forced-id", str(i))]
    alone = json.loads(call(*ask, "--json", "--prompt-logprobs", "0", *forced).stdout)
    assert alone["tokens"] == ids != found["tokens"] and "logprobs" not in alone
    assert len(alone["prompt_logprobs"]) == alone["prompt_tokens"] - 1
    shown = call(*ask, "--n", "2").stdout
    assert shown == f"hello{found['text']}\nhello{other['text']}\n"


def test_grammars(model, tmp_path):
    ask = ("run", model, "-p", "hello", "-s", "3", "--json")
    schema, grammar = tmp_path / "schema.json", tmp_path / "grammar.lark"
    schema.write_text('{"enum": ["fox"]}')
    grammar.write_text('start: "f" "ox"')
    for own in (("--json-schema", schema), ("--json-schema", schema.read_text())):
        assert json.loads(json.loads(call(*ask, *own).stdout)["text"]) == "fox"
    for own in (("--regex", "fox"), ("--grammar", grammar), ("--grammar", grammar.read_text())):
        assert json.loads(call(*ask, *own).stdout)["text"] == "fox"


def test_beams(model):
    import graphllm

    ask = ("run", model, "-p", "hello", "-n", "4", "--beams", "4", "--n", "2", "--json")
    groups = ("--beam-groups", "2", "--diversity-penalty", "0.5")
    rules = ("--length-penalty", "0.5", "--early-stopping", "true")
    found = json.loads(call(*ask, *groups, *rules).stdout)
    llm = graphllm.load(model, device="cpu")
    settings = {"length_penalty": 0.5, "early_stopping": True, "max_tokens": 4}
    settings |= {"beam_groups": 2, "diversity_penalty": 0.5}
    want = llm.generate("hello", beams=4, n=2, **settings)
    have = [found["tokens"], *(each["tokens"] for each in found["alternatives"])]
    assert have == [done.ids for done in want.choices]


def test_tokenize(model):
    ids = json.loads(call("tokenize", model, "hello world", "--ids").stdout)
    lines = call("tokenize", model, "-", input=b"hello world").stdout.splitlines()
    assert [int(line.split()[0]) for line in lines] == ids
    assert lines[0].split(maxsplit=1) == ["1", "'<s>'"]
    assert json.loads(call("tokenize", model, "</s>", "--ids", "--special").stdout)[-1] == 2
    assert json.loads(call("tokenize", model, "hello world", "--ids", "--no-bos").stdout) == ids[1:]


# -------------------------------------------------------------------------------------------- chat

CHAT = ("--chat-template", "zephyr", "-n", "6", "--temp", "0", "--ignore-eos")


def test_chat_reads_messages_and_commands_from_a_pipe(model, tmp_path):
    saved, template = tmp_path / "said.json", tmp_path / "short.jinja"
    template.write_text("{% for m in messages %}{{ m.content + eos_token }}{% endfor %}")
    words = (*CHAT, "--chat-template", str(template), "--system", "Be brief.")
    typed = [
        "hello", '"""', "one", "", "two", '"""', "three\\", "four",
        f"/save {tmp_path / 'first.json'}", f"/save {saved}", "five", f"/save {saved}",
        "/reset", "hello", "/exit", "never read",
    ]  # fmt: skip
    done = call("chat", model, *words, input="\n".join(typed).encode())
    assert (done.returncode, done.stderr) == (0, "")
    said = json.loads(saved.read_text())
    assert said[0] == {"role": "system", "content": "Be brief."}
    asked = [m["content"] for m in said if m["role"] == "user"]
    assert asked == ["hello", "one\n\ntwo", "three\nfour", "five"]
    assert json.loads((tmp_path / "first.json").read_text()) == said[:-2]
    answers = [m["content"] for m in said if m["role"] == "assistant"]
    assert done.stdout == "".join(f"{a}\n" for a in [*answers, answers[0]])
    once = call("run", model, "--chat", *words, "-p", "hello")
    assert once.stdout == answers[0] + "\n"


def test_a_template_in_the_file(tmp_path, monkeypatch):
    """`run` at a terminal prints a note about it; `run --chat` applies it."""
    import pty

    class Writer(gguf.GGUFWriter):
        def add_tokenizer_model(self, model: str) -> None:
            super().add_tokenizer_model(model)
            self.add_chat_template("{% for m in messages %}Q {{ m.content }} A{% endfor %}")

    monkeypatch.setattr(gguf, "GGUFWriter", Writer)
    model = str(tiny.write_llama(tmp_path / "own.gguf", tiny.llama_weights()))
    rest = ("-n", "4", "--temp", "0", "--ignore-eos")
    plain = call("run", model, "-p", "Q hello A", *rest).stdout.removeprefix("Q hello A")
    asked = call("run", model, "--chat", "-p", "hello", *rest)
    assert (asked.stdout, asked.stderr) == (plain, "")
    assert call("chat", model, *rest, input=b"hello").stdout == plain
    ours, theirs = pty.openpty()
    with subprocess.Popen([*COMMAND, "run", model, "-p", "hello", *rest], stderr=theirs) as process:
        os.close(theirs)
        shown = b""
        with suppress(OSError):  # on Linux the end of a terminal is an error
            while more := os.read(ours, 10_000):
                shown += more
    os.close(ours)
    assert process.returncode == 0 and "the model has a chat template" in shown.decode()


@pytest.mark.parametrize(
    ("words", "typed", "message"),
    [
        (["chat", "MODEL"], b"hi", "has no chat template; give one as chat_template"),
        (["run", "MODEL", "--chat", "-p", "x"], b"", "has no chat template"),
        (["run", "MODEL", "--system", "x", "-p", "x"], b"", "--system need --chat"),
        (["chat", "MODEL", "--chat-template", "none"], b"hi", "chat template none: No such file"),
        (["chat", "MODEL", *CHAT], b"/sing\n", "unknown command /sing; known: /reset, /save"),
        (["chat", "MODEL", *CHAT], b"/save\n", "/save needs a file name"),
        (["chat", "MODEL", *CHAT], b"/save /no/where\n", "/no/where: No such file"),
        (["chat", "MODEL", *CHAT], b"/save a\0b\n", "null byte"),
        (["chat", "MODEL", *CHAT], b"/save ~no user/x\n", "home directory"),
        (["chat", "MODEL", *CHAT], b"ab\xff\n", "standard input is not valid UTF-8"),
        (["run", "MODEL", "-p", b"ab\xff"], b"", "-p: character 2 is not valid UTF-8"),
        (["run", "MODEL", "-p", "x", "--repeat-penalty", "0"], b"", "must be in [0.01, 100]"),
        (["run", "MODEL", "-p", "x", "--stop", ""], b"", "must be non-empty strings"),
    ],
)
def test_an_error_of_a_chat_is_one_line(model, words, typed, message):
    done = call(*[model if w == "MODEL" else w for w in words], input=typed)
    assert done.returncode == 1 and done.stderr.startswith("error: ") and message in done.stderr
    assert done.stderr.count("\n") == 1 and not done.stdout


def test_chat_saves_no_messages_over_a_file_that_it_did_not_save(model):
    before = Path(model).read_bytes()
    done = call("chat", model, *CHAT, input=f"/save {model}\nhello\n".encode())
    assert done.returncode == 1 and "exists already, and was not saved by this chat" in done.stderr
    assert Path(model).read_bytes() == before


@pytest.mark.realmodel
def test_ctrl_c_stops_the_answer_but_not_the_chat():
    """At a terminal: Ctrl-C stops an answer, the next message is answered, Ctrl-D ends the chat."""
    import pty

    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [*COMMAND, "chat", "demo", "--chat-template", "gemma", "-n", "3000", "--ignore-eos"],
        stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True,
    )  # fmt: skip
    os.close(theirs)

    unread = ""

    def read_until(pattern: str, seconds: float = 60) -> None:
        """Consume the output up to and including the first match."""
        nonlocal unread
        end = time.monotonic() + seconds
        while not (found := re.search(pattern, unread)):
            ready, _, _ = select.select([ours], [], [], max(0, end - time.monotonic()))
            assert ready, f"no {pattern!r} in {unread!r}"
            unread += os.read(ours, 1000).decode("utf-8", "replace")
        unread = unread[found.end() :]

    try:
        read_until("> ")
        for _ in range(2):
            os.write(ours, b"Tell me a story\n")
            read_until("\n")
            read_until(r"\S")  # wait until the answer begins
            time.sleep(0.5)
            process.send_signal(signal.SIGINT)
            read_until(r"\[stopped\]", 10)
            read_until("> ", 10)
        os.write(ours, b"/help\n")
        read_until("Ctrl-C stops the answer", 10)
        read_until("> ", 10)
        os.write(ours, b"\x04")
        assert process.wait(60) == 0
    finally:
        process.kill()
        os.close(ours)


def test_text_begins_with_the_prompt_and_repeats_with_the_seed(model):
    ask = ("run", model, "-p", "hello", "-n", "6", "--ignore-eos", "-s")
    a, b, c = call(*ask, "5"), call(*ask, "5"), call(*ask, "6")
    assert a.stdout.startswith("hello") and a.stdout == b.stdout != c.stdout


@pytest.mark.parametrize("file", [None, Path("-")])
def test_the_texts_of_an_encoder_from_standard_input(file, monkeypatch):
    """Empty lines count."""
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"one\n\ntwo\n")))
    assert text_lines(file) == ["one", "", "two"]


def test_prompt_from_file_and_standard_input(model, tmp_path):
    file = tmp_path / "prompt.txt"
    file.write_text("hello")
    rest = ("-n", "3", "--temp", "0", "--ignore-eos")
    direct = call("run", model, "-p", "hello", *rest).stdout
    assert call("run", model, "-f", str(file), *rest).stdout == direct
    assert call("run", model, "-p", "-", *rest, input=b"hello").stdout == direct


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["run", "nothing.gguf", "-p", "x"], "nothing.gguf: no such file"),
        (["run", "MODEL"], "give a prompt"),
        (["run", "MODEL", "-p", "x", "--temp", "-1"], "temperature = -1.0 must be at least 0"),
        (["run", "MODEL", "-p", "x", "--top-p", "0"], "top_p = 0.0 must be in (0, 1]"),
        (["run", "MODEL", "-p", "x", "-c", "0"], "context = 0 must be at least 1"),
        (["run", "MODEL", "-p", "x", "-t", "-2"], "threads = -2 must be at least 0"),
        (["run", "MODEL", "-p", "x", "--device", "abacus"], "unknown backend 'abacus'"),
        (
            ["run", "MODEL", "-p", "x", "--kv-type", "q3"],
            "kv_type = 'q3' must be f32, f16, q8_0, q4_0 or fp8",
        ),
        (["run", "MODEL", "-p", "x", "--place", "abc"], "must be PATTERN=BACKEND"),
        (["run", "MODEL", "-p", "x", "--place", "a.*=cpu"], "no node of the model matches 'a.*'"),
        (["run", "MODEL", "-p", "x", "--place", "*=gpu"], "no such usable backend; usable: cpu"),
        (["run", "MODEL", "-f", "none.txt"], "none.txt: No such file"),
        (["profile", "MODEL", "--by", "colour"], "--by colour must be one of op, scope"),
        (["inspect", os.devnull], os.devnull),
    ],
)
def test_an_error_is_one_line(model, words, message):
    done = call(*[model if w == "MODEL" else w for w in words])
    assert done.returncode == 1
    assert done.stderr.startswith("error: ") and message in done.stderr
    assert done.stderr.count("\n") == 1 and not done.stdout


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("\ndef config(keys:", "2: SyntaxError: '(' was never closed"),
        ("\ndef config(keys): return heads", "2: NameError: name 'heads' is not defined"),
        ("Model.mlp = lambda self, x: x * 2", "1: TypeError: unsupported operand type(s) for *"),
        ("Model.mlp = lambda self, x: x.heads(7)",
         "1: model.layers.0.mlp: heads(f32[T,60]): 60 columns do not split into 7 heads"),
    ],
)  # fmt: skip
def test_an_error_of_a_model_file_names_its_line(model, code, message, tmp_path):
    own = "from graphllm.models.llama import *; Model = type('Model', (Decoder,), {}); "
    (tmp_path / "mine.py").write_text(own + code)
    words = ("run", model, "-p", "x", "--model-def", "mine.py")
    done = call(*words, cwd=tmp_path)
    assert done.returncode == 1 and done.stderr.startswith(f"error: mine.py:{message}")
    assert done.stderr.count("\n") == 1 and not done.stdout
    verbose = call(*words, cwd=tmp_path, env={**os.environ, "GRAPHLLM_DEBUG": "1"})
    assert verbose.returncode == 1 and "Traceback" in verbose.stderr


def test_wrong_usage_is_exit_code_2(model):
    assert call("run").returncode == 2
    assert call("run", model, "--temperatur", "1").returncode == 2


def test_invalid_utf8(model):
    done = call("run", model, "-p", "-", input=b"ab\xff")
    assert done.returncode == 1 and "byte 2 is not valid UTF-8" in done.stderr


def test_fallbacks_are_reported_and_rejected_by_strict(model):
    pin = ("--place", "model.layers.1.*=reference")
    done = call("run", model, "-p", "hello", "-n", "2", "--temp", "0", *pin)
    assert done.returncode == 0
    assert "ran on reference" in done.stderr and "pinned by model.layers.1.*" in done.stderr
    done = call("run", model, "-p", "hello", "--strict", *pin)
    assert done.returncode == 1 and "strict placement forbids it" in done.stderr


def test_inspect_escapes_control_characters(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "a\nb\x1b[31m é"}))
    header = json.dumps({"x\x1b": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}}).encode()
    stored = len(header).to_bytes(8, "little") + header
    (tmp_path / "model.safetensors").write_bytes(stored)
    shown = call("inspect", tmp_path).stdout
    assert "\x1b" not in shown and shown.count("\n") == 4
    assert r"model_type = a\nb\x1b[31m é" in shown and r"x\x1b" in shown


def test_profile_and_inspect_and_doctor(model):
    table = call("profile", model, "-n", "4").stdout
    assert "prefill:" in table and "decode: 4 tokens" in table and "linear f32" in table
    assert all(f"\n{name} " in table for name in ("all ops", "gaps", "host", "wall"))
    shown = call("inspect", model).stdout
    assert "blk.2.ffn_down.weight" in shown and "llama.block_count = 3" in shown
    listed = json.loads(call("inspect", model, "--json").stdout)
    assert len(listed["tensors"]) == 30
    doctor = call("doctor").stdout
    assert "cpu " in doctor and "reference " in doctor
    assert "computed as their parts, not fused: combine_add, " in doctor  # on the CPU
    assert "combine_add: " not in doctor and "pool: cpu has no kernel for it" in doctor


def test_a_closed_pipe_ends_quietly(model):
    process = subprocess.Popen(
        [*COMMAND, "run", model, "-p", "hello", "-n", "100", "--ignore-eos"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    process.stdout.close()
    assert without_progress(process.stderr.read().decode()) == "" and process.wait(60) == 0


@pytest.mark.realmodel
@pytest.mark.parametrize("when", ["prefill", "decode"])
def test_ctrl_c_stops_at_once_with_one_line(when, tmp_path):
    prompt = tmp_path / "prompt.txt"
    times = 380 if when == "prefill" else 1
    prompt.write_text("The quick brown fox jumps over the lazy dog. " * times)
    process = subprocess.Popen(
        [*COMMAND, "run", "demo", "-f", str(prompt), "-n", "4000", "--ignore-eos"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, env={**os.environ, "GRAPHLLM_DEBUG": ""},
    )  # fmt: skip
    process.stdout.read(10)  # the prompt is printed once the model is loaded
    time.sleep(1.0)
    used, ended = cpu_seconds(process.pid), children_cpu_seconds()
    process.send_signal(signal.SIGINT)
    process.wait(60)
    used = children_cpu_seconds() - ended - used
    assert process.returncode == 130
    assert without_progress(process.stderr.read().decode()) == "interrupted\n"
    assert used < 2.0  # of CPU time; 0.3 s is usual


def test_importing_is_light():
    code = (
        "import sys, graphllm; bad = {'numba', 'llvmlite', 'cupy', 'torch'} & set(sys.modules); "
        "sys.exit(f'imported {bad}' if bad else 0)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize(
    "verb",
    [
        "run",
        "chat",
        "tokenize",
        "inspect",
        "doctor",
        "plan",
        "profile",
        "bench",
        "diff",
        "compare",
        "validate",
        "new",
    ],
)
def test_help_shows_an_example(verb):
    lines = [line.strip() for line in call(verb, "--help").stdout.splitlines()]
    assert any(line.startswith(f"graphllm {verb}") for line in lines)
