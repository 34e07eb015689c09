"""The CPU backend on 64-bit Arm, without an Arm processor: kernels are compiled here, for Arm, and
loaded by an emulated Python, as Numba itself would take hours under emulation.

    python arm64.py compile ACTION...    compiles the kernels that an action needs
    python arm64.py run ACTION...        (emulated) prints what the action finds

Actions are functions of this module with their arguments. Both processes need the same
GRAPHLLM_CACHE and, in NUMBA_CPU_NAME and NUMBA_CPU_FEATURES, the same processor.
"""

from __future__ import annotations

import platform
import sys

TRIPLE = "aarch64-unknown-linux-gnu"


def target_arm() -> None:
    """Make Numba and graphllm, which must not be imported yet, compile for Arm and run nothing."""
    platform.machine = lambda: "aarch64"
    import llvmlite.binding as llvm

    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    llvm.get_process_triple = llvm.get_default_triple = lambda: TRIPLE
    from graphllm.backends.cpu.runtime import jit, kernel_cache
    from graphllm.backends.cpu.runtime.thread_pool import ThreadPool

    jit.load_machine_code = kernel_cache.load_machine_code = lambda code, symbol: (1, [])
    ThreadPool.run = lambda *args, **keywords: None  # type: ignore[method-assign]


def share_cache() -> None:
    """Give the cache folder a name that does not depend on the machine."""
    from graphllm.backends.cpu.runtime import kernel_cache

    kernel_cache._version = lambda: "a" * 64


# ---------------------------------------------------------------------------------------- actions


def linears(*formats: str) -> list[str]:
    """Digests of the results of linears with block formats."""
    from linear_cases import digests

    return list(digests(formats))


def samples(*names: str) -> list[str]:
    """The processor, and what is wrong with the samples of ops.

    "op:format" selects the samples of one block format, "op:" those without one.
    """
    from op_runs import run_all

    from graphllm.backends import Options
    from graphllm.backends.cpu.runtime.isa import isa

    wrong = [str(isa())]
    for name in names:
        op, _, form = name.partition(":")
        formats = [form] if ":" in name else None
        lines = run_all(op, ("cpu",), Options(threads=1), formats=formats)
        wrong += [f"{name}: {line}" for line in lines]
    return wrong


def greedy(path: str, prompt: str, count: str) -> list[str]:
    """The most likely tokens after a prompt, by a model file."""
    import graphllm

    llm = graphllm.load(path, device="cpu", threads=1, context=64)
    return [str(llm.generate(prompt, max_tokens=int(count), temperature=0).ids)]


if __name__ == "__main__":
    if sys.argv[1] == "compile":
        target_arm()
    share_cache()
    found = globals()[sys.argv[2]](*sys.argv[3:])
    if sys.argv[1] == "run":
        print(*found, sep="\n")
