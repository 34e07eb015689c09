"""GGUF's keys of encoders and of T5, for Hugging Face directories.

Source: llama.cpp's converter (`conversion/bert.py`, `t5.py`).
"""

from __future__ import annotations

from typing import Any

from ..checkpoints.gguf import POOLINGS
from ..checkpoints.hf_directory import HfCheckpoint, read_json
from ..checkpoints.sentence_transformers import read_settings
from ..errors import ConfigError, join_names, quote
from ..model.config import EncoderConfig, EncoderDecoderConfig, ModelConfig

_CONTEXT = 512  # of a T5 that states none: llama.cpp's converter has this number
_LEFT_OUT = ("forced_bos_token_id", "forced_eos_token_id", "bad_words_ids")


def family_keys(file: HfCheckpoint, config: ModelConfig, notes: list[str]) -> dict[str, Any]:
    """Return the keys of a model that is no decoder, without the name of the architecture.

    Args:
        file: The directory.
        config: Its configuration.
        notes: Gets a line for each setting that GGUF has no key for.

    Raises:
        ConfigError: GGUF cannot state a setting without which the results would differ.
    """
    keys = {
        "embedding_length": config.dim,
        "feed_forward_length": config.mlp.intermediate_size,
        "attention.head_count": config.attention.heads,
        "attention.layer_norm_epsilon": float(config.norm.eps),
    }
    if isinstance(config, EncoderDecoderConfig):
        return keys | _t5_keys(file, config, notes)
    assert isinstance(config, EncoderConfig)
    return keys | _encoder_keys(config)


def _encoder_keys(config: EncoderConfig) -> dict[str, Any]:
    keys: dict[str, Any] = {
        "block_count": len(config.layers),
        "context_length": config.context,
        "attention.causal": False,
    }
    rope, heads = config.layers[0].rope, config.attention
    if rope is not None:
        keys["rope.freq_base"] = float(rope.base)
    if heads.heads * heads.head_dim != config.dim:
        keys |= dict.fromkeys(("attention.key_length", "attention.value_length"), heads.head_dim)
    return keys


def pooling_keys(file: HfCheckpoint, config: ModelConfig, notes: list[str]) -> dict[str, Any]:
    """Return the pooling of a directory of sentence-transformers; empty for others.

    See `family_keys` for the arguments. ConfigError: GGUF cannot state how texts become vectors.
    """
    where = file.path / "modules.json"
    if not where.is_file():
        return {}
    settings = read_settings(file)
    numbers = {name: number for number, name in POOLINGS.items()}
    if len(settings.pooling) > 1 or settings.pooling[0] not in numbers:
        found = join_names(settings.pooling, quote)
        raise ConfigError(f"{where}: pooling {found} cannot be written as GGUF")
    for stated, name in ((settings.dense, "a Dense module"), (settings.lowercase, "do_lower_case")):
        if stated:
            raise ConfigError(f"{where}: {name} cannot be written as GGUF")
    if settings.max_length is not None and settings.max_length < config.context:
        notes.append(
            f"the maximum length of {settings.max_length} tokens is left out: GGUF has no key for "
            f"it, so texts are truncated to {config.context} tokens"
        )
    if any(settings.prompts.values()):
        names = join_names(list(settings.prompts), quote)
        notes.append(f"the prompts {names} are left out: GGUF has no key for them")
    return {"pooling_type": numbers[settings.pooling[0]]}


def _t5_keys(file: HfCheckpoint, config: EncoderDecoderConfig, notes: list[str]) -> dict[str, Any]:
    path, a = file.path / "generation_config.json", config.attention
    settings = read_json(path) if path.is_file() else file.metadata
    values = {**file.metadata, **settings}
    start, context = values.get("decoder_start_token_id"), values.get("n_positions", _CONTEXT)
    if type(start) is not int or not 0 <= start < config.vocab:
        raise ConfigError(f"{file.path / 'config.json'}: decoder_start_token_id = {quote(start)}")
    if type(context) is not int or not 0 < context < 2**31:
        raise ConfigError(f"{file.path / 'config.json'}: n_positions = {quote(context)}")
    if lost := [name for name in _LEFT_OUT if settings.get(name)]:
        names = join_names(lost, str)
        notes.append(f"{names} of the directory is left out: GGUF has no key for it")
    assert config.encoder is not None
    return {
        "context_length": context,
        "block_count": len(config.encoder.layers),
        "decoder_block_count": len(config.layers),
        "decoder_start_token_id": start,
        "attention.key_length": a.head_dim,
        "attention.value_length": a.head_dim,
        "attention.layer_norm_rms_epsilon": float(config.norm.eps),
        "attention.relative_buckets_count": a.bias_buckets,
    }
