"""Reader of llama2.c files, version 0: a memory-mapped model ``.bin``, and ``tokenizer.bin``.

Source of the format: karpathy/llama2.c, `export.py` (`legacy_export`), `run.c` and `tokenizer.py`.
Numbers are little-endian. A malformed file raises a ModelFileError that names it.
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

_MAGIC = 0x616B3432  # "ak42" of versions 1 and 2; version 0 has no magic number
_PICKLES = (b"PK\x03\x04", b"\x80\x02\x8a\n")  # first bytes of PyTorch files, which may end in .bin
_MAX_LAYERS = 1 << 12
_MAX_TOKENS = 1 << 20


class _Header(NamedTuple):
    """Sizes at the start of a file. ``vocab`` is negative if the file has an output head."""

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

    ``config`` has the keys of a Hugging Face config.json that the header states or llama2.c
    assumes. Without ``data`` only the header must exist, and `raw` raises.

    Raises:
        ModelFileError: The file is missing, malformed, or of a later version.
    """

    formats = (F32.name,)
    interleaved = True  # rotary pairs of q and k are neighbours, (2i, 2i + 1)

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
    """Read and check the sizes."""
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
        raise _not_llama2c(path, f"{len(view)} bytes")
    header = _Header(*_HEADER.unpack_from(view))
    for field, size in header._replace(vocab=abs(header.vocab))._asdict().items():
        if size < 1:
            raise _not_llama2c(path, f"{field} = {size}")
    if header.layers > _MAX_LAYERS:
        raise _not_llama2c(path, f"layers = {header.layers} must be at most {_MAX_LAYERS}")
    if header.dim % (2 * header.heads):
        raise _not_llama2c(
            path, f"dim = {header.dim} must be an even multiple of heads = {header.heads}"
        )
    if header.heads % header.kv_heads:
        raise _not_llama2c(
            path, f"heads = {header.heads} is not a multiple of kv_heads = {header.kv_heads}"
        )
    return header


def _not_llama2c(path: Path, text: str) -> ModelFileError:
    return ModelFileError(f"{path}: not a llama2.c file: {text}")


def _shown(header: _Header) -> str:
    return ", ".join(f"{field} {size}" for field, size in header._asdict().items())


class _Stack(NamedTuple):
    """Consecutive tensors of one shape; ``{i}`` in the name is replaced by their index."""

    name: str
    copies: int
    shape: tuple[int, ...]
    offset: int

    @property
    def nbytes(self) -> int:
        """Bytes of one tensor."""
        return math.prod(self.shape) * F32.nbytes

    def tensors(self) -> Iterator[TensorInfo]:
        if self.name:  # an empty name marks data that the model does not use
            for i in range(self.copies):
                start = self.offset + i * self.nbytes
                yield TensorInfo(self.name.format(i=i), self.shape, F32, self.nbytes, start)


def _layout(header: _Header) -> list[_Stack]:
    """Return the file's content in order, followed by an empty stack at the file's end."""
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
    """Read a llama2.c ``tokenizer.bin``.

    Returns:
        Pieces and float32 scores by token id; the file does not state their number.

    Raises:
        ModelFileError: The file is missing or malformed.
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
            raise ModelFileError(f"{where}: the file is truncated")
        score, size = struct.unpack_from("<fi", data, pos)
        pos += 8
        if not 0 <= size <= longest:
            raise ModelFileError(f"{where}: {size} bytes are not in 0..{longest}")
        if pos + size > len(data):
            raise ModelFileError(f"{where}: the file is truncated")
        if not math.isfinite(score):
            raise ModelFileError(f"{where}: its score is {score}")
        if len(pieces) == _MAX_TOKENS:
            raise ModelFileError(f"{where}: more than {_MAX_TOKENS} tokens")
        pieces.append(data[pos : pos + size])
        scores.append(score)
        pos += size
    return pieces, np.array(scores, np.float32)
