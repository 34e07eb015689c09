"""The verb ``diff``: compare two backends or two files op by op on one prompt."""

from __future__ import annotations

from typing import Annotated

from ..errors import RequestError
from ..progress import progress_line
from .declarations import Option, exit_with, verb
from .options import AsJson, KvType, LinearMode, Model, ModelDef, NoFuse, Threads
from .output import show_json, show_table


@verb
def diff(
    model: Model,
    backends: Annotated[
        str,
        Option(
            "--backends",
            metavar="A,B",
            help="Backend to check, and the backend to check it against.",
        ),
    ] = "cpu,reference",
    prompt: Annotated[str, Option("-p", "--prompt", help="Prompt.")] = ("The capital of France is"),
    ids: Annotated[
        str | None,
        Option("--ids", metavar="LIST", help="Prompt as comma-separated token ids."),
    ] = None,
    against: Annotated[
        str | None,
        Option("--against", metavar="FILE", help="Compare with another file on the first backend."),
    ] = None,
    fused: Annotated[
        bool,
        Option(
            "--fused", help="Compare the fused steps of the first backend with their unfused ops."
        ),
    ] = False,
    no_fuse: NoFuse = None,
    linear: LinearMode = "auto",
    kv_type: KvType = None,
    model_def: ModelDef = None,
    threads: Threads = 0,
    as_json: AsJson = False,
) -> None:
    """Compare two backends op by op on a prompt and report the first divergence.

    Backend B runs each step of A's plan twice: on A's operands (alone) and on
    its own results of earlier steps (chain). The exit code is 1 if a step that
    runs alone exceeds the tolerance of its op. Two files are compared by chain
    only.

    graphllm diff demo --backends cpu,reference

    graphllm diff demo --fused --ids 2,818,5279

    graphllm diff q4.gguf --against q8.gguf
    """
    from ..profiler.diff.comparison import diff as compare

    with progress_line("comparing") as progress:
        found = compare(
            model, backends.split(","), prompt=prompt, ids=_ids(ids), against=against, fused=fused,
            no_fuse=no_fuse or (), linear=linear, kv_type=kv_type, model_def=model_def,
            threads=threads, progress=progress,
        )  # fmt: skip
    if as_json:
        show_json(found.as_dict())
    else:
        show_table(found.table())
    if found.first is not None:
        exit_with(1)


def _ids(text: str | None) -> list[int] | None:
    """Parse comma-separated token ids. RequestError: not integers."""
    try:
        return None if text is None else [int(part) for part in text.split(",")]
    except ValueError:
        raise RequestError(f"--ids {text!r} must be comma-separated integers") from None
