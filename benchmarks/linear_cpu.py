"""Speed of linear on the CPU, by format: decode in GB/s of weights, prefill in GOP/s.

    python benchmarks/linear_cpu.py [--formats q8_0,q4_k] [--tokens 128] [--shape 1536x8960]

Decode multiplies one token with enough matrices (N x K each) to exceed the caches; its bytes are
those of the weights. Interleaved with it, a read probe measures the ceiling in GB/s. Prefill counts
2 T N K operations; its peak, also interleaved, is what all threads reach with the same instructions
on registers, without scales. Figures are medians without the first round, which also compiles.
Quantizing the activation has its own column.
"""

from __future__ import annotations

import argparse

import numpy as np
from numba import types
from numba.extending import intrinsic

from graphllm import ops
from graphllm.backends import Bound, Header, Operand, Options, TimestampLog, find
from graphllm.backends.cpu.formats import FORMATS
from graphllm.backends.cpu.runtime.cores import thread_count
from graphllm.backends.cpu.runtime.device import CompiledProgram, CpuDevice, Launch
from graphllm.backends.cpu.runtime.host_memory import allocate
from graphllm.backends.cpu.runtime.isa import isa
from graphllm.backends.cpu.runtime.jit import args, kernel
from graphllm.backends.cpu.runtime.roofline_probes import Run, read_probe
from graphllm.backends.cpu.runtime.step_interpreter import BARRIER
from graphllm.backends.cpu.simd.emitter import F32S, VECTOR, Emitter
from graphllm.formats.quantization import quantise
from graphllm.graph.dtype import DType, dtype
from graphllm.graph.tensor import INPUT, WEIGHT, Meta, Tensor

_CHAINS, _TURNS = 12, 1 << 16  # of the peak: independent sums, and terms of each


@intrinsic(prefer_literal=True)
def _calculate(typingctx, integer, at):
    """Accumulate products of the two vectors at ``at``; store the sums after them."""

    def generate(context, builder, sig, values):
        e, fixed = Emitter(builder), integer.literal_value
        u, s = (e.load(values[1], offset=VECTOR * i) for i in range(2))
        x, y = (e.b.bitcast(v, F32S) for v in (u, s))
        sums = [e.variable(u if fixed else x) for _ in range(_CHAINS)]
        with e.loop(_TURNS):
            for total in sums:
                old = e.get(total)
                e.set(total, e.dot_bytes([(u, s)], 15, old) if fixed else e.madd(x, y, old))
        for i, total in enumerate(sums):
            e.store(e.get(total), values[1], VECTOR * (2 + i))
        return context.get_dummy_value()

    return types.none(integer, types.int64), generate


@kernel
def integer_products(p, thread, threads):
    (room,) = args(p, 1)
    _calculate(1, room + thread * (2 + _CHAINS) * VECTOR)


@kernel
def float_products(p, thread, threads):
    (room,) = args(p, 1)
    _calculate(0, room + thread * (2 + _CHAINS) * VECTOR)


class InterleavedRuns:
    """Interleaved runs of several programs, so that noise affects all of them alike."""

    def __init__(self, **programs: Run) -> None:
        self.programs = programs

    def seconds(self, rounds: int) -> dict[str, np.ndarray]:
        """Return the seconds of each step [rounds, steps], without a warm-up round."""
        found: dict[str, list[np.ndarray]] = {name: [] for name in self.programs}
        for _ in range(rounds + 1):
            for name, run in self.programs.items():
                log = TimestampLog()
                run(log)
                ((ends, _),) = log.runs
                found[name].append(np.diff(ends) / 1e9)
        return {name: np.array(each[1:]) for name, each in found.items()}


