"""The one shared decoder. A model file fills in `DecoderConfig`, and overrides what is new."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from . import ops
from .dtype import dtype
from .errors import ModelFileError, RequestError
from .nn import Module
from .tensor import Tensor, Var, feed, scope, state
from .weights import Weights

# ------------------------------------------------------------------------------------ configuration


@dataclass(frozen=True)
class Rope:
    """Rotary positions: ``dims`` of each head rotate (0: all), positions are times ``scale``."""

    base: float = 10_000.0
    dims: int = 0
    style: str = "half"  # pairs (i, i + dims/2), or "interleaved": pairs (2i, 2i + 1)
    scale: float = 1.0
    factors: str = ""  # a weight that divides each frequency, if the model has one


@dataclass(frozen=True)
class Attention:
    heads: int
    kv_heads: int
    head_dim: int
    scale: float = 0.0  # of the scores; 0: head_dim ** -0.5
    softcap: float = 0.0
    qk_norm: bool = False  # RMS norm of each query and key head
    bias: bool = False  # of q, k and v
    out_bias: bool = False


@dataclass(frozen=True)
class Mlp:
    hidden: int
    act: str = "silu"  # of the gate: an op's name


@dataclass(frozen=True)
class Norm:
    eps: float = 1e-5
    sandwich: bool = False  # also after attention and MLP, before the residual is added


@dataclass(frozen=True)
class Layer:
    """What may differ from layer to layer: its window (0: none) and its rotary positions."""

    rope: Rope
    window: int = 0


@dataclass(frozen=True)
class DecoderConfig:
    vocab: int
    dim: int
    context: int  # the longest that the model was made for, in tokens
    layers: tuple[Layer, ...]
    attention: Attention
    mlp: Mlp
    norm: Norm = Norm()
    embed_scale: float = 1.0
    tied: bool = True  # the head is the embedding
    logit_softcap: float = 0.0


# --------------------------------------------------------------------------------- cache and batch


@dataclass(frozen=True)
class CacheSpec:
    """Layers that cache alike: shapes of what one token adds, and how far back they look (0: all).

    Each has slots and a block table of its own; with a window, only as many as `Limits.kept` says.
    """

    name: str
    layers: tuple[int, ...]
    entries: Mapping[str, tuple[int, ...]]
    window: int = 0


@dataclass(frozen=True)
class Limits:
    """The largest step and cache that a graph is built for."""

    tokens: int = 512  # T: tokens of one step
    sequences: int = 1  # S
    context: int = 4096  # tokens of one sequence
    block: int = 64  # tokens of one entry of a block table
    kv_dtype: str = "f16"
    stops: int = 32  # ids that end a sequence
    history: int = 64  # tokens that penalties look back on

    def within(self, context: int) -> Limits:
        """With sequences of ``context`` tokens at most: no model is run beyond its own."""
        length = min(self.context, context)
        return replace(self, context=length, tokens=min(self.tokens, length))

    @property
    def blocks(self) -> int:
        """Blocks of one sequence."""
        return -(-self.context // self.block)

    def kept(self, window: int) -> int:
        """Blocks of one sequence that layers with this window (0: none) keep at a time.

        Those before a step that its first token sees, the step's own, and the next token's.
        """
        if not window:
            return self.blocks
        return min(self.blocks, -(-(window + self.tokens) // self.block) + 1)


class Batch:
    """The inputs of one step: T tokens of S sequences, packed without padding.

    ids, pos [T]; q_start [S + 1]: where each sequence's tokens begin; kv_len [S]: its tokens in the
    cache, this step's included; rows [N]: the tokens whose logits are wanted; and for each cache
    group, slot [T]: where a token's entry goes, and table [S, B]: the blocks of each sequence.
    """

    def __init__(self, caches: tuple[CacheSpec, ...], limits: Limits) -> None:
        t, s = Var("T", 1, limits.tokens), Var("S", 1, limits.sequences)
        n, q = Var("N", 1, limits.tokens), Var("Q", 2, limits.sequences + 1)
        self.limits = limits
        self.ids, self.pos = state("ids", (t,), "i32"), state("pos", (t,), "i32")
        self.kv_len, self.q_start = state("kv_len", (s,), "i32"), feed("q_start", (q,), "i32")
        self.rows = feed("rows", (n,), "i32")
        self.slot = {c.name: state(f"slot.{c.name}", (t,), "i32") for c in caches}
        self.table = {c.name: feed(f"table.{c.name}", (s, limits.blocks), "i32") for c in caches}
        self.count, self.done = state("count", (s,), "i32"), state("done", (s,), "i32")
        self.history = state("history", (s, limits.history), "i32")
        self.stop = feed("stop", (limits.stops,), "i32")
        # sampling parameters, one a sequence
        self.temperature = feed("temperature", (s,), "f32")
        self.top_k = feed("top_k", (s,), "i32")
        self.top_p = feed("top_p", (s,), "f32")
        self.min_p = feed("min_p", (s,), "f32")
        self.seed = feed("seed", (s,), "i64")
        self.repeat = feed("repeat", (s,), "f32")
        self.presence = feed("presence", (s,), "f32")
        self.frequency = feed("frequency", (s,), "f32")
        self.min_tokens = feed("min_tokens", (s,), "i32")


# ----------------------------------------------------------------------------------------- decoder


class Decoder(Module):
    """A pre-norm decoder with rotary positions, grouped-query attention and a gated MLP.

    `build` makes the graph: its outputs are ``logits`` [N, vocab], ``ids`` [T] (sampled and written
    into the step's state, so that the next step can run at once), ``ids.penalised`` (the same, by
    way of `ops.penalise`), and ``kv.*`` (the written pools, for a step that wants nothing else).
    """

    def __init__(self, cfg: DecoderConfig, weights: Weights) -> None:
        super().__init__(weights)
        self.cfg = cfg

    @property
    def caches(self) -> tuple[CacheSpec, ...]:
        """The layers grouped by window."""
        a = self.cfg.attention
        groups: dict[int, list[int]] = {}
        for i, layer in enumerate(self.cfg.layers):
            groups.setdefault(layer.window, []).append(i)
        entries = {"k": (a.kv_heads, a.head_dim), "v": (a.kv_heads, a.head_dim)}
        return tuple(
            CacheSpec(f"window{w}" if w else "full", tuple(layers), entries, w)
            for w, layers in groups.items()
        )

    # -- the graph
    def build(self, limits: Limits) -> dict[str, Tensor]:
        """The outputs of one step, by name. ModelFileError names a missing or unused weight,
        RequestError a cache dtype that the entries do not fit."""
        self._check_cache(limits)
        batch = Batch(self.caches, limits)
        self._group = {i: c for c in self.caches for i in c.layers}
        self.pools: dict[str, Tensor] = {}
        hidden = self.forward(batch)
        logits = self.head(ops.gather_rows(hidden, batch.rows))
        unused = sorted(set(self.weights.names()) - self.used)
        if unused:
            raise ModelFileError(f"unexpected tensor {unused[0]!r} ({len(unused)} in all)")
        penalised = ops.penalise(
            logits, batch.history, batch.count, batch.stop, batch.repeat, batch.presence,
            batch.frequency, batch.min_tokens,
        )  # fmt: skip
        pools = {f"kv.{name}": pool for name, pool in self.pools.items()}
        return {
            "logits": logits,
            "ids": self._next(logits, batch),
            "ids.penalised": self._next(penalised, batch),
            **pools,
        }

    def _check_cache(self, limits: Limits) -> None:
        kind = dtype(limits.kv_dtype)
        for group in self.caches:
            for width in {shape[-1] for shape in group.entries.values()}:
                if width % kind.block:
                    raise RequestError(
                        f"kv_type = {kind.name!r} (--kv-type) keeps blocks of {kind.block}, and a "
                        f"head size of {width} is no multiple of that"
                    )

    def _next(self, logits: Tensor, batch: Batch) -> Tensor:
        """The ids drawn from ``logits``, as the next step's tokens."""
        ids = ops.sample(
            logits, batch.temperature, batch.top_k, batch.top_p, batch.min_p, batch.seed,
            batch.count,
        )  # fmt: skip
        groups = [t for c in self.caches for t in (batch.slot[c.name], batch.table[c.name])]
        return ops.advance(
            ids, batch.stop, batch.ids, batch.pos, batch.kv_len, batch.count, batch.done,
            batch.history, *groups, block=batch.limits.block,
        )  # fmt: skip

    def forward(self, batch: Batch) -> Tensor:
        """The hidden states [T, dim] of all tokens, before the final norm."""
        c = self.cfg
        with scope("model"):
            x = self.embedding(batch.ids, "embed_tokens", c.vocab, c.dim)
            if c.embed_scale != 1.0:
                x = ops.scale(x, factor=c.embed_scale)
            for i in range(len(c.layers)):
                with scope(f"layers.{i}"):
                    x = self.layer(x, i, batch)
        return x

    def layer(self, x: Tensor, i: int, batch: Batch) -> Tensor:
        """One block: x [T, dim] -> [T, dim]."""
        sandwich = self.cfg.norm.sandwich
        h = self.norm(x, "input_layernorm")
        with scope("self_attn"):
            h = self.attn(h, i, batch)
        if sandwich:
            h = self.norm(h, "post_attention_layernorm")
        x = ops.add(x, h)
        before = "pre_feedforward_layernorm" if sandwich else "post_attention_layernorm"
        h = self.norm(x, before)
        with scope("mlp"):
            h = self.mlp(h)
        if sandwich:
            h = self.norm(h, "post_feedforward_layernorm")
        return ops.add(x, h)

    def attn(self, x: Tensor, i: int, batch: Batch) -> Tensor:
        """Attention of layer ``i``: x [T, dim] -> [T, dim]."""
        c = self.cfg.attention
        q = self.linear(x, "q_proj", c.heads * c.head_dim, c.bias).heads(c.heads)
        k = self.linear(x, "k_proj", c.kv_heads * c.head_dim, c.bias).heads(c.kv_heads)
        v = self.linear(x, "v_proj", c.kv_heads * c.head_dim, c.bias).heads(c.kv_heads)
        if c.qk_norm:
            q, k = self.norm(q, "q_norm"), self.norm(k, "k_norm")
        q, k = self.rope(q, i, batch), self.rope(k, i, batch)
        h = self.attend(q, k, v, i, batch)
        return self.linear(h, "o_proj", self.cfg.dim, c.out_bias)

    def mlp(self, x: Tensor) -> Tensor:
        """The gated MLP: x [T, dim] -> [T, dim]."""
        c = self.cfg.mlp
        gate = ops.get(c.act)(self.linear(x, "gate_proj", c.hidden))
        return self.linear(
            ops.mul(gate, self.linear(x, "up_proj", c.hidden)), "down_proj", self.cfg.dim
        )

    def head(self, x: Tensor) -> Tensor:
        """Final norm and logits: x [N, dim] -> [N, vocab]."""
        c = self.cfg
        with scope("model"):
            x = self.norm(x, "norm")
            if c.tied:
                with scope("embed_tokens"):
                    w = self.weight("weight", c.vocab, c.dim)
        if not c.tied:
            with scope("lm_head"):
                w = self.weight("weight", c.vocab, c.dim)
        with scope("lm_head"):
            logits = ops.linear(x, w)
            return ops.softcap(logits, cap=c.logit_softcap) if c.logit_softcap else logits

    # -- pieces for model files
    def norm(self, x: Tensor, name: str) -> Tensor:
        return self.rms_norm(x, name, self.cfg.norm.eps)

    def rope(self, x: Tensor, i: int, batch: Batch) -> Tensor:
        """Rotary positions of layer ``i`` on x [T, H, D]."""
        r, width = self.cfg.layers[i].rope, x.shape[-1]
        pairs = (r.dims or width) // 2  # type: ignore[operator]
        factors = self.weight(r.factors, pairs, root=True) if r.factors else None
        return ops.rope(
            x, batch.pos, factors, base=r.base, dims=r.dims, style=r.style, scale=r.scale
        )

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, i: int, batch: Batch, scale: float = 0.0
    ) -> Tensor:
        """Cache k and v [T, Hkv, D] of layer ``i``, and attend with q [T, H, D]: [T, H * D]."""
        c, group = self.cfg.attention, self._group[i]
        slot, table = batch.slot[group.name], batch.table[group.name]
        k, v = (self._cache(i, e, t, slot, batch.limits) for e, t in (("k", k), ("v", v)))
        out = ops.attention(
            q, k, v, batch.q_start, batch.kv_len, table,
            scale=scale or c.scale or c.head_dim**-0.5,
            block=batch.limits.block, window=group.window, softcap=c.softcap,
        )  # fmt: skip
        return out.flatten()

    def _cache(self, i: int, entry: str, x: Tensor, slot: Tensor, limits: Limits) -> Tensor:
        """Layer ``i``'s pool [slots, Hkv, D] with x [T, Hkv, D] written to it."""
        slots = limits.sequences * limits.kept(self._group[i].window) * limits.block
        shape = (slots, *self._group[i].entries[entry])
        name = f"{self._group[i].name}.{i}.{entry}"
        self.pools[name] = ops.kv_write(state(name, shape, limits.kv_dtype), x, slot)
        return self.pools[name]
