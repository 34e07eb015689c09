"""What the verbs have in common: groups of options, loading a model, a progress bar."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer

from ..errors import RequestError

if TYPE_CHECKING:
    from ..api import LLM
    from ..generation.request import Sampling
    from ..weights.files import ModelFile

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Run decoder language models, and see op by op where the time goes.",
)

MODEL = (
    "A .gguf file (the first, if in parts), a Hugging Face directory or ORG/NAME, a .safetensors "
    "or llama2.c .bin file, or 'demo'."
)
Model = Annotated[str, typer.Argument(help=MODEL, show_default=False)]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Template = Annotated[
    str | None,
    typer.Option(
        "--chat-template",
        help="A Jinja2 file, or gemma, chatml, llama3, mistral, phi3, zephyr; else the model's.",
    ),
]
LinearMode = Annotated[
    str, typer.Option("--linear", help="auto, integer, or float: activations not quantised.")
]
NoFuse = Annotated[
    list[str] | None,
    typer.Option("--no-fuse", help="A fusion rule to leave out, or all.", show_default=False),
]
Threads = Annotated[int, typer.Option("-t", "--threads", help="CPU threads; 0: the usable cores.")]
KvType = Annotated[
    str | None,
    typer.Option("--kv-type", help="f32, f16 or q8_0; f16 by default, f32 on the reference."),
]
ModelDef = Annotated[
    Path | None,
    typer.Option("--model-def", help="A model file of your own, a Python file, for MODEL."),
]
System = Annotated[str | None, typer.Option("--system", help="A system message to begin with.")]


@dataclass
class Placing:
    """Where a model's ops run, and how."""

    device: Annotated[
        str, typer.Option("--device", help="auto, or the first to ask: cuda, cpu, reference.")
    ] = "auto"
    gpu_layers: Annotated[
        str,
        typer.Option(
            "-ngl",
            "--gpu-layers",
            "--n-gpu-layers",
            help="Layers on the GPU, from the output back: auto (what fits), all, or a number.",
        ),
    ] = "auto"
    linear: LinearMode = "auto"
    place: Annotated[
        list[str] | None,
        typer.Option("--place", help="PATTERN=BACKEND: pin sites by scope.", show_default=False),
    ] = None
    no_kernel: Annotated[
        list[str] | None,
        typer.Option(
            "--no-kernel",
            help="BACKEND:OP: that backend leaves the op to others.",
            show_default=False,
        ),
    ] = None
    strict: Annotated[
        bool, typer.Option("--strict", help="Fail where an op misses the first usable backend.")
    ] = False
    no_fuse: NoFuse = None
    model_def: ModelDef = None
    type: Annotated[
        str | None,
        typer.Option(
            "--type",
            help="Quantise float matrices while loading: q8_0, q4_0, ... With --random: the format "
            "of the weights, q4_k_m by default.",
            show_default=False,
        ),
    ] = None

    def arguments(self) -> dict[str, Any]:
        """As `graphllm.load` takes them."""
        pins = {}
        for pin in self.place or []:
            pattern, equals, backend = pin.rpartition("=")
            if not equals:
                raise RequestError(f"--place {pin!r} must be PATTERN=BACKEND")
            pins[pattern] = backend
        own = {f.name: getattr(self, f.name) for f in fields(self)}
        own |= {"place": pins, "no_fuse": self.no_fuse or ()}
        own["no_kernels"] = own.pop("no_kernel") or ()
        return own

    def load(self, model: str | ModelFile, **more: Any) -> LLM:
        """The model, with a progress bar while it loads; ``more`` as in `graphllm.load`."""
        from ..api import load

        with progress_line() as show:
            loaded = load(model, progress=show, **self.arguments() | more)
        for line in loaded.notes():
            note(f"note: {line}")
        return loaded


@dataclass
class Loading(Placing):
    """How to load a model."""

    context: Annotated[
        int, typer.Option("-c", "--ctx-size", help="Tokens of prompt and answer that fit.")
    ] = 4096
    threads: Threads = 0
    kv_type: KvType = None


@dataclass
class Source:
    """A model file, or a shape without one."""

    model: Annotated[
        str | None,
        typer.Argument(help=MODEL, show_default=False),
    ] = None
    random: Annotated[
        str | None,
        typer.Option("--random", metavar="SHAPE", help="Random weights of a real model's shape."),
    ] = None

    def open(self, placing: Placing, data: bool = True) -> ModelFile:
        """The file, with its tensors' ``data`` or without, or random weights, which are made in the
        type that ``placing`` asks for, and so not converted to it. RequestError."""
        from ..weights.files import open_model
        from ..weights.random import RandomFile
        from ..weights.shapes import MIX

        if self.model is not None and self.random is None:
            return open_model(self.model, data)
        if self.random is not None and self.model is None:
            kind, placing.type = placing.type or MIX, None
            return RandomFile(self.random, kind)
        raise RequestError("give a MODEL, or --random SHAPE")


