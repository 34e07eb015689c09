"""Tracing: read the values that a model's scopes return, and replace them (patching)."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ..compiler.placement import Tap, matches
from ..compiler.plan import Plan
from ..errors import RequestError
from ..graph.tensor import Tensor, Var
from .engine import Engine

MAX_STEP_BYTES = 256 << 20  # upper bound of the values that one step returns
SUGGESTIONS = 3  # nearest names in the error for an unknown scope

Patch = Callable[[np.ndarray], np.ndarray]


class _PatchCall:
    """Callback in a plan that applies the current patch of a scope."""

    def __init__(self, scope: str) -> None:
        self.scope = scope
        self.function: Patch | None = None

    def __call__(self, value: np.ndarray) -> np.ndarray:
        assert self.function is not None
        given = self.function(value.copy())
        if _describe(given) != _describe(value):
            raise RequestError(
                f"the patch of {self.scope!r} returned {_describe(given)}, not {_describe(value)}"
            )
        return given


def _describe(value: object) -> str:
    """Return the dtype and shape of an array, or the type of any other object."""
    if not isinstance(value, np.ndarray):
        return f"a {type(value).__name__}"
    return f"{value.dtype}[{','.join(map(str, value.shape))}]"


@dataclass(frozen=True)
class _TracePlan:
    """A plan that returns the values of the scopes ``wanted`` and applies patches."""

    wanted: tuple[str, ...]
    calls: dict[str, _PatchCall]
    plan: Plan
    rows: int  # maximum number of tokens of a step

    def fits(self, wanted: Sequence[str], patches: Mapping[str, Patch]) -> bool:
        return self.wanted == tuple(wanted) and self.calls.keys() == patches.keys()


class Tracer:
    """Compute the values of scopes for a prompt.

    The last plan is kept, so that further prompts with the same scopes and patches reuse it.

    Args:
        engine: the engine that computes the prompt.
        values: nodes of the engine's graph by name; the values of its scopes by default.
    """

    def __init__(self, engine: Engine, values: Mapping[str, Tensor] | None = None) -> None:
        self._engine = engine
        self._values = engine.scope_values if values is None else values
        self._last: _TracePlan | None = None

    def trace(
        self,
        tokens: list[int],
        scopes: str | Iterable[str],
        patch: Mapping[str, Patch] | None = None,
    ) -> dict[str, np.ndarray]:
        """See `LLM.trace`."""
        known = self._values
        patterns = (scopes,) if isinstance(scopes, str) else tuple(scopes)
        if not patterns:
            raise RequestError("scopes is empty: nothing is asked for")
        matched = {scope for pattern in patterns for scope in matching_scopes(pattern, known)}
        patches = _resolve_patches(patch or {}, known)
        traced = self._traced([scope for scope in known if scope in matched], patches)
        try:
            for scope, call in traced.calls.items():
                call.function = patches[scope]
            steps = list(self._steps(traced, tokens))
        finally:
            for call in traced.calls.values():
                call.function = None  # a closure may keep large objects alive
        return {
            name: _join_steps([s.pop(name) for s in steps], known[name]) for name in traced.wanted
        }

    def steps(self, tokens: Sequence[int]) -> Generator[dict[str, np.ndarray], None, None]:
        """Yield all values for the tokens of each step of a prompt; the caller holds the lock.

        A step has as many tokens as `MAX_STEP_BYTES` of values allow.
        """
        return self._steps(self._traced(list(self._values), {}), tokens)

    def _steps(
        self, traced: _TracePlan, tokens: Sequence[int]
    ) -> Generator[dict[str, np.ndarray], None, None]:
        """Compute ``tokens`` step by step; yield the values of each step."""
        with self._engine.evaluation(tokens) as evaluation:
            for at in range(0, len(tokens), traced.rows):
                piece = tokens[at : at + traced.rows]
                rows = np.arange(len(piece))
                yield evaluation.append(traced.plan, piece, rows, traced.wanted)

    def _traced(self, wanted: Sequence[str], patches: Mapping[str, Patch]) -> _TracePlan:
        """Return the plan for these scopes and patches: the last one, or a new one."""
        if self._last is None or not self._last.fits(wanted, patches):
            engine = self._engine
            self._last = None  # free its plan before another is compiled
            calls = {scope: _PatchCall(scope) for scope in patches}
            taps = [
                Tap(scope, node, calls.get(scope))
                for scope, node in self._values.items()
                if scope in wanted or scope in calls
            ]
            rows = max(1, min(engine.limits.tokens, MAX_STEP_BYTES // _row_bytes(taps)))
            bounds = {"T": (1, rows), "S": (1, 1), "Q": (2, 2), "N": (1, rows)}
            plan = engine.executor.tap(taps, bounds)
            self._last = _TracePlan(tuple(wanted), calls, plan, rows)
        return self._last


def _row_bytes(taps: Iterable[Tap]) -> int:
    """Return the bytes of all values for one token."""
    metas = [node.meta for node in dict.fromkeys(tap.node for tap in taps)]
    return sum(meta.at({v.name: 1}).nbytes for meta in metas if isinstance(v := meta.rows, Var))


def _join_steps(parts: Sequence[np.ndarray], node: Tensor) -> np.ndarray:
    """Join the values of all steps: concatenate rows of tokens (T) and of logits (N, here all
    tokens); of any other value take the last step's."""
    rows = node.meta.rows
    per_token = isinstance(rows, Var) and rows.name in ("T", "N")
    return np.concatenate(parts) if per_token and len(parts) > 1 else parts[-1]


# ----------------------------------------------------------------------------------------- scopes


def matching_scopes(pattern: str, known: Iterable[str]) -> list[str]:
    """Return the scopes that match ``pattern``. RequestError: none does; names the nearest."""
    found = [scope for scope in known if matches(scope, pattern)]
    if not found:
        names = ", ".join(nearest_scopes(pattern, known))
        raise RequestError(f"no scope of the model matches {pattern!r}; nearest: {names}")
    return found


def nearest_scopes(pattern: str, known: Iterable[str]) -> list[str]:
    """Return scopes with names similar to ``pattern``; patterns if it is a pattern."""
    names = list(known)
    if any(c in pattern for c in "*?["):
        kinds = dict.fromkeys(re.sub(r"\.\d+(?=\.|$)", ".*", scope) for scope in names)
        parts = [kind.split(".") for kind in kinds]
        ends = ["*." + ".".join(p[at:]) for p in parts for at in range(1, len(p)) if p[at] != "*"]
        names = list(dict.fromkeys([*kinds, *ends]))
    return difflib.get_close_matches(pattern, names, SUGGESTIONS, 0.0)


def _resolve_patches(patch: Mapping[str, Patch], known: Iterable[str]) -> dict[str, Patch]:
    """Return the function of each patched scope: that of the first pattern that matches it."""
    found: dict[str, Patch] = {}
    for pattern, function in patch.items():
        if not callable(function):
            raise RequestError(f"patch of {pattern!r} is {function!r}, not a function of an array")
        for scope in matching_scopes(pattern, known):
            found.setdefault(scope, function)
    return found
