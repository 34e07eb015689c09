"""Tokenizers of ChatGLM: SentencePiece models with additional special tokens.

Source: the published `tokenization_chatglm.py` of ChatGLM-6B, ChatGLM2-6B and ChatGLM3-6B.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from ..errors import ModelFileError, quote
from .sentencepiece_model import SentencePieceModelTokenizer
from .tokenizer_config import TokenizerDirectory
from .untrusted_files import LARGEST_ID
from .vocabulary import SpecialTokens

_IMAGES = (
    20_000  # image token ids before the pieces, for the first release, which does not state them
)
_LONGEST_RUN = 80
_BLANKS = {f"<|blank_{count}|>": " " * count for count in range(_LONGEST_RUN, 1, -1)}
_SPACES = {"<n>": "\n", "<|tab|>": "\t", **_BLANKS}  # white space of ChatGLM-6B pieces
_SHOWN = {piece.encode(): text.encode() for piece, text in _SPACES.items()}
_CONTROLS = (
    "[MASK]", "[gMASK]", "[sMASK]", "<unused_0>", "<sop>", "<eop>", "<ENC>", "<dBLOCK>", "<pad>",
)  # fmt: skip
_COMMANDS = ("[MASK]", "[gMASK]", "[sMASK]", "sop", "eop")
_ROLES = ("<|system|>", "<|user|>", "<|assistant|>", "<|observation|>")


class ChatGlmTokenizer(SentencePieceModelTokenizer):
    """ChatGLM-6B (`ice_text.model`). A prompt ends with [gMASK] and <sop>.

    Newlines, tabs and runs of spaces have pieces of their own. As in the published code, the text
    of such a piece is read as the piece.
    """

    def __init__(self, path: Path, directory: TokenizerDirectory) -> None:
        images = directory.settings.get("num_image_tokens", _IMAGES)
        if not isinstance(images, int) or not 0 <= images < LARGEST_ID:
            file = directory.folder / "tokenizer_config.json"
            text = f"num_image_tokens = {quote(images)} is not a count"
            raise ModelFileError(f"{file}: {text}")
        names = {"bos_token": "<sop>", "eos_token": "<eop>", "unk_token": "<unk>"}
        super().__init__(path, directory, offset=images, names=names, controls=_CONTROLS)
        self.prefix_after_special = True
        self.add_bos = self.add_eos = False
        self._end = list(self._named(("[gMASK]", "<sop>")).values())
        if len(self._end) < 2:
            raise self._error("pieces", "there is no [gMASK] or no <sop>")

    def _affixes(self) -> tuple[list[int], list[int]]:
        return [], self._end

    def _encode_text(self, text: str, starts: bool) -> list[int]:
        for piece, spaces in _SPACES.items():  # longest runs first
            text = text.replace(spaces, piece)
        return super()._encode_text(text, starts)

    def _bytes_of(self, token: int) -> bytes:
        data = super()._bytes_of(token)
        return _SHOWN.get(data, data)


class ChatGlm2Tokenizer(SentencePieceModelTokenizer):
    """ChatGLM2-6B and ChatGLM3-6B. A prompt starts with [gMASK] and sop.

    Command and role tokens follow the pieces. The roles are ChatGLM3's; ChatGLM2 has embedding rows
    for their ids but does not use them.
    """

    def __init__(self, path: Path, directory: TokenizerDirectory) -> None:
        super().__init__(path, directory, extras=(*_COMMANDS, *_ROLES))
        self.prefix_after_special = True
        self.add_bos = self.add_eos = False
        own = self._named((*_COMMANDS, *_ROLES))
        self._begin = [own["[gMASK]"], own["sop"]]
        self.eog_ids |= {own["<|user|>"], own["<|observation|>"]}
        parsed = self._named((*_COMMANDS[:3], *_ROLES, "<s>", "</s>"))
        self._all_specials = _Commands(parsed.items(), self._begin)

    def _affixes(self) -> tuple[list[int], list[int]]:
        return list(self._begin), []


class _Commands(SpecialTokens):
    """Splits off command tokens. "sop" is one only after [gMASK], since it may be a word.

    ``begin``: ids of [gMASK] and sop.
    """

    def __init__(self, pieces: Iterable[tuple[str, int]], begin: list[int]) -> None:
        super().__init__(pieces)
        self._mask, self._start = begin

    def split(self, text: str) -> list[str | int]:
        parts: list[str | int] = []
        for part in super().split(text):
            if isinstance(part, str) and part.startswith("sop") and parts[-1:] == [self._mask]:
                parts.append(self._start)
                part = part.removeprefix("sop")
            if part != "":
                parts.append(part)
        return parts
