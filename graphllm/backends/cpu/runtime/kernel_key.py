"""Cache keys of kernels defined outside this package: a hash of all that their code depends on.

The sources of this package are hashed into the name of the cache folder. A user's function is
identified by its bytecode and by everything that the compiler freezes into it: constants, defaults,
closure values, the globals that it reads, and the functions that it calls, recursively.
"""

from __future__ import annotations

import dis
import hashlib
import sys
from collections.abc import Callable, Iterator
from types import BuiltinFunctionType, CodeType, FunctionType, ModuleType
from typing import Any

import numpy as np
from numba.core.dispatcher import Dispatcher
from numba.core.types import Type
from numba.extending import _Intrinsic

from ....errors import GraphllmError
from .lazy_numba import is_own, register

_PACKAGE = __name__.rsplit(".", 2)[0]  # graphllm.backends.cpu
_PLAIN = (int, float, complex, str, bytes, type(None), type(...), np.dtype, np.ufunc, Type)
# Modules whose code changes only with a version that is part of the fingerprint.
_STABLE = {*sys.stdlib_module_names, "numba", "llvmlite"} - {"__main__"}


def code_key(function: Callable[..., Any], closure: bool = True) -> str:
    """Hash everything that the machine code of ``function`` depends on.

    Returns "" for a function of this backend. ``closure`` = False leaves out closure values. Raises
    GraphllmError for a value whose changes cannot be detected.
    """
    if is_own(function):
        return ""
    digest = hashlib.sha256()
    for part in _function(function, set(), closure):
        digest.update(part.encode() + b"\0")
    return digest.hexdigest()


def _function(f: Any, seen: set[Any], closure: bool = True) -> Iterator[str]:
    """Describe what a Python function depends on; ``seen`` holds the functions described so far."""
    if f in seen:
        yield f"again {f.__name__}"
        return
    seen.add(f)
    register(f)
    yield from _code(f.__code__)
    for value in (*(f.__defaults__ or ()), *(f.__kwdefaults__ or {}).items()):
        yield from _value(value, f, seen)
    for name, cell in zip(f.__code__.co_freevars, f.__closure__ or ()) if closure else ():
        yield name
        yield from _value(cell.cell_contents, f, seen)
    for name in sorted(_globals(f.__code__)):
        if name in f.__globals__:
            yield name
            yield from _value(f.__globals__[name], f, seen)


def _code(code: CodeType) -> Iterator[str]:
    """Describe instructions and constants, without file names and line numbers."""
    yield from (code.co_code.hex(), repr(code.co_names), repr(code.co_varnames))
    yield from (repr(code.co_freevars), repr(code.co_argcount), repr(code.co_flags))
    for value in code.co_consts:
        if isinstance(value, CodeType):
            yield from _code(value)
        else:
            yield repr(sorted(map(repr, value)) if isinstance(value, frozenset) else value)


def _globals(code: CodeType) -> set[str]:
    """Names of the globals that the code reads."""
    found = {
        i.argval for i in dis.get_instructions(code) if i.opname in ("LOAD_GLOBAL", "LOAD_NAME")
    }
    for value in code.co_consts:
        if isinstance(value, CodeType):
            found |= _globals(value)
    return found


def _value(value: Any, user: Any, seen: set[Any]) -> Iterator[str]:
    """Describe a value that the function ``user`` reads."""
    own = _own_name(value)
    module = (getattr(value, "__module__", None) or "").partition(".")[0]
    if isinstance(value, _PLAIN):
        yield repr(value)
    elif own:
        yield own
    elif isinstance(value, (tuple, list)):
        yield f"{type(value).__name__} of {len(value)}"
        for each in value:
            yield from _value(each, user, seen)
    elif isinstance(value, (np.ndarray, np.generic)):
        yield f"{value.dtype.str} {value.shape} {hashlib.sha256(value.tobytes()).hexdigest()}"
    elif isinstance(value, Dispatcher):
        yield repr(sorted(value.targetoptions.items()))
        yield from _function(value.py_func, seen)
    elif isinstance(value, _Intrinsic):
        yield from _function(value._defn, seen)
    elif isinstance(value, ModuleType):
        yield from _module(value, user, seen)
    elif isinstance(value, (type, BuiltinFunctionType, FunctionType)) and module in _STABLE:
        yield f"{value.__module__}.{value.__qualname__}"
    elif isinstance(value, FunctionType):
        yield from _function(value, seen)
    elif type(value).__module__.partition(".")[0] == "llvmlite" and " at 0x" not in repr(value):
        yield repr(value)
    elif getattr(value, "__name__", None) and module == "numpy":
        yield f"numpy {np.__version__} {value.__name__}"
    else:
        raise GraphllmError(
            f"{user.__code__.co_filename}:{user.__code__.co_firstlineno}: {user.__name__} reads a "
            f"{type(value).__name__}; a kernel may read numbers, arrays and compiled functions"
        )


def _module(module: ModuleType, user: Any, seen: set[Any]) -> Iterator[str]:
    """Describe a module and those of its attributes that ``user`` may read."""
    top = module.__name__.partition(".")[0]
    yield module.__name__
    if top == "numpy":
        yield np.__version__
    elif top not in _STABLE and not module.__name__.startswith(_PACKAGE):
        for name in sorted(set(user.__code__.co_names) & vars(module).keys()):
            yield from _value(vars(module)[name], user, seen)


def _own_name(value: Any) -> str:
    """Qualified name of an object that this package defines, else ""; the fingerprint covers it."""
    if isinstance(value, ModuleType):
        return ""
    for module in [m for n, m in sys.modules.items() if n.startswith(_PACKAGE)]:
        for name, each in vars(module).items():
            if each is value:
                return f"{module.__name__}.{name}"
    return ""
