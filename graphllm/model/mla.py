"""Multi-head latent attention, MLA (DeepSeek-AI 2024, DeepSeek-V2, section 2.1).

The KV cache holds one latent vector per token. Keys and values are linear functions of it and are
never computed: the queries are multiplied by the keys' matrix, and the weighted sum of latent
vectors by the values' matrix (section 2.1.2). For the attention op this is one KV head whose values
are the first columns of its keys.
"""

from __future__ import annotations

from dataclasses import replace

from .. import ops
from ..graph.tensor import Tensor
from ..weights.weight_rules import EXPERT_RULES, Rows, View, WeightRule
from .batch import Batch
from .blocks import DecoderBlocks
from .config import Attention, DecoderConfig, Mla
from .config_keys import Keys, base_config
from .rope import yarn_score_scale

_EPS = 1e-6  # of the norms of latent vectors, independent of rms_norm_eps


def mla_config(keys: Keys) -> DecoderConfig:
    """Return `base_config` with latent attention. ConfigError as from `base_config`."""
    mla = _mla_sizes(keys)
    if keys.has("num_key_value_heads") and not keys.gguf:
        keys.require("num_key_value_heads", keys.positive("num_attention_heads"))
    keys.ignore("num_key_value_heads")  # GGUF: 1, or in old files the number of heads
    c = base_config(keys, head_dim=mla.rope)
    bias = keys.bias("attention_bias")
    scale = (mla.nope + mla.rope) ** -0.5 * yarn_score_scale(keys)
    return replace(
        c,
        attention=Attention(
            c.attention.heads, 1, mla.rank + mla.rope, scale, bias=bias, out_bias=bias,
            mla=mla,
        ),
    )  # fmt: skip


def _mla_sizes(keys: Keys) -> Mla:
    rank, queries = keys.positive("kv_lora_rank"), keys.positive("q_lora_rank", 0)
    if not keys.gguf:
        nope, rope = keys.positive("qk_nope_head_dim"), keys.positive("qk_rope_head_dim")
        if keys.positive("qk_head_dim", nope + rope) != nope + rope:
            raise keys.error("qk_head_dim", f"must be {nope} + {rope}")
        keys.ignore("head_dim")  # transformers writes the rotary columns here
        return Mla(rank, queries, nope, rope, keys.positive("v_head_dim"))
    # Old files state head sizes under the keys that newer files use for the cache.
    rope = keys.positive("rotary_dim")
    width = keys.positive("qk_head_dim", keys.positive("head_dim"))
    value = keys.positive("v_head_dim", keys.positive("attention.value_length"))
    if width <= rope:
        raise keys.error("qk_head_dim", f"= {width} must be above the {rope} rotary columns")
    return Mla(rank, queries, width - rope, rope, value)


def mla_rules(config: DecoderConfig) -> tuple[WeightRule, ...]:
    """Return the rules for Hugging Face files: keys and values, and experts."""
    return *EXPERT_RULES, *_split(config, "model.layers.{i}.self_attn.kv_b_proj.weight")


def mla_gguf_rules(config: DecoderConfig) -> tuple[WeightRule, ...]:
    """Return the rules for old GGUF files; newer ones store keys and values separately."""
    return _split(config, "blk.{i}.attn_kv_b.weight")


def _split(config: DecoderConfig, source: str) -> tuple[WeightRule, ...]:
    """Split the tensor ``source``, which has for each head the rows of its keys, then its values.

    The parts are k_b_proj.weight [H, rank, nope], transposed, and v_b_proj.weight [H, value, rank].
    """
    heads, mla = config.attention.heads, config.attention.mla
    assert mla is not None
    nope, columns = mla.nope, mla.nope + mla.value
    keys = View(lambda w: w.reshape(heads, columns, -1)[:, :nope].swapaxes(1, 2))
    values = Rows(lambda w: w.reshape(heads, columns, -1)[:, nope:])
    scope = "model.layers.{i}.self_attn"
    also = ((f"{scope}.v_b_proj.weight", values),)
    return (WeightRule(f"{scope}.k_b_proj.weight", source, keys, also=also),)


def mla_attention(decoder: DecoderBlocks, x: Tensor, i: int, batch: Batch) -> Tensor:
    """Attention of layer ``i`` in the current scope: x [T, dim] -> [T, dim]."""
    c = decoder.cfg.attention
    mla = c.mla
    assert mla is not None
    rank, nope, width = mla.rank, mla.nope, mla.nope + mla.rope
    y = decoder.linear(x, "kv_a_proj_with_mqa", rank + mla.rope, c.bias)
    position = decoder.rope(y.slice(1, rank, rank + mla.rope).heads(1), i, batch).flatten()
    latent = ops.concat(decoder.rms_norm(y.slice(1, 0, rank), "kv_a_layernorm", _EPS), position)
    pool = decoder.cache(i, "k", latent.heads(1), batch)  # [slots, 1, rank + rope]

    q = _queries(decoder, x, mla, c).heads(c.heads)  # [T, H, nope + rope]
    absorbed = decoder.head_linear(q.slice(2, 0, nope), "k_b_proj", rank)
    q = ops.concat(absorbed, decoder.rope(q.slice(2, nope, width), i, batch))
    h = decoder.attention(q, pool, pool.slice(2, 0, rank), i, batch).heads(c.heads)  # [T, H, rank]
    out = decoder.head_linear(h, "v_b_proj", mla.value).flatten()
    return decoder.linear(out, decoder.cfg.names.out, decoder.cfg.dim, c.out_bias)


def _queries(decoder: DecoderBlocks, x: Tensor, mla: Mla, c: Attention) -> Tensor:
    """Return the queries [T, H * (nope + rope)], through a latent vector if they have a rank."""
    columns = c.heads * (mla.nope + mla.rope)
    if not mla.query_rank:
        return decoder.linear(x, decoder.cfg.names.q, columns)
    x = decoder.linear(x, "q_a_proj", mla.query_rank, c.bias)
    return decoder.linear(decoder.rms_norm(x, "q_a_layernorm", _EPS), "q_b_proj", columns)
