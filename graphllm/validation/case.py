"""One validated model: its checkpoint, its oracle, and the token ids of the checks."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from ..api import LLM
from ..checkpoints.checkpoint import Checkpoint
from ..checkpoints.hf_directory import HfCheckpoint
from ..errors import ModelFileError
from ..graph.tensor import Meta
from ..model.config import ModelConfig
from ..model.config_keys import Keys
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

    ``tokens`` tokens of a text are prefilled, and ``new`` tokens are decoded after them.
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
    _llm: LLM | None = None
    _record: OracleRecord | None = None

    def load(self, **more: object) -> LLM:
        """Load the model with a float32 cache and without quantized activations."""
        options = {"kv_type": "f32", "linear": "float", "context": self.tokens + self.new}
        options |= {"max_sequences": 1, **more}
        return LLM.load(self.file, device=self.device, progress=self.progress, **options)  # type: ignore[arg-type]

    @property
    def loaded(self) -> LLM | None:
        """The model if it is loaded, else None."""
        return self._llm

    @property
    def llm(self) -> LLM:
        """The model, loaded on first use."""
        if self._llm is None:
            self._llm = self.load()
            self._choose_ids(self._llm)
        return self._llm

    def _choose_ids(self, llm: LLM) -> None:
        """Choose the ids: a text (or random ids without a tokenizer) and its greedy continuation.

        The oracle computes the continuation; without one it is random.
        """
        most = llm.limits.context
        self.new = max(1, min(self.new, most // 4))
        self.tokens = max(1, min(self.tokens, most - self.new))
        vocab = llm.decoder.cfg.vocab
        rng = np.random.default_rng(7)
        stated = {
            v
            for k, v in self.file.metadata.items()
            if k.endswith("_token_id") and isinstance(v, int)
        }
        plain = [i for i in range(vocab) if i not in stated]  # special ids may have an effect
        ids = rng.choice(plain, self.tokens).tolist()
        if self.file.has_vocabulary:
            ids = [i for i in llm.encode(TEXT)[: self.tokens] if i < vocab]
        self.tokens = len(ids)
        for _ in range(self.new):
            if self.oracle is None:
                ids.append(int(rng.choice(plain)))
            else:
                ids.append(int(self.run_oracle(ids).logits[-1].argmax()))
        self.ids = ids

    def run_oracle(self, ids: list[int], wanted: PathFilter = lambda path: False) -> OracleRecord:
        """Run the oracle; ModelFileError if the vocabulary of its logits differs."""
        assert self.oracle is not None
        record, vocab = self.oracle.run(ids, wanted), self.llm.decoder.cfg.vocab
        if record.logits.shape[-1] != vocab:
            raise ModelFileError(
                f"{self.oracle.name} returned logits {list(record.logits.shape)}, "
                f"expected [{len(ids)}, {vocab}]"
            )
        return record

    @property
    def layers(self) -> list[str]:
        """Paths of the layers."""
        n, count = self.llm.decoder.cfg.names, len(self.llm.decoder.cfg.layers)
        return [f"{n.model}.{n.layers}.{i}" for i in range(count)]

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
        halves = any(
            (meta := self.llm.decoder.weights.meta(name)) is not None
            and meta.dtype.name in ("f16", "bf16")
            for name in self.llm.decoder.weights.names()
        )
        return not (halves and self.llm.executor.backends[0].half_tolerance)
