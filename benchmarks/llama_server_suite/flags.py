"""The command of `graphllm serve` for one of llama.cpp's server."""

from __future__ import annotations

import sys
from pathlib import Path

# Names of models in requests of the tests; llama.cpp's server ignores them.
NAMES = ("test", "davinci-002", "gpt-3.5-turbo", "gpt-3.5-turbo-instruct", "gpt-4.1",
         "text-embedding-3-small", "codellama70b")  # fmt: skip
# llama.cpp's defaults of sampling settings, which hold for all of its endpoints.
DEFAULTS = ["--top-k", "40", "--top-p", "0.95", "--min-p", "0.05"]
SAME = {
    "--host": "--host", "--port": "--port", "--api-key": "--api-key", "--threads": "--threads",
    "--temp": "--temp", "--seed": "--seed", "--n-predict": "--max-tokens", "-ctk": "--kv-type",
    "--chat-template-file": "--chat-template", "--context": "-c", "--parallel": "--parallel",
}  # fmt: skip
# Flags with a value that have no counterpart: no test that runs depends on them.
VALUES = {
    "--hf-repo", "--hf-file", "--model", "--batch-size", "--ubatch-size", "--n-gpu-layers",
    "--pooling", "-ctv", "-fa", "--ctx-size", "--alias", "--chat-template", "--reasoning-format",
    "--reasoning",
}  # fmt: skip
SWITCHES = {
    "--offline", "--cont-batching", "--embedding", "--reranking", "--metrics", "--kv-unified",
    "--slots", "--no-slots", "--jinja", "--no-jinja", "--verbose", "--backend_sampling",
}  # fmt: skip
ENCODERS = {"--embedding": "embedder", "--reranking": "reranker"}  # stand-ins by flag
_GENERATING = ("--temp", "--seed", "--n-predict", "--parallel", "--context")


def server_command(folder: Path, words: list[str]) -> list[str]:
    """Return the command of graphllm for that of llama.cpp's server.

    Args:
        folder: has the stand-ins.
        words: arguments of llama.cpp's server. SystemExit: a flag is unknown.
    """
    given: dict[str, str] = {}
    rest = iter(words)
    for word in rest:
        if word in SAME or word in VALUES:
            given[word] = next(rest)
        elif word in SWITCHES:
            given[word] = ""
        else:
            sys.exit(f"{word} has no counterpart in graphllm serve")
    encoder = next((name for flag, name in ENCODERS.items() if flag in given), None)
    model = encoder or "generator.gguf"
    made = [sys.executable, "-m", "graphllm", "serve", str(folder / model)]
    for name in dict.fromkeys([*given.get("--alias", model).split(","), *NAMES]):
        made += ["--alias", name]
    if encoder:
        given = {flag: value for flag, value in given.items() if flag not in _GENERATING}
    else:
        context, slots = int(given.get("--ctx-size", 4096)), int(given.get("--parallel", 1))
        given["--context"] = str(context if "--kv-unified" in given else context // slots)
        if int(given.get("--n-predict", 1)) < 0:
            del given["--n-predict"]
        template = given.get("--chat-template-file", given.get("--chat-template", "chatml"))
        given["--chat-template-file"] = template
        made += DEFAULTS
    for flag in SAME.keys() & given.keys():
        made += [SAME[flag], given[flag]]
    return made
