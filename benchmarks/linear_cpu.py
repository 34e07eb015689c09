"""Speed of linear on the CPU, by format: decode in GB/s of weights, prefill in GOP/s.

    python benchmarks/linear_cpu.py [--formats q8_0,q4_k] [--tokens 128] [--shape 1536x8960]

Decode multiplies one token with enough different matrices (N x K each) to leave the caches behind;
its bytes are the weights'. Prefill counts 2 T N K operations. The read ceiling, in GB/s, is taken
before each row: all threads read as many bytes, and do nothing with them. Medians; the first round,
which also compiles, is left out. Quantising the activation has its own column.
"""

from __future__ import annotations

import argparse

import numpy as np
from numba import types
from numba.extending import intrinsic

from graphllm import ops
from graphllm.backends import Bound, Header, Operand, Options, find
from graphllm.backends.cpu.device import CpuDevice, Launch, Program
from graphllm.backends.cpu.formats import FORMATS
from graphllm.backends.cpu.isa import isa
from graphllm.backends.cpu.jit import args, i64s, kernel, next_chunk
from graphllm.backends.cpu.layouts import allocate
from graphllm.backends.cpu.simd import VECTOR, Emit
from graphllm.backends.cpu.team import team
from graphllm.backends.cpu.walk import MEET
from graphllm.dtype import DType, dtype
from graphllm.quant import quantise
from graphllm.tensor import INPUT, WEIGHT, Meta, Tensor

_CHUNK = 256 << 10  # bytes that a reader takes at a time
_AHEAD = 4096


@intrinsic
def _read(typingctx, at, nbytes):
    """Load every vector of a piece of memory; an int64 that depends on all of them."""

    def generate(context, builder, sig, values):
        e = Emit(builder)
        total = e.variable(e.i32(0))
        with e.loop(e.b.sdiv(values[1], e.count(4 * VECTOR))) as loop:
            line = e.at(values[0], e.times(loop.index, 4 * VECTOR))
            for i in range(4):
                e.prefetch(line, _AHEAD + i * VECTOR)
                e.set(total, e.b.xor(e.get(total), e.load(line, offset=i * VECTOR)))
        return e.b.zext(e.reduce("add", e.get(total)), context.get_value_type(types.int64))

    return types.int64(types.int64, types.int64), generate


@kernel(key=("benchmark", "read", _AHEAD))
def read(p, thread, threads):
    start, nbytes, sink = args(p, 3)
    chunk, total = next_chunk(p), 0
    while chunk * _CHUNK < nbytes:
        total += _read(start + chunk * _CHUNK, min(_CHUNK, nbytes - chunk * _CHUNK))
        chunk = next_chunk(p)
    i64s(sink)[thread] = total


