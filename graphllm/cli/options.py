"""Option groups that several verbs share, registration of verbs, and loading of models."""

from __future__ import annotations

import sys
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from ..errors import RequestError
from ..progress import progress_line
from ..terminal import note
from .declarations import Argument, Option

if TYPE_CHECKING:
    from ..api import LLM
    from ..checkpoints.checkpoint import Checkpoint
    from ..embedding.encoder_model import EncoderModel

MODEL = (
    "A .gguf file (the first part of a split file), a Hugging Face directory or ORG/NAME, a "
    ".safetensors file, a llama2.c .bin file, 'demo' or 'minilm'."
)
Model = Annotated[str, Argument(help=MODEL, show_default=False)]
AsJson = Annotated[bool, Option("--json", help="Print JSON.")]
Template = Annotated[
    str | None,
    Option(
        "--chat-template",
        help="Chat template: a Jinja2 file, or gemma, chatml, llama3, mistral, phi3 or zephyr; "
        "the model's own by default.",
    ),
]
LinearMode = Annotated[
    str,
    Option(
        "--linear",
        help="Matrix products with quantised weights: integer (activations are quantised, too), "
        "float, or auto.",
    ),
]
NoFuse = Annotated[
    list[str] | None,
    Option(
        "--no-fuse", help="Fusion rule to disable, or all; may be repeated.", show_default=False
    ),
]
Threads = Annotated[
    int, Option("-t", "--threads", help="Number of CPU threads; 0 uses every performance core.")
]
KvType = Annotated[
    str | None,
    Option(
        "--kv-type",
        help="Type of the KV cache: f32, f16, q8_0, q4_0 or fp8; f16 by default, f32 on "
        "the reference backend.",
    ),
]
ModelDef = Annotated[
    Path | None,
    Option("--model-def", help="Python file that defines the model, instead of a built-in family."),
]
Device = Annotated[
    str, Option("--device", help="First backend to try: auto, cuda, cpu or reference.")
]
TextFile = Annotated[
    Path | None,
    Option("-f", "--file", help="Text file; - reads standard input.", show_default=False),
]
System = Annotated[str | None, Option("--system", help="System message.")]


