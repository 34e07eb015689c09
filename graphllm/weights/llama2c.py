"""Reader of llama2.c files, version 0: a model's ``.bin``, memory-mapped, and its tokenizer's.

Source of the format: karpathy/llama2.c, `export.py` (`legacy_export`), `run.c` and `tokenizer.py`.
The numbers are little-endian. A malformed file ends in a ModelFileError that names it.
"""

from __future__ import annotations

import math
import os
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

from ..errors import ModelFileError
from ..graph.dtype import F32
from .mapped_file import NO_PICKLES, MappedFile, TensorFiles, TensorInfo

_MAGIC = 0x616B3432  # "ak42", of versions 1 and 2; version 0 begins with the first size
_PICKLES = (b"PK\x03\x04", b"\x80\x02\x8a\n")  # how PyTorch's files begin, which end in .bin, too
_MAX_LAYERS = 1 << 12
_MAX_TOKENS = 1 << 20


class _Header(NamedTuple):
    """The sizes that a file begins with. ``vocab`` is negative where the head is stored apart."""

    dim: int
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    vocab: int
    context: int


_HEADER = struct.Struct(f"<{len(_Header._fields)}i")


class Llama2c(TensorFiles):
    """The tensors of a llama2.c model under their Hugging Face names; a context manager.

    ``config`` has the keys of a Hugging Face `config.json` that the header states or llama2.c
    takes for granted. Without ``data`` the header is all that is read, and all that must be there:
    `raw` is an error then. ModelFileError when the file is missing, malformed, or of a later
    version.
    """

    formats = (F32.name,)
    interleaved = True  # rows of q and k: rotary pairs are neighbours, (2i, 2i + 1)

    def __init__(self, path: str | os.PathLike[str], data: bool = True) -> None:
        super().__init__(Path(path))
        file = MappedFile(self.path, data)
        view = file.view()
        header = _read_header(view, self.path)
        *stacks, end = _layout(header)
        if data and len(view) != end.offset:
            raise ModelFileError(
                f"{self.path}: {len(view)} bytes, but a model of {_shown(header)} has {end.offset}"
            )
        self._add(file, {info.name: info for stack in stacks for info in stack.tensors()})
        self.config: dict[str, int | float | bool] = {
            "hidden_size": header.dim,
            "intermediate_size": header.hidden,
            "num_hidden_layers": header.layers,
            "num_attention_heads": header.heads,
            "num_key_value_heads": header.kv_heads,
            "vocab_size": abs(header.vocab),
            "max_position_embeddings": header.context,
            "rms_norm_eps": 1e-5,
            "rope_theta": 10_000.0,
            "tie_word_embeddings": header.vocab > 0,
        }


def _read_header(view: memoryview, path: Path) -> _Header:
    """The sizes, which are those of a model that can be."""
    if len(view) >= 8:
        magic, version = struct.unpack_from("<Ii", view)
        if magic == _MAGIC:
            raise ModelFileError(
                f"{path}: llama2.c version {version} is not supported, only version 0 "
                "(export.py --version 0)"
            )
    if view[:4] in _PICKLES:
        raise ModelFileError(f"{path}: {NO_PICKLES}")
    if len(view) < _HEADER.size:
        raise _not_one(path, f"{len(view)} bytes")
    header = _Header(*_HEADER.unpack_from(view))
    for field, size in header._replace(vocab=abs(header.vocab))._asdict().items():
        if size < 1:
            raise _not_one(path, f"{field} = {size}")
    if header.layers > _MAX_LAYERS:
        raise _not_one(path, f"layers = {header.layers} are more than {_MAX_LAYERS}")
    if header.dim % (2 * header.heads):
        raise _not_one(path, f"heads = {header.heads} do not cut dim = {header.dim} in even widths")
    if header.heads % header.kv_heads:
        raise _not_one(path, f"heads = {header.heads} do not share kv_heads = {header.kv_heads}")
    return header


