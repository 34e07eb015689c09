"""Linears of every format on the CPU, compared with the NumPy formulas."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np

from graphllm import ops
from graphllm.backends import Bound, Header, Operand, Options, find
from graphllm.backends.cpu.formats import FORMATS
from graphllm.backends.cpu.kernels.weight_packing import pack
from graphllm.backends.cpu.runtime.device import CpuDevice
from graphllm.formats import BLOCK_FORMATS, ROW_FORMATS, quantization
from graphllm.graph.dtype import DType, dtype
from graphllm.graph.tensor import INPUT, WEIGHT, Meta, Tensor, Var

MOST = 45  # tokens: enough for AMX, and not whole tiles of it
SENTINEL = np.float32(77)
# (offset, end) of the scales of a block, by format: float16, or exponents of one byte.
SCALES = {name: form.span(*form.scales) for name, form in BLOCK_FORMATS.items()}
BLOCKS = tuple(SCALES)
INTEGER_BLOCKS = tuple(name for name, form in BLOCK_FORMATS.items() if form.integers)
INTEGER = (*INTEGER_BLOCKS, "w8a8")  # formats that are multiplied as integers
COLUMNS = {1: (1, 63, 300), 32: (32, 320), 128: (128, 384), 256: (256, 768)}
CASES = [(n, "float") for n in FORMATS] + [(n, "auto") for n in (*BLOCKS, *ROW_FORMATS)]


def any_bits(kind: DType, n: int, k: int, seed: int = 0) -> np.ndarray:
    """Stored bytes of weights [n, k]; in quantised formats random bytes except the scales."""
    rng = np.random.default_rng([seed, n, k])
    values = rng.standard_normal((n, k)).astype(np.float32) / np.sqrt(k)
    raw = quantization.quantise(values, kind)
    if kind.name in ROW_FORMATS:
        q = rng.integers(0, 256, (n, k), np.uint8)
        if kind.name != "w8a8":
            q[q & 127 == 127] = 126  # NaN
        ROW_FORMATS[kind.name].split(raw)[0][:] = q.view(ROW_FORMATS[kind.name].element)
    elif kind.block > 1:
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


def digests(names: Sequence[str]) -> list[str]:
    """One line per format: a digest of the results of its integer kernel.

    `test_cpu_isa` compares them between targets.
    """
    lines = []
    for name in names:
        kind, k = dtype(name), 768
        product, x = Product(any_bits(kind, 33, k), kind, k), activation(k)
        found = hashlib.sha256(product(x).tobytes() + product(x[5:6]).tobytes())
        found.update(product(x[:37]).tobytes())
        found.update(product.activations()[0][:1].tobytes())
        lines.append(f"{name} {found.hexdigest()}")
    return lines