@dataclass
class Drawing:
    """How tokens are drawn, and when to end; the fields are those of `Sampling`."""

    max_tokens: Annotated[
        int,
        typer.Option(
            "-n", "--max-tokens", "--n-predict", "--max-new-tokens", help="Tokens to generate."
        ),
    ] = 128
    seed: Annotated[int | None, typer.Option("-s", "--seed", help="Drawn if not given.")] = None
    temperature: Annotated[
        float, typer.Option("--temp", "--temperature", help="0 takes the most likely token.")
    ] = 0.8
    top_k: Annotated[int, typer.Option("--top-k", help="0: off.")] = 40
    top_p: Annotated[float, typer.Option("--top-p", help="1: off.")] = 0.95
    min_p: Annotated[float, typer.Option("--min-p", help="0: off.")] = 0.0
    repeat_penalty: Annotated[
        float,
        typer.Option(
            "--repeat-penalty", "--repetition-penalty", help="Of the last 64 tokens; 1: off."
        ),
    ] = 1.0
    presence_penalty: Annotated[float, typer.Option("--presence-penalty", help="0: off.")] = 0.0
    frequency_penalty: Annotated[float, typer.Option("--frequency-penalty", help="0: off.")] = 0.0
    stop: Annotated[
        list[str] | None,
        typer.Option(
            "--stop", "--stop-strings", help="A text to end before; repeatable.", show_default=False
        ),
    ] = None
    stop_ids: Annotated[
        list[int] | None,
        typer.Option(
            "--stop-id",
            "--stop-token-ids",
            help="A token to end at; repeatable.",
            show_default=False,
        ),
    ] = None
    min_tokens: Annotated[
        int,
        typer.Option("--min-tokens", "--min-new-tokens", help="No end before so many tokens."),
    ] = 0
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Never draw an end token.")] = (
        False
    )

    def sampling(self) -> Sampling:
        """The request. RequestError names a value out of range."""
        from ..generation.request import Sampling

        own = {f.name: getattr(self, f.name) for f in fields(self)}
        own["stop"], own["stop_ids"] = tuple(self.stop or ()), tuple(self.stop_ids or ())
        return Sampling(**own).checked()


@dataclass
class Answering(Drawing):
    """As `Drawing`, for answers, which end by themselves."""

    max_tokens: Annotated[
        int,
        typer.Option(
            "-n", "--max-tokens", "--n-predict", "--max-new-tokens", help="Tokens of an answer."
        ),
    ] = 1024


def verb(function: Callable[..., None]) -> Callable[..., None]:
    """Register a verb. A parameter whose type is a group stands for all options of the group."""
    parameters: list[inspect.Parameter] = []
    groups: dict[str, tuple[type, list[str]]] = {}
    # Not get_type_hints: Python 3.10's hides Annotated below Optional where the default is None.
    for parameter in inspect.signature(function, eval_str=True).parameters.values():
        kind = parameter.annotation
        if not is_dataclass(kind):
            parameters.append(_option(parameter.name, kind, parameter.default))
            continue
        inner = get_type_hints(kind, include_extras=True)
        groups[parameter.name] = kind, [f.name for f in fields(kind)]  # type: ignore[assignment]
        parameters += [_option(f.name, inner[f.name], f.default) for f in fields(kind)]

    def call(**values: Any) -> None:
        for name, (kind, names) in groups.items():
            values[name] = kind(**{n: values.pop(n) for n in names})
        function(**values)

    call.__name__, call.__doc__ = function.__name__, function.__doc__
    call.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    call.__annotations__ = {p.name: p.annotation for p in parameters}
    app.command()(call)
    return function


def _option(name: str, kind: Any, default: Any) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=kind)


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


def read_text(file: Path | None) -> str:
    """A file, or standard input for None. RequestError for what is not there or no UTF-8."""
    try:
        data = file.read_bytes() if file is not None else sys.stdin.buffer.read()
        return data.decode("utf-8")
    except OSError as error:
        raise RequestError(f"{file}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        where = file or "standard input"
        raise RequestError(f"{where}: byte {error.start} is not valid UTF-8") from None


def say(text: str) -> None:
    """Write to standard output at once."""
    sys.stdout.write(text)
    sys.stdout.flush()


def note(text: str) -> None:
    """Tell something beside the output, on standard error."""
    print(text, file=sys.stderr)