def _not_one(path: Path, text: str) -> ModelFileError:
    return ModelFileError(f"{path}: not a llama2.c file: {text}")


def _shown(header: _Header) -> str:
    return ", ".join(f"{field} {size}" for field, size in header._asdict().items())


class _Stack(NamedTuple):
    """Tensors of one shape, one after another; ``{i}`` in the name stands for their number."""

    name: str
    copies: int
    shape: tuple[int, ...]
    offset: int

    @property
    def nbytes(self) -> int:
        """Of one of them."""
        return math.prod(self.shape) * F32.nbytes

    def tensors(self) -> Iterator[TensorInfo]:
        if self.name:  # else nothing that a model needs
            for i in range(self.copies):
                start = self.offset + i * self.nbytes
                yield TensorInfo(self.name.format(i=i), self.shape, F32, self.nbytes, start)


def _layout(header: _Header) -> list[_Stack]:
    """What the file holds, in its order; last an empty stack at its end."""
    dim, hidden, layers, heads, kv_heads, _, context = header
    vocab, width = abs(header.vocab), dim // heads
    layer = "model.layers.{i}."
    stacks: list[_Stack] = []
    offset = _HEADER.size
    for name, copies, shape in (
        ("model.embed_tokens.weight", 1, (vocab, dim)),
        (layer + "input_layernorm.weight", layers, (dim,)),
        (layer + "self_attn.q_proj.weight", layers, (dim, dim)),
        (layer + "self_attn.k_proj.weight", layers, (kv_heads * width, dim)),
        (layer + "self_attn.v_proj.weight", layers, (kv_heads * width, dim)),
        (layer + "self_attn.o_proj.weight", layers, (dim, dim)),
        (layer + "post_attention_layernorm.weight", layers, (dim,)),
        (layer + "mlp.gate_proj.weight", layers, (hidden, dim)),
        (layer + "mlp.down_proj.weight", layers, (dim, hidden)),
        (layer + "mlp.up_proj.weight", layers, (hidden, dim)),
        ("model.norm.weight", 1, (dim,)),
        ("", 2, (context, width // 2)),  # cosines and sines of rotary positions
        ("lm_head.weight", int(header.vocab < 0), (vocab, dim)),
        ("", 0, ()),
    ):
        stacks.append(_Stack(name, copies, shape, offset))
        offset += copies * stacks[-1].nbytes
    return stacks


def read_vocabulary(path: str | os.PathLike[str]) -> tuple[list[bytes], np.ndarray]:
    """Pieces and float32 scores of a llama2.c ``tokenizer.bin``, by token id.

    The file does not say how many there are. ModelFileError when it is missing or malformed.
    """
    path = Path(path)
    data = bytes(MappedFile(path, data=True).view())
    if len(data) < 4:
        raise ModelFileError(f"{path}: not a llama2.c tokenizer: {len(data)} bytes")
    (longest,) = struct.unpack_from("<i", data)
    pieces: list[bytes] = []
    scores: list[float] = []
    pos = 4
    while pos < len(data):
        where = f"{path}: token {len(pieces)}"
        if pos + 8 > len(data):
            raise ModelFileError(f"{where}: the file ends within it")
        score, size = struct.unpack_from("<fi", data, pos)
        pos += 8
        if not 0 <= size <= longest:
            raise ModelFileError(f"{where}: {size} bytes are not in 0..{longest}")
        if pos + size > len(data):
            raise ModelFileError(f"{where}: the file ends within it")
        if not math.isfinite(score):
            raise ModelFileError(f"{where}: its score is {score}")
        if len(pieces) == _MAX_TOKENS:
            raise ModelFileError(f"{where}: more than {_MAX_TOKENS} are too many")
        pieces.append(data[pos : pos + size])
        scores.append(score)
        pos += size
    return pieces, np.array(scores, np.float32)
