"""Token embeddings of encoder-decoders: a table that both sides share, or one for each side."""

from __future__ import annotations

from ..weights.weight_rules import WeightRule
from .config import EncoderDecoderConfig
from .keys import Keys

SIDES = ("encoder", "decoder")
SHARED = "shared"
TABLES = (SHARED, *(f"{side}.embed_tokens" for side in SIDES))


def tied_embedding(keys: Keys, prefix: str) -> tuple[str, tuple[str, ...]]:
    """Return the name of the table of both sides, and the tensors that must equal it.

    A file may have the table under each of its names; ``prefix``: beginning of those names.
    """
    present = _present(keys, prefix) or [SHARED]
    return present[0], tuple(f"{prefix}{name}.weight" for name in present[1:])


def separate_embeddings(keys: Keys, prefix: str) -> dict[str, str]:
    """Return the name of the table of each side: its own, or the shared one if there is no other.

    ``prefix``: see `tied_embedding`.
    """
    present, own = _present(keys, prefix), zip(SIDES, TABLES[1:], strict=True)
    return {side: name if name in present else SHARED for side, name in own}


def _present(keys: Keys, prefix: str) -> list[str]:
    """Return the names of the tables in the file."""
    stored = {*keys.tensors}
    return [name for name in TABLES if f"{prefix}{name}.weight" in stored]


def embedding_rules(config: EncoderDecoderConfig, prefix: str) -> tuple[WeightRule, ...]:
    """Return the rules that leave out the shared table if no side uses it."""
    assert config.encoder is not None
    used = {config.names.embed, config.encoder.names.embed}
    return () if SHARED in used else (WeightRule("", f"{prefix}{SHARED}.weight"),)
