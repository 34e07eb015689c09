"""Fusion: every fused op against its decomposition, rules on whole decoders, rejected matches."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
from cases import Group, groups, mismatch
from fusion_cases import FUSED, IDS, NOT_ON_CPU, named, nmse, values
from tiny_models import llama_weights, write_llama

import graphllm
from graphllm import ops
from graphllm.backends import Options
from graphllm.compiler import fusion
from graphllm.errors import GraphError
from graphllm.formats import quantization
from graphllm.formats.k_quants import Q4_K
from graphllm.formats.legacy import Q8_0
from graphllm.graph.dtype import F16
from graphllm.graph.fused_op import decompose, results
from graphllm.graph.tensor import Tensor, Var, feed, state, weight
from graphllm.runtime.buffer_guards import GuardedExecutor
from graphllm.runtime.executor import Executor
from graphllm.weights import Arrays

ON_CPU = [name for name in FUSED if name not in NOT_ON_CPU]
T = Var("T", 1, 8)


@cache
def grouped(name: str) -> list[Group]:
    return groups(ops.get(name))


def on_cpu(name: str) -> list[Group]:
    """The samples without float16 activations, which only GPUs have."""
    return [g for g in grouped(name) if not _has_halves(g)]


def _has_halves(group: Group) -> bool:
    x = group.args[0]
    return "f16" in group.node.attrs.get("dtypes", ()) or (x is not None and x.dtype == F16)


@pytest.mark.parametrize("name", ON_CPU)
def test_fused_equals_its_parts(name):
    """On cpu fused, with buffer guards, and on the reference unfused."""
    weights = {k: v for g in on_cpu(name) if g.cases for k, v in g.weights.items()}
    cpu = GuardedExecutor(Arrays(weights), ("cpu",))
    reference = Executor(Arrays(weights), ("reference",))
    wrong = []
    for group in on_cpu(name):
        one = named(results(group.node))
        many = named(group.op(*group.node.src, **group.node.attrs))
        plans = cpu.compile(one), reference.compile(many)
        assert name in [s.node.op for s in plans[0].steps]
        assert name not in [s.node.op for s in plans[1].steps]
        for case in group.cases:
            for executor, plan in zip((cpu, reference), plans):
                executor.bind(plan)
                for leaf in plan.leaves.values():
                    if leaf.op == "state":
                        meta = leaf.meta.bound()
                        executor.set_state(leaf.name, np.full(meta.shape, 7, meta.dtype.numpy))
            got, want = (
                e.run(p, case.feeds, case.sample.env) for e, p in zip((cpu, reference), plans)
            )
            for key, node in one.items():
                (a, step), (b, _) = values(got[key], node), values(want[key], node)
                problem = mismatch(a, b, max(case.tolerance, step))
                if problem:
                    wrong.append(f"{case.sample.label} {key}: {problem}")
    assert not wrong, "\n".join([f"{len(wrong)} results are wrong", *wrong[:8]])


@pytest.mark.parametrize("name", ON_CPU)
def test_every_rule_finds_its_own_parts(name):
    """The decomposition, as a graph, is fused to the op again, or to a larger one."""
    for group in on_cpu(name):
        if name in ("gated", "linears", "rope_write"):
            continue  # see the tests called test_..._found
        if "f32" in group.node.attrs.get("dtypes", ()):
            continue  # see test_a_norm_with_a_float_user_is_found
        weights = {k: v for g in on_cpu(name) if g.cases for k, v in g.weights.items()}
        many = named(group.op(*group.node.src, **group.node.attrs))
        plan = Executor(Arrays(weights), ("cpu",)).compile(many)
        assert name in [s.node.op for s in plan.steps], group.samples[0].label
        off = Executor(Arrays(weights), ("cpu",), Options(without=(name,))).compile(many)
        assert name not in [s.node.op for s in off.steps]


@pytest.mark.parametrize("name", FUSED)
def test_cost_of_a_fused_op(name):
    """It has the operations of its parts, and no more bytes."""
    for group in grouped(name):
        own = decompose(group.node)
        for case in group.cases:
            env = case.sample.env
            joint = ops.get(name).node_cost(group.node, env)
            single = [ops.get(p.op).node_cost(p, env) for p in own.nodes]
            assert joint.flops == sum(c.flops for c in single)
            assert 0 <= joint.bytes <= sum(c.bytes for c in single)


# ------------------------------------------------------------------------------- rejected matches


def steps(outputs, weights, **options) -> list[str]:
    plan = Executor(Arrays(weights), ("cpu", "reference"), Options(**options)).compile(outputs)
    return [s.node.op for s in plan.steps]


def glu_parts():
    gate, up = feed("gate", (T, 64), "f32"), feed("up", (T, 64), "f32")
    activated = ops.silu(gate)
    return activated, ops.mul(activated, up)


def test_a_value_with_another_user_is_not_fused_away():
    activated, y = glu_parts()
    assert steps({"y": y}, {}) == ["glu"]
    assert sorted(steps({"y": y, "also": activated}, {})) == ["mul", "silu"]
    assert sorted(steps({"y": y, "z": ops.scale(activated, factor=2.0)}, {})) == [
        "mul", "scale", "silu",
    ]  # fmt: skip


def test_other_attributes_than_the_rule_builds_are_not_fused():
    gate, up = feed("gate", (T, 64), "f32"), feed("up", (T, 64), "f32")
    assert steps({"y": ops.mul(ops.softcap(gate, cap=2.0), up)}, {}) == ["softcap", "mul"]


def test_a_rule_stays_within_one_backend():
    _, y = glu_parts()
    pins = {"": "reference"}
    ex = Executor(backends=("cpu", "reference"), pins=pins)
    assert "glu" not in [s.node.op for s in ex.compile({"y": y}).steps]


def test_linears_are_found():
    """Linears of one activation in any format, but not linears of their results."""
    w: dict = {n: np.eye(256, dtype=np.float32) for n in ("w1", "w2", "w3")}
    w |= {
        k.name: quantization.Blocks(quantization.quantise(w["w1"], k), k, 256) for k in (Q8_0, Q4_K)
    }
    x = feed("x", (T, 256), "f32")
    a, b, c, d, e = (weight(n, (256, 256), n if n[0] == "q" else "f32") for n in w)
    both = {"y": ops.linear(ops.silu(ops.linear(x, a)), b), "z": ops.linear(x, c)}
    assert sorted(steps(both, w)) == ["linear", "linears", "silu"]
    assert "linears" not in steps({"y": ops.linear(ops.silu(ops.linear(x, a)), b)}, w)
    mixed = {str(i): ops.linear(x, m) for i, m in enumerate((a, d, e))}
    assert sorted(steps(mixed, w)) == ["linears", "quantise_act", "quantise_act"]
    assert sorted(steps(mixed, w, linear="float")) == ["linears"]


def test_gated_linears_are_found():
    w = {n: np.eye(64, dtype=np.float32) for n in ("g", "u", "v")}
    x = feed("x", (T, 64), "f32")
    g, u, v = (ops.linear(x, weight(n, (64, 64), "f32")) for n in w)
    assert steps({"y": ops.mul(ops.silu(g), u)}, w) == ["gated"]
    assert sorted(steps({"y": ops.mul(ops.silu(g), u), "z": v}, w)) == ["gated", "linear"]
    assert sorted(steps({"y": ops.mul(ops.silu(g), u), "z": u}, w)) == ["glu", "linears"]


def test_a_norm_with_a_float_user_is_found():
    """As in a mixture of experts: the router reads the norm, and the experts its quantized form."""
    w = {"n": np.random.default_rng(0).standard_normal(256).astype(np.float32)}
    y = ops.rms_norm(feed("x", (T, 256), "f32"), weight("n", (256,), "f32"), eps=1e-6)
    both = {"y": ops.silu(y), "z": ops.quantise_act(y, dtype="a8_32")}
    assert sorted(steps(both, w)) == ["norm_quantise", "silu"]
    x = np.random.default_rng(1).standard_normal((3, 256)).astype(np.float32)
    got, want = (
        executor.run(executor.compile(both), {"x": x})
        for executor in (
            GuardedExecutor(Arrays(w), ("cpu",), Options(without=without))
            for without in ((), ("norm_quantise",))
        )
    )
    assert not mismatch(got["y"], want["y"], 1e-5)
    q, r = (each["z"][:, :256].view(np.int8).astype(int) for each in (got, want))
    assert abs(q - r).max() <= 1 and abs(r).max() == 127


def test_fusion_never_makes_a_cycle():
    """Values computed from rotated queries: fused, the step would depend on itself."""
    assert "rope_write" in steps({"y": attended(lambda q: None)}, {})
    assert "rope_write" not in steps({"y": attended(lambda q: ops.scale(q, factor=2.0))}, {})


def test_two_matches_never_make_a_cycle():
    """Each attention writes values computed from the rotated queries of the other."""
    first, second = attended(lambda q: None, name="a."), attended(lambda q: None, name="b.")
    values = [ops.scale(each.src[0], factor=2.0) for each in (first, second)]
    crossed = {
        "values": values[0],
        "y": attended(lambda q: values[1], name="a."),
        "z": attended(lambda q: values[0], name="b."),
    }
    assert steps(crossed, {}).count("rope_write") == 1


def test_unknown_rules_are_named():
    with pytest.raises(GraphError, match=r"no fusion rule 'glue'; known: all, .*glu"):
        fusion.check_names(["glue"])
    fusion.check_names(["all", "glu"])


def attended(values, normed: bool = False, name: str = "") -> Tensor:
    """Attention over pools that this step writes; ``values(q)`` may use the rotated q.

    ``name``: prefix of the names of queries, keys, values and pools.
    """
    q, k, v = (feed(f"{name}{n}", (T, 2, 32), "f32") for n in "qkv")
    pos, slot, s = feed("pos", (T,), "i32"), feed("slot", (T,), "i32"), Var("S", 1, 1)
    k_pool, v_pool = (state(f"{name}{n}", (32, 2, 32), "f16") for n in ("kp", "vp"))
    turn = {"base": 1e4, "dims": 0, "style": "half", "scale": 1.0}
    n = weight("n", (32,), "f32")
    q, k = (ops.rms_norm(t, n, eps=1e-6) if normed else t for t in (q, k))
    q = ops.rope(q, pos, **turn)
    k = ops.kv_write(k_pool, ops.rope(k, pos, **turn), slot)
    v = ops.kv_write(v_pool, values(q) or v, slot)
    batch = (feed("qs", (Var("Q", 2, 2),), "i32"), feed("kl", (s,), "i32"),
             feed("table", (s, 2), "i32"))  # fmt: skip
    return ops.attention(q, k, v, *batch, scale=0.2, block=16, window=0, softcap=0.0, causal=True)


def test_rope_write_is_found():
    """With and without norms, if attention reads the written pools."""
    w = {"n": np.ones(32, np.float32)}
    for normed in (False, True):
        y = attended(lambda q: None, normed)
        assert steps({"y": y}, w) == ["rope_write", "attention"]
        assert steps({"y": y, "kv.k": y.src[1]}, w) == ["rope_write", "attention"]


# ---------------------------------------------------------------------------------- whole decoders


@pytest.mark.parametrize("arch", ["llama", "qwen2"])
def test_small_decoders_agree_fused_and_unfused(arch, tmp_path):
    path = write_llama(tmp_path / "tiny.gguf", llama_weights(bias=arch == "qwen2"), arch)
    plain = graphllm.load(path, device="cpu", no_fuse=["all"])
    want, count = plain.logits(IDS), len(plain.engine.decode_plan().steps)
    for rules in ([], *([name] for name in FUSED)):
        llm = graphllm.load(path, device="cpu", no_fuse=rules)
        assert nmse(llm.logits(IDS), want) < 1e-9, rules
        assert len(llm.engine.decode_plan().steps) < count


@pytest.mark.realmodel
def test_the_real_model_agrees_and_is_short(demo_path):
    """Float logits equal those without fusion. With quantised activations, a different rounding
    changes logits as much as quantisation does, and fusion must not add to that. At most nine
    steps per layer."""
    text = "Fusion joins what neighbours compute, so that less goes through memory."
    found = {}
    for linear in ("float", "integer"):
        for rules in ((), ("all",)):
            llm = graphllm.load(
                "demo", device="cpu", context=256, linear=linear, kv_type="f32", no_fuse=rules
            )
            found[linear, rules] = llm.logits(llm.encode(text))
            steps = llm.engine.decode_plan().steps
            if (linear, rules) == ("integer", ()):
                for layer in range(18):
                    prefix = f"model.layers.{layer}."
                    own = [s.node.op for s in steps if s.node.scope.startswith(prefix)]
                    assert 0 < len(own) <= 9, own
    exact = found["float", ("all",)]
    assert nmse(found["float", ()], exact) < 1e-9
    fused, unfused = (nmse(found["integer", rules], exact) for rules in ((), ("all",)))
    assert fused < 1.5 * unfused < 1e-2