class Bench:
    """Matrices of one format [N, K], and programs that multiply activations with them."""

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
        self.threads = thread_count(options)

    def _select(self, node: Tensor):
        chosen = find("cpu").select(node, self.options)
        assert not isinstance(chosen, str), chosen
        return chosen

    def _input(self, tokens: int) -> Tensor:
        return Tensor(INPUT, (), {"name": "x"}, Meta.of((tokens, self.k), "f32"), scopes=("",))

    def _bound(self, node: Tensor, *inputs: Operand) -> Bound:
        out = Operand(node.meta, self.device.alloc(node.meta.nbytes))
        return Bound(node, self._select(node), inputs, out)

    def program(self, tokens: int, most: int = 1 << 30) -> tuple[Run, int]:
        """Build products with ``most`` matrices; return the program and its quantizing steps."""
        x = self._input(tokens)
        data = np.random.default_rng(1).standard_normal((tokens, self.k)).astype(np.float32)
        place = Operand(x.meta, data.view(np.uint8).reshape(-1))
        steps: list[Bound] = []
        for leaf, packed in self.weights[:most]:
            node = ops.linear(x, leaf)
            chosen = self._select(node)
            source = chosen.lower(node, self.options)[0] if chosen.lower else x
            if source is not x and not steps:
                steps.append(self._bound(source, place))
                place = steps[0].out
            node = ops.linear(source if source is not x else x, leaf)
            steps.append(self._bound(node, place, Operand(leaf.meta, packed)))
        first = int(steps[0].node.op != "linear")
        return self.device.build(steps, Header()).run, first

    def decode(self, rounds: int) -> tuple[float, float, float]:
        """Return bytes/s, bytes/s of the read probe, and seconds to quantize the activation."""
        area = allocate(self.nbytes)
        area[:] = 1
        run, first = self.program(1)
        interleaved = InterleavedRuns(read=read_probe(area, self.threads), linear=run)
        found = interleaved.seconds(rounds)
        # There is no barrier between products, so only the sum of their times is meaningful.
        rate = self.nbytes / np.median(found["linear"][:, first:].sum(axis=1))
        quantising = float(np.median(found["linear"][:, :first].sum(axis=1)))
        return rate, self.nbytes / np.median(found["read"]), quantising

    def prefill(self, tokens: int, rounds: int) -> tuple[float, float]:
        """Return operations/s, and those of the peak."""
        run, first = self.program(tokens, most=2)
        fixed = first > 0
        room = allocate(self.threads * (2 + _CHAINS) * VECTOR)
        launch = Launch(integer_products if fixed else float_products, [room.ctypes.data])
        peak = CompiledProgram(self.threads, [[launch]], [BARRIER], room).run
        found = InterleavedRuns(peak=peak, linear=run).seconds(rounds)
        most = self.threads * _CHAINS * _TURNS * (128 if fixed else 32)
        seconds = found["linear"][:, first:]
        done = 2 * tokens * self.n * self.k * seconds.shape[1]
        return done / np.median(seconds.sum(axis=1)), most / np.median(found["peak"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--formats", default=",".join(FORMATS))
    parser.add_argument("--linear", default="auto,float")
    parser.add_argument("--tokens", default="128", help="Tokens of prefill, comma-separated.")
    parser.add_argument("--shape", default="1536x8960", help="N x K of the matrices.")
    parser.add_argument("--mib", type=int, default=1024, help="MiB of weights that decode reads.")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=0)
    opts = parser.parse_args()
    n, k = map(int, opts.shape.split("x"))
    total = opts.mib << 20
    print(f"{isa()}; N x K = {n} x {k}")
    head = "".join(f" | GOP/s T={t} | share" for t in opts.tokens.split(","))
    print(f"format  | linear  | decode GB/s | ceiling | share | quantise us{head}")
    for name in opts.formats.split(","):
        for linear in opts.linear.split(","):
            if linear == "auto" and not dtype(name).quantised:
                continue
            bench = Bench(dtype(name), n, k, Options(linear, opts.threads), total)
            rate, roof, first = bench.decode(opts.rounds)
            row = f"{name:7} | {linear:7} | {rate / 1e9:11.1f}"
            row += f" | {roof / 1e9:7.1f} | {rate / roof:5.0%} | {first * 1e6:11.1f}"
            for tokens in map(int, opts.tokens.split(",")):
                rate, peak = bench.prefill(tokens, opts.rounds)
                row += f" | {rate / 1e9:{len(f'GOP/s T={tokens}')}.0f} | {rate / peak:5.0%}"
            print(row, flush=True)


if __name__ == "__main__":
    main()
