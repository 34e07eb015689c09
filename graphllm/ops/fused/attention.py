"""Attention whose result is quantised; fused ops before it are in rope_attention.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ...graph.dtype import F16, F32, I32, DType
from ...graph.fused_op import fused_op
from ...graph.op import Arg, Proposal, Sample, Samples, Users, get, grid
from ...graph.tensor import Tensor


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
