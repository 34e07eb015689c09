"""NumPy bodies of ops against independent formulas (`oracles`), published vectors, and torch."""

from __future__ import annotations

import sys

import numpy as np
import pytest
from cases import cases, mismatch, plain
from oracles import ORACLES

from graphllm import ops
from graphllm.errors import GraphError
from graphllm.graph.tensor import Var, feed, state, weight
from graphllm.ops.random_numbers import XTC, gumbel, philox4x32, uniform

OPS = sorted(n for n, op in ops.registry().items() if not op.fusion)  # test_fusion has those
# NumPy bodies on floats must meet float32 rounding, not the looser tolerance of integer kernels.
TIGHT = 1e-5


@pytest.mark.parametrize("name", OPS)
def test_oracle(name):
    wrong = []
    for case in cases(name):
        got, states = case.expected()
        own = case.own_operands()
        want = ORACLES[name](*own, **case.sample.attrs)
        tolerance = min(case.tolerance, TIGHT)
        problem = mismatch(got, plain(want).astype(got.dtype), tolerance)
        for label, after in states.items():
            problem = problem or mismatch(after, plain(own[case.states[label]]), tolerance)
        if problem:
            wrong.append(f"{case.sample.label}: {problem}")
    assert not wrong, "\n".join([f"{len(wrong)} samples are wrong", *wrong[:8]])


def test_philox_known_answers():
    """Random123's kat_vectors, philox4x32 with 10 rounds."""
    every = 0xFFFFFFFF
    vectors = [
        ((0,) * 4, (0,) * 2, "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        ((every,) * 4, (every,) * 2, "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            "d16cfe09 94fdcceb 5001e420 24126ea1",
        ),
    ]
    for counter, key, words in vectors:
        got = philox4x32(np.array(counter, np.uint64), np.array(key, np.uint64))
        assert " ".join(f"{w:08x}" for w in got) == words


def test_uniform_depends_on_seed_position_sample_and_item_only():
    """Numbers of the first items do not depend on how many there are."""
    keys = [(5, 0, 0), (5, 1, 0), (5, 0, 1), (-1, 0, 0), (2**40, 0, 0), (5, 0, 0, 6, XTC)]
    drawn = [uniform(*key[:3], 6, *key[4:]) for key in keys]
    for key, numbers in zip(keys, drawn):
        assert (uniform(*key[:3], 11, *key[4:])[:6] == numbers).all()
        assert ((numbers > 0) & (numbers < 1)).all()
    assert len(set(np.concatenate(drawn))) == 6 * len(keys)


def test_gumbel_is_finite_at_both_ends():
    noise = gumbel((np.array([0, 2**32 - 1]) + 0.5) * 2.0**-32)
    assert -3.2 < noise[0] < -3.1 and 22.8 < noise[1] < 22.9


def test_rope_angle_is_exact_near_the_start():
    """At small positions, where float32 angles are exact, it equals the float64 formula."""
    x = np.random.default_rng(0).standard_normal((8, 2, 64)).astype(np.float32)
    got = ops.get("rope").reference(x, np.arange(8, dtype=np.int32), base=1e4, dims=0)
    angle = np.arange(8)[:, None, None] * 1e4 ** (-np.arange(32) / 32)
    a, b = x[..., :32].astype(np.float64), x[..., 32:]
    turned = (a * np.cos(angle) - b * np.sin(angle), a * np.sin(angle) + b * np.cos(angle))
    np.testing.assert_allclose(got, np.concatenate(turned, -1), atol=2e-6)


def test_attention_in_splits(monkeypatch):
    """Splitting the queries changes no result."""
    case = list(cases("attention"))[-3]
    whole, _ = case.expected()
    monkeypatch.setattr(sys.modules["graphllm.ops.attention"], "SCORE_BYTES", 1)
    pieces, _ = case.expected()
    assert mismatch(pieces, whole, 1e-6) == ""


def test_linear_in_tiles(monkeypatch):
    """Dequantising one row at a time changes no result."""
    large = [c for c in cases("linear") if c.sample.env["T"] == 5]
    whole = [c.expected()[0] for c in large]
    monkeypatch.setattr(sys.modules["graphllm.ops.linear"], "_TILE_BYTES", 1)
    for case, want in zip(large, whole, strict=True):
        assert mismatch(case.expected()[0], want, 1e-5) == "", case.sample.label


# ------------------------------------------------------------------------------------ shape rules

T, S = Var("T", 0, 8), Var("S", 0, 4)
X = feed("x", (T, 64), "f32")
HEADS = feed("h", (T, 4, 16), "f32")
POS = feed("pos", (T,), "i32")
POOL = state("pool", (32, 2, 16), "f16")
STARTS, LENGTHS = feed("starts", (Var("Q", 1, 5),), "i32"), feed("lengths", (S,), "i32")
TABLE = feed("table", (S, 4), "i32")


def wide(name, *shape, kind="f32"):
    return weight(name, shape, kind)


