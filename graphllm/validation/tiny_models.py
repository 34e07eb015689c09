"""Small random models: the TINY configurations of a model file with random weights."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np

from ..checkpoints.checkpoint import Checkpoint
from ..errors import ConfigError, ModelFileError
from ..graph.dtype import F32
from ..graph.scopes import current_scope
from ..graph.tensor import Meta, Tensor
from ..model.config import ModelConfig
from ..model.config_keys import Keys
from ..model.spec import ModelSpec
from ..tokenizer import Tokenizer
from ..weights import Arrays, Weights
from ..weights.mapped_file import TensorInfo
from . import hf_oracle
from .case import ValidatedDirectory, build_graph
from .oracle import FunctionOracle, OracleFunction, check_function
from .oracle_record import Oracle

_LAYERS = 512  # upper bound of the layers of a small model


def tiny_models(
    spec: ModelSpec, function: OracleFunction | None
) -> Iterator[tuple[Checkpoint, Oracle | None]]:
    """Yield the small models of ``spec`` with their oracles.

    The oracle is ``function``, or that of the model file, or transformers.

    Raises:
        ModelFileError: the spec has no TINY configurations.
        RequestError: transformers is needed but not installed.
    """
    if not spec.tiny:
        raise ModelFileError(f"{spec.name}: has no TINY configurations to validate")
    function = function or spec.oracle
    if function is not None:
        check_function(spec)
    for variant in spec.tiny:
        config = {**spec.tiny[0], **variant}
        kind = config.pop("model_type", spec.name)
        if function is None:
            hf_oracle.require_transformers()
            if hf_oracle.has_model(kind, spec):
                yield from _of_transformers(spec, kind, config)
                continue
        file = RandomModel(spec, {"model_type": kind, **config})
        yield file, None if function is None else FunctionOracle(function, config, file.made)


def _of_transformers(
    spec: ModelSpec, kind: str, config: Mapping[str, Any]
) -> Iterator[tuple[Checkpoint, Oracle | None]]:
    """Yield a directory that transformers writes from a random model of its own."""
    import torch
    from transformers import AutoConfig

    torch.manual_seed(0)
    with tempfile.TemporaryDirectory(prefix="graphllm-") as folder, hf_oracle.quiet():
        try:
            # for_model modifies its arguments.
            made = AutoConfig.for_model(kind, **deepcopy(dict(config)))
            model = hf_oracle.model_class(spec).from_config(
                made, dtype=torch.float32, **hf_oracle.EAGER_OPTIONS
            )
        except Exception as error:  # transformers raises many kinds
            text = " ".join(str(error).split())
            raise ConfigError(f"{spec.name}: TINY: transformers refuses it: {text}") from None
        _randomise(model)
        model.save_pretrained(folder)
        file = ValidatedDirectory(Path(folder), spec, f"{spec.name}.py: TINY")
        # A model with sinusoidal positions does not save them, so what it saves is loaded.
        yield file, hf_oracle.TransformersOracle.load(file, spec)


def _randomise(model: Any) -> None:
    """Replace the initial values of a model in place.

    Matrices become random with a scale that keeps sums near 1; vectors get noise, so that their
    elements differ.
    """
    import torch

    rng = torch.Generator().manual_seed(0)
    buffers = [b for n, b in model.named_buffers() if n.endswith("e_score_correction_bias")]
    with torch.no_grad():
        for value in (*model.parameters(), *buffers):
            noise = torch.randn(value.shape, generator=rng)
            if value.ndim > 1:
                value.copy_(noise / value.shape[-1] ** 0.5)
            else:
                value.add_(0.2 * noise)


class RandomModel:
    """Checkpoint in memory: random weights with the names and shapes that the model asks for.

    Raises ConfigError and GraphError as building the model does.
    """

    kind, has_vocabulary, chat_template = "random model", False, None

    def __init__(self, spec: ModelSpec, metadata: Mapping[str, Any]) -> None:
        self.path = Path(f"{spec.name}.py")
        self.metadata, self._spec = dict(metadata), spec
        self.made = Arrays(_weights(spec, spec.config(self.keys(spec))))
        self.tensors: dict[str, TensorInfo] = {}
        for name in self.made.names():
            meta = self.made.meta(name)
            assert meta is not None
            self.tensors[name] = TensorInfo(name, meta.shape, F32, meta.nbytes, 0)  # type: ignore[arg-type]

    @property
    def architecture(self) -> str:
        return self._spec.name

    def spec(self) -> ModelSpec:
        return self._spec

    def keys(self, spec: ModelSpec) -> Keys:
        layers = [f"{i}." for i in range(_LAYERS)]  # so that any layer that is looked up exists
        return Keys(f"{self.path}: TINY", self.metadata, layers, {})

    def weights(self, spec: ModelSpec, config: ModelConfig) -> Weights:
        return self.made

    def tokenizer(self) -> Tokenizer:
        raise ModelFileError(f"{self.path}: a random model has no tokenizer")

    def close(self) -> None:
        """Do nothing; no file is open."""


def _weights(spec: ModelSpec, config: ModelConfig) -> dict[str, np.ndarray]:
    """Return random float32 arrays for all weights that the model asks for."""
    made: dict[str, np.ndarray] = {}
    rng = np.random.default_rng(0)

    class Made(Arrays):
        def meta(self, name: str) -> Meta | None:
            return Meta.of(made[name].shape, F32) if name in made else None

    class Asking(spec.model):  # type: ignore[name-defined]
        def weight(self, name: str, *shape: int, root: bool = False) -> Tensor:
            path = name if root else f"{current_scope()}.{name}".lstrip(".")
            if self.weights.meta(path) is None:
                made[path] = _random(rng, path, shape)
            return super().weight(name, *shape, root=root)

    build_graph(Asking(config, Made({})), 64)
    return made


def _random(rng: np.random.Generator, name: str, shape: tuple[int, ...]) -> np.ndarray:
    """Return a random weight as in `_randomise`: biases near 0, other vectors near 1."""
    noise = rng.standard_normal(shape, np.float32)
    if len(shape) > 1:
        return noise / np.float32(shape[-1] ** 0.5)
    return np.float32(0 if name.endswith("bias") else 1) + np.float32(0.2) * noise
