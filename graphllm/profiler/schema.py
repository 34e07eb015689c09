"""Files of `profile` and `bench`: read, and checked before anything relies on what is in them."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..errors import RequestError

SCHEMA, VERSION = "graphllm.profile", 2
READABLE_VERSIONS = (1, VERSION)  # version 1 lacks nothing that a comparison needs

_NUMBER, _NULL = (int, float), type(None)

# What must be there: a type, or several; [of each element]; {under each name}. More may be there.
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
_TYPE_NAMES = {int: "a whole number", float: "a number", str: "a text", bool: "true or false",
          dict: "an object", list: "a list", _NULL: "null"}  # fmt: skip


def read_profile(path: str | Path) -> dict[str, Any]:
    """A profile, as `Profile.as_dict` gives it and docs/profile-format.md describes it.

    RequestError names the file, and what in it is not as it must be.
    """
    found = _json(Path(path))
    _check_profile(found, str(path))
    return found


def read_profile_or_bench(path: str | Path) -> dict[str, Any] | list[dict[str, Any]]:
    """A profile, or the tests of `graphllm bench -o json`. RequestError as `read_profile`."""
    found = _json(Path(path))
    if not isinstance(found, list):
        _check_profile(found, str(path))
        return found
    if not found:
        raise RequestError(f"{path}: holds no test")
    _check(found, [_TEST], f"{path}: not of `bench -o json`: ")
    if not all(test["samples_ns"] and min(test["samples_ns"]) > 0 for test in found):
        raise RequestError(f"{path}: a test has no samples, or one that took no time")
    return found


def _json(path: Path) -> Any:
    try:
        return json.loads(path.read_text("utf-8"), parse_constant=_reject_constant)
    except OSError as error:
        raise RequestError(f"{path}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise RequestError(f"{path}: is not JSON: {error}") from None


def _reject_constant(text: str) -> None:
    raise ValueError(f"{text} is no number")


def _check_profile(found: Any, name: str) -> None:
    if not isinstance(found, dict) or found.get("schema") != SCHEMA:
        raise RequestError(f"{name}: is not a profile (`graphllm profile MODEL -o {name}`)")
    if found.get("version") not in READABLE_VERSIONS:
        raise RequestError(
            f"{name}: a profile of schema version {found.get('version')}; "
            f"this graphllm reads versions {', '.join(map(str, READABLE_VERSIONS))}"
        )
    _check(found, _PROFILE, f"{name}: ")
    for index, phase in enumerate(found["phases"]):
        fault = _inconsistency(phase)
        if fault:
            raise RequestError(f"{name}: phases[{index}]: {fault}")


def _check(found: Any, spec: Any, before: str, at: str = "") -> None:
    """RequestError, beginning with ``before``, for the first thing that is not as in ``spec``."""
    wanted = type(spec) if isinstance(spec, (dict, list)) else spec
    kinds = wanted if isinstance(wanted, tuple) else (wanted,)
    # A bool is an int to Python, not here.
    if not isinstance(found, kinds) or (isinstance(found, bool) and bool not in kinds):
        words = " or ".join(_TYPE_NAMES[kind] for kind in kinds)
        raise RequestError(f"{before}{at or 'the whole'} is not {words}")
    if isinstance(spec, dict):
        for key, inner in spec.items():
            inside = f"{at}.{key}" if at else key
            if key not in found:
                raise RequestError(f"{before}{inside} is missing")
            _check(found[key], inner, before, inside)
    elif isinstance(spec, list):
        if spec[0] is int and all(type(each) is int for each in found):
            return  # times, of which there are many
        for index, each in enumerate(found):
            _check(each, spec[0], before, f"{at}[{index}]")


def _inconsistency(phase: Mapping[str, Any]) -> str:
    """What does not agree within a phase; empty where all does."""
    if not phase["passes"] or phase["tokens"] < 1:
        return "holds no pass, or passes of no token"
    if min(each["plain"] for each in phase["passes"]) < 1:
        return "holds a pass that took no time"
    runs = Counter(run["plan"] for run in phase["runs"])
    for index, row in enumerate(phase["rows"]):
        if len(row["times"]) != runs[row["plan"]]:
            times, plan = len(row["times"]), row["plan"]
            return f"rows[{index}] has {times} times, and plan {plan} ran {runs[plan]} times"
    if any(not 0 <= run["pass"] < len(phase["passes"]) for run in phase["runs"]):
        return "a run is in no pass"
    return ""
