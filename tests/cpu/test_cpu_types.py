"""Type annotations of the CPU backend.

mypy exempts modules with functions that Numba compiles, which take no annotations. This test holds
all other functions of those modules to the same rule as the rest of the package.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import graphllm.backends.cpu

FOLDER = Path(graphllm.backends.cpu.__file__).parent
# Decorators of functions that Numba compiles, or whose parameters are Numba types.
COMPILED = {"kernel", "helper", "inlined", "exact_helper", "_exact", "intrinsic"}


def is_compiled(function: ast.FunctionDef) -> bool:
    names = set()
    for decorator in function.decorator_list:
        called = decorator.func if isinstance(decorator, ast.Call) else decorator
        names.add(called.id if isinstance(called, ast.Name) else "")
    return bool(names & COMPILED)


def is_typed(function: ast.FunctionDef) -> bool:
    a = function.args
    parameters = [*a.posonlyargs, *a.args, *a.kwonlyargs]
    parameters += [p for p in (a.vararg, a.kwarg) if p is not None]
    own = [p for p in parameters if p.arg not in ("self", "cls")]
    return function.returns is not None and all(p.annotation is not None for p in own)


def untyped(node: ast.AST) -> Iterator[ast.FunctionDef]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef):
            if is_compiled(child):
                continue  # functions inside are compiled, too
            if not is_typed(child):
                yield child
        yield from untyped(child)


def test_functions_that_numba_does_not_compile_are_typed():
    found = []
    for path in sorted(FOLDER.rglob("*.py")):
        for function in untyped(ast.parse(path.read_text())):
            found.append(f"{path.relative_to(FOLDER)}:{function.lineno}: {function.name}")
    assert not found, "\n".join(found)
