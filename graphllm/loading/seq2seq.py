"""How targets of encoder-decoders begin and end, and how sources are encoded."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from ..checkpoints.checkpoint import Checkpoint
from ..checkpoints.hf_directory import read_json
from ..engine.request import Sampling
from ..errors import ConfigError, RequestError, quote
from ..model.batch import Limits
from ..model.decoder import Decoder
from ..tokenizer.languages import Languages

_FIRST_IDS = ("decoder_start_token_id", "bos_token_id")


def _stated(values: dict[str, Any]) -> dict[str, Any]:
    """Return the values without null, which counts as missing."""
    return {name: value for name, value in values.items() if value is not None}


class Seq2Seq:
    """Makes the sequences of an encoder-decoder: source, then the first tokens of the target.

    The settings come from generation_config.json, as in transformers: config.json is read only if
    that file does not exist, but for the first token of a target, which it may state as well.

    Attributes:
        start: ids that a target begins with: ``decoder_start_token_id``, ``forced_bos_token_id``.
        forced_eos_id: the last token of a target of maximum length; None: any.
        banned: ids that are never sampled, ``bad_words_ids``.
        max_source: maximum number of tokens of a source.
        max_target: maximum number of tokens of a target that are computed.
    """

    def __init__(self, file: Checkpoint, decoder: Decoder, limits: Limits) -> None:
        """Read the settings. ConfigError: a value is missing or invalid."""
        path, folder = file.path / "generation_config.json", file.path
        self._path = str(folder / "config.json" if folder.is_dir() else folder)
        self._values = dict(file.metadata)
        if path.is_file():
            first_ids = {name: file.metadata.get(name) for name in _FIRST_IDS}
            self._path, self._values = str(path), {**first_ids, **_stated(read_json(path))}
        start = f"{file.architecture}.decoder_start_token_id"  # of a GGUF file
        if start in file.metadata:
            self._values["decoder_start_token_id"] = file.metadata[start]
        self._vocab = decoder.cfg.vocab
        first = self._id(*_FIRST_IDS)
        if first is None:
            raise ConfigError(f"{self._path}: missing key 'decoder_start_token_id'")
        forced = self._id("forced_bos_token_id")
        self.start = [first] if forced is None else [first, forced]
        self.forced_eos_id = self._id("forced_eos_token_id")
        self.banned = self._banned_ids()
        self.max_source, self.max_target = decoder.max_source(limits), decoder.cfg.context

    def _id(self, *names: str) -> int | None:
        """Return the token id of the first key that has a value. ConfigError: it is invalid."""
        for name in names:
            if (value := self._values.get(name)) is not None:
                if type(value) is not int or not 0 <= value < self._vocab:
                    raise self._error(name, value, f"a token id below {self._vocab}")
                return value
        return None

    def _banned_ids(self) -> tuple[int, ...]:
        """Return the ids of ``bad_words_ids``. ConfigError: a word has several tokens."""
        words, wanted = self._values.get("bad_words_ids") or [], "a list of lists with one token id"
        if not isinstance(words, list):
            raise self._error("bad_words_ids", words, wanted)
        for word in words:
            one = word[0] if isinstance(word, list) and len(word) == 1 else None
            if type(one) is not int or not 0 <= one < self._vocab:
                raise self._error("bad_words_ids", words, wanted)
        return tuple(word[0] for word in words)

    def _error(self, name: str, value: Any, wanted: str) -> ConfigError:
        return ConfigError(f"{self._path}: {name} = {quote(value)} is not {wanted}")

    def check_targets(self, lengths: Sequence[int]) -> None:
        """Raise RequestError if the decoder has no positions for targets of these lengths."""
        if max(lengths) > self.max_target:
            raise RequestError(
                f"targets of {max(lengths)} tokens exceed the decoder's {self.max_target} positions"
            )

    def request(
        self,
        prompt: str | Sequence[int],
        sampling: Sampling,
        languages: Callable[[], Languages],
    ) -> tuple[list[int], list[int], Sampling]:
        """Return the ids of the source, those of the beginning of the target, and the settings.

        Args:
            prompt: the source as text or ids.
            sampling: settings of the request.
            languages: returns the languages of the tokenizer; called only if they are needed.

        Raises:
            RequestError: the source is too long, or a language is unknown or of no use.
            ModelFileError: the model has no tokenizer.
        """
        source, language = sampling.source_lang, sampling.target_lang
        if isinstance(prompt, str):
            ids = languages().encode(prompt, source, language)
        elif source is None:
            ids = list(prompt)
        else:
            raise RequestError("source_lang needs a text, not token ids", "source_lang")
        if not ids:
            raise RequestError("the source is empty")
        if len(ids) > self.max_source:
            raise RequestError(
                f"the source has {len(ids)} tokens, but at most {self.max_source} fit: the "
                "positions that the model has for it, or half of the context",
                "context",
            )
        first = None if language is None else languages().first_token(language)
        target = self.start if first is None else [self.start[0], first]
        forced = self.forced_eos_id if sampling.forced_eos_id is None else sampling.forced_eos_id
        settings = replace(
            sampling,
            max_tokens=max(0, min(sampling.max_tokens, self.max_target + 1 - len(target))),
            banned_ids=(*sampling.banned_ids, *self.banned),
            forced_eos_id=forced,
        )
        return ids, target, settings
