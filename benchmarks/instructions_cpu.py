"""Instructions of the product of one token with weights of a block format.

    NUMBA_CPU_NAME=znver3 NUMBA_CPU_FEATURES= python benchmarks/instructions_cpu.py

Compiles the microkernels alone, for any processor, and counts the instructions of their loops for
each 32 bytes of weights: all, those that access the stack at a fixed place (spilled registers and
constants), and prefetches. llvm-mca, if it is installed, estimates the cycles.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
from typing import NamedTuple

from llvmlite import binding, ir

from graphllm.backends.cpu.formats import BLOCK_FORMATS
from graphllm.backends.cpu.kernels import linear_one_token
from graphllm.backends.cpu.runtime.isa import ISA, isa, target
from graphllm.backends.cpu.simd.emitter import Emitter

TRIPLE = "x86_64-unknown-linux-gnu"
STACK, PREFETCH = r"\(%r[sb]p\)", r"^prefetch"


class Loop(NamedTuple):
    """A loop of the machine code, without the loops inside it."""

    runs: int  # for each block
    code: list[str]

    def count(self, pattern: str = "") -> int:
        """Instructions for each block that match a pattern."""
        return self.runs * sum(bool(re.search(pattern, line)) for line in self.code)


def loops(name: str, features: ISA, flags: str = "") -> list[Loop]:
    """The loop over the chunks of a super-block, if there is one, and the loop over blocks."""
    lines = assembly(name, features, flags).splitlines()
    labels = {line.split(":")[0]: i for i, line in enumerate(lines) if line.startswith(".LBB")}
    jumps = ((i, re.match(r"\s+j\w+\s+(\.LBB\w+)$", line)) for i, line in enumerate(lines))
    back = [(labels[jump[1]], i) for i, jump in jumps if jump and labels[jump[1]] < i]
    found, counted = [], set[int]()
    chunks = linear_one_token.iterations(BLOCK_FORMATS[name])
    runs = [chunks, 1] if chunks > 1 else [1]
    assert len(back) == len(runs), f"{name}: {len(back)} loops"
    for (first, last), each in zip(sorted(back, key=lambda span: span[1] - span[0]), runs):
        inside = [i for i in range(first, last + 1) if i not in counted]
        counted.update(inside)
        code = [lines[i].strip() for i in inside if re.match(r"\t[a-z{]", lines[i])]
        found.append(Loop(each, code))
    return found


def assembly(name: str, features: ISA, flags: str = "") -> str:
    """Assembly of the product of a token with 16 rows, for ``features`` of an x86-64 processor."""
    binding.initialize_all_targets()
    binding.initialize_all_asmprinters()
    module, word = ir.Module(name), ir.IntType(64)
    module.triple = TRIPLE
    function = ir.Function(module, ir.FunctionType(ir.VoidType(), [word] * 6), name)
    builder = ir.IRBuilder(function.append_basic_block())
    emitter = Emitter(builder, features)
    linear_one_token.fused(emitter, BLOCK_FORMATS[name].code, *function.args)
    builder.ret_void()
    parsed = binding.parse_assembly(str(module))
    machine = binding.Target.from_triple(TRIPLE).create_target_machine(features.name, flags, opt=3)
    options = binding.create_pipeline_tuning_options(speed_level=3)
    passes = binding.create_pass_builder(machine, options)
    passes.getModulePassManager().run(parsed, passes)
    return machine.emit_assembly(parsed)


def cycles(loop: Loop, cpu: str) -> float | None:
    """Cycles for each block by the model of llvm-mca; None without one."""
    if not shutil.which("llvm-mca"):
        return None
    code = [re.sub(r"\.L\w+", "label", line) for line in loop.code if not line.startswith("j")]
    command = ["llvm-mca", f"-mcpu={cpu}", "-iterations=100", "-instruction-info=0"]
    done = subprocess.run(command, input="\n".join(code), capture_output=True, text=True)
    total = re.search(r"Total Cycles:\s+(\d+)", done.stdout)
    return loop.runs * int(total[1]) / 100 if total else None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--formats", default=",".join(BLOCK_FORMATS))
    opts = parser.parse_args()
    print(f"{isa()}; for each 32 bytes of weights")
    print("format  | instructions | stack | prefetches | cycles")
    for name in opts.formats.split(","):
        found, size = loops(name, isa(), target()[1]), BLOCK_FORMATS[name].nbytes / 32
        counts = [sum(each.count(what) for each in found) / size for what in ("", STACK, PREFETCH)]
        times = [cycles(each, isa().name) for each in found]
        time = "-" if None in times else f"{sum(filter(None, times)) / size:.1f}"
        print(f"{name:7} | {counts[0]:12.1f} | {counts[1]:5.1f} | {counts[2]:10.1f} | {time:>6}")


if __name__ == "__main__":
    main()
