"""expert_linear and head_linear on the CPU: against float64, and against linear."""

from __future__ import annotations

import numpy as np
import pytest
from linear_cases import BLOCKS, CASES, COLUMNS, SENTINEL, Product, any_bits

from graphllm import ops
from graphllm.backends import Bound, Header, Operand, Options, find
from graphllm.backends.cpu.formats import FORMATS
from graphllm.backends.cpu.kernels.weight_packing import pack, packed_bytes
from graphllm.backends.cpu.runtime.device import CpuDevice
from graphllm.errors import GraphllmError
from graphllm.formats import activations, quantization
from graphllm.graph.dtype import DType, dtype
from graphllm.graph.tensor import INPUT, WEIGHT, Meta, Tensor, Var, feed, weight
from graphllm.runtime.buffer_guards import GuardedExecutor
from graphllm.runtime.executor import Executor
from graphllm.weights import Arrays

EXPERTS, EACH, ROWS = 5, 2, 33
BAD = (-1, EXPERTS, 2**31 - 1, -(2**31))


class Experts:
    """expert_linear, or head_linear if ``each`` is 0, as a program of the CPU device.

    ``own``: whether a token has a separate row for each of its experts.
    """

    def __init__(
        self, raw: np.ndarray, kind: DType, k: int, linear: str = "auto", own: bool = False,
        bias: bool = False, each: int = EACH, most: int = 17, threads: int = 2,
        low_mem: bool = False,
    ) -> None:  # fmt: skip
        self.options = Options(linear, threads, low_mem=low_mem)
        self.each, self.most, self.k = each, most, k
        self.device, self.header = CpuDevice(self.options), Header()
        tokens = Var("T", 0, most)
        self.header.slot(tokens)
        self.count = each or EXPERTS
        self.n = len(raw) // EXPERTS
        shape = (self.count, k) if own or not each else (k,)
        x = self._leaf(INPUT, "x", Meta.of((tokens, *shape), "f32"))
        w = self._leaf(WEIGHT, "w", Meta.of((EXPERTS, self.n, k), kind))
        ids = self._leaf(INPUT, "ids", Meta.of((tokens, self.count), "i32"))
        b = self._leaf(WEIGHT, "b", Meta.of((EXPERTS, self.n), "f32"))
        self.x, self.ids = np.zeros((most, *shape), np.float32), np.zeros((most, each), np.int32)
        self.bias = np.random.default_rng(3).standard_normal((EXPERTS, self.n)).astype(np.float32)
        self.packed = raw.reshape(-1) if low_mem else self.device.prepare(pack, raw, w.meta)
        more = [(ids, self.ids), (b, self.bias)][: (1 + bias) * bool(each)]
        given = [Operand(leaf.meta, array.view(np.uint8).reshape(-1)) for leaf, array in more]
        self.steps: list[Bound] = []
        source = Operand(x.meta, self.x.view(np.uint8).reshape(-1))
        build = ops.expert_linear if each else ops.head_linear
        node = build(x, w, *[leaf for leaf, _ in more])
        chosen = self._select(node)
        if chosen.lower:
            x = chosen.lower(node, self.options)[0]
            source = self._step(x, source)
            node = build(x, w, *[leaf for leaf, _ in more])
        self.out = self._step(node, source, Operand(w.meta, self.packed), *given)
        self.program = self.device.build(self.steps, self.header)

    def _leaf(self, kind: str, name: str, meta: Meta) -> Tensor:
        return Tensor(kind, (), {"name": name}, meta, scopes=("",))

    def _select(self, node: Tensor):
        chosen = find("cpu").select(node, self.options)
        assert not isinstance(chosen, str), chosen
        return chosen

    def _step(self, node: Tensor, *inputs: Operand) -> Operand:
        out = Operand(node.meta, self.device.alloc(node.meta.bound().nbytes))
        chosen = self._select(node)
        nbytes = chosen.scratch(node, self.options) if chosen.scratch else 0
        scratch = Operand(Meta.of((nbytes,), "i8"), self.device.alloc(nbytes)) if nbytes else None
        if scratch is not None:
            scratch.buffer[:] = 255
        self.steps.append(Bound(node, chosen, inputs, out, scratch))
        return out

    def __call__(self, x: np.ndarray, ids: np.ndarray | None = None) -> np.ndarray:
        """Return [T, k, n]; rows beyond T must stay unchanged."""
        self.x[...], self.ids[...] = np.nan, -1
        self.x[: len(x)] = x
        if ids is not None:
            self.ids[: len(x)] = ids
        result = self.out.buffer.view(np.float32).reshape(self.most, self.count, self.n)
        result[...] = SENTINEL
        self.header.set({"T": len(x)})
        self.program.run(None)
        assert (result[len(x) :] == SENTINEL).all()
        return result[: len(x)].copy()

    def read(self, x: np.ndarray) -> np.ndarray:
        """The operand of the product that stands for ``x``, in float64."""
        node = self.steps[0].node
        if node.op == "quantise_act":
            return activations.dequantise_act(
                activations.quantise_act(x, node.dtype), node.dtype, self.k
            )
        return x.astype(np.float64)


