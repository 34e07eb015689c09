"""One validated model: its checkpoint, its oracle, and the token ids of the checks."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from ..api import LLM
from ..checkpoints.checkpoint import Checkpoint
from ..checkpoints.hf_directory import HfCheckpoint
from ..engine.encoder_engine import EncoderEngine
from ..engine.engine import Engine
from ..errors import ModelFileError
from ..graph.tensor import Meta
from ..loading.loaded_encoder import LoadedEncoder
from ..model.batch import Batch, Limits, source_length, source_tokens
from ..model.config import EncoderDecoderConfig, ModelConfig
from ..model.config_keys import Keys
from ..model.decoder import Decoder
from ..model.encoder import Encoder, EncoderBatch
from ..model.spec import ModelSpec
from ..runtime.executor import Progress
from ..weights import Weights
from .oracle_record import Oracle, OracleRecord, PathFilter

TEXT = (
    "The lighthouse keeper counted 217 steps every evening, lit the lamp, and wrote the hour in a "
    "book that nobody else would read. When the storm of 1953 took the telephone line, she rowed "
    'to the village herself: "There\'s a ship on the rocks," she said, "and eleven people on '
    'it." They had heard nothing over the wind; by midnight all eleven were safe.'
)


class FilteredWeights:
    """Weights without those in ``dropped``."""

    def __init__(self, weights: Weights, dropped: Collection[str]) -> None:
        self._weights, self._dropped = weights, dropped

    def names(self) -> Iterable[str]:
        return [name for name in self._weights.names() if name not in self._dropped]

    def meta(self, name: str) -> Meta | None:
        return None if name in self._dropped else self._weights.meta(name)

    def raw(self, name: str) -> np.ndarray:
        return self._weights.raw(name)

    def release(self, name: str) -> None:
        self._weights.release(name)


class ValidatedDirectory(HfCheckpoint):
    """A directory that is read with model spec ``given``, whatever its config.json declares.

    Attributes:
        dropped: names of weights to hide.
        ignore_vocabulary: whether to hide the tokenizer.
    """

    def __init__(self, path: Path, given: ModelSpec | None, source: str | None = None) -> None:
        super().__init__(path)
        self._given, self._source = given, source
        self.dropped: set[str] = set()
        self.ignore_vocabulary = False

    @property
    def has_vocabulary(self) -> bool:
        return not self.ignore_vocabulary and super().has_vocabulary

    def spec(self) -> ModelSpec:
        return self._given or super().spec()

    def keys(self, spec: ModelSpec) -> Keys:
        keys = super().keys(spec)
        keys.source = self._source or keys.source
        return keys

    def weights(self, spec: ModelSpec, config: ModelConfig) -> Weights:
        return FilteredWeights(super().weights(spec, config), self.dropped)


@dataclass
class Case:
    """State that the checks of one model share.

    ``tokens`` tokens of a text are prefilled, and ``new`` tokens are decoded after them. The text
    is the source of an encoder-decoder, whose target is decoded; an encoder decodes nothing.

    Attributes:
        ids: tokens of the sequence; those of a source as `source_tokens` has them.
    """

    title: str
    file: Checkpoint
    spec: ModelSpec
    device: str
    oracle: Oracle | None
    tokens: int
    new: int
    progress: Progress
    ids: list[int] = field(default_factory=list)
    _model: LLM | LoadedEncoder | None = None
    _record: OracleRecord | None = None

    def load(self) -> LLM | LoadedEncoder:
        """Load the model with a float32 cache and without quantized activations."""
        common: dict[str, Any] = {"device": self.device, "linear": "float"}
        common["progress"] = self.progress
        if self.spec.is_encoder:
            return LoadedEncoder.load(self.file, **common)
        length = 2 * self.tokens if self.spec.is_encoder_decoder else self.tokens
        common |= {"kv_type": "f32", "context": length + self.new, "max_sequences": 1}
        return LLM.load(self.file, **common)

    @property
    def loaded(self) -> LLM | LoadedEncoder | None:
        """The model if it is loaded, else None."""
        return self._model

    @property
    def model(self) -> LLM | LoadedEncoder:
        """The model, loaded on first use."""
        if self._model is None:
            self._model = self.load()
            self._choose_ids(self._model)
        return self._model

    @property
    def engine(self) -> Engine | EncoderEngine:
        """The engine of the model."""
        return self.model.engine

    @property
    def decoder_engine(self) -> Engine:
        """The engine of a decoder or an encoder-decoder."""
        assert isinstance(self.model, LLM)
        return self.model.engine

    @property
    def config(self) -> ModelConfig:
        """The model's configuration."""
        return _network(self.model).cfg

    @property
    def source(self) -> int:
        """Number of tokens of the source of an encoder-decoder, otherwise 0."""
        return source_length(self.ids)

    def compute(self) -> np.ndarray:
        """Return the logits [T, vocab] of the ids; the hidden states [T, dim] of an encoder."""
        model = self.model  # loading it chooses the ids
        ids = self.ids
        if isinstance(model, LoadedEncoder):
            return model.engine.hidden([ids])[0]
        with model.engine.lock.hold("validate"), model.engine.evaluation(ids) as evaluation:
            return np.concatenate(list(evaluation.logits(ids)))

    def _choose_ids(self, model: LLM | LoadedEncoder) -> None:
        """Choose the ids: a text (or random ids without a tokenizer) and its greedy continuation.

        The oracle computes the continuation; without one it is random.
        """
        config, start = _network(model).cfg, list[int]()
        if isinstance(model, LoadedEncoder):
            self.new, self.tokens = 0, min(self.tokens, model.max_length)
        else:
            most = model.limits.context
            self.new = max(1, min(self.new, most // 4))
            self.tokens = max(1, min(self.tokens, most - self.new))
            if model.seq2seq is not None:
                start = model.seq2seq.start
                self.tokens = min(self.tokens, model.seq2seq.max_source)
        vocab = config.vocab
        rng = np.random.default_rng(7)
        stated = {
            v
            for k, v in self.file.metadata.items()
            if k.endswith("_token_id") and isinstance(v, int)
        }
        plain = [i for i in range(vocab) if i not in stated]  # special ids may have an effect
        ids = rng.choice(plain, self.tokens).tolist()
        if self.file.has_vocabulary:
            ids = [i for i in model.encode(TEXT)[: self.tokens] if i < vocab]
        if start:
            ids = [*source_tokens(ids), *start]
        self.tokens = len(ids)
        for _ in range(self.new):
            if self.oracle is None:
                ids.append(int(rng.choice(plain)))
            else:
                ids.append(int(self.run_oracle(ids).logits[-1].argmax()))
        self.ids = ids

    def run_oracle(self, ids: list[int], wanted: PathFilter = lambda path: False) -> OracleRecord:
        """Run the oracle; ModelFileError if its logits or hidden states have another width."""
        assert self.oracle is not None
        record = self.oracle.run(ids, wanted)
        width = self.config.dim if self.spec.is_encoder else self.config.vocab
        if record.logits.shape[-1] != width:
            raise ModelFileError(
                f"{self.oracle.name} returned logits {list(record.logits.shape)}, "
                f"expected [{len(ids) - source_length(ids)}, {width}]"
            )
        return record

    @property
    def layers(self) -> list[str]:
        """Paths of the layers."""
        decoder = self.config
        both = [decoder.encoder] if isinstance(decoder, EncoderDecoderConfig) else []
        return [
            f"{each.names.model}.{each.names.layers}.{i}".lstrip(".")
            for each in (*both, decoder)
            if each is not None
            for i in range(len(each.layers))
        ]

    @property
    def record(self) -> OracleRecord:
        """Oracle run over the ids, with inputs and outputs of the layers."""
        if self._record is None:
            layers = set(self.layers)
            self._record = self.run_oracle(self.ids, layers.__contains__)
        return self._record

    @property
    def exact(self) -> bool:
        """Whether the device computes in float32 throughout, not in half precision."""
        weights = _network(self.model).weights
        halves = any(
            (meta := weights.meta(name)) is not None and meta.dtype.name in ("f16", "bf16")
            for name in weights.names()
        )
        return not (halves and self.model.executor.backends[0].half_tolerance)


def _network(model: LLM | LoadedEncoder) -> Decoder | Encoder:
    """Return the graph builder of a loaded model."""
    return model.encoder if isinstance(model, LoadedEncoder) else model.decoder


def build_graph(model: Decoder | Encoder, tokens: int) -> None:
    """Build the graph of a model for sequences of at most ``tokens`` tokens."""
    if isinstance(model, Encoder):
        model.build(EncoderBatch(tokens, tokens))
    else:
        model.build(Batch(model.caches, Limits(context=tokens, kv_dtype="f32")))
