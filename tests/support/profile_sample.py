"""Profile reports (docs/profile-format.md) for tests of the writers of other formats.

`sample` is synthetic and has rare cases: two plans in one phase, segments of several backends,
steps that missed the first backend, overlaps, rows without a ceiling. `large` has many rows.
`measured` is a real profile of a small model on two backends.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import tiny_models

import graphllm
from graphllm.profiler.speed import speed

CEILINGS = {"cuda": (900e9, 20e12, 80e12), "cpu": (30e9, 200e9, 800e9)}
PINNED = 1  # the layer that runs on the CPU


@dataclass
class Clock:
    """Time within a pass, and its accounting."""

    at: int = 0
    spent: dict[str, int] = field(default_factory=dict)

    def spend(self, what: str, ns: int) -> int:
        self.at += ns
        self.spent[what] = self.spent.get(what, 0) + ns
        return self.at


def _steps(layers: int, tokens: int) -> list[dict[str, Any]]:
    """Rows of one plan, without what runs add. ``bytes`` and ``flops`` are those of one run."""
    rows: list[dict[str, Any]] = []

    def step(op: str, scope: str, weight: str, mb: float, mflop: float, **more: Any) -> None:
        layer = int(scope.split(".")[2]) if ".layers." in scope else None
        on = "cpu" if layer == PINNED else "cuda"
        why = f"cuda: pinned by model.layers.{PINNED}.*=cpu" if layer == PINNED else ""
        rows.append({
            "plan": 0, "step": len(rows), "op": op, "parts": more.pop("parts", []), "scope": scope,
            "layer": layer, "origin": f"models/gemma3_text.py:{30 + len(op)}",
            "shape": f"f32[{tokens}, 640]", "inputs": [f"a8_32[{tokens}, 640]"], "weight": weight,
            "backend": on, "kernel": f"{op}_{on}",
            "why": why, "copy": False,
            "bytes": mb * 1e6 + 4e3 * tokens, "flops": mflop * 1e6 * tokens, **more,
        })  # fmt: skip

    step("embedding", "model.embed_tokens", "q8_0", 0.001, 0.0)
    for i in range(layers):
        at = f"model.layers.{i}"
        if i in (PINNED, PINNED + 1):
            other = "cpu" if i == PINNED else "cuda"
            step("copy", at, "", 0.004, 0.0, backend=other, why="", copy=True)
        step("norm_quantise", f"{at}.input_layernorm", "", 0.006, 0.004)
        step("linears", f"{at}.self_attn", "q4_k", 1.1, 3.9, parts=["linear", "linear", "linear"])
        step("rope_write", f"{at}.self_attn", "", 0.01, 0.002)
        step("attention_quantise", f"{at}.self_attn", "", 0.3, 0.5)
        step("linear_add", f"{at}.self_attn.o_proj", "q4_k", 0.4, 1.3, parts=["linear", "add"])
        step("gated", f"{at}.mlp", "q5_0", 1.8, 5.2, parts=["linears", "gelu", "mul"])
        step("linear_add", f"{at}.mlp.down_proj", "q6_k", 1.1, 2.6, parts=["linear", "add"])
    missed = {"backend": "cpu", "why": "cuda: no kernel"}
    step("norm_quantise", "model.norm", "", 0.006, 0.004)
    step("linear", "lm_head", "q8_0", 170.0, 335.0)
    step("softcap", "lm_head", "", 2.1, 0.5, **missed)
    step("sample", "", "", 1.0, 0.3)
    step("advance", "", "", 0.0, 0.0)
    return rows


def _limit(row: dict[str, Any], ceilings: bool) -> tuple[float | None, str]:
    """Of all its runs, nanoseconds; none for the sampler and where no ceiling is known."""
    if not ceilings or row["op"] in ("sample", "advance"):
        return None, ""
    bytes_s, _, flop_s = CEILINGS[row["backend"]]
    memory, arithmetic = 1e9 * row["bytes"] / bytes_s, 1e9 * row["flops"] / flop_s
    return max((memory, "memory"), (arithmetic, "arithmetic"))


def _segments(rows: list[dict[str, Any]]) -> list[tuple[int, int]]:
    """First step and count of the steps of one backend in a row."""
    starts = [i for i, r in enumerate(rows) if i == 0 or r["backend"] != rows[i - 1]["backend"]]
    return [(a, b - a) for a, b in zip(starts, [*starts[1:], len(rows)])]


def _run(
    rows: list[dict[str, Any]], plan: int, clock: Clock, random: Random, last: bool
) -> dict[str, Any]:
    """One run of a plan, whose steps' times are added to its rows. The ``last`` of a pass ends by
    the device's clock after it does by the host's."""
    called, segments = clock.at, []
    for first, count in _segments(rows):
        clock.spend("gaps", random.randrange(2_000, 9_000))
        segments.append({"first": first, "count": count, "begin": clock.at})
        for row in rows[first : first + count]:
            bytes_s, _, flop_s = CEILINGS[row["backend"]]
            ideal = 1e9 * max(row["bytes"] / bytes_s, row["flops"] / flop_s)
            ns = int(ideal * random.uniform(1.1, 1.6)) + random.randrange(300, 900)
            clock.spend("copies" if row["copy"] else "ops", ns)
            row.setdefault("times", []).append(ns)
    if last:
        clock.spend("unattributed", -500)
    else:
        clock.spend("gaps", random.randrange(1_000, 3_000))
    env = {"T": int(rows[0]["shape"].split("[")[1].split(",")[0])}
    return {
        "plan": plan, "pass": 0, "called": called, "returned": clock.at, "env": env,
        "segments": segments,
    }  # fmt: skip


def _arena(rows: list[dict[str, Any]], plan: int) -> list[dict[str, Any]]:
    """Each step's result lives until two steps later, in one of four places."""
    spans = [
        {
            "name": f"{row['op']} {row['scope']}".strip(), "offset": 4096 * (i % 4),
            "nbytes": 4096 - 512 * (i % 3), "first": i, "last": min(i + 2, len(rows) - 1),
        }
        for i, row in enumerate(rows)
    ]  # fmt: skip
    return [
        {"plan": plan, "memory": "cuda", "nbytes": 16384, "spans": spans},
        {"plan": plan, "memory": "host", "nbytes": 8192, "spans": spans[8:10]},
    ]


