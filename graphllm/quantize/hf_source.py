"""A Hugging Face directory as the source of a GGUF file, for some families.

Source: llama.cpp's converter (`conversion/llama.py`, `qwen.py`, `gemma.py`) for the keys of each
architecture, and the order of the rows of queries and keys; `encoder_keys` has those of encoders.

Whether the metadata state what config.json does is checked: they are read back as the header of a
GGUF file, and the two configurations must be equal.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from .. import models
from ..checkpoints.gguf import GgufCheckpoint
from ..checkpoints.gguf_writer import TensorEntry, encode_value
from ..checkpoints.hf_directory import HfCheckpoint
from ..errors import ConfigError, ModelFileError, quote
from ..formats.quantization import dequantise
from ..graph.dtype import F32
from ..graph.tensor import Meta
from ..model.config import DecoderConfig, EncoderConfig, ModelConfig
from ..model.relative_positions import BiasByDistance
from ..model.rope import FREQUENCIES
from ..weights import NamedWeights
from ..weights.mapped_file import TensorInfo
from ..weights.weight_rules import IDENTITY, WeightRule
from .encoder_keys import family_keys, pooling_keys
from .source import describe
from .vocabulary import vocabulary_metadata

_ARCHITECTURES = {  # of model types
    "llama": "llama", "mistral": "llama", "qwen2": "qwen2", "qwen3": "qwen3",
    "gemma3_text": "gemma3", "bert": "bert", "roberta": "bert", "xlm-roberta": "bert",
    "camembert": "bert", "nomic_bert": "nomic-bert", "t5": "t5",
}  # fmt: skip
_OTHER_IN_BERT = ("names.", "heads", "position_offset", "tied")
_PATTERN = 6  # llama.cpp's default of Gemma 3: every sixth layer has no window


class HfSource:
    """See `graphllm.quantize.source.Source`. ModelFileError or ConfigError for other families, and
    for settings that GGUF has no keys for."""

    def __init__(self, path: Path) -> None:
        self.path, self._file = path, HfCheckpoint(path)
        kind = self._file.architecture
        if kind not in _ARCHITECTURES:
            known = ", ".join(_ARCHITECTURES)
            raise ModelFileError(
                f"{path / 'config.json'}: model_type {quote(kind)} cannot be written as GGUF; "
                f"supported are {known}"
            )
        self.notes: list[str] = []
        spec = self._file.spec()
        self._config = spec.config(self._file.keys(spec))
        self._weights = self._file.weights(spec, self._config)
        self._arch = _ARCHITECTURES[kind]
        target = models.spec_of_architecture(self._arch, path)
        self._stored = self._names(target.gguf_rules(self._config))
        self.tensors = [self._entry(name) for name in self._stored]
        self._factors = self._rope_factors()
        if self._factors is not None:
            self.tensors.append(TensorEntry(FREQUENCIES, self._factors.shape, F32))
        values = self._metadata()
        self._check(values)
        values |= self._tokenizer()
        self.metadata = {key: encode_value(value) for key, value in values.items()}
        prefix = f"{self._arch}."
        numbers = {k.removeprefix(prefix): v for k, v in values.items() if isinstance(v, int)}
        self.model = describe(self._arch, numbers, self.tensors)

    def _names(self, rules: Any) -> dict[str, str]:
        """Return the weights' names by GGUF's names."""
        inverse = [
            WeightRule(rule.source, rule.pattern) for rule in rules
            if rule.pattern and "{e}" not in rule.source
            and (rule.transform is IDENTITY or isinstance(rule.transform, BiasByDistance))
        ]  # fmt: skip
        found = {}
        for name in self._weights.names():
            matches = (rule.canonical(name) for rule in inverse)
            match = next((each for each in matches if each is not None), None)
            if match is None:
                raise ModelFileError(f"{self.path}: GGUF has no name for tensor {quote(name)}")
            found[match[0][0]] = name
        return found

    def _entry(self, stored: str) -> TensorEntry:
        meta = self._meta(stored)
        shape = tuple(map(int, meta.shape))  # type: ignore[arg-type]
        if meta.dtype.name not in ("f32", "f16", "bf16"):
            raise ModelFileError(f"{self.path}: tensor {quote(stored)} is {meta.dtype}")
        shape = (shape[0] - self._first_row(stored), *shape[1:])
        return TensorEntry(stored, shape, F32 if len(shape) == 1 else meta.dtype)

    def _bias(self, stored: str) -> str | None:
        """Return the directory's name of a tensor of biases of relative positions; None for others.

        It is copied as it is, by bucket: the weight is by distance.
        """
        if not stored.endswith("attn_rel_b.weight"):
            return None
        assert isinstance(self._weights, NamedWeights)
        return self._weights.sources(self._stored[stored])[0]

    def _meta(self, stored: str) -> Meta:
        if (bias := self._bias(stored)) is not None:
            info = self._file.file.readable(bias)
            return Meta.of(tuple(info.shape), info.dtype)
        meta = self._weights.meta(self._stored[stored])
        assert meta is not None
        return meta

    def _first_row(self, stored: str) -> int:
        """Return the first row of a tensor to write: a table of positions begins with the first."""
        return self._config.position_offset if stored == "position_embd.weight" else 0

    def raw(self, name: str) -> np.ndarray:
        """Return a tensor's bytes; vectors are float32, as in all files of llama.cpp."""
        if name == FREQUENCIES:
            assert self._factors is not None
            return self._factors.view(np.uint8).reshape(1, -1)
        meta, bias = self._meta(name), self._bias(name)
        raw = self._file.file.raw(bias) if bias else self._weights.raw(self._stored[name])
        raw = raw[self._first_row(name) :]
        if len(meta.shape) == 1:
            raw = np.ascontiguousarray(dequantise(raw, meta.dtype)).view(np.uint8)
        part = name.rpartition(".")[0].rpartition(".")[2]
        heads = {
            "attn_q": self._config.attention.heads, "attn_k": self._config.attention.kv_heads,
        }.get(part, 0)  # fmt: skip
        if self._arch != "llama" or not heads:
            return raw
        # Rotary pairs are neighbours in llama.cpp's files of this architecture.
        rows = raw.reshape(heads, 2, self._config.attention.head_dim // 2, -1)
        if len(meta.shape) == 1:
            rows = raw.reshape(*rows.shape[:3], F32.nbytes)
        return np.ascontiguousarray(rows.swapaxes(1, 2)).reshape(raw.shape)

    def stored_names(self, weight: str) -> list[str]:
        return [name for name, canonical in self._stored.items() if canonical == weight]

    def release(self, name: str) -> None:
        if name in self._stored:
            self._weights.release(self._stored[name])

    def close(self) -> None:
        self._file.close()

    # -- metadata
    def _metadata(self) -> dict[str, Any]:
        decodes = type(self._config) is DecoderConfig
        own = self._decoder_keys() if decodes else family_keys(
            self._file, self._config, self.notes
        )  # fmt: skip
        own |= pooling_keys(self._file, self._config, self.notes)
        types = getattr(self._config, "token_types", 0)
        return {
            "general.architecture": self._arch,
            "general.type": "model",
            "general.name": self.path.resolve().name,
            **{f"{self._arch}.{key}": value for key, value in own.items()},
            **({"tokenizer.ggml.token_type_count": types} if types else {}),
        }

    def _decoder_keys(self) -> dict[str, Any]:
        c, a = self._config, self._config.attention
        wide = next((layer.rope for layer in c.layers if not layer.window), c.layers[0].rope)
        assert wide is not None  # all these families rotate
        own: dict[str, Any] = {
            "block_count": len(c.layers),
            "context_length": c.context,
            "embedding_length": c.dim,
            "feed_forward_length": c.mlp.intermediate_size,
            "attention.head_count": a.heads,
            "attention.head_count_kv": a.kv_heads,
            "attention.key_length": a.head_dim,
            "attention.value_length": a.head_dim,
            "attention.layer_norm_rms_epsilon": float(c.norm.eps),
            "rope.freq_base": float(wide.base),
            "rope.dimension_count": wide.dims or a.head_dim,
            "vocab_size": c.vocab,
            **self._scaling(),
        }
        windows = sorted({layer.window for layer in c.layers if layer.window})
        if self._arch == "gemma3":
            own |= self._gemma3(windows)
        elif windows and self._arch == "llama":
            self.notes.append(
                f"the sliding window of {windows[0]} tokens is left out: GGUF's llama has none, so "
                "longer contexts differ"
            )
        return own

    def _gemma3(self, windows: list[int]) -> dict[str, Any]:
        own: dict[str, Any] = {}
        layers = self._config.layers
        local = next((layer.rope for layer in layers if layer.window), None)
        if windows and local is not None:
            own["attention.sliding_window"] = windows[0]
            own["rope.freq_base_swa"] = float(local.base)
            full = next((i for i, layer in enumerate(layers) if not layer.window), len(layers))
            if full + 1 != _PATTERN and full < len(layers):
                own["attention.sliding_window_pattern"] = full + 1
        assert isinstance(self._config, DecoderConfig)
        if self._config.logit_softcap:
            own["final_logit_softcapping"] = float(self._config.logit_softcap)
        return own

    def _rope_keys(self) -> Mapping[str, Any]:
        config = self._file.metadata
        found = config.get("rope_parameters") or config.get("rope_scaling") or {}
        found = found.get("full_attention", found) if isinstance(found, dict) else {}
        return found if isinstance(found, dict) else {}

    def _scaling(self) -> dict[str, Any]:
        s = self._rope_keys()
        kind = s.get("rope_type", s.get("type")) or "default"
        if kind in ("default", "llama3"):
            return {}
        if kind not in ("linear", "yarn"):
            raise ConfigError(
                f"{self.path / 'config.json'}: rope_type {quote(kind)} cannot be written as GGUF"
            )
        names = {
            "factor": "factor", "original_max_position_embeddings": "original_context_length",
            "beta_fast": "yarn_beta_fast", "beta_slow": "yarn_beta_slow",
        }  # fmt: skip
        found: dict[str, Any] = {"rope.scaling.type": kind}
        for key, stored in names.items():
            if (value := s.get(key)) is not None and (kind == "yarn" or key == "factor"):
                whole = key == "original_max_position_embeddings"
                found[f"rope.scaling.{stored}"] = int(value) if whole else float(value)
        return found

    def _rope_factors(self) -> np.ndarray | None:
        """Return the divisors of Llama 3's frequencies, which GGUF has as a tensor."""
        s, rope = self._rope_keys(), self._config.layers[0].rope
        if s.get("rope_type", s.get("type")) != "llama3" or rope is None:
            return None
        return np.array(rope.factors, np.float32)

    def _check(self, values: Mapping[str, Any]) -> None:
        """ConfigError unless the metadata describe the same model as config.json."""
        where = self.path / "config.json"
        if self._config.attention.bias and self._arch in ("qwen3", "gemma3"):
            raise ConfigError(f"{where}: attention_bias: llama.cpp's {self._arch} has no biases")
        header = _Header(self.path, values, self.tensors)
        spec = header.spec()
        found = dict(_flat(spec.config(header.keys(spec))))
        pooled = f"{self._arch}.pooling_type" in values
        encodes = isinstance(self._config, EncoderConfig)
        for key, want in _flat(self._config):
            have = found.get(key)
            if encodes and key.startswith(_OTHER_IN_BERT):
                continue  # of files of relatives of BERT, and of heads
            if self._arch == "llama" and key.endswith(".window"):
                continue  # a note says so
            if key == "embed_copies" or key.endswith("names.embed"):
                continue  # names of one table in the directory
            if key == "tied" and pooled:
                continue  # embeddings need no head
            if key.endswith((".style", ".extended_context")):
                continue  # stated by the order of rows, and of no effect
            if key.endswith("bias") and have is None:
                continue  # stated by the tensors
            if ".rope.factors." in key and self._factors is not None:
                continue  # stated by a tensor
            if isinstance(want, float) and isinstance(have, float):
                equal = math.isclose(want, have, rel_tol=1e-5)  # GGUF has float32
            else:
                equal = want == have
            if not equal:
                raise ConfigError(
                    f"{where}: GGUF cannot state {key} = {quote(want)}, its keys mean {quote(have)}"
                )

    def _tokenizer(self) -> dict[str, Any]:
        if not self._file.has_vocabulary:
            raise ModelFileError(f"{self.path}: no tokenizer, which a GGUF file needs")
        tokenizer = self._file.tokenizer()
        keys = vocabulary_metadata(
            self.path, dict(self._file.metadata), tokenizer, self._config.vocab
        )
        template = self._file.chat_template
        return keys | ({"tokenizer.chat_template": template} if template else {})


class _Header(GgufCheckpoint):
    """The header of the file to write, as if it was read."""

    def __init__(self, path: Path, values: Mapping[str, Any], tensors: list[TensorEntry]) -> None:
        self.path, self.version, self.metadata = path, 3, values
        self.tensors = {t.name: TensorInfo(t.name, t.shape, t.dtype, t.nbytes, 0) for t in tensors}


def _flat(config: ModelConfig) -> list[tuple[str, Any]]:
    """Return the numbers and names of a configuration by dotted paths."""
    found: list[tuple[str, Any]] = []

    def visit(path: str, value: Any) -> None:
        if dataclasses.is_dataclass(value):
            for each in dataclasses.fields(value):
                visit(f"{path}.{each.name}" if path else each.name, getattr(value, each.name))
        elif isinstance(value, tuple) and path.endswith(("layers", "factors")):
            for index, each in enumerate(value):
                visit(f"{path}.{index}", each)
        else:
            found.append((path, value))

    visit("", config)
    return found
