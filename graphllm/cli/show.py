"""The verbs that show something: ``inspect``, ``tokenize``, ``doctor``."""

from __future__ import annotations

import sys
from typing import Annotated, Any

import typer

from ..terminal import safe
from .options import AsJson, Model, read_text, verb
from .output import show, show_json
from .progress import progress_line


@verb
def inspect(model: Model, as_json: AsJson = False) -> None:
    """Show the architecture, configuration and tensors of a model file.

    graphllm inspect demo

    graphllm inspect model.gguf --json
    """
    from ..checkpoints.checkpoint import open_model

    file = open_model(model)
    tensors = list(file.tensors.values())
    keys = {k: _short(v) for k, v in file.metadata.items()}
    if as_json:
        listed = [
            {"name": t.name, "shape": list(t.shape), "format": str(t.dtype), "bytes": t.nbytes}
            for t in tensors
        ]
        show_json({"path": str(file.path), "metadata": keys, "tensors": listed})
        return
    show(f"{file.path}: {file.kind}, {_short(file.architecture)}")
    for key, value in keys.items():
        show(f"  {key} = {value}")
    sizes: dict[str, list[int]] = {}
    for t in tensors:
        sizes.setdefault(str(t.dtype), []).append(t.nbytes)
        show(f"  {safe(t.name):<40} {t.dtype!s:<6} {'x'.join(map(str, t.shape)):>14}")
    for name, parts in sorted(sizes.items(), key=lambda item: -sum(item[1])):
        show(f"{name:<6} {len(parts):>4} tensors {sum(parts) / 1e6:>9.1f} MB")


def _short(value: Any) -> Any:
    """A metadata value as shown: long arrays by their kind and length only."""
    if isinstance(value, dict):
        return {k: _short(v) for k, v in value.items()}
    if isinstance(value, str):
        return value if len(value) <= 200 else value[:200] + "..."
    if hasattr(value, "__len__"):
        return f"[{len(value)} values]" if len(value) > 16 else [_short(v) for v in value]
    return value.item() if hasattr(value, "item") else value


@verb
def tokenize(
    model: Model,
    text: Annotated[
        str, typer.Argument(help="Text; - reads it from standard input.", show_default=False)
    ],
    ids: Annotated[bool, typer.Option("--ids", help="Print only the ids, as a JSON list.")] = False,
    special: Annotated[
        bool,
        typer.Option("--special", help="Encode special tokens written out in the text as such."),
    ] = False,
    bare: Annotated[bool, typer.Option("--no-bos", help="Add no BOS and EOS token.")] = False,
) -> None:
    """Show the tokens of a text, one per line: its id and its text.

    graphllm tokenize demo "Hello, world" --ids
    """
    from ..checkpoints.checkpoint import open_model

    own = open_model(model).tokenizer()
    text = read_text(None) if text == "-" else text
    found = own.encode(text, add_special=not bare, parse_special=special)
    if ids:
        show_json(found)
        return
    for token in found:
        shown = own.piece(token).decode("utf-8", "backslashreplace")
        show(f"{token:>7} {shown!r}")


@verb
def doctor(
    measure: Annotated[
        bool,
        typer.Option(
            "--measure",
            help="Measure the bandwidth of memory and caches and the peak arithmetic (30 seconds).",
        ),
    ] = False,
) -> None:
    """List the usable backends, why others are not, and this machine's measured ceilings.

    graphllm doctor

    graphllm doctor --measure
    """
    from .. import backends
    from ..compiler.placement import CALL
    from ..env import cache_dir
    from ..ops import get, registry
    from ..version import __version__

    show(f"graphllm {__version__}, Python {sys.version.split()[0]}, cache {cache_dir()}")
    for name in backends.names():
        backend = backends.find(name)
        ok, reason = backend.available()
        show(f"{name:<10} {'usable' if ok else 'not usable'}: {reason}")
        if ok and backend.kernels:
            names = [op for op in registry() if get(op).role != CALL]  # which is no kernel's
            without = sorted(op for op in names if op not in backend.kernels)
            have = len(names) - len(without)
            show(f"{'':<10} kernels for {have} of {len(names)} ops")
            for op in without:
                show(f"{'':<10} {op}: {name} has no kernel for it; the next backend runs it")
        if ok and backend.measure is not None:
            for line in _ceiling(name, measure):
                show(f"{'':<10} {line}")


def _ceiling(backend: str, measure: bool) -> list[str]:
    """What the backend reaches at best, measured now or before, as lines."""
    from ..profiler import roofline

    if not measure:
        found = roofline.kept(backend)
        return found.lines() if found else ["memory: not measured (graphllm doctor --measure)"]
    with progress_line("measuring") as progress:
        return roofline.measure(backend, progress).lines()