class Bench:
    """Matrices of one format [N, K], and programs that multiply activations with each of them."""

    def __init__(self, kind: DType, n: int, k: int, options: Options, total: int) -> None:
        self.kind, self.n, self.k, self.options = kind, n, k, options
        self.device = CpuDevice(options)
        count = max(1, total // Meta.of((n, k), kind).nbytes)
        rng = np.random.default_rng(0)
        raw = quantise(rng.standard_normal((n, k)).astype(np.float32), kind)
        self.weights = []
        for i in range(count):
            leaf = Tensor(WEIGHT, (), {"name": str(i)}, Meta.of((n, k), kind), scopes=("",))
            chosen = self._select(ops.linear(self._input(1), leaf))
            packed = self.device.prepare(chosen.pack["w"], raw, leaf.meta)
            self.weights.append((leaf, packed))
        self.nbytes = count * leaf.meta.nbytes

    def _select(self, node: Tensor):
        chosen = find("cpu").select(node, self.options)
        assert not isinstance(chosen, str), chosen
        return chosen

    def _input(self, tokens: int) -> Tensor:
        return Tensor(INPUT, (), {"name": "x"}, Meta.of((tokens, self.k), "f32"), scopes=("",))

    def _bound(self, node: Tensor, *inputs: Operand) -> Bound:
        out = Operand(node.meta, self.device.alloc(node.meta.nbytes))
        return Bound(node, self._select(node), inputs, out)

    def times(self, tokens: int, rounds: int, most: int = 1 << 30) -> tuple[float, float]:
        """Seconds to quantise the activation, and of a product, medians."""
        x = self._input(tokens)
        data = np.random.default_rng(1).standard_normal((tokens, self.k)).astype(np.float32)
        place = Operand(x.meta, data.view(np.uint8).reshape(-1))
        steps = []
        for leaf, packed in self.weights[:most]:
            node = ops.linear(x, leaf)
            chosen = self._select(node)
            source = chosen.lower(node, self.options)[0] if chosen.lower else x
            if source is not x and not steps:
                steps.append(self._bound(source, place))
                place = steps[0].out
            node = ops.linear(source if source is not x else x, leaf)
            steps.append(self._bound(node, place, Operand(leaf.meta, packed)))
        program = self.device.build(steps, Header())
        stamps = np.zeros(len(steps) + 1, np.int64)
        found = []
        for _ in range(rounds + 1):
            program.run(stamps)
            found.append(np.diff(stamps) / 1e9)
        first = int(steps[0].node.op != "linear")
        # The threads do not wait for each other between products: only their sum is a time.
        products = [sum(each[first:]) / (len(each) - first) for each in found[1:]]
        quantise = np.median([each[0] for each in found[1:]]) if first else 0.0
        return float(quantise), float(np.median(products))


def ceiling(options: Options, nbytes: int, rounds: int) -> float:
    """Bytes a second that all threads can read."""
    device = CpuDevice(options)
    area = allocate(nbytes)
    area[:] = 1
    sink = np.zeros(device.threads, np.int64)
    launch = Launch(read, [area.ctypes.data, nbytes, sink.ctypes.data])
    program = Program(team(device.threads), [[launch]], [MEET], (area, sink))
    stamps, found = np.zeros(2, np.int64), []
    for _ in range(rounds + 1):
        program.run(stamps)
        found.append(int(stamps[1] - stamps[0]))
    return nbytes / float(np.median(found[1:])) * 1e9


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--formats", default=",".join(FORMATS))
    parser.add_argument("--linear", default="auto,float")
    parser.add_argument("--tokens", default="128", help="of prefill; several with commas")
    parser.add_argument("--shape", default="1536x8960", help="N x K")
    parser.add_argument("--mib", type=int, default=128, help="of weights that decode reads")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=0)
    opts = parser.parse_args()
    n, k = map(int, opts.shape.split("x"))
    total = opts.mib << 20
    print(f"{isa()}; N x K = {n} x {k}")
    head = "".join(f" | GOP/s T={t}" for t in opts.tokens.split(","))
    print(f"format | linear  | decode GB/s | ceiling | part | quantise us{head}")
    for name in opts.formats.split(","):
        for linear in opts.linear.split(","):
            if linear == "auto" and not dtype(name).quantised:
                continue
            bench = Bench(dtype(name), n, k, Options(linear, opts.threads), total)
            each = bench.nbytes / len(bench.weights)
            roof = ceiling(bench.options, total, opts.rounds)
            first, seconds = bench.times(1, opts.rounds)
            rate = each / seconds
            row = f"{name:6} | {linear:7} | {rate / 1e9:11.1f}"
            row += f" | {roof / 1e9:7.1f} | {rate / roof:4.0%}"
            row += f" | {first * 1e6:11.1f}"
            for tokens in map(int, opts.tokens.split(",")):
                _, seconds = bench.times(tokens, 3, most=2)
                row += f" | {2 * tokens * n * k / seconds / 1e9:{len(f'GOP/s T={tokens}')}.0f}"
            print(row, flush=True)


if __name__ == "__main__":
    main()
