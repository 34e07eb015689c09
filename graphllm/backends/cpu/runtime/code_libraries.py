"""Numba code libraries: of kernels, which are executed, and of helpers, which are only linked."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from llvmlite.binding import Linkage
from numba.core.codegen import JITCodeLibrary
from numba.core.compiler import Compiler


class _LinkedLibrary(JITCodeLibrary):
    """Code of a helper, which is only linked into kernels: no machine code is made of it."""

    def _finalize_final_module(self) -> None:
        self._verify_declare_only_symbols()
        self._finalized = True

    def get_pointer_to_function(self, name: str) -> int:
        return 0

    @property
    def codegen(self) -> Any:
        return _NoEnvironment


class _NoEnvironment:
    """In place of a code generator, which would store the environment of a Python function."""

    @staticmethod
    def set_env(name: str, environment: Any) -> None:
        pass


def helper_pipeline(typing: Any, target: Any, _: Any, *rest: Any) -> Compiler:
    """Numba's compiler with a `_LinkedLibrary`."""
    return Compiler(typing, target, _LinkedLibrary(target.codegen(), "helper"), *rest)


class _SelfContainedLibrary(JITCodeLibrary):
    """Machine code of a kernel that includes its own copies of the functions it calls.

    Numba resolves them by name in the process, to whichever copy was compiled first, perhaps for
    another kernel and with another order of rounding. Code from the disk cache would then call
    other copies than the process that compiled it.
    """

    def add_ir_module(self, ir_module: ir.Module) -> None:
        """Add the kernel, with an entry in place of Numba's C wrapper, which would raise errors."""
        (native,) = (function for function in ir_module.functions if function.blocks)
        outputs, values = native.args[:2], native.args[2:]  # addresses of the result and the error
        form = ir.FunctionType(ir.VoidType(), [value.type for value in values])
        entry = ir.Function(ir_module, form, f"cfunc.{native.name}")  # the name of the C wrapper
        builder = ir.IRBuilder(entry.append_basic_block())
        word = ir.IntType(64)
        ignored = [builder.bitcast(builder.alloca(word), each.type) for each in outputs]
        builder.call(native, [*ignored, *entry.args])
        builder.ret_void()
        native.linkage = "internal"
        super().add_ir_module(ir_module)

    def _optimize_final_module(self) -> None:
        # Numba runs a cheaper pipeline before, to remove reference counts, which kernels lack.
        manager, builder = self._codegen._module_pass_manager()
        manager.run(self._final_module, builder)
        for function in self._final_module.functions:
            if function.linkage == Linkage.linkonce_odr:
                function.linkage = Linkage.internal


def kernel_pipeline(
    name: str, typing: Any, target: Any, _: Any, args: Any, result: Any, flags: Any, names: Any
) -> Compiler:
    """Numba's compiler with a `_SelfContainedLibrary`."""
    library = _SelfContainedLibrary(target.codegen(), name)
    library.enable_object_caching()
    flags.no_cfunc_wrapper = True
    return Compiler(typing, target, library, args, result, flags, names)
