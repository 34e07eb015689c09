"""Configuration of a model as plain data: `DecoderConfig`, `EncoderConfig` and their parts.

A model file's ``config`` function returns one of them; `graphllm.model.decoder` and
`graphllm.model.encoder` build the graph from it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

# Hugging Face's names of activations: the op and its attributes.
ACTIVATIONS: dict[str, tuple[str, dict[str, Any]]] = {
    "silu": ("silu", {}),
    "swish": ("silu", {}),
    "gelu": ("gelu", {"kind": "erf"}),
    "gelu_new": ("gelu", {"kind": "tanh"}),
    "gelu_pytorch_tanh": ("gelu", {"kind": "tanh"}),
    "gelu_fast": ("gelu", {"kind": "tanh"}),
    "relu": ("relu", {}),
    "tanh": ("softcap", {"cap": 1.0}),
}


@dataclass(frozen=True)
class Rope:
    """Rotary position embedding (Su et al. 2021).

    Attributes:
        base: Base of the frequencies (``rope_theta``).
        dims: Columns of each head that are rotated; 0 for all.
        style: "half" pairs columns (i, i + dims/2), as GPT-NeoX; "interleaved" (2i, 2i + 1).
        scale: Factor on positions.
        factors: Divisors of the frequencies, one per pair: numbers, or the name of a weight.
        attention_factor: Factor on cosine and sine.
        original_context: Longest context that these values apply to; 0: no limit.
        long_context: Rotation for contexts longer than ``original_context`` (LongRoPE).
        dynamic_factor: Above 0, the base grows with the context beyond ``original_context``
            ("dynamic NTK").
        extended_context: Context length in tokens that the scaling extends the model to; 0 if the
            configuration does not state it.
    """

    base: float = 10_000.0
    dims: int = 0
    style: str = "half"
    scale: float = 1.0
    factors: tuple[float, ...] | str = ()
    attention_factor: float = 1.0
    original_context: int = 0
    long_context: Rope | None = None
    dynamic_factor: float = 0.0
    extended_context: int = 0

    @property
    def factor_weights(self) -> set[str]:
        """Names of the weights that hold frequency factors, for any context length."""
        own = {self.factors} if isinstance(self.factors, str) else set()
        return own | (self.long_context.factor_weights if self.long_context else set())

    def for_context(self, context: int) -> Rope:
        """Return the rotation for sequences of at most ``context`` tokens."""
        if not self.original_context or context <= self.original_context:
            return self
        if self.long_context is not None:
            return self.long_context
        if not self.dynamic_factor:
            return self
        # As in transformers, the base follows from the longest allowed sequence, not from each one.
        stretch = self.dynamic_factor * context / self.original_context - (self.dynamic_factor - 1)
        return replace(self, base=self.base * stretch ** (self.dims / (self.dims - 2)))


@dataclass(frozen=True)
class Mla:
    """Multi-head latent attention (DeepSeek-V2, section 2.1).

    Keys and values of all heads are linear functions of one latent vector per token.

    Attributes:
        rank: Width of the latent vector (``kv_lora_rank``).
        query_rank: Width of the queries' latent vector (``q_lora_rank``); 0 if there is none.
        nope: Columns of a head's query and key without rotary positions.
        rope: Columns of a head's query and key with rotary positions.
        value: Columns of a head's value.
    """

    rank: int
    query_rank: int
    nope: int
    rope: int
    value: int


@dataclass(frozen=True)
class Attention:
    """Attention with ``heads`` query heads that share ``kv_heads`` key and value heads."""

    heads: int
    kv_heads: int
    head_dim: int
    scale: float = 0.0  # factor on the scores; 0: head_dim ** -0.5
    softcap: float = 0.0  # cap of the scores; 0: none
    qk_norm: str = ""  # RMS norm of queries and keys: of each "head", or of the whole "row"
    bias: bool | None = False  # of q, k and v; None: if the file has one
    out_bias: bool | None = False
    # One linear for q, k and v. "rows": the rows of q, then k, then v. "heads": for each KV head
    # the rows of its queries, its key and its value.
    fused: str = ""
    sinks: bool = False  # one logit per head without a value (attention sinks)
    slopes: tuple[float, ...] = ()  # ALiBi slope of each head
    # Biases of relative positions (T5): the weight [heads, 2 * bias_reach + 1] and the distance of
    # key and query from which on they are equal; see `ops.attention`. 0: none.
    bias_name: str = ""
    bias_reach: int = 0
    bias_buckets: int = 0  # of distances, in the file
    skip_prefix: bool = False  # a prefix in the cache is not attended to, see `EncoderDecoder`
    mla: Mla | None = None
    # Token ids by which `Decoder.bidirectional_prefix` finds the end of a prompt's prefix in which
    # attention is not causal; empty for causal models.
    prefix_token_ids: tuple[int, ...] = ()


@dataclass(frozen=True)
class Mlp:
    """Feed-forward network of a layer."""

    intermediate_size: int
    act: str = "silu"  # a name in `ACTIVATIONS`
    gated: bool = True
    fused: bool = False  # one linear for gate and up, the gate's rows first
    bias: bool | None = False


@dataclass(frozen=True)
class Moe:
    """Mixture of experts in place of the MLP.

    Attributes:
        experts: Number of experts.
        experts_per_token: Number of experts that the router selects for each token.
        intermediate_size: Intermediate size of each expert.
        score: "softmax" or "sigmoid" of all router logits, or "topk_softmax", a softmax of the
            selected logits.
        normalise: Whether the weights of the selected experts are scaled to sum to 1.
        scale: Factor on the weights of the selected experts.
        bias: Whether router and experts have biases.
        correction: Whether a learned bias is added to the scores for the selection only
            (``e_score_correction_bias``).
        groups: Number of expert groups; see `ops.top_k`.
        top_groups: Number of groups from which experts are selected.
        top_per_group: Number of best scores that rank a group.
        shared_intermediate_size: Intermediate size of the shared expert, an MLP that every token
            passes; 0 if there is none.
        shared_gate: Whether the shared expert's output is multiplied by a sigmoid gate.
        swiglu_limit: Above 0, experts use gpt-oss's clamped SwiGLU with this limit.
        swiglu_alpha: Factor inside the sigmoid of the clamped SwiGLU.
    """

    experts: int
    experts_per_token: int
    intermediate_size: int
    score: str = "softmax"
    normalise: bool = True
    scale: float = 1.0
    bias: bool = False
    correction: bool = False
    groups: int = 1
    top_groups: int = 1
    top_per_group: int = 1
    shared_intermediate_size: int = 0
    shared_gate: bool = False
    swiglu_limit: float = 0.0
    swiglu_alpha: float = 1.702


@dataclass(frozen=True)
class Norm:
    eps: float = 1e-5
    kind: str = "rms"  # or "layer"
    bias: bool = True  # of a layer norm


@dataclass(frozen=True)
class ModuleNames:
    """Names of the modules on Hugging Face's weight paths. Empty: the model has no such module."""

    model: str = "model"
    embed: str = "embed_tokens"
    embed_norm: str = ""
    positions: str = ""
    token_types: str = ""
    layers: str = "layers"
    norm: str = "norm"
    head: str = "lm_head"
    pre_attn_norm: str = "input_layernorm"
    post_attn_norm: str = ""
    pre_cross_norm: str = ""
    post_cross_norm: str = ""
    pre_mlp_norm: str = "post_attention_layernorm"
    post_mlp_norm: str = ""
    attn: str = "self_attn"
    cross_attn: str = ""
    q: str = "q_proj"
    k: str = "k_proj"
    v: str = "v_proj"
    qkv: str = "qkv_proj"
    out: str = "o_proj"
    q_norm: str = "q_norm"
    k_norm: str = "k_norm"
    mlp: str = "mlp"
    gate: str = "gate_proj"
    up: str = "up_proj"
    gate_up: str = "gate_up_proj"
    down: str = "down_proj"
    router: str = "gate"
    shared: str = "shared_expert"


