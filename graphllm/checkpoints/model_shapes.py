"""Shapes of well-known models in the form of GGUF files: keys, tensors and their formats.

Sources: the config.json of each model; gguf-py for the names; llama.cpp's quantiser for the formats
of the mix q4_k_m, and for the fallbacks of rows that are not whole blocks.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from ..errors import RequestError
from ..formats import BLOCK_FORMATS, ROW_FORMATS, fallback_of
from ..graph.dtype import DTYPES, DType


@dataclass(frozen=True)
class ModelShape:
    """Sizes of a model. A ``head_dim`` of 0 is dim / heads; ``bias``: q, k and v have biases."""

    arch: str
    layers: int
    dim: int
    heads: int
    kv_heads: int
    intermediate_size: int  # of the MLP, or of each expert
    vocab: int
    head_dim: int = 0
    tied: bool = False
    bias: bool = False
    context: int = 32768
    rope_base: float = 10_000.0
    window: int = 0
    experts: int = 0
    experts_per_token: int = 0

    @property
    def head_width(self) -> int:
        """Columns of a head."""
        return self.head_dim or self.dim // self.heads


def _qwen2(
    layers: int, dim: int, heads: int, kv: int, hidden: int, vocab: int, tied: bool
) -> ModelShape:
    return ModelShape(
        "qwen2", layers, dim, heads, kv, hidden, vocab, tied=tied, bias=True, rope_base=1e6
    )


def _llama3(layers: int, dim: int, heads: int, hidden: int, tied: bool) -> ModelShape:
    return ModelShape(
        "llama", layers, dim, heads, 8, hidden, 128_256, tied=tied, context=131_072, rope_base=5e5
    )


def _gemma3(layers: int, dim: int, heads: int, kv: int, hidden: int, window: int) -> ModelShape:
    return ModelShape(
        "gemma3", layers, dim, heads, kv, hidden, 262_144, 256, tied=True, rope_base=1e6,
        window=window,
    )  # fmt: skip


SHAPES = {
    "llama-7b": ModelShape("llama", 32, 4096, 32, 32, 11008, 32_000, context=4096),
    "llama-13b": ModelShape("llama", 40, 5120, 40, 40, 13824, 32_000, context=4096),
    "llama-1b": _llama3(16, 2048, 32, 8192, tied=True),
    "llama-3b": _llama3(28, 3072, 24, 8192, tied=True),
    "llama-8b": _llama3(32, 4096, 32, 14336, tied=False),
    "tinyllama-1.1b": ModelShape("llama", 22, 2048, 32, 4, 5632, 32_000, context=2048),
    "mistral-7b": ModelShape("llama", 32, 4096, 32, 8, 14336, 32_000),
    "qwen2-0.5b": _qwen2(24, 896, 14, 2, 4864, 151_936, tied=True),
    "qwen2-1.5b": _qwen2(28, 1536, 12, 2, 8960, 151_936, tied=True),
    "qwen2-7b": _qwen2(28, 3584, 28, 4, 18944, 152_064, tied=False),
    "gemma3-270m": _gemma3(18, 640, 4, 1, 2048, 512),
    "gemma3-1b": _gemma3(26, 1152, 4, 1, 6912, 512),
    "gemma3-4b": _gemma3(34, 2560, 8, 4, 10240, 1024),
    "mixtral-8x7b": ModelShape(
        "llama", 32, 4096, 32, 8, 14336, 32_000, rope_base=1e6, experts=8, experts_per_token=2
    ),
    "qwen3-30b-a3b": ModelShape(
        "qwen3moe", 48, 2048, 32, 4, 768, 151_936, 128, context=40_960, rope_base=1e6, experts=128,
        experts_per_token=8,
    ),
    "gpt-oss-20b": ModelShape(
        "gpt-oss", 24, 2880, 64, 8, 2880, 201_088, 64, bias=True, context=131_072,
        rope_base=150_000.0, window=128, experts=32,
        experts_per_token=4,
    ),
}  # fmt: skip
MIX = "q4_k_m"  # llama.cpp's mix of q4_k and q6_k
TYPES = (MIX, *BLOCK_FORMATS, *ROW_FORMATS, "f16", "bf16", "f32")
# `general.file_type` -> name of the format of most matrices (llama.cpp, `llama_ftype`).
FILE_TYPES: dict[int, str] = {0: "F32", 1: "F16", 32: "BF16"}
for _form in BLOCK_FORMATS.values():
    FILE_TYPES |= _form.file_types
_MIX_NAME = "Q4_K - Medium"
Stored = tuple[str, tuple[int, ...], DType]  # name in the file, shape, format


def model_shape(name: str) -> ModelShape:
    """Return one of `SHAPES`. RequestError lists them."""
    if name not in SHAPES:
        raise RequestError(f"unknown shape {name!r}; known: {', '.join(SHAPES)}")
    return SHAPES[name]


def metadata(shape: ModelShape, name: str, kind: str) -> dict[str, Any]:
    """Return the keys of a GGUF file of this shape, without a vocabulary: int, float, str."""
    wanted = _MIX_NAME if kind == MIX else kind.upper()
    own: dict[str, Any] = {
        "context_length": shape.context,
        "embedding_length": shape.dim,
        "block_count": shape.layers,
        "feed_forward_length": shape.intermediate_size,
        "attention.head_count": shape.heads,
        "attention.head_count_kv": shape.kv_heads,
        "attention.key_length": shape.head_width,
        "attention.value_length": shape.head_width,
        "attention.layer_norm_rms_epsilon": 1e-6,
        "rope.freq_base": shape.rope_base,
    }
    if shape.window:
        own["attention.sliding_window"] = shape.window
    if shape.experts:
        own["expert_count"], own["expert_used_count"] = shape.experts, shape.experts_per_token
        own["expert_feed_forward_length"] = shape.intermediate_size
    if shape.arch == "gpt-oss":
        own["rope.scaling.type"], own["rope.scaling.factor"] = "yarn", 32.0
        own["rope.scaling.original_context_length"] = 4096
    general: dict[str, Any] = {"general.architecture": shape.arch, "general.name": name}
    numbers = {label: number for number, label in FILE_TYPES.items()}
    if wanted in numbers:
        general["general.file_type"] = numbers[wanted]
    return general | {f"{shape.arch}.{key}": value for key, value in own.items()}


def tensors(shape: ModelShape, kind: str) -> Iterator[Stored]:
    """Yield the tensors of a file with matrices of type ``kind``, one of `TYPES`.

    RequestError for an unknown type lists them.
    """
    if kind not in TYPES:
        raise RequestError(f"unknown type {kind!r}; known: {', '.join(TYPES)}")
    dense = "q8_0" if kind == "mxfp4" and shape.experts else kind  # as llama.cpp does
    outer = _rich(dense)
    yield _matrix("token_embd", shape.vocab, shape.dim, outer)
    yield _vector("output_norm.weight", shape.dim)
    if not shape.tied:
        yield _matrix("output", shape.vocab, shape.dim, outer)
    for i in range(shape.layers):
        attention = _attention(shape, _more(dense, i, shape.layers), dense)
        for name, *rest in (*attention, *_mlp(shape, _more(kind, i, shape.layers), kind)):
            yield f"blk.{i}.{name}", *rest  # type: ignore[misc]


def _attention(shape: ModelShape, rich: str, kind: str) -> Iterator[Stored]:
    """Yield norms and attention of a layer; ``rich``: format of the value projection."""
    q, kv = shape.heads * shape.head_width, shape.kv_heads * shape.head_width
    kinds = {"attn_q": kind, "attn_k": kind, "attn_v": rich, "attn_output": kind}
    if kind == MIX and shape.experts == 8:
        kinds |= {"attn_k": "q8_0", "attn_v": "q8_0", "attn_output": "q5_k"}
    for name in _NORMS.get(shape.arch, ("attn_norm", "ffn_norm")):
        yield _vector(f"{name}.weight", shape.dim)
    if shape.arch in ("gemma3", "qwen3moe"):
        yield _vector("attn_q_norm.weight", shape.head_width)
        yield _vector("attn_k_norm.weight", shape.head_width)
    for name, width in (("attn_q", q), ("attn_k", kv), ("attn_v", kv)):
        yield _matrix(name, width, shape.dim, kinds[name])
        if shape.bias:
            yield _vector(f"{name}.bias", width)
    yield _matrix("attn_output", shape.dim, q, kinds["attn_output"])
    if shape.arch == "gpt-oss":
        yield _vector("attn_output.bias", shape.dim)
        yield _vector("attn_sinks.weight", shape.heads)


_NORMS = {
    "gemma3": ("attn_norm", "ffn_norm", "post_attention_norm", "post_ffw_norm"),
    "gpt-oss": ("attn_norm", "post_attention_norm"),
}


def _mlp(shape: ModelShape, rich: str, kind: str) -> Iterator[Stored]:
    """Yield the MLP of a layer, or router and experts; ``rich``: format of down projections."""
    dim, hidden = shape.dim, shape.intermediate_size
    each = (("gate", hidden, dim, kind), ("up", hidden, dim, kind), ("down", dim, hidden, rich))
    if not shape.experts:
        for name, rows, columns, form in each:
            yield _matrix(f"ffn_{name}", rows, columns, form)
        return
    yield _matrix("ffn_gate_inp", shape.experts, dim, "f32")
    for name, rows, columns, form in each:
        yield _matrix(f"ffn_{name}_exps", rows, columns, form, shape.experts)
    if shape.arch == "gpt-oss":
        yield _vector("ffn_gate_inp.bias", shape.experts)
        for name, rows, *_ in each:
            yield f"ffn_{name}_exps.bias", (shape.experts, rows), DTYPES["f32"]


def _rich(kind: str) -> str:
    """Return the format of matrices that a mix stores with more bits."""
    return "q6_k" if kind == MIX else kind


def _more(kind: str, layer: int, layers: int) -> str:
    """Return `_rich` for the layers that a mix stores with more bits, else ``kind``."""
    eighth = layers // 8
    more = layer < eighth or layer >= 7 * eighth or (layer - eighth) % 3 == 2
    return _rich(kind) if more else kind


def _matrix(name: str, rows: int, columns: int, kind: str, experts: int = 0) -> Stored:
    """Return the entry of a matrix, or of one matrix per expert."""
    form = DTYPES["q4_k" if kind == MIX else kind]
    if columns % form.block:
        form = fallback_of(form) or DTYPES["f16"]
    if columns % form.block:
        form = DTYPES["f16"]
    axes = (experts,) if experts else ()
    return f"{name}.weight", (*axes, rows, columns), form


def _vector(name: str, width: int) -> Stored:
    return name, (width,), DTYPES["f32"]
