"""Walks on a GPU give what the same steps give as launches; and where their blocks meet."""

from __future__ import annotations

import numpy as np
import pytest
from test_cuda import _gpu  # noqa: F401
from test_fusion import nmse

from graphllm.backends.cuda import walk
from graphllm.backends.touched import Touched
from graphllm.decoder import Limits
from graphllm.llm import LLM, decoder_for
from graphllm.profiler.rows import Recorder
from graphllm.weights.random import RandomFile
from graphllm.weights.shapes import Shape

# Rows that are no whole number of chunks, groups of 4 and 7 heads, biases, windows, wide heads.
SHAPES = {
    "llama": Shape("llama", 3, 768, 8, 2, 1792, 501, head_dim=128),
    "qwen2": Shape("qwen2", 2, 512, 14, 2, 1280, 333, head_dim=64, bias=True, tied=True),
    "gemma3": Shape("gemma3", 7, 512, 4, 1, 1536, 700, head_dim=256, tied=True, window=32),
}
KINDS = (
    "f16", "bf16", "f32", "q8_0", "q4_0", "q4_1", "q5_0", "q5_1", "iq4_nl", "mxfp4",
    "q2_k", "q3_k", "q4_k", "q5_k", "q6_k", "iq4_xs", "q4_k_m",
)  # fmt: skip
PROMPT = [3, 141, 59, 26, 5, 35, 89, 79, 32, 38]


def decoded(shape, kind, steps, profile=None):
    """Logits [steps, vocab] of single tokens after a prompt, and the walks in the last plan."""
    file = RandomFile(shape, kind)
    llm = LLM(file, decoder_for(file), {"backends": ("cuda", "reference")}, Limits(context=300))
    engine, found = llm.engine, []
    engine.step_logits(PROMPT, last=True)
    plan = engine._plan(["logits", *engine._pools], 1, 1)
    for step in range(steps):
        feeds = engine._feeds([(7 * step + 11) % 300], np.zeros(1, np.int64))
        env = {"kv_sum": len(PROMPT) + step + 1}
        found.append(engine.executor.run(plan, feeds, env, profile, ("logits",))["logits"][0])
        engine._cached.append(0)
    segments = engine.executor._programs[id(plan)].segments
    walks = [w for s, _ in segments for part in s._work for w in part if isinstance(w, walk.Walk)]
    return np.array(found), walks


@pytest.mark.cuda
@pytest.mark.parametrize(
    "name, kind", [("llama", kind) for kind in KINDS] + [("qwen2", "q8_0"), ("gemma3", "q4_k_m"),
                                                         ("qwen2", "f16"), ("gemma3", "f16")]
)  # fmt: skip
def test_a_walk_gives_what_launches_give(name, kind, monkeypatch):
    steps = 40 if name == "gemma3" else 6
    found, walks = decoded(SHAPES[name], kind, steps)
    monkeypatch.setattr(walk, "LEAST", 10**9)
    wanted, none = decoded(SHAPES[name], kind, steps)
    assert len(walks) == 1 and not none
    assert np.isfinite(found).all()
    # A number at the edge of two steps of a quantised activation may fall to either side.
    assert nmse(found, wanted) < (1e-9 if kind in ("f16", "bf16", "f32") else 1e-3)


@pytest.mark.cuda
def test_the_times_of_a_walk_s_steps():
    recorder = Recorder()
    decoded(SHAPES["llama"], "q4_0", 4, recorder)
    times = [row.ns for row in recorder.rows]
    assert times and all(t >= 0 for t in times) and sum(times) > 0


def task(everywhere=False, **macros):
    return walk.Task("norm", b"", 0, everywhere=everywhere, macros=macros)


def test_where_blocks_meet():
    a, b, c, d = ((i, i + 10) for i in range(0, 40, 10))
    run = walk.Run(0)
    for everywhere, reads, writes in [
        (True, [a], [b]),  # a norm, by every block
        (False, [b], [c]),  # reads what every block has
        (False, [c], [d]),  # reads what others have made: all meet
        (False, [b], [a]),  # overwrites what some may still read: but they have met since
        (True, [a], [c]),  # reads what others have made, and writes what others read
        (True, [c], [b]),  # has its own
        (False, [a], [c]),  # overwrites what others may still read
    ]:
        run.add([task(everywhere)], Touched(reads, writes))
    assert walk._meets(run) == [False, False, True, False, True, False, True]


def test_runs_end_where_a_step_cannot_be_in_them(monkeypatch):
    monkeypatch.setattr(walk, "LEAST", 2)
    none = Touched([], [])
    steps = [([task()], none), ([task(DEPTH=64)], none), None, ([task(DEPTH=64)], none),
             ([task(DEPTH=128)], none), ([task()], none)]  # fmt: skip
    assert [(run.start, len(run.tasks)) for run in walk.runs(steps)] == [(0, 2), (4, 2)]
