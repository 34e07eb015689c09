"""Decoders of every family with random weights, drawn as the graph asks for them, and no file."""

from __future__ import annotations

from math import prod
from zlib import crc32

import numpy as np
from hf_models import SPECS, config_of

from graphllm.engine.engine import Engine
from graphllm.formats import quantization
from graphllm.formats.quantization import Blocks
from graphllm.graph.dtype import dtype
from graphllm.graph.tensor import current_scope
from graphllm.model.batch import Limits
from graphllm.model.config_keys import Keys
from graphllm.model.decoder import Decoder, DecoderConfig
from graphllm.runtime.executor import Executor
from graphllm.weights import Arrays

MIXTURES = ("mixtral", "qwen2_moe", "qwen3_moe", "deepseek_v2", "deepseek_v3", "gpt_oss")
# Of mixtral: rows of whole blocks in every format, and vocabulary enough for the head's kernels.
WIDE = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "head_dim": 64,
        "num_hidden_layers": 2, "num_local_experts": 6}  # fmt: skip


def drawn(name: str, shape: tuple[int, ...], kind: str) -> np.ndarray | Blocks:
    """Numbers of a size that keeps sums near one; vectors near one, in float32."""
    rng = np.random.default_rng(crc32(name.encode()))
    values = rng.standard_normal(shape).astype(np.float32)
    if len(shape) == 1 or name.endswith("bias"):
        return 0.2 * values + (not name.endswith("bias"))
    form, values = dtype(kind), values / np.float32(shape[-1] ** 0.5)
    if form.numpy is not None:
        return values.astype(form.numpy)
    raw = quantization.quantise(values.reshape(prod(shape[:-1]), shape[-1]), form)
    return Blocks(raw.reshape(*shape[:-1], -1), form, shape[-1])


def decoder(name: str, variant: int = 0, kind: str = "f32", **changes: object) -> Decoder:
    """A small model of the family ``name``, its matrices in the format ``kind``; ``changes``: of
    its configuration."""
    spec = SPECS[name]
    values = {**config_of(spec, variant), **changes}
    layers = tuple(f"model.layers.{i}.drawn" for i in range(values["num_hidden_layers"]))
    keys = Keys("drawn", values, layers, {})
    arrays: dict[str, np.ndarray | Blocks] = {}

    class RandomWeights(spec.model):  # type: ignore[name-defined,misc]
        def __init__(self, config: DecoderConfig) -> None:
            super().__init__(config, Arrays({}))
            self.weights.source._arrays = arrays

        def weight(self, name: str, *shape: int, root: bool = False):
            path = name if root else f"{current_scope()}.{name}".lstrip(".")
            if path not in arrays:
                arrays[path] = drawn(path, shape, kind)
            return super().weight(name, *shape, root=root)

    return RandomWeights(spec.config(keys))


def engine(model: Decoder, order: tuple[str, ...], context: int = 128, **options) -> Engine:
    """What runs the model on these backends, its cache in float32."""
    limits = model.limits(Limits(context=context, kv_dtype="f32"))
    return Engine(model, Executor(model.weights, order, **options), limits)
