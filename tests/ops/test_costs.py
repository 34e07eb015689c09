"""Declared costs of ops against counts from the tensors and keys of model files."""

from __future__ import annotations

import math

import pytest

import graphllm
from graphllm import ops
from graphllm.backends import Options
from graphllm.backends.order import ORDER
from graphllm.checkpoints.checkpoint import checkpoint_path
from graphllm.checkpoints.gguf import GgufCheckpoint
from graphllm.checkpoints.random_weights import RandomCheckpoint
from graphllm.compiler.plan import Plan
from graphllm.engine.engine import Engine
from graphllm.formats.activations import A8_32
from graphllm.graph.dtype import F32
from graphllm.graph.op import MATMUL
from graphllm.graph.tensor import Var, feed, state, weight
from graphllm.loading.load import build_decoder, graph_limits
from graphllm.ops.attention import _visible_pairs
from graphllm.profiler import bench, kernel_probes
from graphllm.profiler.planner import Planner

HALF, Q8 = 2, 34 / 32  # bytes of an element of the cache
EXPERT = "_exps."  # in the names of experts' tensors


def engine_of(file: GgufCheckpoint, device: str, kv_type: str = "f16", **options) -> Engine:
    """Return an engine that plans a file for a device, without reading data or a device."""
    decoder = build_decoder(file)
    limits = graph_limits(4096, kv_type, device).within(decoder.cfg.context)
    planner = Planner(decoder.weights, device, Options(**options), None)
    engine = Engine(decoder, planner, limits)
    engine.offload_layers("all")
    return engine


def keys_of(file: GgufCheckpoint, length: int) -> list[int]:
    """Return the visible keys of the last query of ``length`` tokens, for each layer."""
    own = {key.partition(".")[2]: value for key, value in file.metadata.items()}
    window = own.get("attention.sliding_window", 0)
    default = 6 if file.architecture == "gemma3" else 2  # gpt-oss: every other layer
    period = own.get("attention.sliding_window_pattern", default)  # the last layer sees all
    return [
        min(length, window) if window and (layer + 1) % period else length
        for layer in range(own["block_count"])
    ]


def heads_of(file: GgufCheckpoint) -> tuple[int, int, int]:
    """Return query heads, key heads and head size."""
    own = {key.partition(".")[2]: value for key, value in file.metadata.items()}
    names = ("head_count", "head_count_kv", "key_length")
    return tuple(own[f"attention.{name}"] for name in names)


def used(file: GgufCheckpoint) -> float:
    """Return the share of experts that a token uses."""
    own = {key.partition(".")[2]: value for key, value in file.metadata.items()}
    return own.get("expert_used_count", 1) / own.get("expert_count", 1)


def bytes_of(file: GgufCheckpoint, length: int, element: float) -> float:
    """Return the bytes of a decode step.

    All tensors, but only the experts that the token uses, and one row of an embedding that is not
    the head; visible keys and values, and one of each written.
    """
    embedding = file.tensors["token_embd.weight"]
    weights = sum(t.nbytes * (used(file) if EXPERT in n else 1) for n, t in file.tensors.items())
    if "output.weight" in file.tensors:
        weights -= embedding.nbytes
    _, kv_heads, width = heads_of(file)
    rows = sum(keys_of(file, length)) + len(keys_of(file, length))
    return weights + embedding.nbytes / embedding.shape[0] + 2 * rows * kv_heads * width * element


def flops_of(file: GgufCheckpoint, start: int, count: int) -> float:
    """Return the FLOPs of ``count`` tokens after ``start``: two per weight and token (only experts
    that are used; the head for the last token only), two per query element and visible key, and as
    many for the values."""
    head = "output.weight" if "output.weight" in file.tensors else "token_embd.weight"
    matrices = {
        name: math.prod(t.shape) * (used(file) if EXPERT in name else 1)
        for name, t in file.tensors.items()
        if len(t.shape) > 1
    }
    inner = sum(n for name, n in matrices.items() if name not in (head, "token_embd.weight"))
    heads, _, width = heads_of(file)
    pairs = sum(sum(keys_of(file, start + i + 1)) for i in range(count))
    return 2 * (inner * count + matrices[head]) + 4 * heads * width * pairs


def check(file: GgufCheckpoint, engine: Engine, element: float) -> None:
    token: Plan = engine.decode_plan()
    for length in (1, 1000):
        found = bench.step_bytes(token, length)
        assert found == pytest.approx(bytes_of(file, length, element), rel=0.02)
        found = bench.step_flops(token, length - 1, 1)
        assert found == pytest.approx(flops_of(file, length - 1, 1), rel=0.02)
    prompt = engine.generation_plans()[0]
    for start, count in ((0, 300), (300, 512)):
        found = bench.step_flops(prompt, start, count)
        assert found == pytest.approx(flops_of(file, start, count), rel=0.02)


