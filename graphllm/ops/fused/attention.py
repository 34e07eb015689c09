"""Fused ops around attention: rope and writes to the KV cache before it, quantization after it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ...graph.dtype import F16, F32, I32, DType
from ...graph.fused_op import fused_op
from ...graph.op import Arg, Proposal, Sample, Samples, Users, get, grid
from ...graph.tensor import Tensor
from .common import LAYOUTS, is_op


def _rotated(node: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    """Return the input of a rope, and the weight of the norm before it, if any."""
    if not is_op(node, "rope"):
        return None, None
    assert node is not None
    x = node.src[0]
    if is_op(x, "rms_norm"):
        return x.src  # type: ignore[union-attr,return-value]
    return x, None


def _propose_rope_write(node: Tensor, users: Users) -> Proposal | None:
    q, k_pool, v_pool = node.src[:3]
    if not (is_op(k_pool, "kv_write") and is_op(v_pool, "kv_write")):
        return None
    assert q is not None and k_pool is not None and v_pool is not None
    rotated = k_pool.src[1]
    (queries, q_norm), (keys, k_norm) = _rotated(q), _rotated(rotated)
    if queries is None or keys is None:
        return None
    eps = 0.0
    if q_norm is not None:
        assert q.src[0] is not None
        eps = q.src[0].attrs["eps"]
    operands = (queries, keys, v_pool.src[1], q.src[1], k_pool.src[0], v_pool.src[0],
                k_pool.src[2], q_norm, k_norm, q.src[2])  # fmt: skip
    return operands, {**q.attrs, "eps": eps}


def _parts(name: str, *src: Tensor | None, **attrs: Any) -> Any:
    """Return the results of the decomposition of a fused op."""
    fusion = get(name).fusion
    assert fusion is not None
    return fusion.build(*src, **attrs)


def _propose_rope_attention(node: Tensor, users: Users) -> Proposal | None:
    proposal = _propose_rope_write(node, users)
    if proposal is None:
        return None
    (q, k, v, pos, k_pool, v_pool, slot, *rest), rope = proposal
    operands = (q, k, v, pos, k_pool, v_pool, slot, *node.src[3:6], *rest, *node.src[6:])
    return operands, {**rope, "rope_scale": rope["scale"], **node.attrs}


def _propose_rope_attention_quantise(node: Tensor, users: Users) -> Proposal | None:
    assert node.src[0] is not None
    attended = node.src[0].base
    proposal = _propose_rope_attention(attended, users) if attended.op == "attention" else None
    return proposal and (proposal[0], {**proposal[1], "dtype": node.attrs["dtype"]})


def _token_sample(
    heads: int, kv: int, width: int, past: int, style: str, norm: bool, factors: bool,
    layout: str = "contiguous", dtype: str = "", written: bool = True,
) -> Sample:  # fmt: skip
    """A step of one token, whose key is the last one; ``factors``: with a window, too."""
    block, blocks = 16, 20
    table = np.random.default_rng(past).permutation(blocks)
    own = int(table[past // block]) * block + past % block if written else -1
    pool = Arg((block * blocks, kv, width), F16, leaf="state")
    vectors = (Arg((1, n, width), layout=layout) for n in (heads, kv, kv))
    norms = (Arg((width,), leaf="weight"), Arg((width,), leaf="weight")) if norm else (None, None)
    divisors = Arg((width // 2,), leaf="weight", make=lambda g, s: g.uniform(1, 9, s))
    args = (
        *vectors, Arg((1,), I32, make=lambda g, s: np.array([past])), pool, pool,
        Arg((1,), I32, make=lambda g, s: np.array([own])),
        Arg((2,), I32, make=lambda g, s: np.array([0, 1])),
        Arg((1,), I32, make=lambda g, s: np.array([past + 1])),
        Arg((1, blocks), I32, make=lambda g, s: table[None]),
        *norms, divisors if factors else None, Arg((heads,), leaf="weight") if norm else None,
    )  # fmt: skip
    attrs = {
        "eps": 1e-6 if norm else 0.0, "base": 1e4, "dims": 0, "style": style, "rope_scale": 1.0,
        "attention_factor": 1.25, "scale": width**-0.5, "block": block, "causal": True,
        "window": 70 if factors else 0, "softcap": 0.0, "skip_prefix": False,
        **({"dtype": dtype} if dtype else {}),
    }  # fmt: skip
    return Sample(args, attrs)


@fused_op(
    "rope_attention_quantise",
    anchor="quantise_act",
    propose=_propose_rope_attention_quantise,
    writes=lambda count: (4, 5),
    tol={"f32": 1e-3, "f16": 1e-3},
    samples=Samples(lambda: [
        *grid(_token_sample, heads=(6,), kv=(2,), width=(64,), past=(0, 63, 200), style=("half",),
              norm=(False, True), factors=(False,), layout=LAYOUTS, dtype=("a8_32",)),
        *grid(_token_sample, heads=(4,), kv=(1, 4), width=(256,), past=(100,), style=("half",),
              norm=(True,), factors=(True,), dtype=("a8_256",)),
        *grid(_token_sample, heads=(8,), kv=(4,), width=(128,), past=(90,),
              style=("interleaved",), norm=(True,), factors=(False,), dtype=("a8_row",)),
    ]),
)  # fmt: skip
def rope_attention_quantise(
    q: Tensor, k: Tensor, v: Tensor, pos: Tensor, k_pool: Tensor, v_pool: Tensor, slot: Tensor,
    q_start: Tensor, kv_len: Tensor, table: Tensor, q_norm: Tensor | None = None,
    k_norm: Tensor | None = None, factors: Tensor | None = None, sinks: Tensor | None = None,
    slopes: Tensor | None = None, prefix_len: Tensor | None = None,
    position_bias: Tensor | None = None, *, eps: float, base: float, dims: int, style: str,
    rope_scale: float, attention_factor: float, scale: float, block: int, causal: bool,
    window: int, softcap: float, skip_prefix: bool, dtype: str,
) -> Any:  # fmt: skip
    """`rope_attention` with heads concatenated and quantised, as input of the output linear."""
    attended, *pools = _parts(
        "rope_attention", q, k, v, pos, k_pool, v_pool, slot, q_start, kv_len, table, q_norm,
        k_norm, factors, sinks, slopes, prefix_len, position_bias, eps=eps, base=base, dims=dims,
        style=style, rope_scale=rope_scale, attention_factor=attention_factor, scale=scale,
        block=block, causal=causal, window=window, softcap=softcap, skip_prefix=skip_prefix,
    )  # fmt: skip
    return get("quantise_act")(attended.flatten(), dtype=dtype), *pools


@fused_op(
    "rope_attention",
    anchor="attention",
    propose=_propose_rope_attention,
    writes=lambda count: (4, 5),
    tol={"f32": 1e-3, "f16": 1e-3},
    samples=Samples(lambda: [
        *grid(_token_sample, heads=(6, 20), kv=(2,), width=(128,), past=(0, 5, 64, 319),
              style=("half", "interleaved"), norm=(False, True), factors=(False,),
              layout=LAYOUTS),
        *grid(_token_sample, heads=(3,), kv=(1, 3), width=(64, 256), past=(0, 250),
              style=("half",), norm=(True,), factors=(True,)),
        *grid(_token_sample, heads=(4,), kv=(2,), width=(64,), past=(40,), style=("half",),
              norm=(False,), factors=(False,), written=(False,)),
    ]),
)  # fmt: skip
def rope_attention(
    q: Tensor, k: Tensor, v: Tensor, pos: Tensor, k_pool: Tensor, v_pool: Tensor, slot: Tensor,
    q_start: Tensor, kv_len: Tensor, table: Tensor, q_norm: Tensor | None = None,
    k_norm: Tensor | None = None, factors: Tensor | None = None, sinks: Tensor | None = None,
    slopes: Tensor | None = None, prefix_len: Tensor | None = None,
    position_bias: Tensor | None = None, *, eps: float, base: float, dims: int, style: str,
    rope_scale: float, attention_factor: float, scale: float, block: int, causal: bool,
    window: int, softcap: float, skip_prefix: bool,
) -> Any:  # fmt: skip
    """`rope_write`, then the attention that reads its results.

    q [T, H, D], k, v [T, Hkv, D] -> [T, H, D], and the pools. ``rope_scale`` is the ``scale`` of
    `rope`, and ``scale`` that of `attention`.
    """
    q, *pools = _parts(
        "rope_write", q, k, v, pos, k_pool, v_pool, slot, q_norm, k_norm, factors, eps=eps,
        base=base, dims=dims, style=style, scale=rope_scale, attention_factor=attention_factor,
    )  # fmt: skip
    attended = get("attention")(
        q, *pools, q_start, kv_len, table, sinks, slopes, prefix_len, position_bias, scale=scale,
        block=block, causal=causal, window=window, softcap=softcap, skip_prefix=skip_prefix,
    )  # fmt: skip
    return attended, *pools


def _slots(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    slot = rng.permutation(24)[: shape[0]]
    slot[2::3] = -1
    return slot


def _rope_sample(
    rows: int, heads: int, width: int, style: str, dims: int, norm: bool, kind: DType,
    factors: bool, layout: str,
) -> Sample:  # fmt: skip
    kv = max(1, heads // 2)
    pool = Arg((24, kv, width), kind, leaf="state")
    vectors = (Arg(("T", n, width), layout=layout) for n in (heads, kv, kv))
    norms = (Arg((width,), leaf="weight"), Arg((width,), leaf="weight")) if norm else (None, None)
    frequency_factors = Arg(
        ((dims or width) // 2,), leaf="weight", make=lambda g, s: g.uniform(1, 9, s)
    )
    args = (*vectors, Arg(("T",), I32), pool, pool, Arg(("T",), I32, make=_slots), *norms,
            frequency_factors if factors else None)  # fmt: skip
    attrs = {"base": 1e4, "dims": dims, "style": style, "scale": 1.0, "eps": 1e-6 if norm else 0.0,
             "attention_factor": 1.25 if factors else 1.0}  # fmt: skip
    return Sample(args, attrs, {"T": rows})


@fused_op(
    "rope_write",
    anchor="attention",
    propose=_propose_rope_write,
    writes=lambda count: (4, 5),
    tol={"f32": 1e-5, "f16": 1e-3},
    samples=Samples(lambda: [
        *grid(_rope_sample, rows=(0, 1, 7), heads=(1, 6), width=(64,), style=("half",), dims=(0,),
              norm=(False, True), kind=(F32, F16), factors=(False,), layout=LAYOUTS),
        *grid(_rope_sample, rows=(0, 1, 7), heads=(3,), width=(80,), style=("half", "interleaved"),
              dims=(0, 50), norm=(False, True), kind=(F16,), factors=(True,), layout=LAYOUTS),
    ]),
)  # fmt: skip
def rope_write(
    q: Tensor, k: Tensor, v: Tensor, pos: Tensor, k_pool: Tensor, v_pool: Tensor, slot: Tensor,
    q_norm: Tensor | None = None, k_norm: Tensor | None = None, factors: Tensor | None = None, *,
    eps: float, base: float, dims: int, style: str, scale: float, attention_factor: float,
) -> Any:  # fmt: skip
    """Apply norms (if given) and rope to queries and keys; write keys and values to their pools.

    q [T, H, D], k, v [T, Hkv, D] -> q [T, H, D], and the pools.
    """
    rope = {
        "base": base,
        "dims": dims,
        "style": style,
        "scale": scale,
        "attention_factor": attention_factor,
    }
    q = q if q_norm is None else get("rms_norm")(q, q_norm, eps=eps)
    k = k if k_norm is None else get("rms_norm")(k, k_norm, eps=eps)
    q, k = get("rope")(q, pos, factors, **rope), get("rope")(k, pos, factors, **rope)
    write = get("kv_write")
    return q, write(k_pool, k, slot), write(v_pool, v, slot)


# ------------------------------------------------------------------------- quantised attention


def _propose_quantise_of(op: str) -> Callable[[Tensor, Users], Proposal | None]:
    """Return the proposal of an op whose result is quantised."""

    def propose(node: Tensor, users: Users) -> Proposal | None:
        assert node.src[0] is not None
        attended = node.src[0].base
        if attended.op != op:
            return None
        return attended.src, {**attended.attrs, "dtype": node.attrs["dtype"]}

    return propose


def _attention_sample(
    rows: int, heads: int, width: int, dtype: str, window: int, extras: bool = False,
    latent: int = 0,
) -> Sample:  # fmt: skip
    """``extras``: with sinks, slopes and a prefix; ``latent``: columns of keys after the values."""
    past, kv = 70, max(1, heads // 3)
    optional = (
        Arg((heads,), leaf="weight"), Arg((heads,), leaf="weight"),
        Arg(("S",), I32, make=lambda g, s: np.array([past + rows // 2])),
    )  # fmt: skip
    args = (
        Arg(("T", heads, width + latent)), Arg((128, kv, width + latent), F16),
        Arg((128, kv, width), F16, "leading" if latent else "contiguous"),
        Arg(("Q",), I32, make=lambda g, s: np.array([0, rows])),
        Arg(("S",), I32, make=lambda g, s: np.array([past + rows])),
        Arg(("S", 8), I32, make=lambda g, s: g.permutation(8)[None]),
        *(optional if extras else ()),
    )  # fmt: skip
    attrs = {"scale": width**-0.5, "block": 16, "causal": True, "window": window, "softcap": 0.0,
             "skip_prefix": False}  # fmt: skip
    return Sample(args, {**attrs, "dtype": dtype}, {"T": rows, "S": 1, "Q": 2})


@fused_op(
    "attention_quantise",
    anchor="quantise_act",
    propose=_propose_quantise_of("attention"),
    tol={"f32": 1e-3},
    samples=Samples(lambda: [
        *grid(_attention_sample, rows=(0, 1, 7, 40), heads=(3, 6), width=(64,), dtype=("a8_32",),
              window=(0, 9)),
        *grid(_attention_sample, rows=(0, 1, 40), heads=(1, 4), width=(256,), dtype=("a8_256",),
              window=(0,)),
        *grid(_attention_sample, rows=(1, 5), heads=(6,), width=(128,), dtype=("a8_256",),
              window=(0,)),
        *grid(_attention_sample, rows=(1, 40), heads=(3,), width=(64,), dtype=("a8_32",),
              window=(0, 50), extras=(True,)),
        *grid(_attention_sample, rows=(1, 20), heads=(3,), width=(512,), dtype=("a8_256",),
              window=(0,), latent=(64,)),
        *grid(_attention_sample, rows=(0, 1, 7), heads=(6,), width=(64,), window=(0,),
              dtype=("a8_row", "f8_row", "f8_128")),
    ]),
)  # fmt: skip
def attention_quantise(
    q: Tensor, k: Tensor, v: Tensor, q_start: Tensor, kv_len: Tensor, table: Tensor,
    sinks: Tensor | None = None, slopes: Tensor | None = None, prefix_len: Tensor | None = None,
    position_bias: Tensor | None = None, *, scale: float, block: int, causal: bool, window: int,
    softcap: float, skip_prefix: bool, dtype: str,
) -> Any:  # fmt: skip
    """Attention with heads concatenated and quantised, as input of the output linear."""
    attended = get("attention")(
        q, k, v, q_start, kv_len, table, sinks, slopes, prefix_len, position_bias, scale=scale,
        block=block, causal=causal, window=window, softcap=softcap, skip_prefix=skip_prefix,
    )  # fmt: skip
    return get("quantise_act")(attended.flatten(), dtype=dtype)


def _packed_sample(
    lengths: tuple[int, ...], heads: int, width: int, dtype: str, kind: DType, biased: bool = False
) -> Sample:  # fmt: skip
    rows = (Arg(("T", count, width), kind) for count in (heads, heads // 3, heads // 3))
    q_start = Arg(("Q",), I32, make=lambda g, s: np.cumsum([0, *lengths]))
    bias = (Arg((heads, 9), leaf="weight"),) if biased else ()
    attrs = {"scale": width**-0.5, "window": 0, "dtype": dtype}
    return Sample((*rows, q_start, *bias), attrs, {"T": sum(lengths), "Q": len(lengths) + 1})


@fused_op(
    "packed_attention_quantise",
    anchor="quantise_act",
    propose=_propose_quantise_of("packed_attention"),
    tol={"f32": 1e-3},
    samples=Samples(lambda: [
        *grid(_packed_sample, lengths=((), (1,), (5, 0, 33)), heads=(3, 6), width=(64,),
              dtype=("f16", "a8_32"), kind=(F32, F16)),
        *grid(_packed_sample, lengths=((7, 50),), heads=(12,), width=(20, 32),
              dtype=("f16", "bf16"), kind=(F16,), biased=(True,)),
    ]),
)  # fmt: skip
def packed_attention_quantise(
    q: Tensor, k: Tensor, v: Tensor, q_start: Tensor, position_bias: Tensor | None = None, *,
    scale: float, window: int, dtype: str,
) -> Any:  # fmt: skip
    """Packed attention with heads concatenated and quantised, as input of the output linear."""
    attended = get("packed_attention")(q, k, v, q_start, position_bias, scale=scale, window=window)
    return get("quantise_act")(attended.flatten(), dtype=dtype)
