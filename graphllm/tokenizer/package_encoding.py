"""Encoding with the tokenizers package, while other threads go on."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tokenizers import Tokenizer

LONG = 4000  # characters, which take some 3 ms


def encode_text(engine: Tokenizer, text: str, add_special: bool = False) -> Any:
    """Return the package's encoding of a text.

    Of the package's methods only ``encode_batch`` releases Python's lock: ``encode`` would stop all
    threads of a server for a second on a million characters. A short text takes less time than the
    package needs to distribute a batch.
    """
    if len(text) < LONG:
        return engine.encode(text, add_special_tokens=add_special)
    return engine.encode_batch([text], add_special_tokens=add_special)[0]


def copy_engine(engine: Tokenizer) -> Tokenizer:
    """Return an engine with settings of its own, which shares the vocabulary and the pipeline."""
    from tokenizers import Tokenizer

    made = Tokenizer(engine.model)
    for name in ("normalizer", "pre_tokenizer", "post_processor", "decoder"):
        if (part := getattr(engine, name)) is not None:
            setattr(made, name, part)
    # The package assigns the ids again; in ascending order, they are the same.
    made.add_tokens([token for _, token in sorted(engine.get_added_tokens_decoder().items())])
    return made
