"""Strict reading of a model's configuration under Hugging Face's key names."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from ..errors import ConfigError, ModelFileError, join_names, quote

T = TypeVar("T")

# Keys of a config.json that do not change what the model computes, and why.
IGNORED = {
    "architectures": "class that trained the model", "model_type": "selects the model file",
    "_name_or_path": "origin of the model", "transformers_version": "writer of the file",
    "auto_map": "code that is not run", "custom_pipelines": "code that is not run",
    "torch_dtype": "stated by the tensors", "dtype": "stated by the tensors",
    "bos_token_id": "read by the tokenizer",
    "eos_token_id": "read by the tokenizer", "pad_token_id": "read by the tokenizer",
    "sep_token_id": "read by the tokenizer", "decoder_start_token_id": "begins targets",
    "use_cache": "the cache is always used", "initializer_range": "training",
    "attention_dropout": "training", "hidden_dropout": "training", "resid_pdrop": "training",
    "embd_pdrop": "training", "attn_pdrop": "training", "attention_probs_dropout_prob": "training",
    "hidden_dropout_prob": "training", "residual_dropout": "training",
    "embedding_dropout": "training", "classifier_dropout": "another task",
    "pretraining_tp": "parallelism of the training", "output_attentions": "requests outputs",
    "cache_implementation": "implementation", "_attn_implementation_autoset": "implementation",
    "tokenizer_class": "read by the tokenizer", "is_decoder": "always true",
    "num_labels": "another task", "_num_labels": "another task", "output_past": "requests outputs",
    "torchscript": "implementation", "tie_encoder_decoder": "for encoder-decoders",
    "task_specific_params": "another task", "finetuning_task": "another task",
    "_commit_hash": "origin of the model",
    "output_hidden_states": "requests outputs", "return_dict": "requests outputs",
    "id2label": "another task", "label2id": "another task", "problem_type": "another task",
    "chunk_size_feed_forward": "saves memory, same results",
    "is_encoder_decoder": "stated by the model_type",
    "attn_implementation": "implementation", "_attn_implementation": "implementation",
    "router_aux_loss_coef": "training", "output_router_logits": "training",
    "router_jitter_noise": "training", "aux_loss_alpha": "training", "seq_aux": "training",
    "gradient_checkpointing": "training", "unk_token_id": "read by the tokenizer",
    "transformers.js_config": "for another program",
    "sentence_transformers": "read by rerank",
    "sbert_ce_default_activation_function": "read by rerank",
    "unsloth_version": "writer of the file", "unsloth_fixed": "writer of the file",
    "quantization_config": "read with the tensors",
    "use_bfloat16": "stated by the tensors", "tf_legacy_loss": "training",
    "eos_token_ids": "of old versions; not read by transformers",
    "output_scores": "requests outputs", "return_dict_in_generate": "requests outputs",
    **dict.fromkeys(
        ("do_sample", "temperature", "top_k", "top_p", "typical_p", "repetition_penalty",
         "max_length", "max_new_tokens", "min_length", "num_beams", "num_return_sequences",
         "early_stopping", "length_penalty", "no_repeat_ngram_size", "bad_words_ids",
         "forced_bos_token_id", "forced_eos_token_id", "suppress_tokens", "num_beam_groups",
         "diversity_penalty", "encoder_no_repeat_ngram_size", "remove_invalid_values"),
        "default of the sampling",
    ),
}  # fmt: skip

# Keys of old versions that change the model unless they have this value.
_UNCHANGED: dict[str, Any] = {"pruned_heads": {}, "add_cross_attention": False}


@dataclass
class Keys:
    """Values of a configuration by Hugging Face's names. A key that nothing reads is an error.

    Attributes:
        source: The file, for error messages.
        values: Values by Hugging Face's names.
        tensors: Names of the file's tensors.
        stored_names: The file's own name of each key whose name differs.
        gguf: Whether the file is a GGUF file, with the weight layout of llama.cpp's converter.
        interleaved: Whether the rows of q and k are ordered so that rotary pairs are neighbours,
            (2i, 2i + 1).
    """

    source: str
    values: Mapping[str, Any]
    tensors: Iterable[str]
    stored_names: Mapping[str, str]
    gguf: bool = False
    interleaved: bool = False

    def __post_init__(self) -> None:
        self._read: set[str] = set()
        self._defaults: dict[str, Any] = {}

    def set_defaults(self, **values: Any) -> None:
        """Set the defaults of keys missing from config.json, as transformers does.

        A key that is present with the value null does not get its default. Keys missing from a
        GGUF file have other meanings, so that there the defaults do not apply.
        """
        if not self.gguf:
            self._defaults.update(values)

    def rename(self, **names: str) -> None:
        """Read a key under its common name: ``rename(hidden_size="n_embd")``.

        ConfigError if the file has both names with different values.
        """
        for common, own in names.items():
            values = dict(self.values)
            if own not in values:
                continue
            value, known = values.pop(own), values.get(common)
            if value is not None and known is not None and value != known:
                raise self.error(common, f"= {quote(known)}, but {own} = {quote(value)}")
            if known is None:
                values[common], self.stored_names = value, {**self.stored_names, common: own}
            self.values = values

    def __call__(self, name: str, kind: type[T], default: Any = ...) -> T:
        """Return the value of ``name`` as ``kind``; null counts as missing.

        ConfigError if the value has another type, or is missing and there is no default.
        """
        value = self._look(name)
        if value is None:
            if default is ...:
                raise ConfigError(f"{self.source}: missing key {quote(self.stored_name(name))}")
            return default
        if kind is float and isinstance(value, int) and not isinstance(value, bool):
            value = float(value) if abs(value) < 1 << 1023 else value  # a float has no more
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            text = f"{self.stored_name(name)} = {quote(value)} is not {kind.__name__}"
            raise ConfigError(f"{self.source}: {text}")
        return value

    def _look(self, name: str) -> Any:
        self._read.add(name)
        return self.values.get(name, self._defaults.get(name))

    def has(self, name: str) -> bool:
        """Return whether the key has a value. The key does not count as read."""
        return self.values.get(name) is not None

    def positive(self, name: str, default: Any = ...) -> int:
        """Return a positive int32, such as a size; ConfigError otherwise."""
        value = self(name, int, default)
        # In a GGUF file 0 may stand for "none", which the default means as well.
        stated = value is not default or (self.has(name) and not self.gguf)
        if stated and not 1 <= value < 2**31:
            raise self.error(name, f"= {value} is not in 1..2^31-1")
        return value

    def factor(self, name: str, default: Any = ...) -> float:
        """Return a positive float between 1e-12 and 1e12; ConfigError otherwise."""
        value = self(name, float, default)
        if value is not default and not 1e-12 < value < 1e12:
            raise self.error(name, f"= {value} is not in 1e-12..1e12")
        return value

    def eps(self, name: str, default: Any = ...) -> float:
        """Return the epsilon of a norm, in [0, 1); ConfigError otherwise."""
        value = self(name, float, default)
        if not 0 <= value < 1:
            raise self.error(name, f"= {value} is not in [0, 1)")
        return value

    def choice(self, name: str, known: Iterable[str], default: Any = ...) -> str:
        """Return a string that is one of ``known``; ConfigError otherwise."""
        value = self(name, str, default)
        if value not in (known := list(known)):
            raise self.error(name, f"= {quote(value)} is not supported, only {', '.join(known)}")
        return value

    def require(self, name: str, value: Any) -> None:
        """Accept only ``value`` for key ``name``; a missing key counts as ``value``."""
        if self.has(name) and self._look(name) != value:
            raise self.error(
                name, f"= {quote(self._look(name))} is not supported, only {quote(value)}"
            )
        self._read.add(name)

    def bias(self, name: str, default: bool = False) -> bool | None:
        """Return whether a linear has a bias; None for a GGUF file, whose tensors state it."""
        return None if self.gguf else self(name, bool, default)

    def layers(self, name: str = "num_hidden_layers") -> int:
        """Return the number of layers, the value of ``name``.

        A count is trusted only if the tensors of the last layer exist in the file; a
        ModelFileError otherwise.
        """
        count = self.positive(name)
        last = re.compile(rf"(^|\.){count - 1}\.")
        if not any(last.search(name) for name in self.tensors):
            text = f"missing tensor '*.{count - 1}.*' of the last of {count} layers"
            raise ModelFileError(f"{self.source}: {text}")
        return count

    def each_layer(self, name: str, kinds: Mapping[str, T], default: Iterable[T]) -> list[T]:
        """Return a list with one entry per layer, each string replaced by its value in ``kinds``.

        Args:
            name: Key of a list with one string per layer, such as ``layer_types``.
            kinds: Value of each known string.
            default: Entries for a missing key.
        """
        found = self(name, list, None)
        if found is None:
            return list(default)
        if len(found) != (count := self.layers()):
            raise self.error(name, f"has {len(found)} entries for {count} layers")
        for value in found:
            if not isinstance(value, str) or value not in kinds:
                raise self.error(name, f"has {quote(value)}, not {' or '.join(kinds)}")
        return [kinds[value] for value in found]

    def stored_name(self, name: str) -> str:
        """Return the file's own name of a key."""
        return self.stored_names.get(name, name)

    def error(self, name: str, text: str) -> ConfigError:
        return ConfigError(f"{self.source}: {self.stored_name(name)} {text}")

    def ignore(self, *names: str) -> None:
        """Count keys as read that do not change what the model computes."""
        self._read.update(names)

    def finish(self) -> None:
        """Raise ConfigError with all keys that have a value and were not read."""
        for name, value in _UNCHANGED.items():
            self.require(name, value)
        unknown = [
            name
            for name, value in self.values.items()
            if value is not None and name not in self._read and name not in IGNORED
        ]
        if not unknown:
            return

        def text(name: str) -> str:
            near = difflib.get_close_matches(name, self._read, 1, 0.8)
            hint = f" (it reads {quote(self.stored_name(near[0]))})" if near else ""
            return quote(self.stored_name(name)) + hint

        keys = f"key{'s' * (len(unknown) > 1)} {join_names(unknown, text)}"
        raise ConfigError(f"{self.source}: the model does not know the {keys}")

    @property
    def read_names(self) -> set[str]:
        """Names of the keys that were read, present or not."""
        return set(self._read)
