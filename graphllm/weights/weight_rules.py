"""Rules that map a file's tensors to a model's weights: names and transforms."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from ..errors import ModelFileError, quote
from ..formats.quantization import dequantise
from ..graph.dtype import DTYPES, F32, DType
from ..graph.tensor import Meta
from .mapped_file import TensorInfo

_STORED = ("i8", "u8", "f8_e4m3")  # dtypes of elements that have scales elsewhere in the file


class TensorFile(Protocol):
    """A file with tensors, by the file's own names."""

    @property
    def path(self) -> object: ...
    @property
    def tensors(self) -> Mapping[str, TensorInfo]: ...
    def readable(self, name: str) -> TensorInfo: ...
    def raw(self, name: str) -> np.ndarray: ...
    def release(self, name: str) -> None: ...


# ------------------------------------------------------------------------------------ transforms


class Transform(Protocol):
    """Makes a weight from one or several stored tensors. ModelFileError if they do not fit."""

    def meta(self, stored: Sequence[Meta]) -> Meta:
        """Return shape and dtype of the weight, from those of the stored tensors."""

    def raw(self, stored: Sequence[np.ndarray], metas: Sequence[Meta]) -> np.ndarray:
        """Return the weight's bytes, uint8 [rows, row_bytes], from those of the stored tensors."""


class Identity:
    """The tensor unchanged; several tensors (see `WeightRule`) are stacked on a new first axis."""

    offset = 0.0  # what is added to the elements

    def meta(self, stored: Sequence[Meta]) -> Meta:
        first = stored[0]
        for meta in stored[1:]:
            if (meta.shape, meta.dtype) != (first.shape, first.dtype):
                raise ModelFileError(f"{meta} and {first} cannot be stacked")
        return Meta.of(((len(stored),) if len(stored) > 1 else ()) + first.shape, first.dtype)

    def raw(self, stored: Sequence[np.ndarray], metas: Sequence[Meta]) -> np.ndarray:
        return stored[0] if len(stored) == 1 else np.concatenate(stored)


class Stack(Identity):
    """Tensors stacked on a new first axis, also a single tensor."""

    def meta(self, stored: Sequence[Meta]) -> Meta:
        one = super().meta(stored)
        return one if len(stored) > 1 else Meta.of((1, *one.shape), one.dtype)


def _plain(meta: Meta) -> np.dtype:
    if meta.dtype.numpy is None:
        raise ModelFileError(f"{meta} is not a plain array, which the rule of the model needs")
    return meta.dtype.numpy


def sizes(meta: Meta) -> tuple[int, ...]:
    """Return the shape of a stored tensor as integers."""
    return tuple(map(int, meta.shape))  # type: ignore[arg-type]


def _bytes(array: np.ndarray) -> np.ndarray:
    rows = int(np.prod(array.shape[:-1]))
    return np.ascontiguousarray(array).view(np.uint8).reshape(rows, -1)


class AddOne:
    """Norm weights that are stored minus one (Gemma), as float32."""

    offset = 1.0

    def meta(self, stored: Sequence[Meta]) -> Meta:
        _plain(stored[0])
        return Meta.of(stored[0].shape, F32)

    def raw(self, stored: Sequence[np.ndarray], metas: Sequence[Meta]) -> np.ndarray:
        values = stored[0].view(_plain(metas[0])).astype(np.float32)
        return _bytes(values + np.float32(1))


class Transpose:
    """Matrices that are stored as [in, out] (GPT-2's Conv1D); several are stacked as well."""

    def meta(self, stored: Sequence[Meta]) -> Meta:
        _plain(stored[0])
        one = Identity().meta(stored)
        return Meta.of((*one.shape[:-2], one.shape[-1], one.shape[-2]), one.dtype)

    def raw(self, stored: Sequence[np.ndarray], metas: Sequence[Meta]) -> np.ndarray:
        arrays = [r.view(_plain(m)).reshape(m.shape) for r, m in zip(stored, metas, strict=True)]
        return np.concatenate([_bytes(np.swapaxes(a, -1, -2)) for a in arrays])


class Rows:
    """Selected rows of one tensor of any format.

    ``view`` returns a view of an array; it must keep the last axis.
    """

    def __init__(self, view: Callable[[np.ndarray], np.ndarray]) -> None:
        self._view = view

    def meta(self, stored: Sequence[Meta]) -> Meta:
        one = Identity().meta(stored)
        return Meta.of(_view_of(self._view, one).shape, one.dtype)

    def raw(self, stored: Sequence[np.ndarray], metas: Sequence[Meta]) -> np.ndarray:
        width = stored[0].shape[-1]
        rows = stored[0].reshape(*sizes(metas[0])[:-1], width)
        return np.ascontiguousarray(self._view(rows)).reshape(-1, width)


