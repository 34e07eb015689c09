"""The kernels of the roofline probes do all the work that is accounted for."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
from llvmlite import binding, ir
from probe_kernel_cases import (
    combined,
    results,
    wrong,
)

from graphllm.backends import TimestampLog
from graphllm.backends.cpu.formats import FORMATS
from graphllm.backends.cpu.kernels import linear_float, linear_integer
from graphllm.backends.cpu.runtime import probe_kernels, roofline_probes
from graphllm.backends.cpu.runtime.host_memory import allocate
from graphllm.backends.cpu.runtime.isa import ISA
from graphllm.backends.cpu.runtime.roofline_probes import Run
from graphllm.backends.cpu.simd.emitter import Emitter
from graphllm.formats import BLOCK_FORMATS

NBYTES, CHUNK = 3 << 18, 256 << 10


def area(nbytes: int = NBYTES) -> np.ndarray:
    """Random bytes."""
    made = allocate(nbytes)
    made[:] = np.random.default_rng(0).integers(0, 256, nbytes, np.uint8)
    return made


def test_arithmetic():
    assert wrong() == [] and {"f32", "int8"} <= set(probe_kernels.multiply_add_loops())
    assert set(probe_kernels.instruction_names()) == {"f32", "f16", "int8"}


# ------------------------------------------------------------------------------------- upper bound

# Descriptions of processors for the compiler, and (groups, tokens) of a tile of `linear` on them.
PROCESSORS = {
    "haswell": (ISA("", True, True, False, False, True, 32), (1, 4)),
    "skylake-avx512": (ISA("", True, True, True, False, True, 64), (1, 8)),
    "icelake-server": (ISA("", True, True, True, True, True, 64), (3, 4)),
}
MULTIPLY = r"v(pmaddubsw|pdpbusd|fmadd\d+ps)\s"
MOVE = r"v(mov|p?broadcast|extract|insert|gather)"  # on ports that do not multiply


def blocks_of(name: str, emit: Callable[[Emitter, list[Any]], Any], values: int) -> list[list[str]]:
    """Instructions of each basic block of what ``emit`` makes of ``values`` int64 arguments."""
    binding.initialize_all_targets()
    binding.initialize_all_asmprinters()
    module = ir.Module("peak")
    module.triple = "x86_64-unknown-linux-gnu"
    word = ir.IntType(64)
    function = ir.Function(module, ir.FunctionType(word, [word] * values), "peak")
    builder = ir.IRBuilder(function.append_basic_block())
    found = emit(Emitter(builder, PROCESSORS[name][0]), list(function.args))
    builder.ret(ir.Constant(word, 0) if found is None else found)
    target = binding.Target.from_triple(module.triple).create_target_machine(cpu=name, opt=3)
    parsed = binding.parse_assembly(str(module))
    passes = binding.create_pass_builder(target, binding.create_pipeline_tuning_options(3))
    passes.getModulePassManager().run(parsed, passes)
    blocks: list[list[str]] = [[]]
    for line in target.emit_assembly(parsed).splitlines():
        if re.match(r"\.LBB", line):
            blocks.append([])
        if re.match(r"\s+[a-z]", line):
            blocks[-1].append(line.strip())
    return blocks


def per_instruction(block: list[str]) -> float:
    """Multiply-adds of a block per arithmetic vector instruction."""
    width = {"x": 16, "y": 32, "z": 64}
    done = 0
    for line in block:
        if re.match(MULTIPLY, line):
            done += width[line.rpartition("%")[2][0]] // (4 if "ps" in line.split()[0] else 1)
    computing = [line for line in block if line[0] == "v" and not re.match(MOVE, line)]
    return done / max(1, len(computing))


@pytest.mark.parametrize("name", PROCESSORS)
def test_no_kernel_computes_more_per_instruction_than_the_probe(name):
    """No inner loop of linear computes more per instruction than the probe of its ceiling, which
    stores nothing, so that it measures arithmetic only."""
    features, shape = PROCESSORS[name]
    best = {}
    for kind in ("f32", "int8"):
        loop = max(blocks_of(name, partial(_peak, kind), 2), key=len)
        best[kind] = per_instruction(loop)
        assert not [line for line in loop if "rsp" in line or re.match(r"v?mov.*, \S*\(", line)]
    assert best["f32"] == features.lanes
    integers = {name for name, form in BLOCK_FORMATS.items() if form.integers}
    for form in (each for each in FORMATS.values() if each.block == 1 or each.name in integers):
        floats = form.block == 1
        for in_place in {0, int(form.in_place_tokens(features) > 0)}:
            tile = partial(_tile, None if floats else form.code, in_place, shape)
            reached = max(map(per_instruction, blocks_of(name, tile, 10 if floats else 11)))
            assert 0 < reached <= best["f32" if floats else "int8"], (form.name, in_place)


def _peak(kind: str, e: Emitter, values: list[Any]) -> Any:
    return probe_kernels.emit_multiply_add(e, kind, *values)


def _tile(
    code: int | None, in_place: int, shape: tuple[int, int], e: Emitter, values: list[Any]
) -> None:
    if code is None:
        linear_float.tile(e, *shape, *values)
    else:
        linear_integer.tile(e, code, in_place, *shape, *values)


@pytest.mark.parametrize("threads", [1, 2])
def test_all_of_memory_is_read(threads):
    data = area()
    sums = results(probe_kernels.read, threads, data, data.ctypes.data, 0, NBYTES)
    assert sum(sums) == sum(combined(part.reshape(-1, 64)) for part in data.reshape(-1, CHUNK))


@pytest.mark.parametrize("threads", [1, 3])
def test_every_thread_reads_all_of_a_cache(threads):
    """Each thread starts at another place; its result covers both parts."""
    data, times = area(8 * probe_kernels.ITERATION_BYTES), 5
    sums = results(probe_kernels.read_cached, threads, data, data.ctypes.data, data.nbytes, times)
    for thread, found in enumerate(sums):
        unit = probe_kernels.ITERATION_BYTES
        first = data.nbytes // threads * thread // unit * unit
        parts = data[first:], data[:first]
        assert found == times * sum(combined(p.reshape(-1, 64)) for p in parts if p.size)


def test_memory_is_written_and_copied():
    def done(run: Run) -> None:
        log = TimestampLog()
        run(log)
        ((ends, _),) = log.runs
        assert ends[1] > ends[0] > 0

    data = area()
    first = data[: NBYTES // 2].copy()
    done(roofline_probes.copy_probe(data, 2))
    assert (data[NBYTES // 2 :] == first).all() and (data[: NBYTES // 2] == first).all()
    done(roofline_probes.write_probe(data, 2))
    assert (data.view(np.float32) == 1).all()
    done(roofline_probes.read_probe(data, 2))
    assert (data.view(np.float32) == 1).all()


def test_caches_by_name(tmp_path):
    for index, (level, kind, size) in enumerate(
        [("1", "Data", "48K"), ("1", "Instruction", "64K"), ("2", "Unified", "2048K")]
    ):
        folder = tmp_path / f"index{index}"
        folder.mkdir()
        for name, text in (("level", level), ("type", kind), ("size", size)):
            (folder / name).write_text(text + "\n")
    assert roofline_probes.cache_sizes(tmp_path) == {"L1 48 KB": 48 << 10, "L2 2 MB": 2 << 20}
    assert roofline_probes.cache_sizes(tmp_path / "none") == {}
    (tmp_path / "index0" / "size").write_text("big")
    assert roofline_probes.cache_sizes(tmp_path) == {}
