"""Configuration and weight rules of BART, and of encoder-decoders with its keys and names."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ..weights.weight_rules import Rows, View, WeightRule
from .config import (
    ACTIVATIONS,
    Attention,
    EncoderConfig,
    EncoderDecoderConfig,
    Layer,
    Mlp,
    ModuleNames,
    Norm,
)
from .config_keys import Keys
from .shared_embedding import SIDES, embedding_rules, separate_embeddings, tied_embedding

LOGITS_BIAS = "final_logits_bias"
UNUSED = (
    "dropout", "activation_dropout", "encoder_layerdrop", "decoder_layerdrop", "init_std",
    "gradient_checkpointing", "force_bos_token_to_be_generated", "classif_dropout", "prefix",
    # Of older versions; transformers does not read them, and the model's family implies them.
    "static_position_embeddings", "extra_pos_embeddings", "add_bias_logits", "save_step",
)  # fmt: skip


def bart_config(
    keys: Keys,
    *,
    pre_norm: bool,
    embed_norm: bool,
    positions: str = "learned",
    first_position: int = 0,
    act: str = "gelu",
    scaled: bool = False,
    logits_bias: bool = True,
) -> EncoderDecoderConfig:
    """Return the configuration of an encoder-decoder with BART's keys.

    Args:
        keys: configuration.
        pre_norm: whether norms are before attention and MLP, and after the last layer, rather than
            after the sums.
        embed_norm: whether the embeddings are normed.
        positions: kind of the positions, see `config.ModelConfig`.
        first_position: sinusoidal position of a first token.
        act: default of ``activation_function``.
        scaled: default of ``scale_embedding``.
        logits_bias: whether the logits have a bias.
    """
    keys.ignore(*UNUSED, "num_hidden_layers")
    keys.require("tie_encoder_decoder", False)
    keys.require("normalize_before", pre_norm)
    keys.require("add_final_layer_norm", pre_norm)
    keys.require("normalize_embedding", embed_norm)
    vocab, dim = keys.positive("vocab_size"), keys.positive("d_model")
    act = keys.choice("activation_function", ACTIVATIONS, act)
    scale = dim**0.5 if keys("scale_embedding", bool, scaled) else 1.0
    context = keys.positive("max_position_embeddings", 1024)
    # Positions of targets count from one, see `EncoderDecoder.embed`: a table has one more row, the
    # first sinusoidal position is one less.
    shift = 1 if positions == "learned" else -1
    tied = keys("tie_word_embeddings", bool, True)
    shared, copies = tied_embedding(keys, "model.") if tied else ("", ())
    embeds = dict.fromkeys(SIDES, shared) if tied else separate_embeddings(keys, "model.")

    def common(side: str) -> dict[str, Any]:
        source, heads = side == "encoder", keys.positive(f"{side}_attention_heads")
        if dim % heads:
            raise keys.error(f"{side}_attention_heads", f"= {heads} does not divide {dim}")
        return {
            "vocab": vocab, "dim": dim, "context": context, "norm": Norm(1e-5, "layer"),
            "layers": (Layer(None),) * keys.layers(f"{side}_layers"),
            "attention": Attention(
                heads, heads, dim // heads, bias=True, out_bias=True, skip_prefix=not source
            ),
            "mlp": Mlp(keys.positive(f"{side}_ffn_dim"), act, gated=False, bias=True),
            "names": _names(side, embeds[side], pre_norm, embed_norm),
            "embed_scale": scale, "positions": positions,
            "position_offset": first_position + (0 if source else shift),
        }  # fmt: skip

    return EncoderDecoderConfig(
        **common("decoder"),
        encoder=EncoderConfig(**common("encoder")),
        tied=tied,
        logits_bias=LOGITS_BIAS if logits_bias else "",
        embed_copies=copies,
    )


def _names(side: str, embed: str, pre_norm: bool, embed_norm: bool) -> ModuleNames:
    """Return the names of the modules of a side."""
    norms = {"attn": "self_attn_layer_norm", "cross": "encoder_attn_layer_norm",
             "mlp": "final_layer_norm"}  # fmt: skip
    own, other = ("pre", "post") if pre_norm else ("post", "pre")
    return ModuleNames(
        embed=embed, layers=f"{side}.layers", positions=f"{side}.embed_positions",
        embed_norm=f"{side}.layernorm_embedding" if embed_norm else "", out="out_proj",
        cross_attn="encoder_attn",
        norm=f"{side}.layer_norm" if pre_norm else "", mlp="", up="fc1", down="fc2",
        **{f"{own}_{part}_norm": name for part, name in norms.items()},
        **{f"{other}_{part}_norm": "" for part in norms},
    )  # fmt: skip


def bart_rules(
    offset: int | None = None,
) -> Callable[[EncoderDecoderConfig], tuple[WeightRule, ...]]:
    """Return the weight rules by configuration: the logits' bias is a vector.

    ``offset``: rows before the first position in the tables of positions; None: they are left out,
    because the model computes them.
    """
    tables = {side: f"model.{side}.embed_positions.weight" for side in SIDES}
    if offset is None:
        positions = [WeightRule("", n + s) for n in tables.values() for s in ("", "s")]
    else:
        views = (lambda table: table[offset:], lambda table: _one_before(table, offset))
        positions = [WeightRule(n, n, Rows(v)) for n, v in zip(tables.values(), views, strict=True)]
    bias = WeightRule(LOGITS_BIAS, LOGITS_BIAS, View(lambda row: row[0]))
    return lambda config: (bias, *positions, *embedding_rules(config, "model."))


def _one_before(table: np.ndarray, offset: int) -> np.ndarray:
    """Return the rows of positions, and a row before them, which no token has."""
    return table[offset - 1 :] if offset else np.concatenate([table[:1], table])