def _phase(
    name: str, plans: list[list[dict[str, Any]]], order: list[int], tokens: int, passes: int,
    ceilings: bool, random: Random,
) -> dict[str, Any]:  # fmt: skip
    """``order``: the plans that a pass runs."""
    clock, windows, runs = Clock(), [], []
    for index in range(passes):
        start = clock.at
        for turn, plan in enumerate(order, 1):
            clock.spend("host", random.randrange(10_000, 40_000))
            run = _run(plans[plan], plan, clock, random, turn == len(order))
            runs.append({**run, "pass": index})
        wall = clock.at - start
        windows.append({"start": start, "end": clock.at, "plain": int(wall * 0.985)})
        clock.at += 3_000_000  # the same pass without times
    for plan, rows in enumerate(plans):
        for row in rows:
            calls = len(row["times"])
            row |= {"plan": plan, "bytes": row["bytes"] * calls, "flops": row["flops"] * calls}
            row["overlap"] = 120 * calls if row["op"] == "gated" else 0
            row["limit"], row["bound"] = _limit(row, ceilings)
    closing = {k: clock.spent.get(k, 0) for k in ("ops", "copies", "gaps", "host", "unattributed")}
    return {
        "name": name, "tokens": tokens, "passes": windows,
        "closing": {**closing, "wall": sum(closing.values())}, "overhead": 1 / 0.985 - 1,
        "speed": speed(tokens, [window["plain"] for window in windows]).as_dict(), "disturbed": 0.1,
        "rows": [row for rows in plans for row in rows], "runs": runs,
        "arena": [each for i, rows in enumerate(plans) for each in _arena(rows, i)],
    }  # fmt: skip


def sample(layers: int = 4, passes: int = 3, decode: int = 5, ceilings: bool = True) -> dict:
    """A report of a prompt of two chunks and ``decode`` tokens."""
    random = Random(7)
    prompt = [_steps(layers, 512), _steps(layers, 20)]
    phases = [
        _phase("prefill", prompt, [0, 1], 532, passes, ceilings, random),
        _phase("decode", [_steps(layers, 1)], [0] * decode, decode, passes, ceilings, random),
    ]
    return _report(phases, ceilings)


def _report(phases: list[dict[str, Any]], ceilings: bool) -> dict[str, Any]:
    ceilings_by_backend = {
        name: {
            "date": "2026-11-20T10:00:00Z", "stale": name == "cpu", "bytes_s": bytes_s,
            "doubt": "measured 3 days ago; measure again" if name == "cpu" else "",
            "float_flop_s": float_s, "integer_flop_s": integer_s,
        }
        for name, (bytes_s, float_s, integer_s) in CEILINGS.items()
    }  # fmt: skip
    return {
        "schema": "graphllm.profile", "version": 2,
        "made": {"graphllm": "0.1.0", "python": "3.12.3", "date": "2026-11-21T20:00:00Z"},
        "machine": {
            "name": "A machine, 8 processors, host",
            "backends": {"cuda": "A GPU, 16 GB", "cpu": "AVX-512 VNNI, 8 threads"},
        },
        "model": {
            "path": "gemma.gguf", "type": "gemma3 268M Q4_K - Medium", "bytes": 241_000_000,
            "parameters": 268_098_176, "context": 4096, "kv_type": "f16",
        },
        "settings": {
            "device": "auto", "threads": 8, "linear": "auto", "prompt_tokens": 532, "depth": 0,
            "decode_tokens": phases[-1]["tokens"], "repeat": len(phases[0]["passes"]),
        },
        "start": {"load_s": 1.9, "weights_s": 1.1, "kernels_s": 0.5, "first_run_s": 0.03},
        "busy": {"others": 0.02, "note": ""},
        "ceilings": ceilings_by_backend if ceilings else {},
        "phases": phases,
    }  # fmt: skip


def large(rows: int) -> dict[str, Any]:
    """A report of one plan with at least so many rows, run 6 times."""
    steps = _steps(-(-rows // 7), 1)
    return _report([_phase("decode", [steps], [0, 0], 2, 3, True, Random(3))], True)


def measured(folder: Path) -> dict[str, Any]:
    """What two requests really took of a small model, whose last layer is on the reference."""
    path = tiny_models.write_tiny(folder / "m.gguf", "llama")
    place = {"model.layers.1.*": "reference"}
    llm = graphllm.load(path, device="cpu", context=128, max_sequences=2, place=place)
    return llm.profile([list(range(3, 23)), [5, 6, 7]], decode=5, repeat=2).as_dict()
