"""Latent attention (DeepSeek-AI 2024, DeepSeek-V2, section 2.1): one vector a token is cached.

Keys and values are linear in that vector, so they are never made: the queries go through the keys'
matrix, the weighted sum of cached vectors through the values' (section 2.1.2). To attention this is
one KV head, whose values are the first columns of its keys.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from .. import ops
from ..graph.tensor import Tensor
from ..weights.weight_rules import EXPERT_RULES, Rows, View, WeightRule
from .batch import Batch
from .config import Attention, DecoderConfig, Mla
from .config_keys import Keys, base_config
from .rope import yarn_score_scale

if TYPE_CHECKING:
    from .decoder import Decoder

_EPS = 1e-6  # of the norms inside, whatever rms_norm_eps says


def mla_config(keys: Keys) -> DecoderConfig:
    """What `base_config` reads, with latent attention. ConfigError."""
    mla = _latent(keys)
    if keys.has("num_key_value_heads") and not keys.gguf:
        keys.require("num_key_value_heads", keys.positive("num_attention_heads"))
    keys.ignore("num_key_value_heads")  # GGUF: that of the cache, or of old files the heads'
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


def _latent(keys: Keys) -> Mla:
    rank, queries = keys.positive("kv_lora_rank"), keys.positive("q_lora_rank", 0)
    if not keys.gguf:
        nope, rope = keys.positive("qk_nope_head_dim"), keys.positive("qk_rope_head_dim")
        if keys.positive("qk_head_dim", nope + rope) != nope + rope:
            raise keys.error("qk_head_dim", f"is not {nope} + {rope}")
        keys.ignore("head_dim")  # what rotates, as transformers writes it
        return Mla(rank, queries, nope, rope, keys.positive("v_head_dim"))
    # Old files state the widths of heads where newer ones state those of the cache.
    rope = keys.positive("rotary_dim")
    width = keys.positive("qk_head_dim", keys.positive("head_dim"))
    value = keys.positive("v_head_dim", keys.positive("attention.value_length"))
    if width <= rope:
        raise keys.error("qk_head_dim", f"= {width} is not above the {rope} that rotate")
    return Mla(rank, queries, width - rope, rope, value)


def mla_rules(config: DecoderConfig) -> tuple[WeightRule, ...]:
    """Hugging Face's names, and those of experts."""
    return *EXPERT_RULES, *_split(config, "model.layers.{i}.self_attn.kv_b_proj.weight")


def mla_gguf_rules(config: DecoderConfig) -> tuple[WeightRule, ...]:
    """Of llama.cpp's old files; in others the two are apart."""
    return _split(config, "blk.{i}.attn_kv_b.weight")


def _split(config: DecoderConfig, source: str) -> tuple[WeightRule, ...]:
    """The tensor ``source`` has for every head the rows of its keys, then those of its values.

    They become k_b_proj.weight [H, rank, nope], transposed, and v_b_proj.weight [H, value, rank].
    """
    heads, mla = config.attention.heads, config.attention.mla
    assert mla is not None
    nope, columns = mla.nope, mla.nope + mla.value
    keys = View(lambda w: w.reshape(heads, columns, -1)[:, :nope].swapaxes(1, 2))
    values = Rows(lambda w: w.reshape(heads, columns, -1)[:, nope:])
    scope = "model.layers.{i}.self_attn"
    also = ((f"{scope}.v_b_proj.weight", values),)
    return (WeightRule(f"{scope}.k_b_proj.weight", source, keys, also=also),)


def mla_attention(of: Decoder, x: Tensor, i: int, batch: Batch) -> Tensor:
    """Attention of layer ``i`` under the current scope: x [T, dim] -> [T, dim]."""
    c = of.cfg.attention
    mla = c.mla
    assert mla is not None
    rank, nope, width = mla.rank, mla.nope, mla.nope + mla.rope
    y = of.linear(x, "kv_a_proj_with_mqa", rank + mla.rope, c.bias)
    position = of.rope(y.slice(1, rank, rank + mla.rope).heads(1), i, batch).flatten()
    vector = ops.concat(of.rms_norm(y.slice(1, 0, rank), "kv_a_layernorm", _EPS), position)
    pool = of.cache(i, "k", vector.heads(1), batch)  # [slots, 1, rank + rope]

    q = _queries(of, x, mla, c).heads(c.heads)  # [T, H, nope + rope]
    through = of.head_linear(q.slice(2, 0, nope), "k_b_proj", rank)
    q = ops.concat(through, of.rope(q.slice(2, nope, width), i, batch))
    h = of.attention(q, pool, pool.slice(2, 0, rank), i, batch).heads(c.heads)  # [T, H, rank]
    out = of.head_linear(h, "v_b_proj", mla.value).flatten()
    return of.linear(out, of.cfg.names.out, of.cfg.dim, c.out_bias)


def _queries(of: Decoder, x: Tensor, mla: Mla, c: Attention) -> Tensor:
    """[T, H * (nope + rope)], by way of a vector of their own if they have a rank."""
    columns = c.heads * (mla.nope + mla.rope)
    if not mla.query_rank:
        return of.linear(x, of.cfg.names.q, columns)
    x = of.linear(x, "q_a_proj", mla.query_rank, c.bias)
    return of.linear(of.rms_norm(x, "q_a_layernorm", _EPS), "q_b_proj", columns)
