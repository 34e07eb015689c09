"""The verb ``perplexity``: perplexity of a text, and divergence from a base model."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from ..errors import RequestError
from ..progress import progress_line
from .declarations import Option, verb
from .options import AsJson, KvType, Model, PlacementOptions, TextFile, Threads, read_text_file
from .output import check_writable, show_json, show_table

if TYPE_CHECKING:
    from ..api import LLM
    from ..quality.divergence_report import Divergence
    from ..quality.hellaswag import MultipleChoice
    from ..quality.perplexity import Perplexity

_CONTEXT = 512  # default of -c, as in llama.cpp


@dataclass
class TextOptions:
    """The text, its chunks, the base file, and multiple-choice tasks."""

    file: TextFile = None
    context: Annotated[
        int | None,
        Option("-c", "--ctx-size", help="Tokens of a chunk; 512 by default.", show_default=False),
    ] = None
    chunks: Annotated[
        int | None,
        Option("--chunks", help="Maximum number of chunks; all by default.", show_default=False),
    ] = None
    base: Annotated[
        Path | None,
        Option(
            "--kl-base",
            "--kl-divergence-base",
            "--save-all-logits",
            metavar="FILE",
            help="Write the model's log-probabilities to FILE; with --kl-divergence, read the "
            "base model's from it.",
        ),
    ] = None
    compare: Annotated[
        bool,
        Option("--kl-divergence", help="Compare the model with that of --kl-base."),
    ] = False
    hellaswag: Annotated[
        Path | None,
        Option(
            "--hellaswag",
            metavar="FILE",
            help="Answer multiple-choice tasks instead: six lines each, as llama.cpp has them.",
        ),
    ] = None
    tasks: Annotated[
        int | None,
        Option("--hellaswag-tasks", help="Number of tasks; all by default.", show_default=False),
    ] = None
    force: Annotated[bool, Option("--force", help="Overwrite an existing file of --kl-base.")] = (
        False
    )

    def check(self, model: str) -> None:
        """Raise RequestError or OutputError if options do not fit together, or a file exists.

        ``model``: the model, whose files --kl-base must not replace.
        """
        if self.force and (self.base is None or self.compare):
            raise RequestError("--force needs a --kl-base FILE to write")
        if self.tasks is not None and self.tasks < 1:
            raise RequestError(f"--hellaswag-tasks {self.tasks} must be at least 1")
        others = self.file is not None or self.base is not None or self.chunks is not None
        if self.hellaswag is not None and (others or self.compare):
            raise RequestError(
                "--hellaswag FILE has the text; it takes no -f, --chunks or --kl-base"
            )
        if self.hellaswag is None and self.tasks is not None:
            raise RequestError("--hellaswag-tasks needs --hellaswag FILE")
        if self.hellaswag is not None:
            return
        if self.compare and self.base is None:
            raise RequestError("--kl-divergence needs --kl-base FILE, written with the base model")
        if not self.compare and self.file is None:
            raise RequestError("-f FILE is missing: the text to compute the perplexity of")
        if self.base is not None and not self.compare:
            from ..checkpoints.model_files import check_not_input

            if self.base.exists() and not self.force:
                raise RequestError(
                    f"--kl-base {self.base}: the file exists; --kl-divergence compares with it, "
                    "--force overwrites it"
                )
            check_not_input(
                self.base, models=[model], files=[("the text", self.file)], flag="--kl-base"
            )
            check_writable(self.base, "--kl-base")

    def read(self) -> str | None:
        """Return the text, None if there is no file. RequestError: it cannot be read."""
        file = self.file or self.hellaswag
        if file is None:
            return None
        found = read_text_file(file)
        if not found:
            raise RequestError(f"{file}: the text is empty")
        return found


@verb
def perplexity(
    model: Model,
    text: TextOptions,
    placement: PlacementOptions,
    threads: Threads = 0,
    kv_type: KvType = None,
    as_json: AsJson = False,
) -> None:
    """Compute the perplexity of a text, as llama.cpp's perplexity tool does.

    The text is cut into chunks of -c tokens; the tokens of the second half of
    each chunk are predicted. With --kl-base, the log-probabilities of all
    tokens are written to a file, with which --kl-divergence compares another
    model: one quantised from the first, for example.

    graphllm perplexity demo -f book.txt

    graphllm perplexity f16.gguf -f book.txt --kl-base book.base

    graphllm perplexity q4.gguf --kl-base book.base --kl-divergence

    graphllm perplexity demo --hellaswag hellaswag_val_full.txt
    """
    text.check(model)
    words = text.read()

    def load(context: int) -> LLM:
        """Load for chunks of ``context`` tokens, as many at once as a step takes."""
        from ..quality.perplexity import chunks_per_step

        most = 16 if text.hellaswag else chunks_per_step(context)
        return placement.load(
            model, context=context, threads=threads, kv_type=kv_type, max_sequences=most
        )

    run = _compare if text.compare else _measure if text.hellaswag is None else _answer
    found = run(load, text, words or "")
    if as_json:
        show_json({"model": model, **found.as_dict()})
    else:
        show_table(found.table())


def _measure(load: Callable[[int], LLM], options: TextOptions, text: str) -> Perplexity:
    """Compute the perplexity; write the base file if there is one."""
    context = _CONTEXT if options.context is None else options.context
    with load(context) as llm, _progress() as show_chunk:
        return llm.perplexity(
            text, context=context, chunks=options.chunks, save_base=options.base,
            progress=show_chunk,
        )  # fmt: skip


def _answer(load: Callable[[int], LLM], options: TextOptions, text: str) -> MultipleChoice:
    """Answer the tasks of ``text``, which are checked before the model is loaded."""
    from ..quality.hellaswag import answer, parse_tasks

    try:
        tasks = parse_tasks(text, options.tasks)
    except RequestError as error:
        raise RequestError(f"{options.hellaswag}: {error}") from None
    with load(options.context or _CONTEXT) as llm, _progress("accuracy") as show_task:
        return answer(llm, tasks, show_task)


def _compare(load: Callable[[int], LLM], options: TextOptions, text: str) -> Divergence:
    """Compare with the base file. Its header is checked before the model is loaded."""
    from ..quality.base_file import BaseFile

    assert options.base is not None
    with BaseFile(options.base) as base:
        context = base.context
    if options.context not in (None, context):
        raise RequestError(
            f"-c {options.context}: {options.base} was written with chunks of {context} tokens"
        )
    with load(context) as llm, _progress() as show_chunk:
        return llm.kl_divergence(
            options.base, text or None, chunks=options.chunks, progress=show_chunk
        )


@contextmanager
def _progress(what: str = "PPL") -> Iterator[Callable[[int, int, float], None]]:
    """Return a context manager with a callback (done, total, ``what`` so far): a bar at a
    terminal, and nothing elsewhere."""
    if not sys.stderr.isatty():
        yield lambda done, total, value: None
        return
    with progress_line("perplexity") as show_bar:
        yield lambda done, total, value: show_bar("computed", done, total, f"{what} {value:.4f}")
