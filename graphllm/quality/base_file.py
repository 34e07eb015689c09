"""Files with the log-probabilities of a base model, with which other models are compared.

Layout, little-endian:

=================  ==================================================================
``MAGIC``          8 bytes
version            uint32, 1
context            uint32: tokens of a chunk
chunks             uint32
vocab              uint32: size of the vocabulary
vocabulary digest  32 bytes: SHA-256 of the tokenizer's pieces, zeros without a tokenizer
tokens             int32 [chunks, context], as computed, BOS tokens included
rows               one for each predicted token: [chunks, context - 1 - context // 2]
=================  ==================================================================

A row is the log-probability of the predicted token, the largest one, their span (float32 each) and
a uint16 code for each token of the vocabulary. The log-probability of code c is
largest - span * (c / 65535)^2, so the most likely token is exact and the steps are finest where the
probability is. The span is at most 16: what is further below the largest is stored as 16 below.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from ..atomic_file import AtomicFile
from ..errors import ModelFileError, RequestError
from ..tokenizer import Tokenizer
from .perplexity import MIN_CONTEXT, first_predicted

MAGIC, VERSION = b"GLLMBASE", 1
HEADER = np.dtype(
    [("magic", "S8"), ("version", "<u4"), ("context", "<u4"), ("chunks", "<u4"), ("vocab", "<u4"),
     ("digest", "V32")]
)  # fmt: skip
MAX_SPAN = 16.0  # log-probabilities further below the largest one are not told apart
_CODES = 65535


def row_dtype(vocab: int) -> np.dtype[np.void]:
    """Return the dtype of a row."""
    return np.dtype(
        [("token", "<f4"), ("largest", "<f4"), ("span", "<f4"), ("codes", "<u2", (vocab,))]
    )


def vocabulary_digest(tokenizer: Tokenizer | None) -> bytes:
    """Return the SHA-256 of the pieces of all tokens; zeros without a tokenizer."""
    if tokenizer is None:
        return bytes(32)
    digest = hashlib.sha256()
    for token in range(tokenizer.vocab_size):
        piece = tokenizer.piece(token)
        digest.update(len(piece).to_bytes(4, "little") + piece)
    return digest.digest()


def encode(logprobs: np.ndarray, token: int, row: np.void) -> None:
    """Store log-probabilities f32 [vocab], which are not NaN, in a row of `row_dtype`.

    ``token``: the predicted token.
    """
    row["token"], largest = logprobs[token], logprobs.max()
    below = np.minimum(largest - logprobs, np.float32(MAX_SPAN))
    span = below.max()
    row["largest"], row["span"] = largest, span
    if span > 0:
        np.sqrt(below * np.float32(1 / span), out=below)
        row["codes"] = np.rint(below * np.float32(_CODES))
    else:
        row["codes"] = 0


def decode(row: np.void) -> np.ndarray:
    """Return the log-probabilities f32 [vocab] of a row."""
    root = row["codes"] * np.float32(1 / _CODES)
    root *= root
    root *= -row["span"]
    root += row["largest"]
    return root


class BaseFile:
    """A file of base log-probabilities that is open for reading.

    Attributes:
        path: the file.
        context, chunks, vocab, digest: see the module.
        tokens: token ids int32 [chunks, context].
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """Read the header and the tokens.

        ModelFileError: the file cannot be read, is malformed, or has another size than its header
        states.
        """
        self.path = Path(path)
        try:
            self._file = self.path.open("rb")
        except OSError as error:
            raise ModelFileError(f"{path}: {error.strerror}") from None
        try:
            self._read_header()
        except BaseException:
            self._file.close()
            raise

    def _read_header(self) -> None:
        size = os.fstat(self._file.fileno()).st_size
        head = self._file.read(HEADER.itemsize)
        if len(head) < HEADER.itemsize or not head.startswith(MAGIC):
            raise self._error("it is not a file of base log-probabilities")
        own = np.frombuffer(head, HEADER)[0]
        version, self.context, self.chunks, self.vocab = (
            int(own[name]) for name in ("version", "context", "chunks", "vocab")
        )
        self.digest = own["digest"].tobytes()
        if version != VERSION:
            raise self._error(f"version {version} is not supported, {VERSION} is")
        if self.context < MIN_CONTEXT or not self.chunks or not self.vocab:
            raise self._error(
                f"{self.chunks} chunks of {self.context} tokens, a vocabulary of {self.vocab}"
            )
        self.rows = self.context - first_predicted(self.context)  # of a chunk
        self._row = row_dtype(self.vocab)
        tokens = self.chunks * self.context
        # Everything below reads as much as the file has, whatever the header states.
        expected = HEADER.itemsize + 4 * tokens + self.chunks * self.rows * self._row.itemsize
        if size != expected:
            raise self._error(f"it has {size} bytes, its header asks for {expected}")
        self.tokens = np.frombuffer(self._read(4 * tokens), "<i4").reshape(-1, self.context)
        if self.tokens.min() < 0 or self.tokens.max() >= self.vocab:
            raise self._error(f"a token id is not in 0..{self.vocab - 1}")

    def read_rows(self, count: int) -> np.ndarray:
        """Return the next ``count`` rows. ModelFileError: a row is malformed, or missing."""
        found = np.frombuffer(self._read(count * self._row.itemsize), self._row)
        for name, least, most in (
            ("token", -np.inf, 1e-3), ("largest", -1e6, 1e-3), ("span", 0, MAX_SPAN)
        ):  # fmt: skip
            values = found[name]
            valid = (values >= least) & (values <= most)
            if not valid.all():
                raise self._error(f"{name} of a row is {values[valid.argmin()]}")
        return found

    def check_model(self, vocab: int, tokenizer: Tokenizer | None) -> None:
        """Raise RequestError if the file was written with another vocabulary."""
        if vocab != self.vocab:
            raise RequestError(
                f"{self.path}: it has the log-probabilities of {self.vocab} tokens, the model has "
                f"{vocab}"
            )
        if vocabulary_digest(tokenizer) != self.digest:
            raise RequestError(f"{self.path}: it was written with another vocabulary")

    def check_tokens(self, chunks: np.ndarray) -> None:
        """Raise RequestError if the file was written for another text than that of ``chunks``."""
        common = min(len(chunks), self.chunks)  # either may be the beginning of the text
        if not np.array_equal(chunks[:common], self.tokens[:common]):
            raise RequestError(f"{self.path}: it was written for another text")

    def _read(self, size: int) -> bytes:
        data = self._file.read(size)
        if len(data) != size:
            raise self._error("it ends early")
        return data

    def _error(self, why: str) -> ModelFileError:
        return ModelFileError(f"{self.path}: {why}")

    def __enter__(self) -> BaseFile:
        return self

    def __exit__(self, *error: object) -> None:
        self._file.close()


