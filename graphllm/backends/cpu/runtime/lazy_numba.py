"""Numba and llvmlite, imported only when a kernel must be compiled.

A process that finds all its kernels in the disk cache needs neither, and importing them takes half
a second. Modules with kernel code therefore import their names from here:

    from ..runtime.lazy_numba import float32, int64, intrinsic, types

Until something is compiled, these names, and the functions that decorators make of them, are `Lazy`
values. `activate` imports Numba and replaces them in all modules of this backend by the
values that they stand for, because Numba's compiler reads the global names of a function.
"""

from __future__ import annotations

import importlib
import sys
import threading
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

_FOLDER = Path(__file__).resolve().parents[1]
_PACKAGE = __name__.rsplit(".", 2)[0]  # graphllm.backends.cpu
_MISSING = object()


class Lazy:
    """A value that ``make`` returns, made when it is first used."""

    __slots__ = ("_make", "_value")

    def __init__(self, make: Callable[[], Any]) -> None:
        self._make, self._value = make, _MISSING

    def get(self) -> Any:
        """Return the value."""
        if self._value is _MISSING:
            self._value = self._make()
        return self._value

    def __getattr__(self, name: str) -> Any:
        return getattr(self.get(), name)

    def __call__(self, *args: Any, **keywords: Any) -> Any:
        return self.get()(*args, **keywords)


def _module(name: str) -> Any:
    return Lazy(partial(importlib.import_module, name))


def _member(module: str, name: str) -> Any:
    return Lazy(lambda: getattr(importlib.import_module(module), name))


ir = _module("llvmlite.ir")
types, cgutils = _module("numba.core.types"), _module("numba.core.cgutils")
RequireLiteralValue = _member("numba.core.errors", "RequireLiteralValue")
float32, float64 = _member("numba", "float32"), _member("numba", "float64")
int8, int16, int32, int64 = (_member("numba", f"int{bits}") for bits in (8, 16, 32, 64))
uint8, uint16, uint32, uint64 = (_member("numba", f"uint{bits}") for bits in (8, 16, 32, 64))

_lock = threading.RLock()
_active = False
_functions: list[Any] = []  # functions of this package that were decorated before Numba's import


def activate() -> None:
    """Import Numba and replace all lazy values by those that they stand for. Thread-safe."""
    global _active
    with _lock:
        if _active:
            return
        _active = True
        for name, module in list(sys.modules.items()):
            if name.startswith(_PACKAGE):
                _resolve_names(vars(module))
        for function in _functions:
            _resolve_closure(function)
        _functions.clear()


def _resolve_names(names: dict[str, Any]) -> None:
    names.update({k: v.get() for k, v in names.items() if isinstance(v, Lazy)})


def _resolve_closure(function: Any) -> None:
    for cell in function.__closure__ or ():
        cell.cell_contents = resolve(cell.cell_contents)


def resolve(value: Any) -> Any:
    """Return what ``value`` stands for: itself unless it is lazy."""
    return value.get() if isinstance(value, Lazy) else value


def lazy(make: Callable[[], Any]) -> Any:
    """Return the value that ``make`` returns, or a `Lazy` one if Numba is not in use yet."""
    return make() if _active else Lazy(make)


def is_own(function: Any) -> bool:
    """Whether a function is defined in this backend."""
    return _is_own_file(function.__code__.co_filename)


@cache
def _is_own_file(path: str) -> bool:
    return Path(path).resolve().is_relative_to(_FOLDER)


def register(function: Any) -> None:
    """Prepare a function for a later compilation; those of other packages use Numba at once."""
    if not is_own(function):
        activate()
        _resolve_names(function.__globals__)
    if _active:
        _resolve_closure(function)
    else:
        _functions.append(function)


def intrinsic(function: Any = None, **options: Any) -> Any:
    """As `numba.extending.intrinsic`, a decorator with or without options."""
    if function is None:
        return partial(intrinsic, **options)

    def make() -> Any:
        from numba import extending

        decorator: Any = extending.intrinsic
        return decorator(**options)(function) if options else decorator(function)

    register(function)
    return lazy(make)
