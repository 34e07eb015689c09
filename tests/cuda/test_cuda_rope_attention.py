"""Rotation, writes and attention of few tokens in a launch have the bits of separate launches."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from cuda_cases import need_gpu

from graphllm import ops
from graphllm.backends import Options
from graphllm.graph.tensor import Var, feed, state, weight
from graphllm.runtime.executor import Executor
from graphllm.weights import Arrays

pytestmark = pytest.mark.cuda
RULES = ("rope_attention", "rope_attention_quantise")
LENGTHS = (1, 2, 63, 64, 65, 130, 500, 4096, 9000)  # with the new key


@pytest.fixture(autouse=True)
def _gpu():
    need_gpu()


def graph(tokens, heads, width, block, columns, style, norm, window, kind):
    """Attention of the last tokens of a sequence, its output quantised if ``kind`` is not f32, and
    the written pools."""
    count, kv = heads
    q, k, v = (feed(n, (tokens, h, width), "f32") for n, h in zip("qkv", (count, kv, kv)))
    pos, slot = feed("pos", (tokens,), "i32"), feed("slot", (tokens,), "i32")
    pools = [state(n, (block * columns, kv, width), "f16") for n in ("kp", "vp")]
    if norm:
        q, k = (ops.rms_norm(x, weight(f"{n}_norm", (width,), "f32"), eps=1e-6)
                for n, x in (("q", q), ("k", k)))  # fmt: skip
    turn = {"base": 1e4, "dims": 0, "style": style, "scale": 1.0}
    q, k = ops.rope(q, pos, **turn), ops.rope(k, pos, **turn)
    kept = [ops.kv_write(pool, x, slot) for pool, x in zip(pools, (k, v))]
    batch = feed("start", (2,), "i32"), feed("length", (1,), "i32"), feed("t", (1, columns), "i32")
    attended = ops.attention(q, *kept, *batch, scale=width**-0.5, block=block, window=window)
    y = attended if kind == "f32" else ops.quantise_act(attended.flatten(), dtype=kind)
    return {"y": y, "k": kept[0], "v": kept[1]}


@pytest.mark.parametrize("most", [1, 16])
@pytest.mark.parametrize("heads, width, style, norm, window, block, kind", [
    ((32, 8), 128, "half", False, 0, 64, "a8_32"),
    ((32, 8), 128, "interleaved", False, 0, 16, "f32"),
    ((20, 2), 64, "half", True, 100, 32, "a8_32"),  # two groups of heads
    ((4, 1), 256, "half", True, 70, 64, "a8_256"),
    ((6, 6), 128, "half", True, 0, 64, "a8_row"),
    ((64, 8), 64, "half", False, 128, 64, "f16"),
])  # fmt: skip
def test_the_bits_are_those_of_separate_launches(
    heads, width, style, norm, window, block, kind, most
):
    rng, columns = np.random.default_rng(heads[0]), -(-max(LENGTHS) // block) + 3
    table = rng.permutation(columns).astype(np.int32)
    pools = [
        rng.standard_normal((block * columns, heads[1], width)).astype(np.float16) for _ in "kv"
    ]
    weights = {f"{n}_norm": rng.standard_normal(width).astype(np.float32) for n in "qk"}
    tokens = Var("T", 0, most) if most > 1 else 1
    made = graph(tokens, heads, width, block, columns, style, norm, window, kind)
    one = Executor(Arrays(weights), ("cuda",))
    many = Executor(Arrays(weights), ("cuda",), Options(without=RULES))
    plans = one.compile(made), many.compile(made)
    name = "rope_attention" if kind == "f32" else "rope_attention_quantise"
    assert [step.node.op for step in plans[0].steps] == [name]
    assert "rope_write" in [step.node.op for step in plans[1].steps]
    for length, count in itertools.product(LENGTHS, (1, 2, 7, 16)):
        if count > min(most, length):
            continue
        at = np.arange(length - count, length, dtype=np.int32)
        feeds = {n: rng.standard_normal((count, h, width)).astype(np.float32)
                 for n, h in zip("qkv", (heads[0], heads[1], heads[1]))}  # fmt: skip
        feeds |= {"pos": at, "length": np.array([length], np.int32), "t": table[None]}
        feeds |= {"slot": table[at // block] * block + at % block}
        feeds |= {"start": np.array([0, count], np.int32)}
        # What is not written yet must not matter, nor what the slots of the new keys had.
        old = written(table, block, length - count)[:, None, None]
        found = []
        for executor, plan in zip((one, many), plans):
            executor.bind(plan)
            for pool, rows in zip(("kp", "vp"), pools):
                executor.set_state(pool, np.where(old, rows, np.float16(np.nan)))
            found.append(executor.run(plan, feeds, {"T": count} if most > 1 else {}))
        for key in made:
            a, b = (np.ascontiguousarray(f[key]).tobytes() for f in found)
            assert a == b, (length, count, key)


def written(table: np.ndarray, block: int, length: int) -> np.ndarray:
    """Whether each slot of a pool has one of the first ``length`` keys."""
    found = np.zeros(len(table) * block, bool)
    keys = np.arange(length)
    found[table[keys // block] * block + keys % block] = True
    return found
