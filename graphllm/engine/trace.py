"""Tracing: read the values that a model's scopes return, and replace them (patching)."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from ..compiler.placement import Tap, matches
from ..compiler.plan import Plan
from ..errors import RequestError
from ..graph.rewrite import toposort
from ..graph.tensor import Tensor, Var
from ..model.batch import ENCODED, source_length
from ..runtime.executor import Executor

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


class _Limits(Protocol):
    @property
    def tokens(self) -> int: ...


class _Engine(Protocol):
    """What the `Tracer` needs of an engine."""

    executor: Executor
    outputs: dict[str, Tensor]
    scope_values: dict[str, Tensor]

    @property
    def limits(self) -> _Limits: ...
    def evaluation(self, tokens: Sequence[int]) -> AbstractContextManager[Any]: ...


@dataclass(frozen=True)
class _TracePlan:
    """Plans that return the values of the scopes ``wanted`` and apply patches.

    Attributes:
        source: the plan that encodes the source of an encoder-decoder; None for other models, and
            if no scope of the encoder is wanted or patched.
        plan: the plan of the forward pass; None if all scopes are in the encoder.
        source_rows: maximum number of tokens of a source.
        rows: maximum number of tokens of a step of the forward pass.
    """

    wanted: tuple[str, ...]
    calls: dict[str, _PatchCall]
    source: Plan | None
    plan: Plan | None
    source_rows: int
    rows: int

    def fits(
        self, wanted: Sequence[str], patches: Mapping[str, Patch], source: int, whole: int
    ) -> bool:
        asked = self.wanted == tuple(wanted) and self.calls.keys() == patches.keys()
        return asked and source <= self.source_rows and whole <= self.rows


class Tracer:
    """Compute the values of scopes for a prompt.

    The last plans are kept, so that further prompts with the same scopes and patches reuse them.

    Args:
        engine: the engine that computes the prompt.
        values: nodes of the engine's graph by name; the values of its scopes by default.
    """

    def __init__(self, engine: _Engine, values: Mapping[str, Tensor] | None = None) -> None:
        self._engine = engine
        self._values = engine.scope_values if values is None else values
        self._last: _TracePlan | None = None
        self._pools = {n: node for n, node in engine.outputs.items() if n.startswith(ENCODED)}
        self._encoder = set(toposort(self._pools.values()))

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
        wanted = [scope for scope in known if scope in matched]
        steps: list[dict[str, np.ndarray]] = []
        try:
            for step in self._steps(tokens, wanted, patches):
                steps.append(step)
        finally:
            for call in self._last.calls.values() if self._last else ():
                call.function = None  # a closure may keep large objects alive
        return {
            name: _join_steps([s.pop(name) for s in steps if name in s], known[name])
            for name in wanted
        }

    def steps(self, tokens: Sequence[int]) -> Generator[dict[str, np.ndarray], None, None]:
        """Yield all values for the tokens of each step of a prompt; the caller holds the lock.

        A step has as many tokens as `MAX_STEP_BYTES` of values allow.
        """
        return self._steps(tokens, list(self._values), {})

    def _steps(
        self, tokens: Sequence[int], wanted: Sequence[str], patches: Mapping[str, Patch]
    ) -> Generator[dict[str, np.ndarray], None, None]:
        """Compute ``tokens`` step by step; yield the values of each step."""
        at = source_length(tokens)
        with self._engine.evaluation(tokens) as evaluation:
            traced = self._traced(wanted, patches, at, 0 if at else evaluation.whole)
            for scope, call in traced.calls.items():
                call.function = patches[scope]
            if at and traced.source is not None:
                names = traced.source.outputs.keys() & set(wanted)
                yield evaluation.append_source(traced.source, tokens[:at], names)
            elif at:
                evaluation.encode(tokens[:at])
            if traced.plan is None:
                return
            names = traced.plan.outputs.keys() & set(wanted)
            for first in range(at, len(tokens), traced.rows):
                piece = tokens[first : first + traced.rows]
                yield evaluation.append(traced.plan, piece, np.arange(len(piece)), names)

    def _traced(
        self, wanted: Sequence[str], patches: Mapping[str, Patch], source: int, whole: int
    ) -> _TracePlan:
        """Return the plans for these scopes and patches: the last ones, or new ones.

        Args:
            wanted: scopes to return.
            patches: replacements by scope.
            source: number of tokens of the source.
            whole: number of tokens that a step of the forward pass must be able to compute.
        """
        if self._last is None or not self._last.fits(wanted, patches, source, whole):
            engine = self._engine
            self._last = None  # free its plans before others are compiled
            calls = {scope: _PatchCall(scope) for scope in patches}
            taps = [
                Tap(scope, node, calls.get(scope))
                for scope, node in self._values.items()
                if scope in wanted or scope in calls
            ]
            encoder = [tap for tap in taps if tap.node in self._encoder]
            own = [tap for tap in taps if tap.node not in self._encoder]
            most = min(engine.limits.tokens, MAX_STEP_BYTES // max(1, _row_bytes(own)))
            most = max(1, whole, most)
            bounds = {"T": (1, most), "S": (1, 1), "Q": (2, 2), "N": (1, most)}
            self._last = _TracePlan(
                tuple(wanted), calls, self._source_plan(encoder, source) if encoder else None,
                engine.executor.tap(own, bounds) if own else None, source, most,
            )  # fmt: skip
        return self._last

    def _source_plan(self, taps: Sequence[Tap], tokens: int) -> Plan:
        """Return the plan that encodes a source of at most ``tokens``, with outputs ``taps``."""
        pools = [Tap(name, node) for name, node in self._pools.items()]
        bounds = {"T": (1, tokens), "Q": (2, 2)}
        return self._engine.executor.tap([*taps, *pools], bounds)


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
