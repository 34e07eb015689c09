"""WordPiece vocabularies of GGUF files (`tokenizer.ggml.model` = bert).

In these files the pieces that begin a word have SentencePiece's space before them, and those that
continue one have no prefix. The tokenizers package splits texts. Source: llama.cpp,
`llm_tokenizer_wpm` in `src/llama-vocab.cpp`.
"""

from __future__ import annotations

from typing import Any

from .package_encoding import encode_text
from .tokenizer_json_decoder import clean_up
from .untrusted_files import hold_stderr, wrap_errors
from .vocabulary import NORMAL, SPACE, Vocabulary, VocabularySource

_PREFIX = "##"  # of pieces that continue a word, in vocab.txt


class WordPieceTokenizer(Vocabulary):
    """BERT's WordPiece. As in transformers, a word of more than 100 characters is unknown."""

    default_ids = (101, None, 100)
    default_adds = (True, False, True)

    def __init__(self, file: VocabularySource) -> None:
        super().__init__(file)
        self.space_prefix = True  # pieces begin with a space, whatever the file states
        if self._value("bos_token_id", int) is None:
            self.bos_id = self._token("cls", self.bos_id)
        end = self._token("seperator", 102 if self.vocab_size > 102 else None)
        if self.bos_id is None or end is None or self._unknown_id is None:
            ids = {"bos": self.bos_id, "seperator": end, "unknown": self._unknown_id}
            name = next(name for name, token in ids.items() if token is None)
            raise self._error(f"{name}_token_id", "missing")
        self.add_bos, self._end = True, end
        self._engine = self._make_engine(self._unknown_id)

    def _make_engine(self, unknown: int) -> Any:
        from tokenizers import Tokenizer, models, normalizers, pre_tokenizers

        pieces = {}
        for token, piece in enumerate(self._pieces.tolist()):
            text = piece.decode("utf-8", "replace")
            if self._kinds[token] == NORMAL and text:
                text = text[1:] if text.startswith(SPACE) else _PREFIX + text
                pieces[text] = token
        unknown_text = self._pieces[unknown].decode("utf-8", "replace")
        pieces[unknown_text] = unknown
        lowercase = self._flag("normalizer.lowercase", True)
        strip_accents = self._flag("normalizer.strip_accents", lowercase)
        with wrap_errors(self._file.path), hold_stderr():
            engine = Tokenizer(models.WordPiece(pieces, unk_token=unknown_text))
            engine.normalizer = normalizers.BertNormalizer(
                lowercase=lowercase, strip_accents=strip_accents
            )
            engine.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
        return engine

    def _affixes(self) -> tuple[list[int], list[int]]:
        return super()._affixes()[0], [self._end]

    def _encode_text(self, text: str, starts: bool) -> list[int]:
        with wrap_errors(self._file.path):
            ids: list[int] = encode_text(self._engine, text).ids
        return ids

    def _bytes_of(self, token: int) -> bytes:
        if self._kinds[token] != NORMAL:
            return self._pieces[token]
        text = self._pieces[token].decode("utf-8", "replace")
        return clean_up(text.replace(SPACE, " ")).encode()