SANDWICH_NORMS = {  # names of the norms where attention and MLP have one before and one after
    "post_attn_norm": "post_attention_layernorm",
    "pre_mlp_norm": "pre_feedforward_layernorm",
    "post_mlp_norm": "post_feedforward_layernorm",
}


@dataclass(frozen=True)
class Layer:
    """Properties that may differ from layer to layer."""

    rope: Rope | None  # None: no rotary positions
    window: int = 0  # sliding window in tokens; 0: none
    moe: bool = False  # whether the layer has a mixture of experts in place of the MLP
    scale: float = 0.0  # factor on the scores; 0: `Attention.scale`


@dataclass(frozen=True)
class ModelConfig:
    """What the architectures of decoders and encoders have in common."""

    vocab: int
    dim: int  # hidden size
    context: int  # maximum sequence length in tokens
    layers: tuple[Layer, ...]
    attention: Attention
    mlp: Mlp
    norm: Norm = Norm()
    names: ModuleNames = ModuleNames()
    embed_scale: float = 1.0
    positions: str = ""  # added to the embedding: "learned" (a table) or "sinusoidal"; "": none
    position_offset: int = 0  # position of the first token
    tied: bool = True  # the output head, if there is one, is the embedding matrix
    mtp_layers: int = 0  # trailing multi-token prediction layers, which are not loaded


