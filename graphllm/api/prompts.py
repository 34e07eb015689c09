"""Arguments of requests: one prompt or several, a string or token ids; settings for each."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ..arguments import are_ints, as_int, invalid_argument, quote
from ..engine.request import Sampling
from ..errors import RequestError

Prompt = str | Sequence[int]


def parse_prompt(value: Any, where: str) -> str | list[int]:
    """Return the single prompt ``value``, as a string or a list of ids.

    ``where``: name of the called function, for errors. RequestError: not a single prompt.
    """
    found = parse_prompts(value, where)
    if not found:
        raise RequestError("the prompt is empty")
    if isinstance(found, tuple):
        raise RequestError(f"{where} takes one prompt; llm.generate takes several")
    return found


def parse_prompts(value: Any, where: str) -> str | list[int] | tuple[str | list[int], ...]:
    """Return one prompt, or a tuple of prompts if ``value`` is an iterable of prompts.

    ``where``: name of the called function, for errors. RequestError: not a prompt.
    """
    if isinstance(value, str):
        return str(value)
    if type(value) is list and are_ints(value):
        return [*value]
    items = _items(value, where)
    if items and not any(isinstance(item, (str, Iterable)) and _has_axes(item) for item in items):
        return _ids(items, where)
    return tuple(
        str(item) if isinstance(item, str) else _ids(_items(item, where), where) for item in items
    )


def parse_settings(arguments: Mapping[str, Any], count: int | None, where: str) -> list[Sampling]:
    """Return the settings of each prompt.

    Args:
        arguments: see `Sampling.from_arguments`; ``sampling`` may also be an iterable with an
            element for each of several prompts.
        count: number of prompts; None for a prompt that is not one of several.
        where: name of the called function, for errors.

    Raises:
        RequestError: an argument is invalid, or there are more or fewer settings than prompts.
    """
    given = arguments.get("sampling")
    common = given is None or isinstance(given, (Sampling, Mapping, str, bytes))
    if count is None or common or not isinstance(given, Iterable):
        return [Sampling.from_arguments(where, arguments)] * (1 if count is None else count)
    each = list(given)
    if len(each) != count:
        raise RequestError(
            f"sampling has {len(each)} elements for {count} prompts: give one for all prompts, or "
            "one for each",
            "sampling",
        )
    found = []
    for index, own in enumerate(each):
        try:
            found.append(Sampling.from_arguments(where, {**arguments, "sampling": own}))
        except RequestError as error:
            raise RequestError(f"sampling[{index}]: {error}", error.argument) from None
    return found


def check_one_sample(settings: Sampling, where: str) -> None:
    """Raise RequestError if the settings ask for several samples of the prompt, or for beams."""
    if settings.beams > 1:
        raise RequestError(
            f"{where} cannot yield a beam search (beams = {settings.beams}), whose text is known "
            "at the end only; llm.generate and llm.submit can return it",
            "beams",
        )
    if settings.n > 1:
        raise RequestError(
            f"{where} yields the text of one sample, not of n = {settings.n}; llm.generate and "
            "llm.submit return several",
            "n",
        )


def _items(value: Any, where: str) -> list[Any]:
    """Return the elements of an iterable. RequestError: no iterable, or chat messages."""
    if isinstance(value, Mapping):
        raise _messages(where) if "role" in value else _no_prompt(value)
    if isinstance(value, (bytes, bytearray)) or not isinstance(value, Iterable):
        raise _no_prompt(value)
    items = list(value)
    if any(isinstance(item, Mapping) for item in items):
        raise _messages(where)
    return items


def _has_axes(item: Any) -> bool:
    """Whether the item has elements; a 0-dimensional NumPy or torch array has none."""
    return getattr(item, "ndim", 1) != 0


def _ids(items: Iterable[Any], where: str) -> list[int]:
    ids = []
    for item in items:
        number = as_int(item)
        if number is None:
            raise RequestError(
                f"the prompt of {where} has the element {quote(item)}, which is not a token id"
            )
        ids.append(number)
    return ids


def _no_prompt(value: Any) -> RequestError:
    return invalid_argument("prompt", value, "a string or token ids")


def _messages(where: str) -> RequestError:
    return RequestError(f"{where} takes a string or token ids; pass messages to llm.chat")
