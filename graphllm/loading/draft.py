"""Start of speculative decoding: which draft model it can use, and what runs its steps."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from ..checkpoints.checkpoint import Checkpoint
from ..compiler.plan import HOST, Plan
from ..engine.device_drafts import DeviceDrafts
from ..engine.engine import Engine
from ..engine.speculation import Drafter, Speculation
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


def start_speculation(engine: Engine, fixed: int, drafter: Drafter | None) -> list[Plan]:
    """Let ``engine`` compute draft tokens; return the plans of one sequence with them.

    Args:
        engine: an engine whose limits have drafts.
        fixed: see `Speculation`.
        drafter: predicts them; None for prompt look-up, on a device with its own memory by itself.
    """
    batcher, limits, executor = engine.batcher, engine.limits, engine.executor
    own = Speculation(engine.scheduler, limits.step_sequences, fixed, drafter)
    batcher.speculation, batcher.device_drafts = own, None
    plans = [engine.decode_plan(1 << bits) for bits in range(1, limits.drafts.bit_length() + 1)]
    if drafter is None and executor.backends[0].memory != HOST:
        batcher.device_drafts = DeviceDrafts(batcher.runner, engine.scheduler, own)
        plans += batcher.device_drafts.plans()
    return plans