BAD = {
    "linear: K": lambda: ops.linear(X, wide("w", 8, 65)),
    "linear: bias": lambda: ops.linear(X, wide("w", 8, 64), wide("b", 9)),
    "linear: dtype": lambda: ops.linear(X, wide("w", 8, 64, kind="i32")),
    "embedding: ids": lambda: ops.embedding(X, wide("w", 8, 64)),
    "rms_norm: weight": lambda: ops.rms_norm(X, wide("w", 63), eps=1e-6),
    "rope: odd dims": lambda: ops.rope(HEADS, POS, base=1e4, dims=3),
    "rope: too many dims": lambda: ops.rope(HEADS, POS, base=1e4, dims=18),
    "rope: style": lambda: ops.rope(HEADS, POS, base=1e4, style="neox"),
    "rope: factors": lambda: ops.rope(HEADS, POS, wide("f", 16), base=1e4),
    "rope: attention_factor": lambda: ops.rope(HEADS, POS, base=1e4, attention_factor=0.0),
    "positions_2d: part": lambda: ops.positions_2d(POS, STARTS, LENGTHS, part=2),
    "positions_2d: floats": lambda: ops.positions_2d(X, STARTS, LENGTHS, part=0),
    "sinusoids: one frequency": lambda: ops.sinusoids(POS, width=3),
    "concat: rows": lambda: ops.concat(X, HEADS),
    "concat: one axis": lambda: ops.concat(wide("a", 4), wide("b", 4)),
    "rope: base missing": lambda: ops.rope(HEADS, POS),
    "kv_write: heads": lambda: ops.kv_write(POOL, HEADS, POS),
    "copy_blocks: block": lambda: ops.copy_blocks(POOL, POS, POS, block=5),
    "copy_blocks: pairs": lambda: ops.copy_blocks(POOL, POS, LENGTHS, block=8),
    "attention: groups": lambda: ops.attention(
        feed("q", (T, 3, 16), "f32"), POOL, POOL, STARTS, LENGTHS, TABLE, scale=1.0, block=8
    ),
    "attention: block": lambda: ops.attention(
        HEADS, POOL, POOL, STARTS, LENGTHS, TABLE, scale=1.0, block=0
    ),
    "attention: sinks": lambda: ops.attention(
        HEADS, POOL, POOL, STARTS, LENGTHS, TABLE, wide("s", 5), scale=1.0, block=8
    ),
    "attention: heads apart": lambda: ops.attention(
        HEADS,
        wide("k", 32, 2, 32, kind="f16").slice(2, 0, 16),
        POOL,
        STARTS,
        LENGTHS,
        TABLE,
        scale=1.0,
        block=8,
    ),
    "add: shapes": lambda: ops.add(X, wide("b", 63)),
    "gelu: kind": lambda: ops.gelu(X, kind="quick"),
    "softcap: cap": lambda: ops.softcap(X, cap=0.0),
    "cast: dtype": lambda: ops.cast(X, dtype="q8_0"),
    "quantise_act: ragged": lambda: ops.quantise_act(X, dtype="a8_256"),
    "quantise_act: format": lambda: ops.quantise_act(X, dtype="q8_0"),
    "quantise: ragged": lambda: ops.quantise(X, dtype="q4_k"),
    "quantise: format": lambda: ops.quantise(X, dtype="f16"),
    "quantise: x": lambda: ops.quantise(POS, dtype="q8_0"),
    "rebuild_padding: length": lambda: ops.rebuild_padding(X, POS, length=0),
    "remove_padding: rows": lambda: ops.remove_padding(feed("b", (T,), "f32"), POS, POS),
    "gather_rows: index": lambda: ops.gather_rows(X, X),
    "argmax: axes": lambda: ops.argmax(POS),
    "scale: unknown attribute": lambda: ops.scale(X, factor=1.0, bias=2.0),
}


@pytest.mark.parametrize("what", BAD)
def test_shape_rules(what):
    with pytest.raises(GraphError) as caught:
        BAD[what]()
    assert what.split(":")[0] in str(caught.value)


# ----------------------------------------------------------------------------------------- parity


@pytest.mark.parity
@pytest.mark.parametrize("name", ["silu", "gelu"])
def test_activations_as_torch(name):
    import torch

    functional = torch.nn.functional
    kinds = {"erf": "none", "tanh": "tanh"}
    for case in cases(name):
        x = torch.from_numpy(np.ascontiguousarray(case.operands[0]))
        if name == "silu":
            want = functional.silu(x)
        else:
            want = functional.gelu(x, approximate=kinds[case.sample.attrs["kind"]])
        assert mismatch(case.expected()[0], want.numpy(), 2e-6) == "", case.sample.label


@pytest.mark.parity
@pytest.mark.parametrize("causal", [True, False])
def test_attention_as_torch(causal):
    import torch

    rng = np.random.default_rng(1)
    q, k, v = (rng.standard_normal((24, h, 32)).astype(np.float32) for h in (6, 2, 2))
    dense = (torch.from_numpy(x).transpose(0, 1)[None] for x in (q, k, v))
    want = torch.nn.functional.scaled_dot_product_attention(
        *dense, is_causal=causal, enable_gqa=True
    )
    one = [np.array(x, np.int32) for x in ([0, 24], [24], [[0, 1, 2]])]
    got = ops.get("attention").reference(q, k, v, *one, scale=32**-0.5, block=8, causal=causal)
    assert mismatch(got, want[0].transpose(0, 1).numpy(), 1e-5) == ""
