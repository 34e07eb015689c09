"""Compilation of kernels by Numba and LLVM. Imported only when something must be compiled."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any, NamedTuple

from llvmlite import binding, ir
from llvmlite.binding import Linkage
from llvmlite.binding.object_file import ObjectFileRef
from numba import int64, types
from numba.core.ccallback import CFunc
from numba.core.codegen import JITCodeLibrary
from numba.core.compiler import Compiler
from numba.core.errors import NumbaError
from numba.core.registry import cpu_target
from numba.core.runtime import rtsys

from ....debug import debug
from ....errors import GraphllmError

# Neither nnan nor ninf: masks are infinities, and NaN must propagate.
FASTMATH = {"contract", "reassoc", "nsz", "arcp"}
_OPTIONS: dict[str, Any] = {
    "fastmath": FASTMATH,
    "boundscheck": False,
    "error_model": "numpy",
    "nopython": True,
}
_ARGUMENTS = (int64, int64, int64)


class Compiled(NamedTuple):
    """A compiled kernel.

    Attributes:
        code: object file.
        symbol: name of its entry.
        reusable: whether other processes may use it; it may contain addresses of this one.
    """

    code: bytes
    symbol: str
    reusable: bool


def compile_kernel(name: str, function: Callable[..., Any]) -> Compiled:
    """Compile ``function(p, thread, threads)``. GraphllmError if Numba cannot."""
    pipeline: Any = partial(_kernel_pipeline, name)
    compiled: Any = CFunc(function, (_ARGUMENTS, types.void), {}, _OPTIONS, pipeline)
    try:
        compiled.compile()
    except NumbaError as error:
        raise GraphllmError(f"{name}: {' '.join(str(error).split())[:400]}") from error
    debug(4, compiled.inspect_llvm)
    library = compiled._library
    return Compiled(library.object_file, compiled.native_name, not library.has_dynamic_globals)


def prepare() -> None:
    """Import what Numba otherwise imports when it compiles for the first time."""
    cpu_target.target_context.refresh()
    cpu_target.typing_context.refresh()


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


class _KernelLibrary(JITCodeLibrary):
    """Object file of a kernel, with its own copies of the functions that it calls.

    Numba resolves them by name in the process, to whichever copy was compiled first, perhaps for
    another kernel and with another order of rounding. Code from the disk cache would then call
    other copies than the process that compiled it.
    """

    object_file = b""

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

    def _finalize_final_module(self) -> None:
        self._finalize_dynamic_globals()
        self._verify_declare_only_symbols()
        self.object_file = self._codegen._tm.emit_object(self._final_module)
        self._finalized = True

    def get_pointer_to_function(self, name: str) -> int:
        self._ensure_finalized()
        return 0


def _kernel_pipeline(
    name: str, typing: Any, target: Any, _: Any, args: Any, result: Any, flags: Any, names: Any
) -> Compiler:
    """Numba's compiler with a `_KernelLibrary`."""
    flags.no_cfunc_wrapper = True
    library = _KernelLibrary(target.codegen(), name)
    return Compiler(typing, target, library, args, result, flags, names)


# ----------------------------------------------------------------------------------------- loading


def symbol_address(name: str) -> int:
    """Address of a function of Numba's runtime; 0 if there is none."""
    rtsys.initialize(cpu_target.target_context)
    return int(binding.address_of_symbol(name) or 0)


@cache
def _machine() -> Any:
    binding.initialize_native_target()
    binding.initialize_native_asmprinter()
    return binding.Target.from_default_triple().create_target_machine(codemodel="jitdefault")


_engines: list[Any] = []  # own the machine code


def load_object(code: bytes, symbol: str) -> int:
    """Load an object file with LLVM's loader; return the address of ``symbol``.

    Raises ValueError if the bytes are no object file of this system or do not define the symbol.
    LLVM ends the process for some kinds of damage.
    """
    if not code.startswith((b"\x7fELF", b"\xcf\xfa\xed\xfe")):
        raise ValueError("its code is no object file")
    file = ObjectFileRef.from_data(code)
    engine = binding.create_mcjit_compiler(binding.parse_assembly(""), _machine())
    engine.add_object_file(file)
    engine.finalize_object()
    address = int(engine.get_function_address(symbol))
    if not address:
        raise ValueError(f"it does not define {symbol}")
    _engines.append(engine)
    return address
