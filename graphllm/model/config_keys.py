"""A model's configuration, read strictly, under Hugging Face's names whatever the file is."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from ..errors import ConfigError, ModelFileError, join_names, quote
from .config import ACTIVATIONS, Attention, DecoderConfig, Layer, Mlp, Norm

T = TypeVar("T")

# Keys of a config.json that say nothing about what is computed, and why.
IGNORED = {
    "architectures": "the class that trained it", "model_type": "chose the model file",
    "_name_or_path": "where it came from", "transformers_version": "what wrote it",
    "auto_map": "code that is not run", "custom_pipelines": "code that is not run",
    "torch_dtype": "the tensors say theirs", "dtype": "the tensors say theirs",
    "bos_token_id": "the tokenizer's",
    "eos_token_id": "the tokenizer's", "pad_token_id": "the tokenizer's",
    "sep_token_id": "the tokenizer's", "decoder_start_token_id": "not of a decoder alone",
    "use_cache": "the cache is always used", "initializer_range": "training",
    "attention_dropout": "training", "hidden_dropout": "training", "resid_pdrop": "training",
    "embd_pdrop": "training", "attn_pdrop": "training", "attention_probs_dropout_prob": "training",
    "hidden_dropout_prob": "training", "residual_dropout": "training",
    "embedding_dropout": "training", "classifier_dropout": "another task",
    "pretraining_tp": "how it was trained, not what", "output_attentions": "what is returned",
    "cache_implementation": "how, not what", "_attn_implementation_autoset": "how, not what",
    "tokenizer_class": "the tokenizer's", "is_decoder": "always", "num_labels": "another task",
    "_num_labels": "another task", "output_past": "what is returned",
    "torchscript": "how, not what", "tie_encoder_decoder": "not of a decoder alone",
    "task_specific_params": "another task", "finetuning_task": "another task",
    "_commit_hash": "where it came from",
    "output_hidden_states": "what is returned", "return_dict": "what is returned",
    "id2label": "another task", "label2id": "another task", "problem_type": "another task",
    "chunk_size_feed_forward": "memory, not results",
    "is_encoder_decoder": "no such model_type is known",
    "attn_implementation": "how, not what", "_attn_implementation": "how, not what",
    "router_aux_loss_coef": "training", "output_router_logits": "training",
    "router_jitter_noise": "training", "aux_loss_alpha": "training", "seq_aux": "training",
    "gradient_checkpointing": "training", "unk_token_id": "the tokenizer's",
    "transformers.js_config": "another program's",
    "unsloth_version": "what wrote it", "unsloth_fixed": "what wrote it",
    "quantization_config": "read with the tensors",
    **dict.fromkeys(
        ("do_sample", "temperature", "top_k", "top_p", "typical_p", "repetition_penalty",
         "max_length", "max_new_tokens", "min_length", "num_beams", "num_return_sequences",
         "early_stopping", "length_penalty", "no_repeat_ngram_size", "bad_words_ids",
         "forced_bos_token_id", "forced_eos_token_id", "suppress_tokens"),
        "how to draw tokens",
    ),
}  # fmt: skip


@dataclass
class Keys:
    """A configuration's values by Hugging Face's names. Every one must be read, or it is an error.

    ``source``: the file, for messages; ``shown``: what it calls a key, where that is another name;
    ``tensors``: the names of its tensors. ``gguf``: it is a GGUF file, whose weights are laid out
    as llama.cpp's converter does. ``interleaved``: rows of q and k stand so that what rotates
    together are neighbours.
    """

    source: str
    values: Mapping[str, Any]
    tensors: Iterable[str]
    shown: Mapping[str, str]
    gguf: bool = False
    interleaved: bool = False

    def __post_init__(self) -> None:
        self._read: set[str] = set()
        self._defaults: dict[str, Any] = {}

    def set_defaults(self, **values: Any) -> None:
        """What keys stand for that a config.json leaves out, which is not what null stands for: as
        transformers has it. A GGUF file's keys that are not there stand for other things."""
        if not self.gguf:
            self._defaults.update(values)

    def rename(self, **names: str) -> None:
        """Read under the common name what a family calls by its own: ``hidden_size="n_embd"``.

        ConfigError where the file has both, and they differ.
        """
        for common, own in names.items():
            values = dict(self.values)
            if own not in values:
                continue
            value, known = values.pop(own), values.get(common)
            if value is not None and known is not None and value != known:
                raise self.error(common, f"= {quote(known)}, but {own} = {quote(value)}")
            if known is None:
                values[common], self.shown = value, {**self.shown, common: own}
            self.values = values

    def __call__(self, name: str, kind: type[T], default: Any = ...) -> T:
        """The value of ``name``; null is no value. ConfigError if there is none (unless there is a
        default) or of another type."""
        value = self._look(name)
        if value is None:
            if default is ...:
                raise ConfigError(f"{self.source}: missing key {quote(self.called(name))}")
            return default
        if kind is float and isinstance(value, int) and not isinstance(value, bool):
            value = float(value)
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            text = f"{self.called(name)} = {quote(value)} is not {kind.__name__}"
            raise ConfigError(f"{self.source}: {text}")
        return value

    def _look(self, name: str) -> Any:
        self._read.add(name)
        return self.values.get(name, self._defaults.get(name))

    def has(self, name: str) -> bool:
        """Whether there is a value; that does not read it."""
        return self.values.get(name) is not None

    def positive(self, name: str, default: Any = ...) -> int:
        """A count: at least 1, and within the 32 bits that positions and sizes of steps have."""
        value = self(name, int, default)
        # A GGUF file may say 0 for none, which is what the default stands for.
        stated = value is not default or (self.has(name) and not self.gguf)
        if stated and not 1 <= value < 2**31:
            raise self.error(name, f"= {value} is not in 1..2^31-1")
        return value

    def factor(self, name: str, default: Any = ...) -> float:
        """A number above 0, of a size that float32 can compute with."""
        value = self(name, float, default)
        if value is not default and not 1e-12 < value < 1e12:
            raise self.error(name, f"= {value} is not in 1e-12..1e12")
        return value

    def eps(self, name: str, default: Any = ...) -> float:
        """What a norm adds to the mean square."""
        value = self(name, float, default)
        if not 0 <= value < 1:
            raise self.error(name, f"= {value} is not in [0, 1)")
        return value

    def choice(self, name: str, known: Iterable[str], default: Any = ...) -> str:
        """A text out of ``known``."""
        value = self(name, str, default)
        if value not in (known := list(known)):
            raise self.error(name, f"= {quote(value)} is not supported, only {', '.join(known)}")
        return value

    def require(self, name: str, value: Any) -> None:
        """A key of which one value alone is supported, which is what its absence means, too."""
        if self.has(name) and self._look(name) != value:
            raise self.error(
                name, f"= {quote(self._look(name))} is not supported, only {quote(value)}"
            )
        self._read.add(name)

    def bias(self, name: str, default: bool = False) -> bool | None:
        """A flag of biases; of a GGUF file None: they are there if it has them."""
        return None if self.gguf else self(name, bool, default)

    def layers(self) -> int:
        """The count of layers, of which the file has the last: it may be any number in the key."""
        count = self.positive("num_hidden_layers")
        last = re.compile(rf"(^|\.){count - 1}\.")
        if not any(last.search(name) for name in self.tensors):
            text = f"missing tensor '*.{count - 1}.*', of the last of {count} layers"
            raise ModelFileError(f"{self.source}: {text}")
        return count

    def each_layer(self, name: str, kinds: Mapping[str, T], default: Iterable[T]) -> list[T]:
        """A list with a text for each layer, as what the texts stand for; ``default`` without."""
        found = self(name, list, None)
        if found is None:
            return list(default)
        if len(found) != (count := self.layers()):
            raise self.error(name, f"has {len(found)} entries for {count} layers")
        for value in found:
            if not isinstance(value, str) or value not in kinds:
                raise self.error(name, f"has {quote(value)}, not {' or '.join(kinds)}")
        return [kinds[value] for value in found]

    def called(self, name: str) -> str:
        """What the file calls a key."""
        return self.shown.get(name, name)

    def error(self, name: str, text: str) -> ConfigError:
        return ConfigError(f"{self.source}: {self.called(name)} {text}")

    def ignore(self, *names: str) -> None:
        """Keys that say nothing about what is computed."""
        self._read.update(names)

    def finish(self) -> None:
        """ConfigError for keys that nothing read, unless they are null; it names all of them."""
        unknown = [
            name
            for name, value in self.values.items()
            if value is not None and name not in self._read and name not in IGNORED
        ]
        if not unknown:
            return

        def text(name: str) -> str:
            near = difflib.get_close_matches(name, self._read, 1, 0.8)
            hint = f" (it reads {quote(self.called(near[0]))})" if near else ""
            return quote(self.called(name)) + hint

        keys = f"key{'s' * (len(unknown) > 1)} {join_names(unknown, text)}"
        raise ConfigError(f"{self.source}: the model does not know the {keys}")

    @property
    def read(self) -> set[str]:
        """The names that were asked for."""
        return set(self._read)


