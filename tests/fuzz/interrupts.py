"""Campaign that sends Ctrl-C (SIGINT) at random times: ``interrupts.py FOLDER COUNT SEED [VERB]``.

Each case starts a verb on a small model and sends one or two SIGINT after a random time. The verb
must end with exit code 130 and the line "interrupted", or have finished before. Prints the number
of cases by outcome as JSON. Failures are printed on standard error, and the exit code is 1.
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

MODEL, TEMPLATE = "interrupted.gguf", "interrupted.jinja"
RUN = ["run", MODEL, "-p", "hello world " * 20, "-n", "100", "--ignore-eos"]
# Short turns: both messages and answers fit the model's context of 128 tokens, so that the chat
# continues until the signal: it waits for a third message.
CHAT = ["chat", MODEL, "--chat-template", TEMPLATE, "-n", "24", "--ignore-eos"]
CHAT_SOURCE = "{% for m in messages %}{{ m.content + eos_token }}{% endfor %}"
MESSAGES = b"hello\nhow are you\n"
VERBS = [
    RUN,
    [*RUN, "--device", "reference"],
    [*RUN, "--json"],
    CHAT,
    ["tokenize", MODEL, "hello"],
    ["inspect", MODEL],
    ["plan", MODEL],
    ["profile", MODEL, "-n", "50", "-r", "9", "-o", "interrupted.html"],
    ["bench", MODEL, "-p", "64", "-n", "64", "-r", "50", "--no-ceiling"],
    ["diff", MODEL],
    ["doctor"],
    ["--help"],
]

# Write a line once `main` handles Ctrl-C; before that, Python handles it.
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
TIMEOUT_S = 60.0


def campaign(
    folder: Path, count: int, seed: int, verb: str | None = None
) -> collections.Counter[str]:
    """Run ``count`` cases and return the number of cases by outcome.

    Args:
        folder: directory for the model.
        count: number of cases.
        seed: seed of the times.
        verb: run only the cases of this verb; all verbs by default.

    Returns:
        Number of cases that were interrupted, had finished, or were wrong.
    """
    tiny.write_llama(folder / MODEL, tiny.llama_weights())
    (folder / TEMPLATE).write_text(CHAT_SOURCE)
    rng, outcomes = random.Random(seed), collections.Counter(wrong=0)
    verbs = [words for words in VERBS if verb in (None, words[0])]
    for case in range(count):
        words = verbs[case % len(verbs)]
        outcomes[_case(folder, words, rng.uniform(0, 3.0), rng.random() < 0.2)] += 1
    return outcomes


def _case(folder: Path, words: list[str], seconds: float, twice: bool) -> str:
    process = subprocess.Popen(
        [sys.executable, "-c", START, *words],
        cwd=folder, env={**os.environ, "GRAPHLLM_DEBUG": ""},
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    process.stderr.readline()
    with suppress(BrokenPipeError):  # the verb has finished already
        process.stdin.write(MESSAGES)
        process.stdin.flush()
    time.sleep(seconds)
    for _ in range(1 + twice):
        process.send_signal(signal.SIGINT)
    try:
        with suppress(BrokenPipeError):
            process.stdin.close()
        process.stdin = None
        _, errors = process.communicate(timeout=TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        errors = b"it did not end\n" + process.communicate()[1]
    lines = without_progress(errors.decode()).splitlines()
    lines = [line for line in lines if not line.startswith("note: ")]
    if process.returncode == 130 and lines == ["interrupted"]:
        return "interrupted"
    if process.returncode == 0 and lines == [] and words != CHAT:
        return "finished"
    what = f"{words[:2]} after {seconds:.3f} s, {1 + twice} times: exit code {process.returncode}"
    print(f"--- {what}\n{errors.decode()}", file=sys.stderr)
    return "wrong"


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in a shell's background job
    found = campaign(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), *sys.argv[4:5])
    print(json.dumps({"outcomes": found}))
    sys.exit(found["wrong"] > 0)
