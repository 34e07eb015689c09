"""Machine code of the product of one token, which instructions limit on AVX2."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from linear_cases import INTEGER_BLOCKS

from graphllm.backends.cpu.formats import BLOCK_FORMATS
from graphllm.backends.cpu.runtime.isa import ISA

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
import instructions_cpu

HASWELL = ISA("haswell", x86=True, avx2=True, avx512=False, vnni=False, f16c=True, width=32)
LINE = 64  # bytes of a cache line


@pytest.mark.parametrize("name", INTEGER_BLOCKS)
def test_registers_are_not_spilled_and_weights_are_prefetched(name):
    inner, *outer = instructions_cpu.loops(name, HASWELL)
    assert inner.count() > 40 and inner.count(instructions_cpu.STACK) == 0
    prefetches = sum(each.count(instructions_cpu.PREFETCH) for each in (inner, *outer))
    lines = BLOCK_FORMATS[name].nbytes / LINE
    assert 2 * lines <= prefetches <= 2 * lines + 3  # a line is fetched into L2, then into L1
