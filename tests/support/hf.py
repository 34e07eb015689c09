"""Transformers models carrying the same dequantised weights as a graphllm model: the oracle."""

from __future__ import annotations

import numpy as np

from graphllm.formats.quantization import Blocks
from graphllm.model.decoder import DecoderConfig
from graphllm.weights import Weights


def dequantised(weights: Weights, name: str) -> np.ndarray:
    """The weight ``name`` as float32, in its own shape."""
    meta = weights.meta(name)
    assert meta is not None
    raw = weights.raw(name)
    return Blocks(raw, meta.dtype, meta.shape[-1]).dequantise().reshape(meta.shape)


def gemma3(config: DecoderConfig, weights: Weights):
    """A float32 `Gemma3ForCausalLM` with eager attention."""
    import torch
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    a, layers = config.attention, config.layers
    wide = next(layer for layer in layers if not layer.window)
    near = next(layer for layer in layers if layer.window)
    hf_config = Gemma3TextConfig(
        vocab_size=config.vocab,
        hidden_size=config.dim,
        intermediate_size=config.mlp.intermediate_size,
        num_hidden_layers=len(layers),
        num_attention_heads=a.heads,
        num_key_value_heads=a.kv_heads,
        head_dim=a.head_dim,
        query_pre_attn_scalar=a.head_dim,
        sliding_window=near.window,
        layer_types=["sliding_attention" if c.window else "full_attention" for c in layers],
        rope_parameters={
            "full_attention": {"rope_type": "default", "rope_theta": wide.rope.base},
            "sliding_attention": {"rope_type": "default", "rope_theta": near.rope.base},
        },
        rms_norm_eps=config.norm.eps,
        max_position_embeddings=config.context,
        attn_implementation="eager",
    )
    with torch.device("meta"):
        model = Gemma3ForCausalLM(hf_config)
    state = {}
    for name in weights.names():
        value = dequantised(weights, name)
        # GGUF stores 1 + w of Gemma's norms, transformers w.
        state[name] = torch.from_numpy(value - 1 if name.endswith("norm.weight") else value)
    model.to_empty(device="cpu")
    missing, unexpected = model.load_state_dict(state, strict=False)
    assert not unexpected and set(missing) <= {"lm_head.weight"}, (missing, unexpected)
    model.tie_weights()
    _refill_buffers(model, hf_config)
    return model.eval()


def _refill_buffers(model, hf_config) -> None:
    """Rotary frequencies and the embedding's scale are made in constructors: make them again."""
    import torch
    from transformers.models.gemma3.modeling_gemma3 import Gemma3RotaryEmbedding

    model.model.rotary_emb = Gemma3RotaryEmbedding(hf_config)
    embed = model.model.embed_tokens
    embed.embed_scale = torch.tensor(hf_config.hidden_size**0.5)


def returned(model, ids: list[int]) -> dict[str, np.ndarray]:
    """What every module of a causal language model returns for the ids, by its name, a row a token:
    [T, ...]."""
    import torch

    found: dict[str, np.ndarray] = {}

    def note(name: str):
        def hook(module, args, out) -> None:
            out = out[0] if isinstance(out, tuple) else getattr(out, "last_hidden_state", out)
            if isinstance(out, torch.Tensor) and out.shape[0] == 1:
                rows = out[0].transpose(0, 1) if out.ndim == 4 and _by_head(name) else out[0]
                found[name] = rows.numpy().copy()

        return hook

    hooks = [m.register_forward_hook(note(name)) for name, m in model.named_modules() if name]
    with torch.no_grad():
        model(torch.tensor([ids]))
    for hook in hooks:
        hook.remove()
    return found


def _by_head(name: str) -> bool:
    """Whether a module's result is [1, heads, T, width]: Gemma norms heads that stand so."""
    return name.endswith(("q_norm", "k_norm"))
