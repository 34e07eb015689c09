"""How a file's tensors become a model's weights: names, and what is done to the rows, as data."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from ..errors import ModelFileError, quote
from ..formats import MXFP4
from ..formats.quantization import dequantise
from ..graph.dtype import DTYPES, F32, DType
from ..graph.tensor import Meta
from .mapped_file import TensorInfo


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


class Transform(Protocol):
    """What makes a weight of one or several stored tensors. ModelFileError where it cannot."""

    def meta(self, stored: Sequence[Meta]) -> Meta: ...

    def raw(self, stored: Sequence[np.ndarray], metas: Sequence[Meta]) -> np.ndarray:
        """uint8 [rows, row_bytes], of the same."""


class Identity:
    """The tensor as it is; of several (see `WeightRule`) a new first axis."""

    def meta(self, stored: Sequence[Meta]) -> Meta:
        first = stored[0]
        for meta in stored[1:]:
            if (meta.shape, meta.dtype) != (first.shape, first.dtype):
                raise ModelFileError(f"{meta} and {first} cannot be stacked")
        return Meta.of(((len(stored),) if len(stored) > 1 else ()) + first.shape, first.dtype)

    def raw(self, stored: Sequence[np.ndarray], metas: Sequence[Meta]) -> np.ndarray:
        return stored[0] if len(stored) == 1 else np.concatenate(stored)


class Stack(Identity):
    """As `Identity`, with a new first axis for a single tensor, too."""

    def meta(self, stored: Sequence[Meta]) -> Meta:
        one = super().meta(stored)
        return one if len(stored) > 1 else Meta.of((1, *one.shape), one.dtype)


def _plain(meta: Meta) -> np.dtype:
    if meta.dtype.numpy is None:
        raise ModelFileError(f"{meta} is no plain array, which a rule of the model changes")
    return meta.dtype.numpy


def _sizes(meta: Meta) -> tuple[int, ...]:
    """The shape of a stored tensor: nothing in it varies."""
    return tuple(map(int, meta.shape))  # type: ignore[arg-type]


def _bytes(array: np.ndarray) -> np.ndarray:
    rows = int(np.prod(array.shape[:-1]))
    return np.ascontiguousarray(array).view(np.uint8).reshape(rows, -1)


class AddOne:
    """Norms that are stored as their distance from one (Gemma): float32."""

    def meta(self, stored: Sequence[Meta]) -> Meta:
        _plain(stored[0])
        return Meta.of(stored[0].shape, F32)

    def raw(self, stored: Sequence[np.ndarray], metas: Sequence[Meta]) -> np.ndarray:
        values = stored[0].view(_plain(metas[0])).astype(np.float32)
        return _bytes(values + np.float32(1))


class Transpose:
    """Matrices that are stored as [in, out] (GPT-2's Conv1D); of several a new first axis."""

    def meta(self, stored: Sequence[Meta]) -> Meta:
        _plain(stored[0])
        one = Identity().meta(stored)
        return Meta.of((*one.shape[:-2], one.shape[-1], one.shape[-2]), one.dtype)

    def raw(self, stored: Sequence[np.ndarray], metas: Sequence[Meta]) -> np.ndarray:
        arrays = [r.view(_plain(m)).reshape(m.shape) for r, m in zip(stored, metas, strict=True)]
        return np.concatenate([_bytes(np.swapaxes(a, -1, -2)) for a in arrays])


class Rows:
    """Some rows of one tensor of any format: ``of`` is a view of an array whose last axis it leaves
    alone."""

    def __init__(self, of: Callable[[np.ndarray], np.ndarray]) -> None:
        self._of = of

    def meta(self, stored: Sequence[Meta]) -> Meta:
        one = Identity().meta(stored)
        return Meta.of(_viewed(self._of, one).shape, one.dtype)

    def raw(self, stored: Sequence[np.ndarray], metas: Sequence[Meta]) -> np.ndarray:
        width = stored[0].shape[-1]
        rows = stored[0].reshape(*_sizes(metas[0])[:-1], width)
        return np.ascontiguousarray(self._of(rows)).reshape(-1, width)


class View:
    """Another view of one tensor's elements: some of them, its axes in another order. Of a block
    format they are float32 then."""

    def __init__(self, of: Callable[[np.ndarray], np.ndarray]) -> None:
        self._of = of

    def meta(self, stored: Sequence[Meta]) -> Meta:
        one = Identity().meta(stored)
        kind = F32 if one.dtype.quantised else one.dtype
        return Meta.of(_viewed(self._of, one).shape, kind)

    def raw(self, stored: Sequence[np.ndarray], metas: Sequence[Meta]) -> np.ndarray:
        kind = metas[0].dtype
        plain = dequantise(stored[0], kind) if kind.quantised else stored[0].view(_plain(metas[0]))
        return _bytes(self._of(plain.reshape(_sizes(metas[0]))))


def _viewed(of: Callable[[np.ndarray], np.ndarray], meta: Meta) -> np.ndarray:
    """``of`` an array of this shape. ModelFileError where it has no such view."""
    try:
        return of(np.broadcast_to(np.zeros(()), _sizes(meta)))
    except (ValueError, IndexError):
        raise ModelFileError(f"shape {meta.shape} cannot be cut as the model wants") from None


class Mxfp4:
    """MXFP4 (OCP 2023) in two tensors, as gpt-oss has it, in GGUF's blocks: the same values.

    The first is uint8 [E, rows, blocks, 16] with two neighbours in a byte, the first in the lower
    half; the second uint8 [E, rows, blocks], the exponents. ``rows``: those that the weight has.
    """

    def __init__(self, rows: slice = slice(None)) -> None:
        self._rows = rows

    def meta(self, stored: Sequence[Meta]) -> Meta:
        shapes = [_sizes(meta) for meta in stored]
        good = len(shapes) == 2 and len(shapes[1]) == 3 and shapes[0] == (*shapes[1], 16)
        if not good or {meta.dtype.numpy for meta in stored} != {np.dtype(np.uint8)}:
            raise ModelFileError(f"{' and '.join(map(str, stored))}: no blocks and scales of mxfp4")
        experts, rows, blocks = shapes[1]
        kept = len(range(rows)[self._rows])
        return Meta.of((experts, kept, blocks * MXFP4.block), MXFP4)

    def raw(self, stored: Sequence[np.ndarray], metas: Sequence[Meta]) -> np.ndarray:
        pairs, scales = (
            raw.reshape(meta.shape)[:, self._rows] for raw, meta in zip(stored, metas, strict=True)
        )
        made = np.empty((*scales.shape, MXFP4.nbytes), np.uint8)
        made[..., 0] = scales
        for expert, each in zip(made, pairs):  # one at a time, for memory
            q = np.stack((each & 15, each >> 4), axis=-1).reshape(*each.shape[:-1], MXFP4.block)
            expert[..., 1:] = q[..., :16] | q[..., 16:] << 4
        return made.reshape(-1, scales.shape[-1] * MXFP4.nbytes)


IDENTITY, STACK, ADD_ONE, TRANSPOSE = Identity(), Stack(), AddOne(), Transpose()

# ------------------------------------------------------------------------------------------- rules

# What stands for what in a rule's names.
_HOLES = {"{i}": r"(?P<i>\d+)", "{e}": r"(?P<e>\d+)", "{*}": r"(?P<rest>.+)"}


@functools.cache
def _regex(source: str) -> re.Pattern[str]:
    regex = re.escape(source)
    for hole, pattern in _HOLES.items():
        regex = regex.replace(re.escape(hole), pattern)
    return re.compile(regex)


@dataclass(frozen=True)
class WeightRule:
    """How a weight's canonical name is spelled in a file, and what is done to it.

    ``{i}`` stands for a number that both names have, ``{*}`` for any rest. ``{e}`` in ``source``
    counts tensors that together are one weight: experts; where they have names of their own, each
    has a rule, and is the ``part`` that this says. ``source`` is the file's name for ``pattern``; a
    rule whose pattern is empty names a tensor that the model does not use. ``also``: pattern and
    transform of other weights that the same tensor is (a part of).
    """

    pattern: str
    source: str
    transform: Transform = IDENTITY
    part: int = 0
    also: tuple[tuple[str, Transform], ...] = ()

    def canonical(self, stored: str) -> list[tuple[str, Transform, int]] | None:
        """Of the file's tensor ``stored`` the canonical names, with what is done to it, and which
        part of that weight it is; None when the rule does not apply."""
        match = _regex(self.source).fullmatch(stored)
        if match is None:
            return None
        found, names = match.groupdict(), []
        part = int(found.get("e") or self.part)
        for name, transform in ((self.pattern, self.transform), *self.also):
            for hole, key in (("{i}", "i"), ("{*}", "rest")):
                name = name.replace(hole, found.get(key) or "")
            names.append((name, transform, part))
        return names


def optional_prefix(model: str, head: str) -> tuple[WeightRule, ...]:
    """For files whose names may lack the ``model.`` that all but those of the head begin with."""
    whole = (WeightRule(f"{name}.{{*}}", f"{name}.{{*}}") for name in (model, head))
    return (*whole, WeightRule(f"{model}.{{*}}", "{*}"))


# Of Hugging Face files: what older versions of transformers stored, though no training made it.
UNUSED_BUFFERS = (WeightRule("", "{*}.rotary_emb.inv_freq"),)
GEMMA_NORM_RULES = (WeightRule("{*}norm.weight", "{*}norm.weight", ADD_ONE),)

FIRST_HALF = Rows(lambda w: np.split(w, 2, axis=-2)[0])
SECOND_HALF = Rows(lambda w: np.split(w, 2, axis=-2)[1])
_EXPERTS = "model.layers.{i}.mlp.experts"
# Matrices of each expert, as models are published, or stacked, as transformers computes with them.
EXPERT_RULES = (
    *(
        WeightRule(f"{_EXPERTS}.{name}.weight", f"{_EXPERTS}.{{e}}.{name}.weight", STACK)
        for name in ("gate_proj", "up_proj", "down_proj")
    ),
    WeightRule(
        f"{_EXPERTS}.gate_proj.weight",
        f"{_EXPERTS}.gate_up_proj",
        FIRST_HALF,
        also=((f"{_EXPERTS}.up_proj.weight", SECOND_HALF),),
    ),
    WeightRule(f"{_EXPERTS}.down_proj.weight", f"{_EXPERTS}.down_proj"),
)


@dataclass
class _Weight:
    """The tensors that one weight is made of, by part."""

    transform: Transform
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
                    f"{file.path}: missing tensor, part {min(lacking)} of {quote(name)}"
                )

    def _place(self, stored: str, rules: Sequence[WeightRule], strict: bool) -> None:
        found = (rule.canonical(stored) for rule in rules)
        known = next((names for names in found if names is not None), None)
        if known is None and strict:
            raise ModelFileError(f"{self.file.path}: unexpected tensor {quote(stored)}")
        for name, transform, part in known or [(stored, IDENTITY, 0)]:
            if not name:
                continue
            weight = self._weights.setdefault(name, _Weight(transform))
            if part in weight.parts:
                both = f"{quote(weight.parts[part])} and {quote(stored)}"
                raise ModelFileError(f"{self.file.path}: {both} are both {quote(name)}")
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
            return self._weights[name].transform.meta(metas)
        except ModelFileError as error:
            raise ModelFileError(f"{self.file.path}: {name}: {error}") from None

    def raw(self, name: str) -> np.ndarray:
        metas, raws = self._metas(name), [self.file.raw(s) for s in self.sources(name)]
        return self._weights[name].transform.raw(raws, metas)

    def release(self, name: str) -> None:
        for stored in self.sources(name):
            self.file.release(stored)


def plain_dtype(array: np.ndarray) -> DType:
    """The dtype of an array's elements; ModelFileError."""
    for known in DTYPES.values():
        if known.numpy == array.dtype:
            return known
    raise ModelFileError(f"weights of dtype {array.dtype} are not supported")