def inputs(k: int, own: bool = False, tokens: int = 17) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng([7, k])
    ids = rng.integers(0, EXPERTS, (tokens, EACH)).astype(np.int32)
    return rng.standard_normal((tokens, EACH, k) if own else (tokens, k)).astype(np.float32), ids


def alike(got: np.ndarray, want: np.ndarray) -> None:
    assert np.array_equal(got.view(np.uint32), want.view(np.uint32))


@pytest.mark.parametrize("name, linear", CASES)
def test_experts(name, linear):
    """Against float64; the bits of a token are those of `linear`, whatever the batch."""
    kind = dtype(name)
    k = COLUMNS[kind.block][-1]
    raw = any_bits(kind, EXPERTS * ROWS, k)
    w = quantization.dequantise(raw, kind).astype(np.float64).reshape(EXPERTS, ROWS, k)
    for own in (False, True):
        x, ids = inputs(k, own)
        product = Experts(raw, kind, k, linear, own)
        got = product(x, ids)
        a = product.read(x) if own else np.repeat(product.read(x)[:, None], EACH, axis=1)
        want, size = (np.einsum("tjk,tjnk->tjn", p, q[ids]) for p, q in ((a, w), (abs(a), abs(w))))
        np.testing.assert_array_less(abs(got - want), 1e-6 * size + 1e-30)
        for tokens in (0, 1, 2, 5):
            alike(product(x[:tokens], ids[:tokens]), got[:tokens])
        alike(product(x[3:4], ids[3:4]), got[3:4])
    for expert in range(EXPERTS):
        t, j = np.nonzero(ids == expert)
        alone = Product(raw[expert * ROWS : (expert + 1) * ROWS], kind, k, linear)
        alike(alone(x[t[:17], j[:17]]), got[t[:17], j[:17]])


LOW_MEM = [("f16", "float"), ("q8_0", "auto"), ("q6_k", "auto"), ("q4_k", "float")]


@pytest.mark.parametrize("name, linear", LOW_MEM)
def test_low_mem_changes_nothing(name, linear):
    """Experts that are packed for each use: few tokens and many, of few experts and of all."""
    kind, k = dtype(name), 512
    raw, (x, ids) = any_bits(kind, EXPERTS * 85, k), inputs(k, tokens=300)
    ids[150:] = 3
    packed, mapped = (Experts(raw, kind, k, linear, most=300, low_mem=low) for low in (False, True))
    for tokens in (0, 1, 5, 300):
        alike(mapped(x[:tokens], ids[:tokens]), packed(x[:tokens], ids[:tokens]))
    assert mapped.steps[-1].kernel.name.startswith("experts_mapped")


@pytest.mark.parametrize("name, linear", [("f16", "float"), ("q8_0", "auto"), ("q4_k", "auto")])
def test_threads_change_nothing(name, linear):
    kind, k = dtype(name), 512
    raw, (x, ids) = any_bits(kind, EXPERTS * 320, k), inputs(k)
    first, *others = [Experts(raw, kind, k, linear, threads=t)(x, ids) for t in (1, 2, 3)]
    for other in others:
        alike(other, first)