SHAPES = [("llama-1b", "q4_0"), ("tinyllama-1.1b", "f32"), ("qwen2-0.5b", "q8_0"),
          ("gemma3-1b", "q4_k_m"), ("gemma3-270m", "f16"), ("mixtral-8x7b", "f16"),
          ("qwen3-30b-a3b", "q4_k_m"), ("gpt-oss-20b", "mxfp4")]  # fmt: skip


@pytest.mark.parametrize("device", ORDER)
@pytest.mark.parametrize("shape, kind", SHAPES)
def test_of_every_family(shape, kind, device):
    file = RandomCheckpoint(shape, kind)
    check(file, engine_of(file, device), HALF)


def test_unfused_and_with_a_cache_in_blocks():
    """Fusion removes only traffic between steps, which is not counted."""
    file = RandomCheckpoint("gemma3-1b", "q8_0")
    check(file, engine_of(file, "cpu", "q8_0", without=("all",)), Q8)
    check(file, engine_of(file, "cpu", "q8_0"), Q8)


@pytest.mark.realmodel
def test_of_the_demo():
    file = GgufCheckpoint(checkpoint_path("demo"), data=False)
    check(file, engine_of(file, "cpu"), HALF)
    told = graphllm.dry_run("demo", device="cpu", context=1001).token
    assert told.nbytes == pytest.approx(bytes_of(file, told.cached + 1, HALF), rel=0.02)
    assert told.flops == pytest.approx(flops_of(file, told.cached, 1), rel=0.02)


@pytest.mark.parametrize("window", [0, 1, 5, 12, 100])
@pytest.mark.parametrize(
    "start, count", [(0, 0), (0, 1), (0, 20), (3, 4), (11, 1), (12, 7), (9, 9)]
)
def test_pairs_that_a_window_leaves(start, count, window):
    seen = [
        {k for k in range(p + 1) if not window or p - k < window}
        for p in range(start, start + count)
    ]
    keys = set().union(*seen)
    assert _visible_pairs(start, count, window) == (sum(map(len, seen)), len(keys))


def test_attention_of_several_sequences():
    """One token per sequence: FLOPs from the sum of lengths, windows from their mean."""
    t, s, q = Var("T", 1, 8), Var("S", 1, 8), Var("Q", 2, 9)
    small = feed("q_start", (q,), "i32"), feed("kv_len", (s,), "i32"), feed("table", (s, 8), "i32")
    pools = [state(name, (512, 2, 16), "f16") for name in ("k", "v")]
    env = {"T": 3, "S": 3, "Q": 4, "kv_sum": 3 + 70 + 17}
    for window, keys in ((0, 90), (40, 3 * 30), (20, 3 * 20)):
        node = ops.attention(
            feed("q", (t, 4, 16), "f32"), *pools, *small, scale=1.0, block=64, window=window
        )
        cost = ops.get("attention").node_cost(node, env)
        assert cost.flops == keys * 4 * 4 * 16
        own = bench.leaf_bytes(node, env)  # only its result is not a leaf
        assert own == keys * 2 * 2 * 16 * 2 + 3 * 4 * 16 * 4 + 4 * (4 + 3 + 3 * 8)


@pytest.mark.parametrize("kind, element", [("f16", HALF), ("q8_0", Q8)])
def test_values_that_are_a_part_of_the_keys_are_read_once(kind, element):
    t, s, q = Var("T", 1, 8), Var("S", 1, 1), Var("Q", 2, 2)
    small = feed("q_start", (q,), "i32"), feed("kv_len", (s,), "i32"), feed("table", (s, 8), "i32")
    pool = state("k", (512, 1, 576), kind)
    node = ops.attention(
        feed("q", (t, 4, 576), "f32"), pool, pool.slice(2, 0, 512), *small, scale=1.0, block=64
    )
    cost = ops.get("attention").node_cost(node, {"T": 1, "S": 1, "Q": 2, "kv_sum": 300})
    assert cost.flops == 300 * 2 * 4 * (576 + 512)
    assert cost.bytes == 300 * 576 * element + 4 * 4 * (576 + 512) + 4 * (2 + 1 + 8)


def test_matrix_products_are_declared():
    """By their declaration, not their name: products of experts and heads are included."""
    t = Var("T", 1, 8)
    products = {name for name, op in ops.registry().items() if op.arithmetic == MATMUL}
    assert products == {"linear", "expert_linear", "head_linear"}
    for x, kind in ((F32, "float"), (A8_32, "integer")):
        rows = feed("rows", (t, 64), x)
        y = ops.expert_linear(rows, weight("w", (4, 32, 64), "q8_0"), feed("ids", (t, 2), "i32"))
        flops = 2 * 8 * 2 * 32 * 64  # of 8 tokens with 2 experts each
        assert [*kernel_probes.operations(y, {"T": 8})] == [(kind, "q8_0", 8, flops)]
        heads = feed("heads", (t, 3, 64), x)
        y = ops.head_linear(heads, weight("h", (3, 32, 64), "q8_0"))
        assert [*kernel_probes.operations(y, {"T": 8})] == [(kind, "q8_0", 8, 2 * 8 * 3 * 32 * 64)]