@dataclass
class PlacementOptions:
    """Options that choose backends, kernels and weight formats."""

    device: Device = "auto"
    gpu_layers: Annotated[
        str,
        Option(
            "-ngl",
            "--gpu-layers",
            "--n-gpu-layers",
            help="Number of layers to offload to the GPU, the last ones first; all, or auto for as "
            "many as fit.",
        ),
    ] = "auto"
    linear: LinearMode = "auto"
    prefill: Annotated[
        str,
        Option(
            "--prefill",
            help="fp8: multiply e4m3 copies of the weights in plans for more than 256 tokens, such "
            "as those of prompts, on GPUs of compute capability 8.9 and newer: faster (measured on "
            "9.0 alone) and less exact; the copies take one byte per weight. auto: off.",
        ),
    ] = "auto"
    deterministic: Annotated[
        bool,
        Option(
            "--deterministic",
            help="Give a request the same bits in any batch on CUDA, too; the CPU always does.",
        ),
    ] = False
    low_mem: Annotated[
        bool,
        Option(
            "--low-mem",
            help="Read the experts of a mixture from the model file for each use and keep no copy "
            "of them in memory; on the CPU only.",
        ),
    ] = False
    place: Annotated[
        list[str] | None,
        Option(
            "--place",
            metavar="PATTERN=BACKEND",
            help="Run the ops whose scope matches on this backend; may be repeated.",
            show_default=False,
        ),
    ] = None
    no_kernel: Annotated[
        list[str] | None,
        Option(
            "--no-kernel",
            metavar="BACKEND:OP",
            help="Do not run this op on this backend; may be repeated.",
            show_default=False,
        ),
    ] = None
    strict: Annotated[
        bool,
        Option("--strict", help="Fail if an op does not run on the first usable backend."),
    ] = False
    no_fuse: NoFuse = None
    model_def: ModelDef = None
    type: Annotated[
        str | None,
        Option(
            "--type",
            help="Format to quantise float matrices to while loading: q8_0, q4_0, ...; of random "
            "weights (--random, where a verb has it), their format, q4_k_m by default.",
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

    def load(self, model: str | Checkpoint, **more: Any) -> LLM:
        """Load the model with a progress bar and print its notes.

        ``more``: further keyword arguments of `graphllm.load`.
        """
        from ..api import LLM

        with progress_line() as show:
            one = {"max_sequences": 1}  # unless the verb asks for more
            loaded = LLM.load(model, progress=show, **one | self.arguments() | more)
        for line in loaded.notes():
            note(f"note: {line}")
        return loaded

    def load_encoder(self, file: Checkpoint) -> EncoderModel:
        """Load an encoder with a progress bar; note ops that missed the device.

        RequestError: an option has no meaning for an encoder.
        """
        from ..api.loader import load_encoder

        default = type(self)().arguments()
        given = {
            name: value for name, value in self.arguments().items() if value != default.get(name)
        }
        with progress_line() as show:
            loaded = load_encoder(file, progress=show, **given)
        for line in loaded.misses():
            note(f"note: {line}")
        return loaded


@dataclass
class LoadOptions(PlacementOptions):
    """Options of loading a model."""

    context: Annotated[
        int | None,
        Option(
            "-c",
            "--ctx-size",
            help="Context size in tokens; 4096 by default, at most the model's own.",
            show_default=False,
        ),
    ] = None
    threads: Threads = 0
    kv_type: KvType = None

    def arguments(self) -> dict[str, Any]:
        """As `graphllm.load` takes them."""
        own = super().arguments()
        if self.context is None:
            del own["context"]
        return own

    def load(self, model: str | Checkpoint, **more: Any) -> LLM:
        """Load as `PlacementOptions.load`; print a note if the model's context is below -c."""
        loaded = super().load(model, **more)
        for line in self.notes(loaded.limits.context):
            note(f"note: {line}")
        return loaded

    def notes(self, context: int) -> list[str]:
        """Return the notes for a model whose ``context`` is shorter than asked for."""
        if self.context is None or self.context <= context:
            return []
        return [f"-c {self.context} exceeds the model's context: {context} tokens are used"]


@dataclass
class GenerationLoadOptions(LoadOptions):
    """Options of loading a model that generates text."""

    speculate: Annotated[
        str,
        Option(
            "--speculate",
            metavar="N|auto|off",
            help="Speculative decoding by prompt look-up: compute up to N draft tokens in a step, "
            "or as many as pay (auto). Answers stay the same.",
        ),
    ] = "off"
    draft: Annotated[
        str | None,
        Option(
            "--draft",
            metavar="MODEL",
            help="Predict draft tokens with a smaller model of the same vocabulary instead; "
            "--speculate is then auto unless it is a number.",
            show_default=False,
        ),
    ] = None


@dataclass
class ModelSource:
    """The model to use: a file, or random weights."""

    model: Annotated[
        str | None,
        Argument(help=MODEL, show_default=False),
    ] = None
    random: Annotated[
        str | None,
        Option(
            "--random", metavar="SHAPE", help="Use random weights in the shape of a known model."
        ),
    ] = None

    def open(self, placement: PlacementOptions, data: bool = True) -> Checkpoint:
        """Open the model file or create random weights.

        Args:
            placement: its ``type`` is the format of random weights; it is reset to None, since they
                need no conversion.
            data: whether the data of the tensors are needed, not only their shapes.

        Raises:
            RequestError: not exactly one of MODEL and --random is given.
        """
        from ..checkpoints.checkpoint import open_checkpoint
        from ..checkpoints.model_shapes import MIX
        from ..checkpoints.random_weights import RandomCheckpoint

        if self.model is not None and self.random is None:
            return open_checkpoint(self.model, data)
        if self.random is not None and self.model is None:
            kind, placement.type = placement.type or MIX, None
            return RandomCheckpoint(self.random, kind)
        raise RequestError("give a MODEL, or --random SHAPE")


def target_size(model: str, size: str) -> int:
    """Return the bytes of --target-size. RequestError: no mix of formats is that small."""
    from ..quality.mix_search import check_target
    from .number_lists import parse_size

    found = parse_size("--target-size", size)
    check_target(model, found)
    return found


def read_text_file(file: Path) -> str:
    """Return the text of a `TextFile`. RequestError: see `read_text`."""
    return read_text(None if str(file) == "-" else file)


def read_text(file: Path | None) -> str:
    """Return the text of a file, or of standard input if ``file`` is None.

    RequestError: it cannot be read, or is not valid UTF-8.
    """
    try:
        data = file.read_bytes() if file is not None else sys.stdin.buffer.read()
        return data.decode("utf-8")
    except OSError as error:
        raise RequestError(f"{file}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        where = file or "standard input"
        raise RequestError(f"{where}: byte {error.start} is not valid UTF-8") from None
