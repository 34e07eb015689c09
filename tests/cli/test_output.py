"""Terminal safety: no foreign control sequence reaches a terminal; a pipe gets exact text."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time

import pytest
import tiny_models as tiny
from pseudo_terminal import at_terminal

from graphllm.cli import output
from graphllm.progress import _Lines
from graphllm.terminal import escape_control, escape_control_lines

COMMAND = [sys.executable, "-m", "graphllm"]
ENV = {**os.environ, "GRAPHLLM_DEBUG": "", "TERM": "xterm-256color"}
REFERENCE = ("--device", "reference")
# A title, a colour that graphllm itself uses, a C1 introducer, and a text direction override.
HOSTILE = "x\x1b]0;owned\x07\x1b[31m\x9b5m\x7f\u202ey"
ESCAPED = r"x\x1b]0;owned\x07\x1b[31m\x9b5m\x7f\u202ey"
RAW = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Write a model with a hostile name and others that contain hostile text."""
    where = tmp_path_factory.mktemp("output")
    tiny.write_llama(where / f"{HOSTILE}.gguf", tiny.llama_weights())
    shutil.copy(where / f"{HOSTILE}.gguf", where / "good.gguf")
    speaking = {**tiny.VOCAB, "pieces": list(tiny.VOCAB["pieces"])}
    for i, kind in enumerate(speaking["types"]):
        if kind == 1:  # an ordinary token
            speaking["pieces"][i] = f"\x1b[{i}m\x9b\u202eé\n\t{i}"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiny, "VOCAB", speaking)
        tiny.write_llama(where / "speaking.gguf", tiny.llama_weights())
    (where / "refuses.jinja").write_text("{{ raise_exception(messages[0].content) }}")
    (where / f"{HOSTILE}.json").write_text("{}")
    (where / "config").mkdir()
    (where / "config" / "config.json").write_text(json.dumps({"model_type": HOSTILE}))
    header = json.dumps({HOSTILE: {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}}).encode()
    stored = len(header).to_bytes(8, "little") + header
    (where / "config" / "model.safetensors").write_bytes(stored)
    (where / "mine.py").write_text(f"raise ValueError({HOSTILE!r})")
    return where


# Arguments, standard input, and whether the command succeeds.
VERBS = {
    "run, name": (["run", f"{HOSTILE}.gguf", "-p", HOSTILE, "-n", "2", *REFERENCE], b"", True),
    "run, prompt": (["run", "good.gguf", "-p", HOSTILE, "-n", "2", *REFERENCE], b"", True),
    "run, flag": (["run", "good.gguf", "-p", "x", f"--{HOSTILE}"], b"", False),
    "run, number": (["run", "good.gguf", "-p", "x", "-n", HOSTILE], b"", False),
    "run, device": (["run", "good.gguf", "-p", "x", "--device", HOSTILE], b"", False),
    "run, pin": (["run", "good.gguf", "-p", "x", "--place", f"{HOSTILE}=cpu"], b"", False),
    "run, file": (["run", "good.gguf", "-f", HOSTILE], b"", False),
    "run, no model": (["run", f"{HOSTILE}/none.gguf", "-p", "x"], b"", False),
    "run, model file": (["run", "good.gguf", "-p", "x", "--model-def", "mine.py"], b"", False),
    "run, template": (
        ["run", "good.gguf", "--chat", "-p", HOSTILE, "--chat-template", "refuses.jinja",
         *REFERENCE], b"", False,
    ),
    "chat": (
        ["chat", "good.gguf", "--chat-template", "refuses.jinja", *REFERENCE], HOSTILE.encode(),
        False,
    ),
    "chat, command": (
        ["chat", "good.gguf", "--chat-template", "zephyr", *REFERENCE],
        f"/{HOSTILE}".encode(), False,
    ),
    "tokenize": (["tokenize", "good.gguf", HOSTILE], b"", True),
    "tokenize, pieces": (["tokenize", "speaking.gguf", "the"], b"", True),
    "inspect, name": (["inspect", f"{HOSTILE}.gguf"], b"", True),
    "inspect, contents": (["inspect", "config"], b"", True),
    "inspect, json": (["inspect", "config", "--json"], b"", True),
    "plan": (["plan", f"{HOSTILE}.gguf", *REFERENCE], b"", True),
    "plan, shape": (["plan", "--random", HOSTILE], b"", False),
    "profile": (
        ["profile", f"{HOSTILE}.gguf", "-n", "2", "-r", "1", *REFERENCE, "-o", "page.html", "-p",
         HOSTILE], b"", True,
    ),
    "profile, output": (["profile", "good.gguf", "-o", HOSTILE], b"", False),
    "bench": (["bench", f"{HOSTILE}.gguf", "-p", HOSTILE], b"", False),
    "diff": (
        ["diff", f"{HOSTILE}.gguf", "--backends", "reference,reference", "-p", HOSTILE], b"", True,
    ),
    "diff, backends": (["diff", "good.gguf", "--backends", HOSTILE], b"", False),
    "compare": (["compare", f"{HOSTILE}.json", f"{HOSTILE}.json"], b"", False),
    "compare, flags": (["compare", "good.gguf", "--against", f"--{HOSTILE}"], b"", False),
    "validate": (["validate", f"{HOSTILE}.gguf"], b"", False),
    "validate, config": (["validate", "config"], b"", False),
    "new": (["new", HOSTILE], b"", False),
    "new, like": (["new", "mine2", "--like", HOSTILE], b"", False),
    "doctor": (["doctor", HOSTILE], b"", False),
    "no verb": ([HOSTILE], b"", False),
}  # fmt: skip