@dataclass(frozen=True)
class DecoderConfig(ModelConfig):
    """Architecture of a decoder-only model."""

    moe: Moe | None = None
    parallel: bool = False  # attention and MLP read the same input
    residual_scale: float = 1.0  # factor on the outputs of attention and MLP
    # Above 0, the residual is the norm's output times this (post-layer-norm residual), not x.
    post_layernorm_residual: float = 0.0
    logit_scale: float = 1.0
    logit_softcap: float = 0.0  # cap of the logits; 0: none


@dataclass(frozen=True)
class Head:
    """Head of an encoder: a linear, before it possibly a dense layer with activation and norm.

    Attributes:
        out: Name of the linear, whose rows are the labels or the vocabulary.
        bias: Name of its bias; empty if it has none.
        dense: Name of the dense layer; empty if there is none.
        dense_bias: Whether the dense layer has a bias.
        width: Rows of the dense layer; 0 for as many as it has columns.
        act: Activation after the dense layer, a name in `ACTIVATIONS`.
        norm: Name of the layer norm after the activation; empty if there is none.
        pooling: What it reads of a text: "cls" (the first token), "mean", or "" for every token.
    """

    out: str
    bias: str
    dense: str = ""
    dense_bias: bool = True
    width: int = 0
    act: str = "gelu"
    norm: str = ""
    pooling: str = ""

    @property
    def modules(self) -> tuple[str, ...]:
        """Names of the modules with weights of the head."""
        return tuple(filter(None, (self.out, self.dense, self.norm, self.bias.rpartition(".")[0])))


@dataclass(frozen=True)
class EncoderConfig(ModelConfig):
    """Architecture of a bidirectional encoder.

    In a layer, ``pre_*_norm`` are norms before attention and MLP, ``post_*_norm`` norms after the
    sums; a model has the ones or the others.
    """

    token_types: int = 0  # rows of the table of token types; 0: none
    # The heads that the family has, by the end of the name of transformers' class, such as
    # "SequenceClassification"; and the one to compute, None for the hidden states only.
    heads: Mapping[str, Head] = field(default_factory=dict)
    head: Head | None = None


@dataclass(frozen=True)
class EncoderDecoderConfig(DecoderConfig):
    """Architecture of an encoder-decoder; the inherited fields are those of the decoder.

    Norms of layers are placed as in `EncoderConfig`.
    """

    encoder: EncoderConfig | None = None
    logits_bias: str = ""  # name of a weight [vocab] that is added to the logits if the file has it
    embed_copies: tuple[str, ...] = ()  # tensors that must equal the embedding if the file has them
