"""The command line: ``graphllm run | inspect | doctor | profile``.

Errors are one line on standard error with exit code 1 (2 for wrong usage); a traceback shows only
with GRAPHLLM_DEBUG set. Nothing here computes: each verb calls the Python API and prints.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .debug import debug_level
from .errors import GraphllmError, RequestError

if TYPE_CHECKING:
    from .llm import LLM

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Run decoder language models, and see op by op where the time goes.",
)

Model = Annotated[str, typer.Argument(help="A .gguf file, or 'demo'.", show_default=False)]
Prompt = Annotated[
    str | None, typer.Option("-p", "--prompt", help="The text to continue; '-' reads it.")
]
PromptFile = Annotated[
    Path | None, typer.Option("-f", "--file", help="A file with the text to continue.")
]
Count = Annotated[
    int, typer.Option("-n", "--max-tokens", "--n-predict", help="How many tokens to generate.")
]
Context = Annotated[
    int, typer.Option("-c", "--ctx-size", help="Tokens of prompt and answer that fit.")
]
Threads = Annotated[int, typer.Option("-t", "--threads", help="CPU threads; 0: the usable cores.")]
DeviceName = Annotated[
    str, typer.Option("--device", help="auto, or the first backend to ask: cpu, reference.")
]
KvType = Annotated[
    str | None,
    typer.Option("--kv-type", help="f16 or f32; f16 by default, f32 on the reference."),
]
Linear = Annotated[
    str, typer.Option("--linear", help="auto, integer, or float: activations not quantised.")
]
Place = Annotated[
    list[str] | None,
    typer.Option("--place", help="PATTERN=BACKEND: pin sites by scope.", show_default=False),
]
Strict = Annotated[
    bool, typer.Option("--strict", help="Fail where an op misses the first usable backend.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]


# ---------------------------------------------------------------------------------------- progress


@contextmanager
def progress_line() -> Iterator[Callable[[str, int, int], None]]:
    """A callback (what, done, total) that shows a bar on standard error if that is a terminal."""
    if not sys.stderr.isatty():
        yield lambda what, done, total: None
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as bar:
        tasks: dict[str, Any] = {}

        def show(what: str, done: int, total: int) -> None:
            if what not in tasks:
                tasks[what] = bar.add_task(what, total=total)
            bar.update(tasks[what], completed=done, total=total)

        yield show


def _load(model: str, **options: Any) -> LLM:
    from . import llm

    pins = {}
    for pin in options.pop("place") or []:
        pattern, equals, backend = pin.rpartition("=")
        if not equals:
            raise RequestError(f"--place {pin!r} must be PATTERN=BACKEND")
        pins[pattern] = backend
    with progress_line() as show:
        return llm.load(model, place=pins, progress=show, **options)


def _prompt(text: str | None, file: Path | None) -> str:
    """The prompt from -p, from -f or from standard input; bytes that are no UTF-8 are an error."""
    if text is not None and file is not None:
        raise RequestError("give -p or -f, not both")
    if text is not None and text != "-":
        return text
    if text is None and file is None:
        raise RequestError("give a prompt with -p TEXT, -p - or -f FILE")
    try:
        data = file.read_bytes() if file is not None else sys.stdin.buffer.read()
        return data.decode("utf-8")
    except OSError as error:
        raise RequestError(f"{file}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        where = file or "standard input"
        raise RequestError(f"{where}: byte {error.start} is not valid UTF-8") from None


# ------------------------------------------------------------------------------------------- verbs


@app.command()
def run(
    model: Model,
    prompt: Prompt = None,
    file: PromptFile = None,
    max_tokens: Count = 128,
    context: Context = 4096,
    threads: Threads = 0,
    seed: Annotated[int | None, typer.Option("-s", "--seed", help="Drawn if not given.")] = None,
    temperature: Annotated[
        float, typer.Option("--temp", "--temperature", help="0 takes the most likely token.")
    ] = 0.8,
    top_k: Annotated[int, typer.Option("--top-k", help="0: off.")] = 40,
    top_p: Annotated[float, typer.Option("--top-p", help="1: off.")] = 0.95,
    min_p: Annotated[float, typer.Option("--min-p", help="0: off.")] = 0.0,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Go on after the end.")] = False,
    device: DeviceName = "auto",
    kv_type: KvType = None,
    linear: Linear = "auto",
    place: Place = None,
    strict: Strict = False,
    as_json: AsJson = False,
) -> None:
    """Continue a prompt.

    graphllm run demo -p "The capital of France is" -n 32 --temp 0
    """
    from .generation.request import Completion, Sampling

    text = _prompt(prompt, file)
    sampling = Sampling(max_tokens, temperature, top_k, top_p, min_p, seed, ignore_eos).checked()
    llm = _load(
        model, context=context, threads=threads, device=device, kv_type=kv_type, linear=linear,
        place=place, strict=strict,
    )  # fmt: skip
    done = Completion([])
    if not as_json:
        sys.stdout.write(text)
        sys.stdout.flush()
    with progress_line() as show:
        pieces = llm.complete(text, sampling, done, partial(show, "reading the prompt"))
        first = next(pieces, "")
    for piece in itertools.chain([first], pieces):
        if not as_json:
            sys.stdout.write(piece)
            sys.stdout.flush()
    if as_json:
        ops = llm.placement()
        where = {
            "device": llm.device,
            "placement": {backend: sum(counts.values()) for backend, counts in ops.items()},
            "ops": ops,
            "fallbacks": llm.misses(),
        }
        print(json.dumps({**done.as_dict(), **where}, ensure_ascii=False))
        return
    sys.stdout.write("\n")
    _tell(llm, done, seed)


def _tell(llm: LLM, done: Any, seed: int | None) -> None:
    """After a run: the drawn seed and the rates on a terminal; always what fell back."""
    if sys.stderr.isatty():
        t = done.timings.as_dict()
        drawn = f", seed {done.seed}" if seed is None else ""
        print(
            f"[{len(done.prompt_ids)} + {len(done.ids)} tokens, load {t['load_s']:.2f} s, first "
            f"token {t['ttft_s']:.2f} s, {t['decode_tok_s']:.1f} tok/s{drawn}]",
            file=sys.stderr,
        )
    for line in llm.misses():
        print(f"note: {line}", file=sys.stderr)


@app.command()
def inspect(model: Model, as_json: AsJson = False) -> None:
    """Show a model file's architecture, configuration, tensors, formats and sizes."""
    from .llm import model_path
    from .weights.gguf import GGUF

    file = GGUF(model_path(model))
    tensors = list(file.tensors.values())
    keys = {k: _short(v) for k, v in file.metadata.items()}
    if as_json:
        listed = [
            {"name": t.name, "shape": list(t.shape), "format": str(t.dtype), "bytes": t.nbytes}
            for t in tensors
        ]
        print(json.dumps({"path": str(file.path), "metadata": keys, "tensors": listed}))
        return
    print(f"{file.path}: GGUF version {file.version}, {file.architecture}")
    for key, value in keys.items():
        print(f"  {key} = {value}")
    sizes: dict[str, list[int]] = {}
    for t in tensors:
        sizes.setdefault(str(t.dtype), []).append(t.nbytes)
        print(f"  {t.name:<40} {t.dtype!s:<6} {'x'.join(map(str, t.shape)):>14}")
    for name, parts in sorted(sizes.items(), key=lambda item: -sum(item[1])):
        print(f"{name:<6} {len(parts):>4} tensors {sum(parts) / 1e6:>9.1f} MB")


