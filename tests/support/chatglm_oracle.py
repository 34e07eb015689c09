"""What ChatGLM of both generations computes, in float64, also for `graphllm validate --oracle`.

Written from GLM (Du et al. 2022), section 2, and from what the published modelling code computes;
transformers has neither any more. Nothing here knows graphllm.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

Weights = Mapping[str, np.ndarray]


def is_first(config: Mapping[str, Any]) -> bool:
    return "inner_hidden_size" in config


def oracle(config: Mapping[str, Any], weights: Weights, ids: Sequence[int]) -> np.ndarray:
    """Logits of a whole sequence, float64 [T, vocab], as `graphllm validate --oracle` asks."""
    wide = {name: value.astype(np.float64) for name, value in weights.items()}
    return (_first if is_first(config) else _second)(config, wide, list(ids))


def _first(c: Mapping[str, Any], w: Weights, ids: list[int]) -> np.ndarray:
    heads, eps, count = c["num_attention_heads"], c["layernorm_epsilon"], len(ids)
    before = ids[: ids.index(c["bos_token_id"])] if c["bos_token_id"] in ids else []
    ids_of_masks = (c["gmask_token_id"], c["mask_token_id"])
    masks = [before.index(each) for each in ids_of_masks if each in before]
    context, mask = (len(before), masks[0]) if masks else (0, 0)
    # In the prompt the first position counts; after it the second does, from 1. Without a mask or
    # sop, of which the published code makes nothing, there is but a text.
    at = [(p, 0) if p < context or not context else (mask, p - context + 1) for p in range(count)]
    seen = np.tril(np.ones((count, count), bool))
    seen[:, :context] = True
    alpha = (2 * c["num_layers"]) ** 0.5

    x = w["transformer.word_embeddings.weight"][ids]
    for i in range(c["num_layers"]):
        layer = f"transformer.layers.{i}."
        h = _layer_norm(w, layer + "input_layernorm", x, eps)
        joint = _linear(w, layer + "attention.query_key_value", h).reshape(count, heads, 3, -1)
        q, k, v = joint[:, :, 0], joint[:, :, 1], joint[:, :, 2]
        q, k = (_turned_by_two(t, at) for t in (q, k))
        # Divided by the layer's number before the softmax, and times it within: for half precision.
        scores = np.einsum("ihd,jhd->hij", q, k) / (q.shape[-1] ** 0.5 * (i + 1))
        mixed = np.einsum("hij,jhd->ihd", _softmax(np.where(seen, scores, -1e4) * (i + 1)), v)
        x = h * alpha + _linear(w, layer + "attention.dense", mixed.reshape(count, -1))
        h = _layer_norm(w, layer + "post_attention_layernorm", x, eps)
        up = _gelu(_linear(w, layer + "mlp.dense_h_to_4h", h))
        x = h * alpha + _linear(w, layer + "mlp.dense_4h_to_h", up)
    x = _layer_norm(w, "transformer.final_layernorm", x, eps)
    return x @ w.get("lm_head.weight", w["transformer.word_embeddings.weight"]).T


def _turned_by_two(x: np.ndarray, at: Sequence[tuple[int, int]]) -> np.ndarray:
    """Each half of a head [T, H, D] turned by one of the two positions, pairs half a half apart."""
    result = np.empty_like(x)
    quarter = x.shape[-1] // 4
    for t, pair in enumerate(at):
        for part, position in enumerate(pair):
            for i in range(quarter):
                angle = position * 10_000.0 ** (-i / quarter)
                a, b = 2 * part * quarter + i, (2 * part + 1) * quarter + i
                result[t, :, a] = x[t, :, a] * np.cos(angle) - x[t, :, b] * np.sin(angle)
                result[t, :, b] = x[t, :, b] * np.cos(angle) + x[t, :, a] * np.sin(angle)
    return result


def _second(c: Mapping[str, Any], w: Weights, ids: list[int]) -> np.ndarray:
    heads, width, eps = c["num_attention_heads"], c["kv_channels"], c["layernorm_epsilon"]
    count, norm = len(ids), _rms_norm if c.get("rmsnorm", True) else _layer_norm
    normed = c.get("apply_residual_connection_post_layernorm", False)
    base = 10_000.0 * c.get("rope_ratio", 1)
    seen = np.tril(np.ones((count, count), bool))

    x = w["transformer.embedding.word_embeddings.weight"][ids]
    for i in range(c["num_layers"]):
        layer = f"transformer.encoder.layers.{i}."
        h = norm(w, layer + "input_layernorm", x, eps)
        joint = _linear(w, layer + "self_attention.query_key_value", h)
        if c["multi_query_attention"]:
            groups = c["multi_query_group_num"]
            cuts = np.cumsum([heads * width, groups * width])
            q, k, v = (t.reshape(count, -1, width) for t in np.split(joint, cuts, axis=1))
            k, v = (np.repeat(t, heads // groups, axis=1) for t in (k, v))
        else:
            q, k, v = np.split(joint.reshape(count, heads, 3 * width), 3, axis=2)
        q, k = (_turned_in_half(t, base) for t in (q, k))
        scores = np.einsum("ihd,jhd->hij", q, k) / width**0.5
        mixed = np.einsum("hij,jhd->ihd", _softmax(np.where(seen, scores, -np.inf)), v)
        out = _linear(w, layer + "self_attention.dense", mixed.reshape(count, -1))
        x = (h if normed else x) + out
        h = norm(w, layer + "post_attention_layernorm", x, eps)
        gate, up = np.split(_linear(w, layer + "mlp.dense_h_to_4h", h), 2, axis=1)
        out = _linear(w, layer + "mlp.dense_4h_to_h", gate / (1 + np.exp(-gate)) * up)
        x = (h if normed else x) + out
    if c.get("post_layer_norm", True):
        x = norm(w, "transformer.encoder.final_layernorm", x, eps)
    head = "transformer.output_layer.weight"
    return x @ w.get(head, w["transformer.embedding.word_embeddings.weight"]).T


def _turned_in_half(x: np.ndarray, base: float) -> np.ndarray:
    """The first half of a head [T, H, D] turned, neighbours together; the rest is left."""
    result, turned = x.copy(), x.shape[-1] // 2
    for t in range(len(x)):
        for i in range(0, turned, 2):
            angle = t * base ** (-i / turned)
            z = (x[t, :, i] + 1j * x[t, :, i + 1]) * np.exp(1j * angle)
            result[t, :, i], result[t, :, i + 1] = z.real, z.imag
    return result


def _linear(w: Weights, name: str, x: np.ndarray) -> np.ndarray:
    return x @ w[name + ".weight"].T + w.get(name + ".bias", 0.0)


def _layer_norm(w: Weights, name: str, x: np.ndarray, eps: float) -> np.ndarray:
    centred = x - x.mean(axis=-1, keepdims=True)
    scaled = centred / np.sqrt((centred**2).mean(axis=-1, keepdims=True) + eps)
    return scaled * w[name + ".weight"] + w[name + ".bias"]


def _rms_norm(w: Weights, name: str, x: np.ndarray, eps: float) -> np.ndarray:
    return x / np.sqrt((x**2).mean(axis=-1, keepdims=True) + eps) * w[name + ".weight"]


def _softmax(x: np.ndarray) -> np.ndarray:
    e = np.exp(x - x.max(axis=-1, keepdims=True))
    return e / e.sum(axis=-1, keepdims=True)


def _gelu(x: np.ndarray) -> np.ndarray:
    return 0.5 * x * (1 + np.tanh(0.7978845608028654 * x * (1 + 0.044715 * x * x)))