@pytest.mark.parametrize("name, tokens", [("f16", 300), ("q8_0", 1200), ("q6_k", 300)])
def test_many_tokens_on_one_expert(name, tokens):
    """More tokens than a pass, or than are sorted on the stack; the same bits as single tokens."""
    kind, k = dtype(name), 256
    raw, (x, ids) = any_bits(kind, EXPERTS * ROWS, k), inputs(k, tokens=tokens)
    ids[:] = 3
    product = Experts(raw, kind, k, most=tokens)
    got = product(x, ids)
    alike(got[:, 0], got[:, 1])
    for t in (0, 99, 127, 128, 255, tokens - 1):
        alike(product(x[t : t + 1], ids[t : t + 1]), got[t : t + 1])


@pytest.mark.parametrize("name", ["f32", "bf16", "q8_0", "q4_k"])
@pytest.mark.parametrize("tokens", [1, 17])
def test_experts_that_are_not_selected_are_not_read(name, tokens):
    """The other experts hold NaN, in weights and scales."""
    kind, k = dtype(name), 256
    raw, (x, ids) = any_bits(kind, EXPERTS * ROWS, k), inputs(k, tokens=tokens)
    ids = np.where(ids % 2, 1, 4).astype(np.int32)
    product = Experts(raw, kind, k)
    want = product(x, ids)
    each = packed_bytes(Meta.of((ROWS, k), kind))
    for expert in (0, 2, 3):
        product.packed[expert * each : (expert + 1) * each] = 255
    alike(product(x, ids), want)
    assert np.isfinite(want).all()


def test_bias():
    kind, k = dtype("q8_0"), 320
    raw, (x, ids) = any_bits(kind, EXPERTS * ROWS, k), inputs(k)
    product = Experts(raw, kind, k, bias=True)
    plain = Experts(raw, kind, k)(x, ids)
    alike(product(x, ids), plain + product.bias[ids])


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("tokens", [1, 17])
def test_ids_out_of_range(bad, tokens):
    """An error is raised; other products of the run and the next run are correct."""
    kind, k = dtype("q8_0"), 64
    raw, (x, ids) = any_bits(kind, EXPERTS * ROWS, k), inputs(k, tokens=tokens)
    product = Experts(raw, kind, k)
    want = product(x, ids)
    wrong = ids.copy()
    wrong[-1, 0] = bad
    with pytest.raises(GraphllmError, match="outside its table"):
        product(x, wrong)
    result = product.out.buffer.view(np.float32).reshape(-1, EACH, ROWS)
    alike(result[: tokens - 1], want[:-1])
    alike(result[tokens - 1, 1], want[-1, 1])
    assert (result[tokens - 1, 0] == SENTINEL).all()
    alike(product(x, ids), want)


@pytest.mark.parametrize("bad", BAD)
def test_picked_columns_out_of_range(bad):
    executor = Executor(Arrays({}), ("cpu",), Options())
    x = feed("x", (Var("T", 1, 4), EXPERTS), "f32")
    plan = executor.compile({"y": ops.pick(x, feed("ids", (Var("T", 1, 4), 1), "i32"))})
    values, ids = np.ones((2, EXPERTS), np.float32), np.array([[0], [bad]], np.int32)
    with pytest.raises(GraphllmError, match="outside its table"):
        executor.run(plan, {"x": values, "ids": ids}, {"T": 2})


