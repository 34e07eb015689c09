"""linear and quantise_act on the CPU: against float64, and batches against single tokens."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Sequence

import numpy as np
import pytest

from graphllm import ops
from graphllm.backends import Bound, Header, Operand, Options, find
from graphllm.backends.cpu.formats import FORMATS
from graphllm.backends.cpu.kernels.weight_packing import pack, packed_bytes
from graphllm.backends.cpu.runtime.device import CpuDevice
from graphllm.errors import ModelFileError
from graphllm.formats import BLOCK_FORMATS, activations, quantization
from graphllm.graph.dtype import DType, dtype
from graphllm.graph.tensor import INPUT, WEIGHT, Meta, Tensor, Var, feed, scope, weight

MOST = 17  # tokens
TOKENS = (0, 1, 2, 5, 7, 8, MOST)
ROWS = (1, 15, 16, 33, 640)
SENTINEL = np.float32(77)
PLAIN = ("f32", "f16", "bf16")
# (offset, end) of the scales of a block, by format: float16, or exponents of one byte.
SCALES = {name: form.span(*form.scales) for name, form in BLOCK_FORMATS.items()}
BLOCKS = tuple(SCALES)
FOREIGN = DType("iq2_xxs", 256, 66)  # a format that nothing here reads
COLUMNS = {1: (1, 63, 300), 32: (32, 320), 256: (256, 768)}
CASES = [(n, "float") for n in FORMATS] + [(n, "auto") for n in BLOCKS]


def any_bits(kind: DType, n: int, k: int, seed: int = 0) -> np.ndarray:
    """Stored bytes of weights [n, k]; in block formats random bytes except the scales."""
    rng = np.random.default_rng([seed, n, k])
    values = rng.standard_normal((n, k)).astype(np.float32) / np.sqrt(k)
    raw = quantization.quantise(values, kind)
    if kind.block > 1:
        scales, blocks = slice(*SCALES[kind.name]), raw.reshape(n, -1, kind.nbytes)
        kept = blocks[..., scales].copy()
        blocks[:] = rng.integers(0, 256, blocks.shape)
        blocks[..., scales] = kept
    return raw


class Product:
    """x w^T as a program of the CPU device, for up to `MOST` tokens.

    ``padding``: elements between rows of x.
    """

    def __init__(
        self, raw: np.ndarray, kind: DType, k: int, linear: str = "auto", bias: bool = False,
        padding: int = 0, threads: int = 2,
    ) -> None:  # fmt: skip
        self.options = Options(linear, threads)
        self.device, self.header = CpuDevice(self.options), Header()
        self.tokens = Var("T", 0, MOST)
        self.header.slot(self.tokens)
        n = len(raw)
        strides = (4 * (k + padding), 4)  # rows of x are this far apart
        x = self._leaf(INPUT, "x", Meta((self.tokens, k), dtype("f32"), strides))
        w = self._leaf(WEIGHT, "w", Meta.of((n, k), kind))
        b = self._leaf(WEIGHT, "b", Meta.of((n,), "f32")) if bias else None
        self.x = np.zeros((MOST, k + padding), np.float32)
        self.bias = np.random.default_rng(3).standard_normal(n).astype(np.float32)
        self.steps: list[Bound] = []
        source = Operand(x.meta, self.x.view(np.uint8).reshape(-1))
        node = ops.linear(x, w, b)
        chosen = self._select(node)
        if chosen.lower:
            quantised = chosen.lower(node, self.options)[0]
            source = self._step(quantised, source)
            node = ops.linear(quantised, w, b)
        packed = Operand(w.meta, self.device.prepare(pack, raw, w.meta))
        offsets = Operand(b.meta, self.bias.view(np.uint8)) if b is not None else None
        self.out = self._step(node, source, packed, offsets)
        self.program = self.device.build(self.steps, self.header)
        self.k, self.n = k, n

    def _leaf(self, kind: str, name: str, meta: Meta) -> Tensor:
        return Tensor(kind, (), {"name": name}, meta, scopes=("",))

    def _select(self, node: Tensor):
        chosen = find("cpu").select(node, self.options)
        assert not isinstance(chosen, str), chosen
        return chosen

    def _step(self, node: Tensor, *inputs: Operand | None) -> Operand:
        out = Operand(node.meta, self.device.alloc(node.meta.bound().nbytes))
        self.steps.append(Bound(node, self._select(node), inputs, out))
        return out

    def __call__(self, x: np.ndarray) -> np.ndarray:
        """x [T, k] -> [T, n]; rows beyond T must stay as they are."""
        self.x[...] = np.nan
        self.x[: len(x), : self.k] = x
        result = self.out.buffer.view(np.float32).reshape(MOST, self.n)
        result[...] = SENTINEL
        self.header.set({"T": len(x)})
        self.program.run(None)
        assert (result[len(x) :] == SENTINEL).all()
        return result[: len(x)].copy()

    def activations(self) -> tuple[np.ndarray, DType]:
        """Output of quantise_act in the last run."""
        operand = self.steps[0].out
        return operand.buffer.reshape(MOST, -1), operand.meta.dtype


def activation(k: int, tokens: int = MOST) -> np.ndarray:
    x = np.random.default_rng([9, k]).standard_normal((tokens, k)).astype(np.float32)
    x[0] = np.where(x[0] < 0, -1, 1)  # the largest possible sums
    return x


def compare(product: Product, raw: np.ndarray, kind: DType, x: np.ndarray, bias: bool) -> None:
    """Compare `MOST` tokens with float64, and results of fewer tokens with these."""
    got = product(x)
    w = quantization.dequantise(raw, kind).astype(np.float64)
    a = x.astype(np.float64)
    if len(product.steps) > 1:  # the integer kernel's operands
        stored, form = product.activations()
        assert np.array_equal(stored, activations.quantise_act(x, form))
        a = activations.dequantise_act(stored, form, product.k).astype(np.float64)
    offsets = product.bias.astype(np.float64) if bias else np.zeros(1)
    size = np.abs(a) @ np.abs(w).T + np.abs(offsets)
    np.testing.assert_array_less(np.abs(got - (a @ w.T + offsets)), 1e-6 * size + 1e-30)
    for tokens in TOKENS:
        assert np.array_equal(product(x[:tokens]), got[:tokens]), f"{tokens} tokens"
    assert np.array_equal(product(x[3:4]), got[3:4]), "alone"


@pytest.mark.parametrize("name, linear", CASES)
def test_linear(name, linear):
    kind = dtype(name)
    for k in COLUMNS[kind.block]:
        for n in ROWS:
            raw = any_bits(kind, n, k)
            compare(Product(raw, kind, k, linear), raw, kind, activation(k), bias=False)


@pytest.mark.parametrize("name", BLOCKS)
def test_the_largest_sums_fit(name):
    """All bits of q and of the scales are equal, and all activations are as large as possible."""
    kind, k = dtype(name), 512
    raw, x = any_bits(kind, 33, k), activation(k)
    blocks, scales = raw.reshape(33, -1, kind.nbytes), slice(*SCALES[name])
    kept = blocks[..., scales].copy()
    blocks[::2], blocks[1::2] = 0, 255
    blocks[:16, :, : kind.nbytes // 2] ^= 255  # the halves differ
    blocks[..., scales] = kept
    x[0], x[1], x[2], x[2, ::2] = 1, -1, 1, -1
    compare(Product(raw, kind, k), raw, kind, x, bias=False)


@pytest.mark.parametrize("name, linear", [("f16", "float"), ("q8_0", "auto"), ("q6_k", "float")])
def test_bias_and_strided_rows(name, linear):
    kind, k = dtype(name), 512
    raw = any_bits(kind, 33, k)
    product = Product(raw, kind, k, linear, bias=True, padding=5)
    compare(product, raw, kind, activation(k), bias=True)


@pytest.mark.parametrize("name, linear", [("f32", "float"), *((n, "auto") for n in BLOCKS)])
def test_threads_change_nothing(name, linear):
    kind, k = dtype(name), 512
    raw, x = any_bits(kind, 640, k), activation(k)
    results = [Product(raw, kind, k, linear, threads=t)(x) for t in (1, 2, 3)]
    assert all(np.array_equal(r, results[0]) for r in results)


def test_more_tokens_than_a_pass(monkeypatch):
    """The bits of a token are the same in the second pass over a group."""
    monkeypatch.setattr(sys.modules[__name__], "MOST", 150)
    kind, k = dtype("q8_0"), 320
    raw, x = any_bits(kind, 33, k), activation(k, 150)
    product = Product(raw, kind, k)
    got = product(x)
    for t in (0, 75, 76, 127, 128, 149):
        assert np.array_equal(product(x[t : t + 1])[0], got[t]), t


@pytest.mark.parametrize("name", FORMATS)
def test_pack_pads_with_zeros(name):
    kind = dtype(name)
    k = 2 * kind.block
    meta = Meta.of((5, k), kind)
    packed = pack(any_bits(kind, 5, k), meta)
    assert packed.nbytes == packed_bytes(meta) == 16 * kind.row_nbytes(k)
    assert packed.ctypes.data % 64 == 0
    full = np.zeros((16, kind.row_nbytes(k)), np.uint8)
    full[:5] = any_bits(kind, 5, k)
    assert np.array_equal(packed, pack(full, Meta.of((16, k), kind)))


def test_other_formats_are_refused():
    """The error is raised when the graph is built, and names scope, format and known formats."""
    says = "^model.layers.0.mlp.up_proj: weights in iq2_xxs are not supported, only in f32.*mxfp4$"
    with scope("model.layers.0.mlp.up_proj"):
        w = weight("model.layers.0.mlp.up_proj.weight", (8, 256), FOREIGN)
        with pytest.raises(ModelFileError, match=says):
            ops.linear(feed("x", (3, 256), "f32"), w)
        with pytest.raises(ModelFileError, match=says):
            ops.embedding(feed("ids", (3,), "i32"), w)


# ----------------------------------------------------------------------------------- other targets


def digests(names: Sequence[str]) -> list[str]:
    """One line per format: a digest of the results of its integer kernel.

    `test_cpu_isa` compares them between targets.
    """
    lines = []
    for name in names:
        kind, k = dtype(name), 768
        product, x = Product(any_bits(kind, 33, k), kind, k), activation(k)
        found = hashlib.sha256(product(x).tobytes() + product(x[5:6]).tobytes())
        found.update(product.activations()[0][:1].tobytes())
        lines.append(f"{name} {found.hexdigest()}")
    return lines