def sliding_windows(keys: Keys, usual: Callable[[int], bool], used: bool = True) -> list[int]:
    """The window of each layer, 0 where it has none: those of layer_types have the model's one, or
    where no key tells, those of which ``usual`` is true. ``used``: whether it counts at all."""
    window = keys.positive("sliding_window", 0) if used else 0
    keys.ignore("sliding_window")
    near = keys.each_layer(
        "layer_types",
        {"sliding_attention": True, "full_attention": False},
        (bool(window) and usual(i) for i in range(keys.layers())),
    )
    if any(near) and not window:
        raise keys.error("layer_types", "has windows, but there is no sliding_window in use")
    return [window if each else 0 for each in near]


def mha_sizes(keys: Keys) -> tuple[int, int, int]:
    """Columns of x, heads, and columns of a head, where heads share them evenly. ConfigError."""
    dim, heads = keys.positive("hidden_size"), keys.positive("num_attention_heads")
    if dim % heads:
        raise keys.error("num_attention_heads", f"= {heads} is no divisor of {dim} columns")
    if keys.gguf:  # which may state what is so anyway
        keys.require("num_key_value_heads", heads)
    return dim, heads, dim // heads


def kv_head_count(keys: Keys, heads: int, name: str = "num_key_value_heads") -> int:
    """How many KV heads so many heads share. ConfigError where they do not."""
    count = keys.positive(name, heads)
    if heads % count:
        raise ConfigError(f"{keys.source}: {heads} heads do not share {count} KV heads")
    return count