def check_safe(shown: str, rich: bool = False) -> None:
    """Check for control characters other than newline, tab and those of a progress bar."""
    if rich:
        assert not re.search("\x1b\\]|\x07|\x1b\\[31m|[\x7f-\x9f\u202e]", shown), repr(shown)
    else:
        assert not RAW.search(shown), repr(shown)


IN_PIPES = ("run, prompt", "run, template", "tokenize, pieces", "plan", "diff", "compare")


@pytest.mark.parametrize("case", VERBS)
def test_hostile_text_is_escaped_at_a_terminal(folder, case):
    """On standard output and standard error."""
    words, typed, works = VERBS[case]
    code, both, _ = at_terminal(*COMMAND, *words, typed=typed, errors=True, cwd=folder, env=ENV)
    check_safe(both.decode(), rich=True)
    assert (code == 0) == works
    if not works:
        assert "error: " in both.decode().splitlines()[-1], both


@pytest.mark.parametrize("case", IN_PIPES)
def test_names_and_errors_are_escaped_in_a_pipe(folder, case):
    """They may end up in a log."""
    words, typed, works = VERBS[case]
    done = subprocess.run(
        [*COMMAND, *words], input=typed, capture_output=True, cwd=folder, env=ENV, timeout=120
    )
    check_safe(done.stderr.decode())
    assert (done.returncode == 0) == works
    if case == "run, prompt":  # the printed prompt is part of the generated text
        assert done.stdout.decode().startswith(HOSTILE)
    else:
        check_safe(done.stdout.decode())
    if not works:
        assert done.stderr.startswith(b"error: ") and done.stdout == b"", done


def test_names_are_escaped_not_removed(folder):
    for words in (["inspect", f"{HOSTILE}.gguf"], ["plan", f"{HOSTILE}.gguf", *REFERENCE]):
        done = subprocess.run([*COMMAND, *words], capture_output=True, cwd=folder, text=True)
        assert done.stdout.startswith(f"{ESCAPED}.gguf: "), done


@pytest.mark.parametrize("verb", ["run", "chat"])
def test_an_answer_is_escaped_at_a_terminal_and_exact_in_a_pipe(folder, verb):
    rest = ["-n", "8", "--temp", "0", "--ignore-eos", *REFERENCE]
    asks = {"run": ["-p", "the\x1b[1mé", *rest], "chat": ["--chat-template", "zephyr", *rest]}
    command = [*COMMAND, verb, "speaking.gguf", *asks[verb]]
    pipe = subprocess.run(command, input=b"hello", capture_output=True, cwd=folder)
    code, shown, _ = at_terminal(*command, typed=b"hello", cwd=folder)
    exact = pipe.stdout.decode()
    assert (pipe.returncode, code) == (0, 0) and "\x1b[" in exact and "\x9b" in exact
    assert shown.decode() == escape_control_lines(exact)
    check_safe(shown.decode())
    as_json = [*COMMAND, "run", "speaking.gguf", *asks["run"], "--json"]
    if verb == "run":
        code, shown, _ = at_terminal(*as_json, cwd=folder)
        check_safe(shown.decode())
        assert json.loads(shown)["text"] == exact.removeprefix("the\x1b[1mé").removesuffix("\n")


