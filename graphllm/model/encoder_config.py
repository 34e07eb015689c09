"""Parts that encoders share: configuration keys, names, heads, and rules of their files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from ..weights.weight_rules import WeightRule
from .config import ACTIVATIONS, Attention, EncoderConfig, Head, Layer, Mlp, ModuleNames, Norm
from .config_keys import mha_sizes
from .keys import Keys

SEQUENCE, TOKEN, MASKED_LM = "SequenceClassification", "TokenClassification", "MaskedLM"
TOKEN_HEAD = Head("classifier", "classifier.bias")


def bert_config(
    keys: Keys,
    names: ModuleNames,
    heads: Mapping[str, Head],
    position_offset: int = 0,
    token_types: bool = True,
) -> EncoderConfig:
    """Return the configuration of an encoder like BERT, read from the keys that BERT has.

    Args:
        keys: Configuration.
        names: Names of the modules, but for that of the masked language model's linear.
        heads: Heads by the end of the name of transformers' class.
        position_offset: Position of the first token.
        token_types: Whether the model has token types; the tensors of a GGUF file state it.
    """
    dim, count, width = mha_sizes(keys)
    act = keys.choice("hidden_act", ACTIVATIONS, "gelu")
    keys.require("attention.causal", False)  # of GGUF files
    if keys.gguf:
        token_types = keys.has("type_vocab_size")
    return EncoderConfig(
        vocab=keys.positive("vocab_size"),
        dim=dim,
        context=keys.positive("max_position_embeddings", 512) - position_offset,
        layers=(Layer(None),) * keys.layers(),
        attention=Attention(count, count, width, bias=True, out_bias=True),
        mlp=Mlp(keys.positive("intermediate_size"), act, gated=False, bias=True),
        norm=Norm(keys.eps("layer_norm_eps", 1e-12), "layer"),
        names=replace(names, head=heads[MASKED_LM].out),
        positions="learned",
        position_offset=position_offset,
        tied=keys("tie_word_embeddings", bool, True),
        token_types=keys.positive("type_vocab_size", 2) if token_types else 0,
        heads={**heads, MASKED_LM: _with_stored_bias(keys, heads[MASKED_LM])},
    )


def _with_stored_bias(keys: Keys, masked: Head) -> Head:
    """Return the head of a masked language model with the bias that transformers adds.

    A file may have the bias of the linear, or a parameter that transformers ties to it, or both. If
    both exist and differ, transformers does not tie them and adds the bias of the linear.
    """
    own = f"{masked.out}.bias"
    return replace(masked, bias=own) if masked.bias and own in {*keys.tensors} else masked


def bert_names(model: str) -> ModuleNames:
    """Return the names of BERT's modules; ``model``: prefix of all of them."""
    return ModuleNames(
        model=model, embed="embeddings.word_embeddings", embed_norm="embeddings.LayerNorm",
        positions="embeddings.position_embeddings", token_types="embeddings.token_type_embeddings",
        layers="encoder.layer", norm="", attn="attention", pre_attn_norm="", q="self.query",
        k="self.key", v="self.value", out="output.dense", mlp="", pre_mlp_norm="",
        post_attn_norm="attention.output.LayerNorm", up="intermediate.dense", down="output.dense",
        post_mlp_norm="output.LayerNorm",
    )  # fmt: skip


def bert_heads(keys: Keys, model: str, norm: str = "LayerNorm") -> dict[str, Head]:
    """Return the heads of BERT.

    Args:
        keys: Configuration.
        model: Prefix of the model's names, where the pooler is.
        norm: Name of the layer norm of the masked language model.
    """
    cls, act = "cls.predictions", keys.choice("hidden_act", ACTIVATIONS, "gelu")
    return {
        SEQUENCE: Head(
            "classifier", "classifier.bias", f"{model}.pooler.dense", act="tanh", pooling="cls"
        ),
        TOKEN: TOKEN_HEAD,
        MASKED_LM: Head(
            f"{cls}.decoder", f"{cls}.bias", f"{cls}.transform.dense", act=act,
            norm=f"{cls}.transform.{norm}",
        ),
    }  # fmt: skip


def roberta_heads(act: str = "tanh") -> dict[str, Head]:
    """Return the heads of RoBERTa; ``act``: activation of the classifier of sequences."""
    return {
        SEQUENCE: Head(
            "classifier.out_proj", "classifier.out_proj.bias", "classifier.dense", act=act,
            pooling="cls",
        ),
        TOKEN: TOKEN_HEAD,
        MASKED_LM: Head(
            "lm_head.decoder", "lm_head.bias", "lm_head.dense", norm="lm_head.layer_norm"
        ),
    }  # fmt: skip


def encoder_rules(config: EncoderConfig, *unused: str) -> tuple[WeightRule, ...]:
    """Return the rules of an encoder's files, whose names may lack the prefix of the model.

    Args:
        config: Configuration with the head to compute.
        unused: Modules to leave out, unless they are parts of that head.
    """
    model, head = config.names.model, config.head
    used = [f"{name.removeprefix(f'{model}.')}." for name in (head.modules if head else ())]
    left_out = [name for name in unused if not any(own.startswith(f"{name}.") for own in used)]
    masked = config.heads.get(MASKED_LM)
    # Two names of one bias, see `_with_stored_bias`.
    roots = {masked.out, masked.out.removesuffix(".decoder")} if masked else ()
    twice = [f"{root}.bias" for root in roots if masked and masked.bias != f"{root}.bias"]
    modules = (name for each in config.heads.values() for name in each.modules)
    tops = [*dict.fromkeys([model, *(name.partition(".")[0] for name in modules)])]
    own = [(f"{top}.{{*}}", f"{top}.{{*}}") for top in tops] + [(f"{model}.{{*}}", "{*}")]
    return (
        *(WeightRule("", f"{root}{name}.{{*}}") for name in left_out for root in ("", f"{model}.")),
        *(WeightRule("", name) for name in twice),
        *(WeightRule("", f"{root}embeddings.position_ids") for root in ("", f"{model}.")),
        *(WeightRule(f"{new}.LayerNorm.{name}", f"{old}.LayerNorm.{tensorflow}")
          for new, old in own for name, tensorflow in (("weight", "gamma"), ("bias", "beta"))),
        *(WeightRule(new, old) for new, old in own),
    )  # fmt: skip