class BaseFileWriter:
    """Writes a file of base log-probabilities, under a temporary name until it is complete."""

    def __init__(
        self, path: str | os.PathLike[str], chunks: np.ndarray, vocab: int, digest: bytes
    ) -> None:
        """Prepare the file; ``with`` creates it.

        Args:
            path: the file; an existing one is replaced at the end.
            chunks: token ids int32 [chunks, context].
            vocab: size of the vocabulary.
            digest: see `vocabulary_digest`.
        """
        self.path, self._chunks = Path(path), chunks
        count, context = chunks.shape
        fields = (MAGIC, VERSION, context, count, vocab, np.void(digest))
        self._header = np.array([fields], HEADER)
        self._row = row_dtype(vocab)
        self._file = AtomicFile(self.path, replace=True)

    def new_rows(self, count: int) -> np.ndarray:
        """Return rows for `encode` to fill."""
        return np.empty(count, self._row)

    def write(self, data: np.ndarray) -> None:
        """Append rows. RequestError: the file cannot be written."""
        with self._reported():
            self._file.write(data.view(np.uint8).data)

    def __enter__(self) -> BaseFileWriter:
        with self._reported():
            self._file.__enter__()
        try:
            self.write(self._header)
            self.write(self._chunks.astype("<i4"))
        except BaseException:
            self._file.discard()
            raise
        return self

    def __exit__(self, kind: object, *failure: object) -> None:
        with self._reported():
            self._file.__exit__(kind)

    @contextmanager
    def _reported(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise RequestError(f"{self.path}: {error.strerror}") from None
