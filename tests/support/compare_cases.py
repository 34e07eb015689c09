"""Synthetic profiles with the noise of real machines."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

LAYERS, TOKENS, PASSES = 6, 16, 3
# op, parts, weight, microseconds a token of each layer
STEPS = (
    ("linears", ("linear",) * 3, "q5_0", 33.0),
    ("rope_write", ("rope", "kv_write"), "", 3.1),
    ("attention", (), "", 8.7),
    ("linear", (), "q4_k", 24.0),
    ("norm_add_norm", ("rms_norm", "add", "rms_norm"), "", 1.9),
    ("gated", ("linear", "linear", "gelu", "mul"), "q5_0", 77.0),
    ("linear", (), "q6_k", 46.0),
)
ENDS = (("embedding", "model.embed_tokens", "q8_0", 2.5), ("scale", "model", "", 0.7),
        ("linear", "lm_head", "q8_0", 6400.0), ("sample", "", "", 92.0),
        ("advance", "", "", 1.9))  # fmt: skip


def steps() -> list[tuple[str, tuple[str, ...], str, int | None, str, float]]:
    """(op, parts, scope, layer, weight, microseconds) in execution order."""
    inner = [
        (op, parts, f"model.layers.{layer}.{op}_{weight}", layer, weight, us)
        for layer in range(LAYERS)
        for op, parts, weight, us in STEPS
    ]
    ends: list[Any] = [(op, (), scope, None, weight, us) for op, scope, weight, us in ENDS]
    return [*ends[:2], *inner, *ends[2:]]


@dataclass
class Machine:
    """Generator of run times with the noise observed on real machines.

    A process is slower as a whole by some percent (``drift``), and each of its steps for itself by
    a percent and a part of a microsecond. A step's run is longer by some percent, and now and then
    several times as long; ``load`` is the share of runs which another process makes longer as a
    whole. In every sixth process threads wake up late.
    """

    seed: int
    drift: float = 0.03
    load: float = 0.0

    def __post_init__(self) -> None:
        self.rng = np.random.default_rng(self.seed)

    def process(self, slow: dict[str, float] | None = None, **sections: Any) -> dict[str, Any]:
        """Return a profile of a new process.

        ``slow``: factors by ``op weight``, by scope or for ``all``; ``sections``: changes of
        ``model`` and ``settings``.
        """
        rng, all_steps = self.rng, steps()
        default = np.array([1e3 * us for *_, us in all_steps])
        own = default * np.exp(rng.normal(0, 0.012, len(default))) + rng.normal(
            0, 100, len(default)
        )
        own = np.maximum(own, 0.5 * default) * np.exp(rng.normal(0, self.drift))
        factors = {"all": 1.0, **(slow or {})}
        for index, (op, _, scope, _, weight, _) in enumerate(all_steps):
            named = factors.get(f"{op} {weight}".strip(), 1.0) * factors.get(scope, 1.0)
            own[index] *= factors["all"] * named
        wakes = 4e6 * (rng.random() < 1 / 6)
        phases = [
            self._phase("prefill", own * 1.4, 1, wakes),
            self._phase("decode", own, TOKENS, 0.0),
        ]
        model = {"path": "m.gguf", "type": "gemma3", "bytes": 10, "parameters": 20,
                 "context": 4096, "kv_type": "f16"}  # fmt: skip
        settings = {"threads": 2, "prompt_tokens": 6, "decode_tokens": TOKENS, "repeat": PASSES}
        return {
            "schema": "graphllm.profile", "version": 2, "made": {},
            "machine": {"name": "abacus", "backends": {"cpu": "beads"}},
            "model": model | sections.get("model", {}),
            "settings": settings | sections.get("settings", {}),
            "start": {}, "ceilings": {}, "phases": phases,
        }  # fmt: skip

    def _phase(self, name: str, own: np.ndarray, runs: int, wakes: float) -> dict[str, Any]:
        rng, count = self.rng, PASSES * runs
        times = own * np.exp(np.abs(rng.normal(0, 0.03, (count, len(own)))))
        hit = rng.random(times.shape) < 0.02
        times[hit] *= 1 + rng.exponential(2.0, hit.sum())
        loaded = rng.random(count) < self.load
        times[loaded] *= rng.uniform(1.3, 2.0, (loaded.sum(), 1))
        times[:, 0] += wakes
        walls = times.reshape(PASSES, -1).sum(axis=1) * np.exp(np.abs(rng.normal(0, 0.01, PASSES)))
        rows = [
            {
                "plan": 0, "step": index, "op": op, "parts": list(parts), "scope": scope,
                "layer": layer, "origin": "", "shape": "f32[1,640]", "inputs": [],
                "weight": weight, "backend": "cpu", "kernel": op, "why": "", "copy": False,
                "times": [int(ns) for ns in times[:, index]], "overlap": 0, "bytes": 1, "flops": 1,
                "limit": None, "bound": "",
            }
            for index, (op, parts, scope, layer, weight, _) in enumerate(steps())
        ]  # fmt: skip
        one = {"plan": 0, "called": 0, "returned": 0, "env": {"T": 1}, "segments": []}
        return {
            "name": name, "tokens": 6 if name == "prefill" else runs,
            "passes": [{"start": 0, "end": int(ns), "plain": int(ns)} for ns in walls],
            "closing": dict.fromkeys(
                ("ops", "copies", "gaps", "host", "unattributed", "wall"), 0
            ),
            "overhead": 0.0, "rows": rows,
            "runs": [{**one, "pass": index // runs} for index in range(count)], "arena": [],
        }  # fmt: skip


def write(folder: Path, name: str, found: Any) -> Path:
    path = folder / f"{name}.json"
    path.write_text(json.dumps(found), "utf-8")
    return path


def run_interleaved(
    machine: Machine, pairs: int, folder: Path, **slow: Any
) -> tuple[list[Path], list[Path]]:
    """Write files of ``pairs`` interleaved processes per side; side B is slowed by ``slow``."""
    files: tuple[list[Path], list[Path]] = ([], [])
    for turn in range(pairs):
        for side in (0, 1) if turn % 2 else (1, 0):
            found = machine.process(**slow) if side else machine.process()
            files[side].append(write(folder, f"{'AB'[side]}{turn}", found))
    return files