def _short(value: Any) -> Any:
    """A metadata value as shown: long arrays by their kind and length only."""
    if isinstance(value, str):
        return value if len(value) <= 200 else value[:200] + "..."
    if hasattr(value, "__len__"):
        return f"[{len(value)} values]" if len(value) > 16 else [_short(v) for v in value]
    return value.item() if hasattr(value, "item") else value


@app.command()
def doctor() -> None:
    """Show which backends can be used here, and why the others can not."""
    from . import __version__, backends
    from .ops import registry
    from .paths import cache_dir

    print(f"graphllm {__version__}, Python {sys.version.split()[0]}, cache {cache_dir()}")
    for name in backends.names():
        backend = backends.find(name)
        ok, reason = backend.available()
        print(f"{name:<10} {'usable' if ok else 'not usable'}: {reason}")
        if ok and backend.kernels:
            without = sorted(op for op in registry() if op not in backend.kernels)
            have = len(registry()) - len(without)
            print(f"{'':<10} kernels for {have} of {len(registry())} ops")
            for op in without:
                print(f"{'':<10} {op}: {name} has no kernel for it; the next backend runs it")


@app.command()
def profile(
    model: Model,
    prompt: Prompt = "The capital of France is",
    max_tokens: Count = 64,
    by: Annotated[str, typer.Option("--by", help="op, scope, layer, backend or format.")] = "op",
    context: Context = 4096,
    threads: Threads = 0,
    device: DeviceName = "auto",
    kv_type: KvType = None,
    linear: Linear = "auto",
    place: Place = None,
    strict: Strict = False,
) -> None:
    """Show what each op of a prefill and of a decode costs: time, share, GB/s, GFLOP/s."""
    from .profiler.rows import KEYS

    if by not in KEYS:
        raise RequestError(f"--by {by} must be one of {', '.join(KEYS)}")
    llm = _load(
        model, context=context, threads=threads, device=device, kv_type=kv_type, linear=linear,
        place=place, strict=strict,
    )  # fmt: skip
    print(llm.profile(prompt or "", max_tokens).table(by))


# -------------------------------------------------------------------------------------------- main


def _call() -> None:
    """Parse the arguments and call the verb.

    Not through the library's own ``main``, which has its own mind about Ctrl-C and closed pipes.
    """
    command = typer.main.get_command(app)
    with command.make_context("graphllm", sys.argv[1:]) as context:
        command.invoke(context)
    sys.stdout.flush()


def main() -> None:
    """The entry point: runs a verb and turns its failure into one line and an exit code."""
    try:
        _call()
    except KeyboardInterrupt:
        print("\ninterrupted" if sys.stderr.isatty() else "interrupted", file=sys.stderr)
        sys.exit(130)
    except BrokenPipeError:
        # The reader has gone: nothing more can be said, also not by the interpreter's last flush.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except GraphllmError as error:
        if debug_level():
            raise
        print(f"error: {error}", file=sys.stderr)
        sys.exit(1)
    except Exception as error:
        if hasattr(error, "exit_code"):  # the library's: wrong usage, or --help has been shown
            if hasattr(error, "show"):
                error.show()
            sys.exit(error.exit_code)
        if debug_level():
            raise
        what = f"{type(error).__name__}: {error}"
        print(f"error: {what} (GRAPHLLM_DEBUG=1 shows where)", file=sys.stderr)
        sys.exit(1)
