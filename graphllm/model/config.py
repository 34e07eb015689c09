"""What a decoder is made of, as data: a model file's ``config`` returns a `DecoderConfig`."""

from __future__ import annotations

from dataclasses import dataclass, replace

# How Hugging Face calls the activations: the op, and its attributes.
ACTIVATIONS: dict[str, tuple[str, dict[str, str]]] = {
    "silu": ("silu", {}),
    "swish": ("silu", {}),
    "gelu": ("gelu", {"kind": "erf"}),
    "gelu_new": ("gelu", {"kind": "tanh"}),
    "gelu_pytorch_tanh": ("gelu", {"kind": "tanh"}),
    "gelu_fast": ("gelu", {"kind": "tanh"}),
}


@dataclass(frozen=True)
class Rope:
    """Rotary positions: ``dims`` of each head rotate (0: all), positions are times ``scale``.

    A context of more than ``original`` tokens (0: none) turns as ``long`` says, or by a base that
    grows with it where ``dynamic`` (a factor) is above 0; see `within`. ``reach``: tokens that it
    was stretched to, where that is more than the model was trained for (0: nothing says so).
    """

    base: float = 10_000.0
    dims: int = 0
    style: str = "half"  # pairs (i, i + dims/2), or "interleaved": pairs (2i, 2i + 1)
    scale: float = 1.0
    factors: tuple[float, ...] | str = ()  # divide each frequency: numbers, or a weight's name
    attention_factor: float = 1.0  # cosine and sine are times this
    original_context: int = 0
    long_context: Rope | None = None
    dynamic_factor: float = 0.0
    extended_context: int = 0

    @property
    def factor_weights(self) -> set[str]:
        """The weights that hold factors, for contexts of any length."""
        own = {self.factors} if isinstance(self.factors, str) else set()
        return own | (self.long_context.factor_weights if self.long_context else set())

    def for_context(self, context: int) -> Rope:
        """What turns sequences of at most ``context`` tokens."""
        if not self.original_context or context <= self.original_context:
            return self
        if self.long_context is not None:
            return self.long_context
        if not self.dynamic_factor:
            return self
        # "Dynamic NTK": as transformers has it, for the longest sequence rather than each one.
        stretch = self.dynamic_factor * context / self.original_context - (self.dynamic_factor - 1)
        return replace(self, base=self.base * stretch ** (self.dims / (self.dims - 2)))


@dataclass(frozen=True)
class Mla:
    """Attention whose keys and values are made of one vector a token (DeepSeek-V2, section 2.1).

    ``rank``: of that vector, ``query_rank`` of the queries' (0: they are made directly). A head's
    query and key have ``nope`` columns without and ``rope`` with positions, its value ``value``.
    """

    rank: int
    query_rank: int
    nope: int
    rope: int
    value: int


@dataclass(frozen=True)
class Attention:
    heads: int
    kv_heads: int
    head_dim: int
    scale: float = 0.0  # of the scores; 0: head_dim ** -0.5
    softcap: float = 0.0
    qk_norm: str = ""  # RMS norm of queries and keys: of each "head", or of the whole "row"
    bias: bool | None = False  # of q, k and v; None: if the file has one
    out_bias: bool | None = False
    # One linear for q, k and v: its "rows" are those of q, then k, then v; or by "heads", for each
    # KV head its queries, its key, its value.
    fused: str = ""
    sinks: bool = False  # a logit of each head that no value belongs to
    slopes: tuple[float, ...] = ()  # ALiBi: of each head
    mla: Mla | None = None
    # Token ids by which `Decoder.bidirectional_prefix` finds the end of a prompt's prefix in which
    # attention is not causal; empty for causal models.
    prefix_token_ids: tuple[int, ...] = ()


@dataclass(frozen=True)
class Mlp:
    hidden: int
    act: str = "silu"  # a name of `ACTIVATIONS`
    gated: bool = True
    fused: bool = False  # one linear for gate and up, the gate's rows first
    bias: bool | None = False


@dataclass(frozen=True)
class Moe:
    """A mixture of experts in place of the MLP: ``active`` of ``experts`` for each token.

    ``score``: "softmax" or "sigmoid" of all logits of the router, or "chosen": a softmax of those
    that are chosen. ``limit`` above 0: experts are gpt-oss's clamped units.
    """

    experts: int
    active: int
    hidden: int  # of each expert
    score: str = "softmax"
    normalise: bool = True  # the weights of the chosen sum to one
    scale: float = 1.0
    bias: bool = False  # of router and experts
    correction: bool = False  # added to the scores for choosing only
    groups: int = 1  # see `ops.top_k`
    kept: int = 1
    best: int = 1
    shared: int = 0  # width of an MLP that every token passes
    shared_gate: bool = False  # its result is times the sigmoid of a linear
    limit: float = 0.0
    alpha: float = 1.702


@dataclass(frozen=True)
class Norm:
    eps: float = 1e-5
    kind: str = "rms"  # or "layer"
    bias: bool = True  # of a layer norm


@dataclass(frozen=True)
class ModuleNames:
    """What modules are called, on Hugging Face's paths. An empty name: there is no such module."""

    model: str = "model"
    embed: str = "embed_tokens"
    embed_norm: str = ""
    positions: str = ""
    layers: str = "layers"
    norm: str = "norm"
    head: str = "lm_head"
    pre_attn_norm: str = "input_layernorm"
    post_attn_norm: str = ""
    pre_mlp_norm: str = "post_attention_layernorm"
    post_mlp_norm: str = ""
    attn: str = "self_attn"
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


SANDWICH_NORMS = {  # norms before and after both halves of a layer, by their usual names
    "post_attn_norm": "post_attention_layernorm",
    "pre_mlp_norm": "pre_feedforward_layernorm",
    "post_mlp_norm": "post_feedforward_layernorm",
}


@dataclass(frozen=True)
class Layer:
    """What may differ from layer to layer: rotary positions (None: no positions), a window (0:
    none), whether the MLP is a mixture, and the scale of the scores (0: `Attention.scale`)."""

    rope: Rope | None
    window: int = 0
    moe: bool = False
    scale: float = 0.0


@dataclass(frozen=True)
class DecoderConfig:
    vocab: int
    dim: int
    context: int  # the longest that the model was made for, in tokens
    layers: tuple[Layer, ...]
    attention: Attention
    mlp: Mlp
    norm: Norm = Norm()
    names: ModuleNames = ModuleNames()
    moe: Moe | None = None
    embed_scale: float = 1.0
    # Added to the embedding: "learned" (rows of a table) or "sinusoidal"; "": none.
    positions: str = ""
    position_offset: int = 0  # of the first token
    parallel: bool = False  # attention and MLP read the same x, side by side
    residual_scale: float = 1.0  # of what is added to the residual
    post_layernorm_residual: float = 0.0  # above 0: the residual is the normed x times this, not x
    tied: bool = True  # the head is the embedding
    mtp_layers: int = 0  # layers behind the last, which predict further tokens and are not read
    logit_scale: float = 1.0
    logit_softcap: float = 0.0