def base_config(
    keys: Keys,
    eps: str = "rms_norm_eps",
    act: str = "silu",
    act_key: str = "hidden_act",
    head_dim: int = 0,
    **rope: Any,
) -> DecoderConfig:
    """What the families of llama's kin have in common, under llama's names; ``eps``: the key of the
    norms', ``act``: the activation where its key does not state it; ``head_dim``: in place of the
    key; ``rope``: what else `rope_config` is told."""
    from .rope import rope_config

    dim, heads = keys.positive("hidden_size"), keys.positive("num_attention_heads")
    # Where heads do not divide dim, this is 0 or gives weights of another shape than the file's.
    head_dim = head_dim or keys.positive("head_dim", dim // heads)
    kv_heads = kv_head_count(keys, heads)
    stated = None if keys.gguf else False  # biases
    count, turns = keys.layers(), rope_config(keys, head_dim, **rope)
    return DecoderConfig(
        vocab=keys.positive("vocab_size"),
        dim=dim,
        context=max(keys.positive("max_position_embeddings"), turns.extended_context),
        layers=(Layer(turns),) * count,
        attention=Attention(heads, kv_heads, head_dim, bias=stated, out_bias=stated),
        mlp=Mlp(keys.positive("intermediate_size"), keys.choice(act_key, ACTIVATIONS, act)),
        norm=Norm(keys.eps(eps)),
        tied=keys("tie_word_embeddings", bool, False),
    )
