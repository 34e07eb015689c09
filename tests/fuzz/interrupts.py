"""A campaign of Ctrl-C at random times: ``interrupts.py FOLDER COUNT SEED``.

Each case starts a verb on a small model and sends SIGINT after a random time, or two of them. It
must end with exit code 130 and the line "interrupted", or have finished before. Prints a count of
each outcome as JSON; what went wrong is printed on standard error, and the exit code is 1.
"""

from __future__ import annotations

import collections
import json
import os
import random
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import tiny_models as tiny
from pseudo_terminal import without_progress

MODEL = "interrupted.gguf"
RUN = ["run", MODEL, "-p", "hello world " * 20, "-n", "100", "--ignore-eos"]
VERBS = [
    RUN,
    [*RUN, "--device", "reference"],
    [*RUN, "--json"],
    ["tokenize", MODEL, "hello"],
    ["inspect", MODEL],
    ["plan", MODEL],
    ["profile", MODEL, "-n", "50", "-r", "9", "-o", "interrupted.html"],
    ["bench", MODEL, "-p", "64", "-n", "64", "-r", "50", "--no-ceiling"],
    ["diff", MODEL],
    ["doctor"],
    ["--help"],
]

# Writes a line once `main` catches Ctrl-C; before that it is Python's own.
START = """
import os
import graphllm.cli as cli
call = cli._call
def started():
    os.write(2, b".\\n")
    call()
cli._call = started
cli.main()
"""
WAIT_S = 60.0


def campaign(folder: Path, count: int, seed: int) -> collections.Counter[str]:
    """How often each outcome was met: interrupted, finished, wrong."""
    tiny.write_llama(folder / MODEL, tiny.llama_weights())
    draw, outcomes = random.Random(seed), collections.Counter(wrong=0)
    for case in range(count):
        words = VERBS[case % len(VERBS)]
        outcomes[_case(folder, words, draw.uniform(0, 3.0), draw.random() < 0.2)] += 1
    return outcomes


def _case(folder: Path, words: list[str], seconds: float, twice: bool) -> str:
    process = subprocess.Popen(
        [sys.executable, "-c", START, *words],
        cwd=folder, env={**os.environ, "GRAPHLLM_DEBUG": ""},
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    process.stderr.readline()
    process.stdin.write(b"hello\nhow are you\n")
    process.stdin.flush()
    time.sleep(seconds)
    for _ in range(1 + twice):
        process.send_signal(signal.SIGINT)
    try:
        with suppress(BrokenPipeError):
            process.stdin.close()
        process.stdin = None
        _, told = process.communicate(timeout=WAIT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        told = b"it did not end\n" + process.communicate()[1]
    lines = without_progress(told.decode()).splitlines()
    lines = [line for line in lines if not line.startswith("note: ")]
    if process.returncode == 130 and lines == ["interrupted"]:
        return "interrupted"
    if process.returncode == 0 and lines == []:
        return "finished"
    what = f"{words[:2]} after {seconds:.3f} s, {1 + twice} times: exit code {process.returncode}"
    print(f"--- {what}\n{told.decode()}", file=sys.stderr)
    return "wrong"


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in a shell's background job
    found = campaign(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
    print(json.dumps({"outcomes": found}))
    sys.exit(found["wrong"] > 0)
