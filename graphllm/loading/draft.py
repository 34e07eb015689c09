"""Which draft model speculative decoding can use, and how it is loaded."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from ..checkpoints.checkpoint import Checkpoint
from ..errors import RequestError
from ..model.decoder import Decoder
from ..tokenizer import Tokenizer

# Arguments of `load` that the draft model shares with the model.
_SHARED = (
    "device", "context", "max_sequences", "kv_type", "linear", "prefill", "deterministic",
    "threads", "no_fuse", "no_kernels", "progress",
)  # fmt: skip


class Vocabulary(Protocol):
    """The part of a loaded model that says what its token ids stand for."""

    file: Checkpoint
    decoder: Decoder

    @property
    def tokenizer(self) -> Tokenizer: ...


def draft_arguments(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of loading the draft model, from those of loading the model."""
    return {name: given[name] for name in _SHARED}


def check_vocabularies(model: Vocabulary, draft: Vocabulary) -> None:
    """Raise RequestError unless a token id means the same to both models.

    The tables of embeddings may have different numbers of unused rows at the end.
    """
    files = f"{draft.file.path} cannot predict drafts for {model.file.path}"
    if not (model.file.has_vocabulary and draft.file.has_vocabulary):  # random weights
        if model.decoder.cfg.vocab != draft.decoder.cfg.vocab:
            raise RequestError(f"{files}: their vocabularies have different sizes", "draft")
        return
    own, other = model.tokenizer, draft.tokenizer
    for token in range(max(own.vocab_size, other.vocab_size)):
        if token >= min(own.vocab_size, other.vocab_size) or own.piece(token) != other.piece(token):
            raise RequestError(f"{files}: token {token} is not the same", "draft")
