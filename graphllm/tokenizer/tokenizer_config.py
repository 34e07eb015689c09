"""Tokenizer settings of a Hugging Face directory: special tokens, added tokens, class.

They come from tokenizer_config.json, special_tokens_map.json, added_tokens.json, config.json and
generation_config.json. Source of their precedence: transformers 5, `tokenization_utils_base.py` and
`models/auto/tokenization_auto.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ..errors import ModelFileError, quote
from .untrusted_files import LARGEST_ID, read_json

NAMED = (
    "bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token",
)  # fmt: skip
_ID_DIGITS = 10  # of an id in a file; Python refuses to convert thousands

# transformers' tokenizer class of each model type; GENERIC reads tokenizer.json as it is. A
# directory's own `tokenizer_class` takes precedence, except for the model types in _MISNAMED.
GENERIC = "TokenizersBackend"
_CLASS_OF = {
    **dict.fromkeys(("qwen2", "qwen3", "qwen2_moe", "qwen3_moe"), "Qwen2Tokenizer"),
    **dict.fromkeys(("gemma", "gemma2", "gemma3", "gemma3_text"), "GemmaTokenizer"),
    **dict.fromkeys(("gpt2", "gptj", "opt", "phi", "starcoder2"), "GPT2Tokenizer"),
    **dict.fromkeys(("gpt_neox", "olmo", "mpt"), "GPTNeoXTokenizer"),
    "xglm": "XGLMTokenizer",
    "t5": "T5Tokenizer",
    "pegasus": "PegasusTokenizer",
    "marian": "MarianTokenizer",
    "m2m_100": "M2M100Tokenizer",
    "mbart": "MBartTokenizer",
    **dict.fromkeys(("bert", "distilbert", "electra", "nomic_bert"), "BertTokenizer"),
    "mpnet": "MPNetTokenizer",
    **dict.fromkeys(("roberta", "bart"), "RobertaTokenizer"),
    "xlm-roberta": "XLMRobertaTokenizer",
    "camembert": "CamembertTokenizer",
    **dict.fromkeys(
        ("mistral", "mixtral", "phi3", "glm", "glm4", "olmo2", "granite", "stablelm", "modernbert"),
        GENERIC,
    ),
}
_MISNAMED = ("qwen2", "phi3", "modernbert")


@dataclass(frozen=True)
class AddedToken:
    """A token that is split off the text before the model tokenizes the rest.

    ``normalized``: whether it is searched for in the normalised text. If it is None, because the
    file does not state it, special tokens are searched for in the original text, others in the
    normalised one.
    """

    content: str
    special: bool = False
    lstrip: bool = False
    rstrip: bool = False
    single_word: bool = False
    normalized: bool | None = None


class TokenizerDirectory:
    """Tokenizer settings of a directory; ``config``: config.json if it has been read already."""

    def __init__(self, folder: Path, config: Mapping[str, Any] | None = None) -> None:
        self.folder = folder
        self.config = read_json(folder / "config.json") if config is None else config
        self.settings = read_json(folder / "tokenizer_config.json")
        self._generation = read_json(folder / "generation_config.json")
        for file, values in self._configurations():
            self._ids(file, values, "bos_token_id")
        self.added: dict[int, AddedToken] = {}
        self.added = self._read_added()

    def _wrong(self, file: str, text: str) -> ModelFileError:
        return ModelFileError(f"{self.folder / file}: {text}")

    def _read_added(self) -> dict[int, AddedToken]:
        """Read the added tokens by id.

        special_tokens_map.json, whose settings are merged in here, and added_tokens.json are used
        only if tokenizer_config.json does not list the added tokens.
        """
        file, listed = "tokenizer_config.json", self.settings.get("added_tokens_decoder")
        if listed is None:
            for key, value in read_json(self.folder / "special_tokens_map.json").items():
                self.settings[key] = value | {"special": True} if isinstance(value, dict) else value
            file = "added_tokens.json"
            special = {token.content for token in self.named({}).values()}
            special.update(token.content for token in self.extras())
            id_of = read_json(self.folder / file)
            for token in id_of.values():
                if not isinstance(token, (int, str)):
                    raise self._wrong(file, f"{quote(token)} is not the id of a token")
            listed = {
                token: AddedToken(text, special=text in special) for text, token in id_of.items()
            }
        if not isinstance(listed, dict):
            raise self._wrong(file, "key 'added_tokens_decoder' is not an object")
        found = {}
        for key, value in listed.items():
            is_number = isinstance(key, str) and key.isdecimal() and len(key) <= _ID_DIGITS
            token = int(key) if is_number else key
            if type(token) is not int or not 0 <= token < LARGEST_ID:
                raise self._wrong(file, f"{quote(key)} is not the id of a token")
            is_read = isinstance(value, AddedToken)
            found[token] = value if is_read else self._token(value, file, f"added token {key}")
        return found

    def _token(self, value: Any, file: str, what: str) -> AddedToken:
        """Parse an added token: a string, which is a special token, or an object."""
        if isinstance(value, str):
            return AddedToken(value, special=True)
        if not isinstance(value, dict) or not isinstance(value.get("content"), str):
            raise self._wrong(file, f"{what}: neither a string nor an object with a content")
        flags = {
            key: flag
            for key in ("special", "lstrip", "rstrip", "single_word", "normalized")
            if isinstance(flag := value.get(key), bool)
        }
        return AddedToken(value["content"], **flags)

    def named(self, defaults: Mapping[str, str]) -> dict[str, AddedToken]:
        """Return special tokens by name: ``bos_token`` and the like, and model-specific ones.

        ``defaults``: texts of tokens that the directory does not state.
        """
        extra = self._extras()
        own = extra if isinstance(extra, dict) else {}
        keys = [key for key in self.settings if key.endswith("_token") and key not in NAMED]
        found = {}
        for key in (*NAMED, *keys, *own):
            value = own.get(key, self.settings.get(key, defaults.get(key)))
            if isinstance(value, (str, dict)):
                token = self._token(value, "tokenizer_config.json", f"key {quote(key)}")
                found[key] = self._listed(token)
        return {key: token for key, token in found.items() if token.content}

    def _listed(self, token: AddedToken) -> AddedToken:
        """Return the token with the flags of the added token with the same text, if any."""
        added = self.added.values()
        same = next((other for other in added if other.content == token.content), token)
        return replace(same, special=True)

    def _extras(self) -> Any:
        older = self.settings.get("additional_special_tokens")
        return self.settings.get("extra_special_tokens") or older or []

    def extras(self) -> list[AddedToken]:
        """Return the additional special tokens, which have no names."""
        extra = self._extras()
        if not isinstance(extra, (list, dict)):
            raise self._wrong("tokenizer_config.json", "the extra special tokens are not a list")
        listed = extra if isinstance(extra, list) else []
        what = "an extra special token"
        return [self._token(value, "tokenizer_config.json", what) for value in listed]

    def flag(self, key: str, default: bool) -> bool:
        """Return a boolean setting; null, which many files have, means the default."""
        value = self.settings.get(key)
        if value is not None and not isinstance(value, bool):
            raise self._wrong(
                "tokenizer_config.json", f"key {quote(key)} is not true, false or null"
            )
        return default if value is None else value

    @property
    def rows(self) -> int:
        """Vocabulary size of the model, which includes padding; 0 if config.json has none."""
        for key in ("padded_vocab_size", "vocab_size"):
            value = self.config.get(key)
            if isinstance(value, int) and 0 < value <= LARGEST_ID:
                return value
        return 0

    def eos_ids(self, vocab_size: int) -> frozenset[int]:
        """Return the EOS ids of generation_config.json, else of config.json.

        Ids above the vocabulary are dropped: transformers writes the defaults of a model type
        there, whatever the size of the vocabulary.
        """
        by_file = {
            file: self._ids(file, values, "eos_token_id")
            for file, values in self._configurations()
            if "eos_token_id" in values
        }
        ids = next(iter(by_file.values()), [])
        return frozenset(token for token in ids if token < vocab_size)

    def _configurations(self) -> tuple[tuple[str, Mapping[str, Any]], ...]:
        """Return the files that state ids of special tokens, by precedence."""
        return ("generation_config.json", self._generation), ("config.json", self.config)

    def _ids(self, file: str, values: Mapping[str, Any], key: str) -> list[int]:
        """Return the ids of a key with an id, a list of ids or null. ModelFileError otherwise."""
        value = values.get(key)
        ids = value if isinstance(value, list) else [] if value is None else [value]
        if not all(type(token) is int and 0 <= token < LARGEST_ID for token in ids):
            what = "neither a token id nor a list of token ids"
            raise self._wrong(file, f"{key} = {quote(value)} is {what}")
        return ids

    def class_name(self, byte_level: bool) -> str:
        """Return the tokenizer class that transformers uses for the directory.

        ``byte_level``: whether tokenizer.json has a ByteLevel step, which LlamaTokenizer lacks.
        """
        model_type = self.config.get("model_type")
        default = _CLASS_OF.get(model_type) if isinstance(model_type, str) else None
        given = self.settings.get("tokenizer_class") or self.config.get("tokenizer_class")
        name = given.removesuffix("Fast") if isinstance(given, str) else ""
        if not name:
            return default or GENERIC
        if name == "LlamaTokenizer" and byte_level and model_type not in _MISNAMED:
            return GENERIC
        if default is None or default == name:
            return name
        return default if default == GENERIC or model_type in _MISNAMED else name
