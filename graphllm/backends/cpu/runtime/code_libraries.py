"""Numba code libraries: of kernels, which are executed, and of helpers, which are only linked."""

from __future__ import annotations

from typing import Any

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

    def _optimize_final_module(self) -> None:
        # Numba runs a cheaper pipeline before, to remove reference counts, which kernels lack.
        manager, builder = self._codegen._module_pass_manager()
        manager.run(self._final_module, builder)
        for function in self._final_module.functions:
            if function.linkage == Linkage.linkonce_odr:
                function.linkage = Linkage.internal


def kernel_pipeline(name: str, typing: Any, target: Any, _: Any, *rest: Any) -> Compiler:
    """Numba's compiler with a `_SelfContainedLibrary`."""
    library = _SelfContainedLibrary(target.codegen(), name)
    library.enable_object_caching()
    return Compiler(typing, target, library, *rest)