class View:
    """Any view of one tensor's elements, such as a slice or a permutation of its axes.

    A tensor in a block format becomes float32. ``view`` returns a view of an array.
    """

    def __init__(self, view: Callable[[np.ndarray], np.ndarray]) -> None:
        self._view = view

    def meta(self, stored: Sequence[Meta]) -> Meta:
        one = Identity().meta(stored)
        kind = F32 if one.dtype.quantised else one.dtype
        return Meta.of(_view_of(self._view, one).shape, kind)

    def raw(self, stored: Sequence[np.ndarray], metas: Sequence[Meta]) -> np.ndarray:
        kind = metas[0].dtype
        plain = dequantise(stored[0], kind) if kind.quantised else stored[0].view(_plain(metas[0]))
        return _bytes(self._view(plain.reshape(sizes(metas[0]))))


def _view_of(view: Callable[[np.ndarray], np.ndarray], meta: Meta) -> np.ndarray:
    """Return ``view`` of a placeholder array of this shape. ModelFileError if that fails."""
    try:
        return view(np.broadcast_to(np.zeros(()), sizes(meta)))
    except (ValueError, IndexError):
        raise ModelFileError(f"shape {meta.shape} cannot be split as the model requires") from None


IDENTITY, STACK, ADD_ONE, TRANSPOSE = Identity(), Stack(), AddOne(), Transpose()

# ------------------------------------------------------------------------------------------- rules

# Placeholders in the names of a rule, and what they match.
_PLACEHOLDERS = {"{i}": r"(?P<i>\d+)", "{e}": r"(?P<e>\d+)", "{*}": r"(?P<rest>.+)"}


@functools.cache
def _regex(source: str) -> re.Pattern[str]:
    regex = re.escape(source)
    for placeholder, pattern in _PLACEHOLDERS.items():
        regex = regex.replace(re.escape(placeholder), pattern)
    return re.compile(regex)


@dataclass(frozen=True)
class WeightRule:
    """Maps a tensor of a file to a weight of the model.

    In names ``{i}`` matches a number and ``{*}`` any text; both sides use them. ``{e}`` in
    ``source`` numbers tensors that are stacked to one weight, such as experts.

    Attributes:
        pattern: Canonical name of the weight; empty for a tensor that the model does not use.
        source: Name of the tensor in the file.
        transform: Transform from the stored tensors to the weight.
        part: Position of the tensor among those of a weight, for sources without ``{e}``.
        also: Pattern and transform of further weights that are made from the same tensor.
    """

    pattern: str
    source: str
    transform: Transform = IDENTITY
    part: int = 0
    also: tuple[tuple[str, Transform], ...] = ()

    def canonical(self, stored: str) -> list[tuple[str, Transform, int]] | None:
        """Apply the rule to the file's tensor ``stored``.

        Returns:
            Canonical name, transform and part of each weight; None if the rule does not match.
        """
        match = _regex(self.source).fullmatch(stored)
        if match is None:
            return None
        found, names = match.groupdict(), []
        part = int(found.get("e") or self.part)
        for name, transform in ((self.pattern, self.transform), *self.also):
            for placeholder, key in (("{i}", "i"), ("{*}", "rest")):
                name = name.replace(placeholder, found.get(key) or "")
            names.append((name, transform, part))
        return names


def optional_prefix(model: str, head: str) -> tuple[WeightRule, ...]:
    """Rules for files whose tensor names may lack the prefix ``model.``; ``head`` has none."""
    whole = (WeightRule(f"{name}.{{*}}", f"{name}.{{*}}") for name in (model, head))
    return (*whole, WeightRule(f"{model}.{{*}}", "{*}"))


# Hugging Face files: buffers that older versions of transformers stored with the weights.
UNUSED_BUFFERS = (WeightRule("", "{*}.rotary_emb.inv_freq"),)
GEMMA_NORM_RULES = (WeightRule("{*}norm.weight", "{*}norm.weight", ADD_ONE),)

FIRST_HALF = Rows(lambda w: np.split(w, 2, axis=-2)[0])
SECOND_HALF = Rows(lambda w: np.split(w, 2, axis=-2)[1])
_EXPERTS = "model.layers.{i}.mlp.experts"
# One tensor per expert, as models are published, or stacked, as transformers uses them.
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
    """The stored tensors of one weight, by part."""

    transform: Transform
    parts: dict[int, str] = field(default_factory=dict)


