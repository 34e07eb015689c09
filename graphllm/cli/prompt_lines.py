"""Prompt files with one request per line, in JSON (``run -f FILE.jsonl``)."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from ..arguments import invalid_argument, quote
from ..errors import GraphllmError, RequestError

if TYPE_CHECKING:
    from ..api import LLM
    from ..engine.request import Sampling

_OWN = ("prompt", "messages", "id")
R = TypeVar("R")


@dataclass(frozen=True)
class PromptLine:
    """One request of a prompt file.

    Attributes:
        where: name of the file and number of the line, for errors.
        index: index among the requests of the file; empty lines do not count.
        id: the caller's name of the request, a string or an integer; None if there is none.
        digest: digest of the line, by which a changed file is noticed.
        prompt: a string or token ids; None if there are ``messages``.
        messages: chat messages; None if there is a ``prompt``.
        sampling: settings; the seed is None unless it was given.
    """

    where: str
    index: int
    id: str | int | None
    digest: str
    prompt: str | list[int] | None
    messages: list[Any] | None
    sampling: Sampling

    def encode(self, llm: LLM) -> str | list[int]:
        """Return the prompt as ``llm.generate`` takes it. RequestError: it is invalid for it."""
        ids: str | list[int]
        if self.messages is not None:
            ids = self.call(llm.encode_chat, self.messages)
        elif isinstance(self.prompt, str):
            ids = self.call(llm.encode_prompt, self.prompt, self.sampling)
        else:
            ids = self.prompt or []
        known = ids if isinstance(ids, list) else []
        self.call(llm.check_ids, [*known, *self.sampling.token_ids])
        return ids

    def call(self, function: Callable[..., R], *arguments: Any, **more: Any) -> R:
        """Call a function; its errors begin with the number of the line."""
        try:
            return function(*arguments, **more)
        except GraphllmError as error:
            raise _error(self.where, error) from None


@dataclass(frozen=True)
class PromptFile:
    """A file of requests; each iteration reads it anew, line by line.

    A line is a string or an object with ``prompt`` (a string or token ids) or ``messages``,
    optionally an ``id``, and fields of `Sampling`. Empty lines are skipped.

    Attributes:
        path: the file.
        sampling: settings that the fields of a line override; the seed is None unless it is given.
        chat: whether a string prompt is the message of a user.
        system: system message of chats that have none.
    """

    path: Path
    sampling: Sampling
    chat: bool = False
    system: str | None = None

    def __iter__(self) -> Iterator[PromptLine]:
        """Yield the requests. RequestError: a line is invalid, or the file cannot be read."""
        index = 0
        try:
            with self.path.open("rb") as file:
                for number, line in enumerate(file, 1):
                    if line.strip():
                        yield self._parse(line.strip(), f"{self.path}:{number}", index)
                        index += 1
        except OSError as error:
            raise RequestError(f"{self.path}: {error.strerror}") from None

    def _parse(self, line: bytes, where: str, index: int) -> PromptLine:
        try:
            found = _read_json(line)
            values = {"prompt": found} if isinstance(found, str) else found
            if not isinstance(values, dict):
                raise RequestError(f"{quote(found)} must be a string or an object")
            if ("prompt" in values) == ("messages" in values):
                raise RequestError("the line must have either a prompt or messages")
            own = {name: value for name, value in values.items() if name not in _OWN}
            return PromptLine(
                where,
                index,
                _id(values.get("id")),
                hashlib.sha256(line).hexdigest()[:16],
                *self._prompt(values),
                self._sampling(own),
            )
        except RequestError as error:
            raise _error(where, error) from None

    def _prompt(self, values: Mapping[str, Any]) -> tuple[str | list[int] | None, list[Any] | None]:
        """Return the prompt and the messages of a line, one of which is None."""
        from ..api.prompts import parse_prompt
        from ..chat import normalize_messages

        if "prompt" in values:
            prompt = parse_prompt(values["prompt"], "the line")
            if not (self.chat and isinstance(prompt, str)):
                return prompt, None
            messages: Any = [{"role": "user", "content": prompt}]
        else:
            messages = values["messages"]
        plain = list(normalize_messages(messages, "the line"))
        if self.system is not None and plain[0]["role"] != "system":
            plain.insert(0, {"role": "system", "content": self.system})
        return None, plain

    def _sampling(self, own: dict[str, Any]) -> Sampling:
        from ..engine.request import Sampling

        if "sampling" in own:
            raise RequestError("the line has no argument 'sampling': give the settings themselves")
        if isinstance(biases := own.get("logit_bias"), dict):  # keys of JSON are strings
            own["logit_bias"] = {
                int(key) if key.isdecimal() and len(key) < 10 else key: value
                for key, value in biases.items()
            }
        return Sampling.from_arguments("the line", {"sampling": self.sampling, **own})


def _id(value: Any) -> str | int | None:
    if value is not None and (isinstance(value, bool) or not isinstance(value, (str, int))):
        raise invalid_argument("id", value, "a string or an integer")
    return value


def _read_json(line: bytes) -> Any:
    """Return the value of a line. RequestError: it is not JSON, or has a key twice."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) < len(pairs):
            twice = next(key for i, (key, _) in enumerate(pairs) if key in dict(pairs[:i]))
            raise RequestError(f"the key {quote(twice)} is given twice")
        return found

    try:
        value = json.loads(line.decode("utf-8"), object_pairs_hook=unique)
        json.dumps(value, ensure_ascii=False).encode("utf-8")
    except UnicodeDecodeError as error:
        raise RequestError(f"byte {error.start} is not valid UTF-8") from None
    except UnicodeEncodeError:  # an escape such as \ud800
        raise RequestError("a string has half of a surrogate pair") from None
    except RecursionError:
        raise RequestError("the JSON is nested too deeply") from None
    except ValueError as error:
        raise RequestError(f"is not JSON: {error}") from None
    return value


def _error(where: str, error: GraphllmError) -> RequestError:
    return RequestError(f"{where}: {error}", error.argument)
