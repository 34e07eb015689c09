"""Schema of profile and bench files: reading and validation."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..errors import RequestError

SCHEMA, VERSION = "graphllm.profile", 2
READABLE_VERSIONS = (1, VERSION)  # version 1 has all that `compare` needs

_NUMBER, _NULL = (int, float), type(None)

# Required keys: a type or a tuple of types; [type of each element]; {key: type}. Other keys are
# allowed.
_ROW = {
    "plan": int, "step": int, "op": str, "parts": [str], "scope": str, "layer": (int, _NULL),
    "origin": str, "shape": str, "inputs": [str], "weight": str, "backend": str, "kernel": str,
    "why": str, "copy": bool, "times": [int], "overlap": int, "bytes": _NUMBER, "flops": _NUMBER,
    "limit": (*_NUMBER, _NULL), "bound": str,
}  # fmt: skip
_RUN = {
    "plan": int, "pass": int, "called": int, "returned": int, "env": dict,
    "segments": [{"first": int, "count": int, "begin": int}],
}  # fmt: skip
_SPAN = {"name": str, "offset": int, "nbytes": int, "first": int, "last": int}
_CLOSING = ("ops", "copies", "gaps", "host", "unattributed", "wall")
_PHASE = {
    "name": str,
    "tokens": int,
    "passes": [{"start": int, "end": int, "plain": int}],
    "closing": dict.fromkeys(_CLOSING, _NUMBER),
    "overhead": _NUMBER,
    "rows": [_ROW],
    "runs": [_RUN],
    "arena": [{"plan": int, "memory": str, "nbytes": int, "spans": [_SPAN]}],
}
_COST = {"ns": _NUMBER, "bytes": _NUMBER, "flops": _NUMBER}
_REQUEST = {
    "request": int, "tokens": int, **_COST, "gaps": _NUMBER, "host": _NUMBER, "ops": dict,
}  # fmt: skip
_PROFILE = {
    "made": dict,
    "machine": {"name": str, "backends": dict},
    "model": {"path": str, "type": str, "bytes": int, "parameters": int},
    "settings": {"prompt_tokens": int, "decode_tokens": int},
    "start": dict,
    "ceilings": dict,
    "phases": [_PHASE],
}
_TEST = {
    "n_prompt": int, "n_gen": int, "n_depth": int, "samples_ns": [int],
    "model_type": str, "model_size": int, "model_n_params": int,
}  # fmt: skip
_TYPE_NAMES = {int: "an integer", float: "a number", str: "a string", bool: "a boolean",
          dict: "an object", list: "a list", _NULL: "null"}  # fmt: skip


def read_profile(path: str | Path) -> dict[str, Any]:
    """Read a profile (docs/profile-format.md).

    Raises:
        RequestError: names the file and the first key that is missing or invalid.
    """
    found = _json(Path(path))
    _check_profile(found, str(path))
    return found


def read_profile_or_bench(path: str | Path) -> dict[str, Any] | list[dict[str, Any]]:
    """Read a profile, or the tests of `graphllm bench -o json`. Raises as `read_profile`."""
    found = _json(Path(path))
    if not isinstance(found, list):
        _check_profile(found, str(path))
        return found
    if not found:
        raise RequestError(f"{path}: contains no test")
    _check(found, [_TEST], f"{path}: not written by `bench -o json`: ")
    if not all(test["samples_ns"] and min(test["samples_ns"]) > 0 for test in found):
        raise RequestError(f"{path}: a test has no samples, or a sample of 0 ns")
    return found


def _json(path: Path) -> Any:
    try:
        return json.loads(path.read_text("utf-8"), parse_constant=_reject_constant)
    except OSError as error:
        raise RequestError(f"{path}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise RequestError(f"{path}: not JSON: {error}") from None


def _reject_constant(text: str) -> None:
    raise ValueError(f"{text} is not a number")


def _check_profile(found: Any, name: str) -> None:
    if not isinstance(found, dict) or found.get("schema") != SCHEMA:
        raise RequestError(f"{name}: not a profile (written by `graphllm profile MODEL -o {name}`)")
    if found.get("version") not in READABLE_VERSIONS:
        raise RequestError(
            f"{name}: schema version {found.get('version')} is not supported; "
            f"this graphllm reads versions {', '.join(map(str, READABLE_VERSIONS))}"
        )
    _check(found, _PROFILE, f"{name}: ")
    _check(found.get("requests", []), [_REQUEST], f"{name}: requests: ")  # not in older files
    for index, phase in enumerate(found["phases"]):
        fault = _inconsistency(phase)
        if fault:
            raise RequestError(f"{name}: phases[{index}]: {fault}")


def _check(found: Any, spec: Any, before: str, at: str = "") -> None:
    """Raise RequestError, prefixed with ``before``, for the first deviation from ``spec``."""
    wanted = type(spec) if isinstance(spec, (dict, list)) else spec
    kinds = wanted if isinstance(wanted, tuple) else (wanted,)
    # bool is a subclass of int, but not valid in its place.
    if not isinstance(found, kinds) or (isinstance(found, bool) and bool not in kinds):
        words = " or ".join(_TYPE_NAMES[kind] for kind in kinds)
        raise RequestError(f"{before}{at or 'the document'} is not {words}")
    if isinstance(spec, dict):
        for key, inner in spec.items():
            inside = f"{at}.{key}" if at else key
            if key not in found:
                raise RequestError(f"{before}{inside} is missing")
            _check(found[key], inner, before, inside)
    elif isinstance(spec, list):
        if spec[0] is int and all(type(each) is int for each in found):
            return  # fast path for long lists of times
        for index, each in enumerate(found):
            _check(each, spec[0], before, f"{at}[{index}]")


def _inconsistency(phase: Mapping[str, Any]) -> str:
    """Return the first inconsistency within a phase, or an empty string."""
    if not phase["passes"] or phase["tokens"] < 1:
        return "has no passes, or passes without tokens"
    if min(each["plain"] for each in phase["passes"]) < 1:
        return "has a pass of 0 ns"
    runs = Counter(run["plan"] for run in phase["runs"])
    for index, row in enumerate(phase["rows"]):
        if len(row["times"]) != runs[row["plan"]]:
            times, plan = len(row["times"]), row["plan"]
            return f"rows[{index}] has {times} times, but plan {plan} has {runs[plan]} runs"
    if any(not 0 <= run["pass"] < len(phase["passes"]) for run in phase["runs"]):
        return "a run belongs to no pass"
    return ""