class NamedWeights:
    """A file's tensors as weights under canonical names.

    Args:
        file: File with tensors.
        rules: Rules; the first that matches a tensor applies.
        strict: Whether a tensor that no rule matches is an error; otherwise it keeps its name.

    Raises:
        ModelFileError: A tensor is unexpected, missing, or stored twice.
    """

    def __init__(self, file: TensorFile, rules: Sequence[WeightRule], strict: bool) -> None:
        self.file = file
        self._weights: dict[str, _Weight] = {}
        for stored in file.tensors:
            self._place(stored, rules, strict)
        for name, weight in self._weights.items():
            lacking = set(range(len(weight.parts))) - weight.parts.keys()
            if lacking:
                raise ModelFileError(
                    f"{file.path}: missing tensor: part {min(lacking)} of {quote(name)}"
                )
        self._add_orders()

    def _add_orders(self) -> None:
        """Add ``{module}.columns``, the order of the columns of the file's ``{module}.weight``, to
        the weights. Weights that are not single matrices of the file get its own order back."""
        orders = getattr(self.file, "orders", {})
        found = [name for name in self._weights if orders.keys() & {*self.sources(name)}]
        whole = [name for name in found if self._is_matrix(name)]
        others = {stored for name in found if name not in whole for stored in self.sources(name)}
        for name in whole:
            (stored,) = self.sources(name)
            if stored not in others:
                columns = name.removesuffix("weight") + "columns"
                self._weights[columns] = _Weight(IDENTITY, {0: orders[stored]})
        for stored in others:
            self.file.restore_order(stored)  # type: ignore[attr-defined]

    def _is_matrix(self, name: str) -> bool:
        """Whether a weight consists of rows of one tensor."""
        meta = self.meta(name)
        one = meta is not None and meta.ndim == 2 and len(self.sources(name)) == 1
        return one and name.endswith(".weight") and bool(self.row_sources(name))

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
                both = f"tensors {quote(weight.parts[part])} and {quote(stored)}"
                raise ModelFileError(f"{self.file.path}: {both} are both {quote(name)}")
            weight.parts[part] = stored

    def names(self) -> Iterable[str]:
        return self._weights.keys()

    def notes(self) -> list[str]:
        """Return the file's notes for the user on tensors read so far."""
        return getattr(self.file, "notes", list)()

    def drop(self, name: str) -> None:
        """Remove a weight that the model does not use."""
        del self._weights[name]

    def sources(self, name: str) -> list[str]:
        """Return the file's names of a weight's tensors, in order."""
        weight = self._weights.get(name)
        return [weight.parts[i] for i in range(len(weight.parts))] if weight else []

    def row_sources(self, name: str) -> list[str]:
        """Return the file's names of the tensors whose rows are the rows of a weight, unchanged.

        Empty if the weight is made in another way.
        """
        weight = self._weights.get(name)
        same = weight is not None and isinstance(weight.transform, (Identity, Rows))
        return self.sources(name) if same else []

    def stored_as(self, name: str) -> tuple[str, float] | None:
        """Return the tensor that a weight is stored as, and what is added to its elements.

        None if the weight is made in another way.
        """
        stored, weight = self.sources(name), self._weights.get(name)
        offset = getattr(weight.transform, "offset", None) if weight else None
        return None if offset is None or len(stored) != 1 else (stored[0], offset)

    def _metas(self, name: str) -> list[Meta]:
        infos = map(self.file.readable, self.sources(name))
        return [Meta.of(tuple(info.shape), info.dtype) for info in infos]

    def meta(self, name: str) -> Meta | None:
        """See `Weights.meta`. ModelFileError for an unsupported format."""
        if name not in self._weights:
            return None
        metas = self._metas(name)
        try:
            made = self._weights[name].transform.meta(metas)
        except ModelFileError as error:
            raise ModelFileError(f"{self.file.path}: {name}: {error}") from None
        if made.dtype.name in _STORED:
            raise ModelFileError(f"{self.file.path}: {name}: is {made.dtype}, without its scales")
        return made

    def raw(self, name: str) -> np.ndarray:
        metas, raws = self._metas(name), [self.file.raw(s) for s in self.sources(name)]
        return self._weights[name].transform.raw(raws, metas)

    def release(self, name: str) -> None:
        for stored in self.sources(name):
            self.file.release(stored)


def plain_dtype(array: np.ndarray) -> DType:
    """Return the dtype of an array's elements. ModelFileError if it is not supported."""
    for known in DTYPES.values():
        if known.numpy == array.dtype:
            return known
    raise ModelFileError(f"weights of dtype {array.dtype} are not supported")