def test_multi_token_characters_are_printed_once_complete(folder):
    """The bytes of one character are spread over several tokens."""
    from graphllm.checkpoints.checkpoint import open_checkpoint

    own = open_checkpoint(folder / "good.gguf").tokenizer()
    for text in ("é", "\u202eא", "\x9bé", "🧑‍🚀"):
        ids = [own.encode("x", False)[-1], *byte_tokens(own, text)]
        stream = own.stream(continuation=True)
        pieces = [stream.push(i) for i in ids] + [stream.finish()]
        assert "".join(map(escape_control_lines, pieces)).endswith(escape_control_lines(text))


def byte_tokens(own, text):
    """Return the single-byte tokens of a text."""
    by_piece = {own.piece(i): i for i in reversed(range(3, 259))}
    return [by_piece[bytes([b])] for b in text.encode()]


@pytest.mark.parametrize(
    ("text", "line", "lines"),
    [
        ("é ü 中\u3000文 🧑‍🚀", "é ü 中\u3000文 🧑\\u200d🚀", "é ü 中\u3000文 🧑‍🚀"),
        ("a\tb\nc\r\n", r"a\tb\nc\r\n", "a\tb\nc\\r\n"),
        ("\x1b[2J\x9b\x7f\x00", r"\x1b[2J\x9b\x7f\x00", r"\x1b[2J\x9b\x7f\x00"),
        ("\u202e\u2066\u2028", r"\u202e\u2066\u2028", "\\u202e\\u2066\u2028"),
        (os.fsdecode(b"\xff\xe9.gguf"), r"\xff\xe9.gguf", r"\xff\xe9.gguf"),
        ("\ud800", r"\ud800", r"\ud800"),
        (r"C:\x", r"C:\x", r"C:\x"),
    ],
)
def test_escaping(text, line, lines):
    assert escape_control(text) == line and escape_control_lines(text) == lines
    assert not RAW.search(
        escape_control(text) + escape_control_lines(text).replace("\n", "").replace("\t", "")
    )


def test_page_titles_are_escaped():
    from graphllm.validation.html_page import render_page
    from graphllm.validation.report import Report

    title = re.search("<title>.*?</title>", render_page(Report(HOSTILE, ())), re.DOTALL)[0]
    assert title == f"<title>{ESCAPED}: validation</title>"


def test_long_lines_are_truncated():
    assert escape_control("x" * 5000).endswith("x ... (3000 more characters)")
    assert (
        len(escape_control("x" * 10**6)) < 2100
        and escape_control("x" * 5000, limit=None) == "x" * 5000
    )


def test_other_encodings_escape_the_rest(folder):
    env = {**os.environ, "PYTHONIOENCODING": "ascii", "GRAPHLLM_DEBUG": ""}
    words = ("run", "good.gguf", "-p", "é", "-n", "0", *REFERENCE)
    code, shown, _ = at_terminal(*COMMAND, *words, cwd=folder, env=env)
    assert (code, shown) == (0, b"\\xe9\n")
    done = subprocess.run([*COMMAND, *words], capture_output=True, cwd=folder, env=env)
    assert (done.returncode, done.stdout) == (0, "é\n".encode())


def test_every_print_of_the_command_line_goes_through_output():
    """No verb prints directly, so that none can forget to escape."""
    folder = os.path.dirname(output.__file__)
    for name in sorted(os.listdir(folder)):
        if name.endswith(".py") and name != "output.py":
            with open(os.path.join(folder, name), encoding="utf-8") as file:
                found = re.findall(r"\bprint\(|std(?:out|err)\.write|\becho\(", file.read())
            assert not found, f"{name}: {found}"


def test_progress_without_a_terminal(monkeypatch, capsys):
    monkeypatch.setattr("graphllm.progress._INTERVAL_S", 0.2)
    with _Lines("loading the model") as show:
        time.sleep(0.3)
        for done in range(40):
            show("compiling kernels", done, 40)
        time.sleep(0.2)
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "loading the model" and lines[-1] == "compiling kernels: 39 of 40"
    assert 2 <= len(lines) <= 4
    with _Lines("loading the model") as show:
        show("compiling kernels", 1, 40)
    assert capsys.readouterr().err == ""


def test_a_progress_bar_ignores_markup_in_names(folder):
    words = [
        "-c",
        "from graphllm.progress import progress_line\n"
        "with progress_line() as show: show('[bold]x[/nope]\\x1b]0;owned\\x07', 1, 2)",
    ]
    code, shown, _ = at_terminal(sys.executable, *words, errors=True, cwd=folder)
    assert code == 0 and b"[bold]x[/nope]" in shown and b"\x1b]0" not in shown
