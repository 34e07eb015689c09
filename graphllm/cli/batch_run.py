"""``run -f FILE.jsonl``: the requests of a file as one batch, with their answers in order."""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import RequestError
from ..progress import request_progress
from ..terminal import note
from .answer_file import AnswerFile, answer_line
from .output import show_json
from .prompt_lines import PromptFile, PromptLine

if TYPE_CHECKING:
    from ..api import LLM, RequestHandle
    from ..engine.completion import Completion

# Requests that are submitted at once, for each that runs. Answers are written in order, so those
# behind a long one wait in memory; with fewer, the batch would run empty meanwhile.
_SUBMITTED = 32


def run_batch(
    prompts: PromptFile,
    output: Path | None,
    parallel: int,
    load: Callable[[], LLM],
    check_length: Callable[[LLM, list[int]], None],
) -> None:
    """Generate the answers that ``output`` does not have yet, and append them in order.

    All lines are checked before the model is loaded, and their prompts before any is computed.

    Args:
        prompts: the requests.
        output: file of the answers; standard output if it is None.
        parallel: number of requests that run at once.
        load: returns the model.
        check_length: raises RequestError if a prompt does not fit the context.

    Raises:
        RequestError: a line is invalid, or its request failed.
        OutputError: ``output`` cannot be written, or has answers to other requests.
    """
    total = sum(1 for _ in prompts)
    if not total:
        raise RequestError(f"{prompts.path}: has no prompts")
    answers = AnswerFile(output, prompts) if output is not None else None
    first = answers.count if answers is not None else 0
    if first == total:
        note(f"note: {output} has all {total} answers")
        return
    llm = load()
    for line in islice(prompts, first, None):
        line.call(check_length, llm, line.encode(llm))
    start, tokens = time.perf_counter(), 0
    with answers if answers is not None else nullcontext():
        computed = _Requests(llm, islice(prompts, first, None), _SUBMITTED * parallel)
        for line, done in computed.answers(first, total, None if answers else False):
            tokens += sum(len(each.ids) for each in done.choices)
            if answers is not None:
                answers.write(line, done)
            else:
                show_json(answer_line(line, done), ascii=False)
    if sys.stderr.isatty():
        seconds = time.perf_counter() - start
        rate = f"{seconds:.2f} s, {tokens / seconds:.1f} tok/s"
        note(f"[{total - first} answers, {tokens} tokens, {rate}]")
    for text in llm.misses():
        note(f"note: {text}")


class _Requests:
    """Runs requests with a limited number of them in memory.

    Args:
        llm: the model.
        lines: the requests.
        most: number of requests that are submitted and not answered.
    """

    def __init__(self, llm: LLM, lines: Iterator[PromptLine], most: int) -> None:
        self._llm, self._lines, self._most = llm, lines, most
        self._submitted: deque[tuple[PromptLine, RequestHandle]] = deque()
        self._ended = self._tokens = 0  # of the requests that were answered

    def answers(
        self, first: int, total: int, progress: bool | None
    ) -> Iterator[tuple[PromptLine, Completion]]:
        """Yield the requests with their answers in order, and show the progress.

        Args:
            first: number of answers that there are already.
            total: number of requests of the file.
            progress: see `request_progress`.
        """
        self._ended = first
        try:
            with request_progress(total, self._computed, progress) as update:
                while self._submit():
                    line, handle = self._submitted[0]
                    done = line.call(_wait, handle, update)
                    self._submitted.popleft()
                    self._ended += 1
                    self._tokens += sum(len(each.ids) for each in done.choices)
                    yield line, done
        finally:
            for _, handle in self._submitted:
                handle.cancel()

    def _submit(self) -> bool:
        """Submit requests up to the limit; return whether there are any."""
        for line in islice(self._lines, self._most - len(self._submitted)):
            ids, sampling = line.encode(self._llm), line.sampling
            handle = line.call(self._llm.submit, ids, sampling=sampling)
            self._submitted.append((line, handle))
        return bool(self._submitted)

    def _computed(self) -> tuple[int, int]:
        handles = [handle for _, handle in self._submitted]
        samples = [each for handle in handles for each in (handle, *handle.alternatives)]
        ended = self._ended + sum(handle.done for handle in handles)
        return ended, self._tokens + sum(sample.progress.tokens for sample in samples)


def _wait(handle: RequestHandle, update: Callable[[], None]) -> Completion:
    for _ in handle:
        update()
    return handle.result()
