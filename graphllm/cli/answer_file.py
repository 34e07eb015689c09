"""Files of answers in JSON lines, which an interrupted run can continue (``run -o FILE``)."""

from __future__ import annotations

import json
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, BinaryIO

from .output import OutputError, check_writable
from .prompt_lines import PromptFile, PromptLine

if TYPE_CHECKING:
    from ..engine.completion import Completion


def answer_line(line: PromptLine, done: Completion) -> dict[str, Any]:
    """Return the object that is written for an answer."""
    return {**_head(line), **done.as_dict()}


def _head(line: PromptLine) -> dict[str, Any]:
    """Return what identifies the request of an answer."""
    named = {} if line.id is None else {"id": line.id}
    return {"index": line.index, **named, "input_sha256": line.digest}


class AnswerFile:
    """The answers to the requests of a prompt file, in its order.

    Attributes:
        path: the file.
        count: number of answers in it.
    """

    def __init__(self, path: Path, prompts: PromptFile) -> None:
        """Read the answers that the file has already; nothing is written.

        Args:
            path: the file.
            prompts: the prompt file.

        Raises:
            RequestError: it is the prompt file.
            OutputError: the file cannot be written, or has answers to other requests.
        """
        from ..checkpoints.model_files import check_not_input

        check_writable(path)
        self.path, self._prompts = path, prompts.path
        self.count = self._size = 0
        self._file: BinaryIO | None = None
        if not path.is_file():  # a new file, or a device
            return
        check_not_input(path, files=[("the file of the prompts", prompts.path)], flag="-o")
        lines = iter(prompts)
        try:
            with path.open("rb") as file:
                for number, answer in enumerate(file, 1):
                    if not self._keep(answer, number, next(lines, None)):
                        return
        except OSError as error:
            raise OutputError(f"-o {path}: {error.strerror}") from None

    def _keep(self, answer: bytes, number: int, line: PromptLine | None) -> bool:
        """Check the next answer; return False for the part of a line that ends the file."""
        where = f"-o {self.path}:{number}"
        if line is None:
            raise OutputError(f"{where}: there are more answers than prompts in {self._prompts}")
        start = f'{{"index": {self.count}, '.encode()
        if not answer.endswith(b"\n") and (answer.startswith(start) or start.startswith(answer)):
            return False  # written by a run that was interrupted
        try:
            found = json.loads(answer)
            kept = {name: found[name] for name in ("index", "id", "input_sha256") if name in found}
        except (ValueError, TypeError, RecursionError):
            kept = {}
        if "index" not in kept or not answer.endswith(b"\n"):
            raise OutputError(f"{where}: is not an answer of this command; give another file")
        for name, value in _head(line).items():
            if name not in kept or kept[name] != value:
                raise OutputError(
                    f"{where}: is the answer to another prompt than {line.where} ({name} = "
                    f"{kept.get(name)!r}, not {value!r}); give another file"
                )
        self.count += 1
        self._size += len(answer)
        return True

    def __enter__(self) -> AnswerFile:
        """Open the file behind the last complete answer. OutputError: it cannot be written."""
        try:
            if self.path.is_file():
                self._file = self.path.open("r+b")
                self._file.truncate(self._size)
                self._file.seek(self._size)
            else:
                self._file = self.path.open("wb")
        except OSError as error:
            raise OutputError(f"-o {self.path}: {error.strerror}") from None
        return self

    def write(self, line: PromptLine, done: Completion) -> None:
        """Append an answer. OutputError: it cannot be written."""
        assert self._file is not None
        text = json.dumps(answer_line(line, done), ensure_ascii=False) + "\n"
        try:
            self._file.write(text.encode("utf-8"))
            self._file.flush()
        except OSError as error:
            raise OutputError(f"-o {self.path}: {error.strerror}") from None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:  # fmt: skip
        if self._file is not None:
            try:
                self._file.close()
            except OSError:  # what could not be written has been reported by `write`
                if kind is None:
                    raise
