"""Kernels read slices in place: plans contain no copies of them."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from cases import mismatch
from paper_cuda import paper_fixture  # noqa: F401

from graphllm import ops
from graphllm.backends import Options
from graphllm.graph.dtype import CACHED
from graphllm.graph.tensor import Tensor, Var, feed, state, weight
from graphllm.runtime.executor import Executor
from graphllm.weights import Arrays

T, S, Q = Var("T", 1, 20), Var("S", 1, 1), Var("Q", 2, 2)
HEADS, WIDTH = 2, 64
DEPTH, LATENT, TURNED = 576, 512, 64
LATENT_KINDS = [kind for kind in CACHED if kind != "fp8"]  # columns of its rows share a scale
WEIGHTS = {
    "norm": np.linspace(0.5, 2, WIDTH, dtype=np.float32),
    "slopes": np.array([0.5, 0.1], np.float32),
}


def attended(q: Tensor, k: Tensor, v: Tensor, slopes: Tensor | None = None) -> Tensor:
    """Attention of one sequence over pools of 32 slots in blocks of 16."""
    batch = feed("starts", (Q,), "i32"), feed("length", (S,), "i32"), feed("table", (S, 2), "i32")
    return ops.attention(q, k, v, *batch, None, slopes, scale=0.1, block=16)


def mla(kind: str) -> Tensor:
    """MLA: one pool shared by all heads, whose first columns are the values."""
    pos, slot = feed("pos", (T,), "i32"), feed("slot", (T,), "i32")
    rotated = ops.rope(feed("rotated", (T, 1, TURNED), "f32"), pos, base=1e4)
    rows = ops.concat(feed("mla", (T, 1, LATENT), "f32"), rotated)
    k = ops.kv_write(state("k", (32, 1, DEPTH), kind), rows, slot)
    return attended(feed("q", (T, 4, DEPTH), "f32"), k, k.slice(2, 0, LATENT))


def heads_of(x: Tensor, layout: str) -> list[Tensor]:
    """Slice queries, keys and values [T, H, D] from rows of a joint linear: each as a whole
    (split), or interleaved by head (joint)."""
    size = HEADS * WIDTH
    if layout == "split":
        return [x.slice(1, i * size, (i + 1) * size).heads(HEADS) for i in range(3)]
    joint = x.reshape(T, HEADS, 3 * WIDTH)
    return [joint.slice(2, i * WIDTH, (i + 1) * WIDTH) for i in range(3)]


def fused(layout: str, rotated: bool, kind: str) -> Tensor:
    """Attention from rows of one linear: with norms and rope (Qwen3), or with slopes (Bloom)."""
    q, k, v = heads_of(feed("x", (T, 3 * HEADS * WIDTH), "f32"), layout)
    pos, slot = feed("pos", (T,), "i32"), feed("slot", (T,), "i32")
    if rotated:
        norm = weight("norm", (WIDTH,), "f32")
        q, k = (ops.rope(ops.rms_norm(x, norm, eps=1e-6), pos, base=1e4) for x in (q, k))
    pools = (state(name, (32, HEADS, WIDTH), kind) for name in "kv")
    k, v = (ops.kv_write(pool, x, slot) for pool, x in zip(pools, (k, v)))
    return attended(q, k, v, None if rotated else weight("slopes", (HEADS,), "f32"))


def ops_of(backend: str, y: Tensor, **options: object) -> list[str]:
    executor = Executor(Arrays(WEIGHTS), (backend,), Options(**options))  # type: ignore[arg-type]
    return [step.node.op for step in executor.compile({"y": y}).steps]


BACKENDS = pytest.mark.parametrize("backend", ["cpu", "cuda"])


@pytest.fixture(autouse=True)
def _plans_for_a_gpu(paper):
    paper((9, 0))


@BACKENDS
@pytest.mark.parametrize("kind", LATENT_KINDS)
def test_values_that_are_columns_of_the_keys_are_not_copied(backend, kind):
    y = mla(kind)
    assert ops_of(backend, y) == ["rope", "concat", "kv_write", "attention"]
    quantised = ops.quantise_act(y.flatten(), dtype="a8_32")
    assert ops_of(backend, quantised) == ["rope", "concat", "kv_write", "attention_quantise"]


@BACKENDS
@pytest.mark.parametrize("kind", CACHED)
def test_parts_of_a_joint_row_are_not_copied(backend, kind):
    one_by_one = ops_of(backend, fused("split", True, kind), without=("all",))
    assert sorted(set(one_by_one)) == ["attention", "kv_write", "rms_norm", "rope"]
    assert ops_of(backend, fused("split", True, kind)) == ["rope_write", "attention"]
    assert ops_of(backend, fused("split", False, kind)) == ["kv_write", "kv_write", "attention"]


@BACKENDS
def test_interleaved_heads_are_copied(backend):
    """So weights of this form are better reordered when they are loaded."""
    for rotated in (False, True):
        assert ops_of(backend, fused("joint", rotated, "f16")).count("contiguous") == 3


# -------------------------------------------------------------------------------------- the values


def chunks(executor: Executor, y: Tensor, sizes: tuple[int, ...]) -> np.ndarray:
    """Return the result for a sequence that is split into runs of ``sizes`` tokens."""
    rng, done, found = np.random.default_rng(3), 0, []
    executor.bind(plan := executor.compile({"y": y}))
    leaves = {leaf.name: leaf for leaf in plan.leaves.values() if leaf.op == "input"}
    floats = {n: leaf for n, leaf in leaves.items() if leaf.dtype.name == "f32"}
    whole = {n: rng.standard_normal((sum(sizes), *x.meta.inner)) for n, x in floats.items()}
    for count in sizes:
        at = np.arange(done, done + count, dtype=np.int32)
        feeds = {name: x[at].astype(np.float32) for name, x in whole.items()}
        feeds |= {"pos": at, "slot": at ^ 16, "starts": np.array([0, count], np.int32)}
        feeds |= {"length": at[-1:] + 1, "table": np.array([[1, 0]], np.int32)}
        env = {"T": count, "S": 1, "Q": 2}
        live = {name: feeds[name] for name in leaves}
        found.append(executor.run(plan, live, env)["y"].copy())
        done += count
    return np.concatenate(found)


CASES: dict[str, Callable[[str], Tensor]] = {
    "mla": mla,
    "split, rotated": lambda kind: fused("split", True, kind),
    "split, with slopes": lambda kind: fused("split", False, kind),
    "joint, rotated": lambda kind: fused("joint", True, kind),
}


TOLERANCE = {"f32": 1e-5, "f16": 1e-3, "q8_0": 1e-2, "q4_0": 0.1, "fp8": 3e-2}


@pytest.mark.parametrize(
    "case, kind", [(case, k) for case in CASES for k in (LATENT_KINDS if case == "mla" else CACHED)]
)
def test_slices_match_the_reference(case, kind):
    """And a prompt in chunks gives bit-identical results."""
    y, sizes = CASES[case](kind), (20, 1, 3)
    cpu = Executor(Arrays(WEIGHTS), ("cpu",))
    have = chunks(cpu, y, sizes)
    want = chunks(Executor(Arrays(WEIGHTS), ("reference",)), y, sizes)
    # A rotated key may round to an adjacent value of the pool's format.
    assert mismatch(have, want, TOLERANCE[kind]) == ""
    np.testing.assert_array_equal(chunks(cpu, y, (1, 2, 18, 3)), have)
