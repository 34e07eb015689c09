"""Speed of expert_linear on the CPU against linear, by format: decode in GB/s, prefill in GOP/s.

    python benchmarks/experts_cpu.py [--formats q8_0,q4_k] [--shapes 8x3584x2048:2]

A shape is E x N x K : k, with E experts of which each token uses k. Decode multiplies one token
with k experts at a time, until every expert was read once, in random order. Interleaved with it,
linear reads the same bytes as matrices of k N rows, and a read probe measures the ceiling. Prefill
counts 2 T k N K operations with random experts; linear does the same number of operations on the
same bytes: T k / E tokens and one matrix of E N rows. Figures are medians without the first round,
which also compiles, and without the time to quantize activations.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass

import numpy as np
from linear_cpu import InterleavedRuns

from graphllm import ops
from graphllm.backends import Bound, Header, Operand, Options, find
from graphllm.backends.cpu.formats import FORMATS
from graphllm.backends.cpu.runtime.cores import thread_count
from graphllm.backends.cpu.runtime.device import CpuDevice
from graphllm.backends.cpu.runtime.host_memory import allocate
from graphllm.backends.cpu.runtime.isa import isa
from graphllm.backends.cpu.runtime.roofline_probes import Run, read_probe
from graphllm.formats.quantization import quantise
from graphllm.graph.dtype import DType, dtype
from graphllm.graph.tensor import INPUT, WEIGHT, Meta, Tensor


@dataclass(frozen=True)
class Shape:
    """``experts`` matrices N x K, of which each token uses ``each``."""

    experts: int
    n: int
    k: int
    each: int

    @classmethod
    def parse(cls, text: str) -> Shape:
        sizes, _, each = text.partition(":")
        return cls(*map(int, sizes.split("x")), int(each))

    def __str__(self) -> str:
        return f"{self.experts}x{self.n}x{self.k}:{self.each}"


class Bench:
    """Experts of one format, and programs that multiply activations with them."""

    def __init__(self, kind: DType, shape: Shape, options: Options, total: int) -> None:
        self.kind, self.shape, self.options = kind, shape, options
        self.device, self.threads = CpuDevice(options), thread_count(options)
        experts, n, k = shape.experts, shape.n, shape.k
        one = quantise(np.random.default_rng(0).standard_normal((n, k)).astype(np.float32), kind)
        raw = np.tile(one, (experts, 1))
        meta = Meta.of((experts, n, k), kind)
        self.layers = max(1, total // meta.nbytes)
        leaf = Tensor(WEIGHT, (), {"name": "w"}, meta, scopes=("",))
        node = ops.expert_linear(self._leaf("x", (1, k), "f32"), leaf, self._ids(1))
        pack = self._select(node).pack["w"]
        self.packed = [self.device.prepare(pack, raw, meta) for _ in range(self.layers)]
        self.nbytes = self.layers * meta.nbytes
        self.rng = np.random.default_rng(1)

    def _select(self, node: Tensor):
        chosen = find("cpu").select(node, self.options)
        assert not isinstance(chosen, str), chosen
        return chosen

    def _leaf(self, name: str, shape: tuple[int, ...], kind: str) -> Tensor:
        return Tensor(INPUT, (), {"name": name}, Meta.of(shape, kind), scopes=("",))

    def _ids(self, tokens: int) -> Tensor:
        return self._leaf("ids", (tokens, self.shape.each), "i32")

    def _bound(self, node: Tensor, *inputs: Operand) -> Bound:
        out = Operand(node.meta, self.device.alloc(node.meta.nbytes))
        return Bound(node, self._select(node), inputs, out, self._scratch(node))

    def _scratch(self, node: Tensor) -> Operand | None:
        chosen = self._select(node)
        nbytes = chosen.scratch(node, self.options) if chosen.scratch else 0
        return Operand(Meta.of((nbytes,), "i8"), self.device.alloc(nbytes)) if nbytes else None

    def program(self, name: str, tokens: int, steps: int = 1, joined: int = 1) -> tuple[Run, int]:
        """Build ``steps`` products by op ``name``; return the program and its quantizing steps.

        The quantizing steps come first. ``joined``: number of experts that linear treats as one
        matrix.
        """
        shape, k = self.shape, self.shape.k
        x = self._leaf("x", (tokens, k), "f32")
        data = self.rng.standard_normal((tokens, k)).astype(np.float32)
        place, made = Operand(x.meta, data.view(np.uint8).reshape(-1)), []
        source = x
        for i in range(steps):
            layer, group = divmod(i, max(1, shape.experts // shape.each))
            if name == "linear":
                weight = Meta.of((joined * shape.n, k), self.kind)
                start = group * joined * (self.packed[0].nbytes // shape.experts)
                more = ()
            else:
                weight, start = Meta.of((shape.experts, shape.n, k), self.kind), 0
                more = (self._chosen(tokens, layer, group),)
            leaf = Tensor(WEIGHT, (), {"name": "w"}, weight, scopes=("",))
            build = getattr(ops, name)
            node = build(source, leaf, *[n for n, _ in more])
            chosen = self._select(node)
            if source is x and chosen.lower:
                source = chosen.lower(node, self.options)[0]
                if source is not x:
                    made.append(self._bound(source, place))
                    place = made[0].out
                node = build(source, leaf, *[n for n, _ in more])
            packed = Operand(weight, self.packed[layer][start:])
            made.append(self._bound(node, place, packed, *[o for _, o in more]))
        return self.device.build(made, Header()).run, len(made) - steps

    def _chosen(self, tokens: int, layer: int, group: int) -> tuple[Tensor, Operand]:
        """Return expert ids, node and operand; for one token, groups cover each expert once."""
        shape, node = self.shape, self._ids(tokens)
        if tokens == 1:
            every = np.random.default_rng(layer).permutation(shape.experts)
            ids = every[None, group * shape.each : (group + 1) * shape.each]
        else:
            ids = self.rng.random((tokens, shape.experts)).argsort(axis=1)[:, : shape.each]
        stored = np.ascontiguousarray(ids, np.int32)
        return node, Operand(node.meta, stored.view(np.uint8).reshape(-1))

    def decode(self, rounds: int) -> tuple[float, float, float]:
        """Return the bytes/s of expert_linear, of linear, and of the read probe."""
        steps = self.layers * (self.shape.experts // self.shape.each)
        area = allocate(self.nbytes)
        area[:] = 1
        runs = {
            name: self.program(name, 1, steps, self.shape.each)
            for name in ("expert_linear", "linear")
        }
        read = read_probe(area, self.threads)
        interleaved = InterleavedRuns(read=read, **{name: run for name, (run, _) in runs.items()})
        found = interleaved.seconds(rounds)
        times = [found[name][:, first:].sum(axis=1) for name, (_, first) in runs.items()]
        experts, linear, reading = (self.nbytes / np.median(t) for t in (*times, found["read"]))
        return experts, linear, reading

    def prefill(self, tokens: int, rounds: int) -> tuple[float, float]:
        """Return the operations/s of expert_linear and of linear."""
        shape = self.shape
        fewer = tokens * shape.each // shape.experts
        runs = {
            "expert_linear": self.program("expert_linear", tokens),
            "linear": self.program("linear", fewer, joined=shape.experts),
        }
        found = InterleavedRuns(**{name: run for name, (run, _) in runs.items()}).seconds(rounds)
        done = 2 * tokens * shape.each * shape.n * shape.k
        times = [found[name][:, first:].sum(axis=1) for name, (_, first) in runs.items()]
        experts, linear = (done / np.median(t) for t in times)
        return experts, linear


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--formats", default="q4_k,q8_0,mxfp4,f16", help=", ".join(FORMATS))
    parser.add_argument("--shapes", default="8x3584x2048:2,128x768x2048:8")
    parser.add_argument("--tokens", type=int, default=128, help="Tokens of prefill.")
    parser.add_argument("--mib", type=int, default=512, help="MiB of weights that decode reads.")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=0)
    opts = parser.parse_args()
    options = Options(threads=opts.threads)
    print(f"{isa()}, {thread_count(options)} threads")
    print("decode of one token, GB/s (share of the ceiling); prefill, GOP/s")
    heads = "experts", "linear", "ceiling", "of linear's", f"T={opts.tokens}", "linear", "of it"
    print(f"{'shape':16} {'format':6} " + " ".join(f"{h:>11}" for h in heads))
    for shape in map(Shape.parse, opts.shapes.split(",")):
        for name in opts.formats.split(","):
            bench = Bench(dtype(name), shape, options, opts.mib << 20)
            rate, dense, roof = bench.decode(opts.rounds)
            cells = [f"{r / 1e9:.1f} ({r / roof:.0%})" for r in (rate, dense)]
            cells += [f"{roof / 1e9:.1f}", f"{rate / dense:.0%}"]
            rate, dense = bench.prefill(opts.tokens, opts.rounds)
            cells += [f"{rate / 1e9:.0f}", f"{dense / 1e9:.0f}", f"{rate / dense:.0%}"]
            line = " ".join(f"{cell:>11}" for cell in cells)
            print(f"{shape!s:16} {name:6} {line}", flush=True)


if __name__ == "__main__":
    main()