@pytest.mark.parametrize("name, linear", [("f16", "float"), *((n, "auto") for n in BLOCKS)])
def test_head_linear_equals_linear(name, linear):
    kind = dtype(name)
    k = COLUMNS[kind.block][-1]
    raw = any_bits(kind, EXPERTS * ROWS, k)
    x = np.random.default_rng(1).standard_normal((17, EXPERTS, k)).astype(np.float32)
    product = Experts(raw, kind, k, linear, each=0)
    got = product(x)
    for tokens in (0, 1, 2):
        alike(product(x[:tokens]), got[:tokens])
    for head in range(EXPERTS):
        alone = Product(raw[head * ROWS : (head + 1) * ROWS], kind, k, linear)
        alike(got[:, head], alone(x[:, head]))


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("rows", [16, 21])
def test_matrices_are_packed_separately(name, rows):
    kind = dtype(name)
    k = 2 * kind.block
    raw, one = any_bits(kind, 3 * rows, k), Meta.of((rows, k), kind)
    packed = pack(raw, Meta.of((3, rows, k), kind)).reshape(3, packed_bytes(one))
    for i in range(3):
        assert np.array_equal(packed[i], pack(raw[i * rows : (i + 1) * rows], one))


def test_reference_reads_only_selected_experts():
    class Watched:
        shape, opened = (EXPERTS, 3, 4), []

        def __getitem__(self, expert: int) -> np.ndarray:
            self.opened.append(expert)
            return np.ones((3, 4), np.float32)

    w = Watched()
    ops.get("expert_linear").reference(np.ones((2, 4)), w, np.array([[4, 1], [1, 1]], np.int32))
    assert w.opened == [1, 4]


def test_cost_counts_the_experts_that_are_read():
    tokens, w = Var("T", 0, 64), weight("w", (64, 32, 256), "q8_0")
    node = ops.expert_linear(feed("x", (tokens, 256), "f32"), w, feed("i", (tokens, 4), "i32"))
    one = w.meta.nbytes // 64

    def read(**env: int) -> float:
        cost = ops.get("expert_linear").node_cost(node, env)
        assert cost.flops == 2 * env["T"] * 4 * 32 * 256
        return cost.bytes - env["T"] * (4 * 256 + 4 * 4 + 4 * 4 * 32)

    assert read(T=1) == 4 * one and read(T=0) == 0
    assert read(T=10) == 40 * one and read(T=10, experts=7) == 7 * one
    assert read(T=60) == 64 * one == read(T=60, experts=1000)


# --------------------------------------------------------------------------------- MoE layer


def moe_layer(x: Tensor, kind: str) -> Tensor:
    """A layer of 8 experts, 3 of which are selected for each token."""
    scores = ops.softmax(ops.linear(x, weight("gate", (8, 256), "f32")))
    ids = ops.top_k(scores, k=3)
    weights = ops.sum_norm(ops.pick(scores, ids))
    gate, up = (ops.expert_linear(x, weight(n, (8, 512, 256), kind), ids) for n in ("w1", "w3"))
    h = ops.mul(ops.silu(gate), up)
    return ops.combine(ops.expert_linear(h, weight("w2", (8, 256, 512), kind), ids), weights)


@pytest.mark.parametrize("kind", ["f16", "q4_k"])
def test_moe_layer(kind):
    rng = np.random.default_rng(0)
    form, arrays = dtype(kind), {"gate": rng.standard_normal((8, 256)).astype(np.float32)}
    for name, shape in {"w1": (8, 512, 256), "w3": (8, 512, 256), "w2": (8, 256, 512)}.items():
        rows = (rng.standard_normal(shape) / 16).astype(np.float32).reshape(-1, shape[2])
        raw = quantization.quantise(rows, form)
        stored = quantization.Blocks(raw.reshape(*shape[:2], -1), form, shape[2])
        arrays[name] = stored if form.quantised else raw.view(form.numpy).reshape(shape)
    x = rng.standard_normal((40, 256)).astype(np.float32)
    found = {}
    for order in (("cpu",), ("reference",)):
        executor = GuardedExecutor(Arrays(arrays), order, Options("float"))
        y = moe_layer(feed("x", (Var("T", 0, 64), 256), "f32"), kind)
        plan = executor.compile({"y": y})
        found[order[0]] = [executor.run(plan, {"x": x[:t]}, {"T": t})["y"] for t in (0, 1, 40)]
    for got, want in zip(*found.values()):
        np.testing.assert_allclose(got, want, atol=1e-5)
