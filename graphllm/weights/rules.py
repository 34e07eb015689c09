"""How a file's tensors become a model's weights: names, and what is done to the rows, as data."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from ..dtype import DTYPES, F32, DType
from ..errors import ModelFileError
from ..tensor import Meta
from .mapped import TensorInfo


class TensorFile(Protocol):
    """Tensors by the names that a file gives them."""

    @property
    def path(self) -> object: ...
    @property
    def tensors(self) -> Mapping[str, TensorInfo]: ...
    def readable(self, name: str) -> TensorInfo: ...
    def raw(self, name: str) -> np.ndarray: ...
    def release(self, name: str) -> None: ...


# ---------------------------------------------------------------------------------------- changes


class Change(Protocol):
    """What makes a weight of one or several stored tensors. ModelFileError where it cannot."""

    def meta(self, stored: Sequence[Meta]) -> Meta: ...

    def raw(self, stored: Sequence[np.ndarray], metas: Sequence[Meta]) -> np.ndarray:
        """uint8 [rows, row_bytes], of the same."""


class Same:
    """The tensor as it is; of several (see `WeightRule`) a new first axis."""

    def meta(self, stored: Sequence[Meta]) -> Meta:
        first = stored[0]
        for meta in stored[1:]:
            if (meta.shape, meta.dtype) != (first.shape, first.dtype):
                raise ModelFileError(f"{meta} and {first} cannot be stacked")
        return Meta.of(((len(stored),) if len(stored) > 1 else ()) + first.shape, first.dtype)

    def raw(self, stored: Sequence[np.ndarray], metas: Sequence[Meta]) -> np.ndarray:
        return stored[0] if len(stored) == 1 else np.concatenate(stored)


class Stacked(Same):
    """As `Same`, with a new first axis for a single tensor, too."""

    def meta(self, stored: Sequence[Meta]) -> Meta:
        one = super().meta(stored)
        return one if len(stored) > 1 else Meta.of((1, *one.shape), one.dtype)


def _plain(meta: Meta) -> np.dtype:
    if meta.dtype.numpy is None:
        raise ModelFileError(f"{meta} is no plain array, which a rule of the model changes")
    return meta.dtype.numpy


def _bytes(array: np.ndarray) -> np.ndarray:
    rows = int(np.prod(array.shape[:-1]))
    return np.ascontiguousarray(array).view(np.uint8).reshape(rows, -1)


class PlusOne:
    """Norms that are stored as their distance from one (Gemma): float32."""

    def meta(self, stored: Sequence[Meta]) -> Meta:
        _plain(stored[0])
        return Meta.of(stored[0].shape, F32)

    def raw(self, stored: Sequence[np.ndarray], metas: Sequence[Meta]) -> np.ndarray:
        values = stored[0].view(_plain(metas[0])).astype(np.float32)
        return _bytes(values + np.float32(1))


class Transposed:
    """Matrices that are stored as [in, out] (GPT-2's Conv1D); of several a new first axis."""

    def meta(self, stored: Sequence[Meta]) -> Meta:
        _plain(stored[0])
        one = Same().meta(stored)
        return Meta.of((*one.shape[:-2], one.shape[-1], one.shape[-2]), one.dtype)

    def raw(self, stored: Sequence[np.ndarray], metas: Sequence[Meta]) -> np.ndarray:
        arrays = [r.view(_plain(m)).reshape(m.shape) for r, m in zip(stored, metas, strict=True)]
        return np.concatenate([_bytes(np.swapaxes(a, -1, -2)) for a in arrays])


SAME, STACKED, PLUS_ONE, TRANSPOSED = Same(), Stacked(), PlusOne(), Transposed()

# ------------------------------------------------------------------------------------------- rules

# What stands for what in a rule's names.
_HOLES = {"{i}": r"(?P<i>\d+)", "{e}": r"(?P<e>\d+)", "{*}": r"(?P<rest>.+)"}


@dataclass(frozen=True)
class WeightRule:
    """How a weight's canonical name is spelled in a file, and what is done to it.

    ``{i}`` stands for a number that both names have, ``{*}`` for any rest. ``{e}`` in ``source``
    counts tensors that together are one weight: experts. ``source`` is the file's name for
    ``pattern``; a rule whose pattern is empty names a tensor that the model does not use.
    """

    pattern: str
    source: str
    change: Change = SAME

    def canonical(self, stored: str) -> tuple[str, int] | None:
        """The canonical name of the file's tensor ``stored``, and which part of it that is; None
        when the rule does not apply."""
        regex = re.escape(self.source)
        for hole, pattern in _HOLES.items():
            regex = regex.replace(re.escape(hole), pattern)
        match = re.fullmatch(regex, stored)
        if match is None:
            return None
        found, name = match.groupdict(), self.pattern
        for hole, key in (("{i}", "i"), ("{*}", "rest")):
            name = name.replace(hole, found.get(key) or "")
        return name, int(found.get("e") or 0)


def rooted(model: str, head: str) -> tuple[WeightRule, ...]:
    """For files whose names may lack the ``model.`` that all but those of the head begin with."""
    whole = (WeightRule(f"{name}.{{*}}", f"{name}.{{*}}") for name in (model, head))
    return (*whole, WeightRule(f"{model}.{{*}}", "{*}"))


GEMMA_NORMS = (WeightRule("{*}norm.weight", "{*}norm.weight", PLUS_ONE),)


@dataclass
class _Weight:
    """The tensors that one weight is made of, by part."""

    rule: WeightRule
    parts: dict[int, str] = field(default_factory=dict)


class NamedWeights:
    """A file's tensors under canonical names. ``strict``: a name that no rule knows is an error;
    otherwise it is its own canonical name. ModelFileError."""

    def __init__(self, file: TensorFile, rules: Sequence[WeightRule], strict: bool) -> None:
        self.file = file
        self._weights: dict[str, _Weight] = {}
        for stored in file.tensors:
            self._place(stored, rules, strict)
        for name, weight in self._weights.items():
            lacking = set(range(len(weight.parts))) - weight.parts.keys()
            if lacking:
                raise ModelFileError(
                    f"{file.path}: missing tensor, part {min(lacking)} of {name!r}"
                )

    def _place(self, stored: str, rules: Sequence[WeightRule], strict: bool) -> None:
        found = ((rule, rule.canonical(stored)) for rule in rules)
        rule, place = next(((r, p) for r, p in found if p), (WeightRule("", ""), None))
        if place is None and strict:
            raise ModelFileError(f"{self.file.path}: unexpected tensor {stored!r}")
        name, part = place or (stored, 0)
        if not name:
            return
        weight = self._weights.setdefault(name, _Weight(rule))
        if part in weight.parts:
            both = f"{weight.parts[part]!r} and {stored!r}"
            raise ModelFileError(f"{self.file.path}: {both} are both {name!r}")
        weight.parts[part] = stored

    def names(self) -> Iterable[str]:
        return self._weights.keys()

    def drop(self, name: str) -> None:
        """Forget a weight: the model has no use for it."""
        del self._weights[name]

    def sources(self, name: str) -> list[str]:
        """What the file calls the tensors of a weight, in order."""
        weight = self._weights.get(name)
        return [weight.parts[i] for i in range(len(weight.parts))] if weight else []

    def _metas(self, name: str) -> list[Meta]:
        infos = map(self.file.readable, self.sources(name))
        return [Meta.of(tuple(info.shape), info.dtype) for info in infos]

    def meta(self, name: str) -> Meta | None:
        """ModelFileError for a format that nothing here reads."""
        if name not in self._weights:
            return None
        metas = self._metas(name)
        try:
            return self._weights[name].rule.change.meta(metas)
        except ModelFileError as error:
            raise ModelFileError(f"{self.file.path}: {name}: {error}") from None

    def raw(self, name: str) -> np.ndarray:
        metas, raws = self._metas(name), [self.file.raw(s) for s in self.sources(name)]
        return self._weights[name].rule.change.raw(raws, metas)

    def release(self, name: str) -> None:
        for stored in self.sources(name):
            self.file.release(stored)


def plain_dtype(array: np.ndarray) -> DType:
    """The dtype of an array's elements; ModelFileError."""
    for known in DTYPES.values():
        if known.numpy == array.dtype:
            return known
    raise ModelFileError(f"weights of dtype {array.dtype} are not supported")
