"""`LLM.trace`: values of all scopes against the reference backend and transformers, unfused steps,
chunks of long prompts, patches, invalid requests."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path

import numpy as np
import pytest
import tiny_models as tiny
import windowed_model
from cuda_cases import need_gpu
from doc_examples import example
from gemma3_texts import TEXTS
from model_cases import nmse
from remote_memory import remote  # noqa: F401

import graphllm
from graphllm import ops
from graphllm.compiler.placement import Tap
from graphllm.compiler.plan import HOST
from graphllm.engine import trace as tracing
from graphllm.engine.trace import Tracer, nearest_scopes
from graphllm.errors import GraphError, RequestError
from graphllm.graph.scopes import record_scope_values
from graphllm.graph.tensor import Var, feed, scope, weight
from graphllm.runtime.buffer_guards import GuardedExecutor
from graphllm.runtime.executor import Executor
from graphllm.weights import Arrays

IDS = [1, 5, 300, 17, 9, 9, 250, 3, 44, 101, 7]
ARCHS = ("llama", "qwen2", "gemma3")
FLOAT = {"linear": "float", "kv_type": "f32"}
SITES = [
    "input_layernorm", "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj",
    "self_attn.o_proj", "self_attn", "post_attention_layernorm", "mlp.gate_proj", "mlp.up_proj",
    "mlp.down_proj", "mlp",
]  # fmt: skip
GEMMA3_SITES = [*SITES[:4], "self_attn.q_norm", "self_attn.k_norm", *SITES[4:7]]
GEMMA3_SITES += ["pre_feedforward_layernorm", *SITES[7:], "post_feedforward_layernorm"]


@pytest.fixture(scope="module")
def paths(tmp_path_factory):
    """Write a small model of each architecture."""
    folder = tmp_path_factory.mktemp("trace")
    return {arch: tiny.write_tiny(folder / f"{arch}.gguf", arch) for arch in ARCHS}


@pytest.fixture
def llama(paths):
    return graphllm.load(paths["llama"], device="cpu", kv_type="f32")


def expected(arch: str, layers: int) -> list[str]:
    """Return all scopes in the order in which a run leaves them."""
    sites = GEMMA3_SITES if arch == "gemma3" else SITES
    names = [f"model.layers.{i}{s and '.'}{s}" for i in range(layers) for s in [*sites, ""]]
    return ["model.embed_tokens", *names, "model.norm", "model", "lm_head"]


def worst(have: dict[str, np.ndarray], want: dict[str, np.ndarray]) -> float:
    """Return the largest normalised mean square error of all values."""
    assert list(have) == list(want)
    for name, value in have.items():
        assert (value.shape, value.dtype) == (want[name].shape, np.float32), name
    return max(nmse(have[name], want[name]) for name in want)


# ------------------------------------------------------------------------------------------ values


@pytest.mark.parametrize("how", [{}, {"no_fuse": ["all"]}], ids=["fused", "unfused"])
@pytest.mark.parametrize("arch", ARCHS)
def test_every_scope_of_a_small_model(arch, how, paths):
    """All scopes in one plan, which is then unfused; then one by one, with other steps fused."""
    reference = graphllm.load(paths[arch], device="reference")
    cpu = graphllm.load(paths[arch], device="cpu", kv_type="f32", **how)
    want, have = (llm.trace(IDS, "*") for llm in (reference, cpu))
    assert cpu.scopes() == list(have) == expected(arch, tiny.LAYERS)
    assert worst(have, want) < 1e-10
    unfused = graphllm.load(paths[arch], device="cpu", kv_type="f32", no_fuse=["all"])
    np.testing.assert_array_equal(have["lm_head"], unfused.logits(IDS))
    alone = {name: cpu.trace(IDS, name)[name] for name in cpu.scopes()}
    assert worst(alone, want) < 1e-10


@pytest.mark.parity
@pytest.mark.parametrize("arch", ["llama", "qwen2"])
def test_every_scope_agrees_with_transformers(arch, paths):
    """A scope is the module of that name. GGUF stores llama's q and k rows in another order."""
    import hf

    have = graphllm.load(paths[arch], device="cpu", **FLOAT).trace(IDS, "*")
    want = hf.returned(tiny.hf_model(arch, tiny.llama_weights(bias=arch == "qwen2")), IDS)
    if arch == "llama":
        for name in [n for n in want if n.endswith(("q_proj", "k_proj"))]:
            heads = tiny.HEADS if name.endswith("q_proj") else tiny.KV
            want[name] = tiny._interleaved(want[name].T, heads).T
    assert worst(have, {name: want[name] for name in have}) < 1e-9


def test_the_value_of_a_scope():
    """It is the last result in the scope's block, of several blocks in the last one with a result.

    Values computed from weights alone and blocks ended by an exception do not count.
    """
    x = feed("x", (Var("T", 1, 8), 4), "f32")
    with record_scope_values() as values:
        with scope("a"):
            a = ops.silu(x)
        with scope("b"):
            b = ops.silu(x)
            with scope("c"):
                ops.scale(a, factor=2.0)
                c = ops.add(a, b)
        with scope("a"):
            again = ops.silu(c)
        with scope("a"):
            ops.cast(weight("w", (4,), "f16"), dtype="f32")
        with scope("empty"):
            pass
        with contextlib.suppress(GraphError), scope("failed"):
            ops.mul(ops.silu(x), a.heads(3))
    with scope("after"):
        ops.silu(x)
    assert list(values.items()) == [("b.c", c), ("b", c), ("a", again)]


def test_only_a_step_that_hides_a_value_is_unfused(paths):
    """Of three gated MLPs only the one with the traced gate is unfused, and only as far as needed.

    Steps after the last traced value are not run.
    """
    llm = graphllm.load(paths["gemma3"], device="cpu")
    gate = "model.layers.1.mlp.gate_proj"

    def fused() -> list[tuple[str, tuple[str, ...]]]:
        steps = llm._tracer._last.plan.steps
        return [(s.node.op, s.node.scopes) for s in steps if ops.get(s.node.op).fusion]

    llm.trace(IDS, "lm_head")
    before = fused()
    llm.trace(IDS, ["lm_head", gate])
    after = fused()
    (hidden,) = (f for f in before if gate in f[1])
    assert hidden[0] == "gated" and [f for f in before if f not in after] == [hidden]
    new = [f for f in after if f not in before]
    assert [op for op, _ in new] == ["linears", "glu"]
    assert {scope for _, scopes in new for scope in scopes} <= set(hidden[1])
    llm.trace(IDS, gate)
    steps = llm._tracer._last.plan.steps
    assert steps[-1].node.scope == gate and all("layers.2" not in s.node.scope for s in steps)


def test_a_users_model_file_has_scopes(tmp_path):
    """The example of the documentation: parallel attention and MLP."""
    (tmp_path / "parallel.py").write_text(example("Add a model"))
    weights = {k: v for k, v in tiny.llama_weights().items() if "post_attention" not in k}
    path = tiny.write_llama(tmp_path / "one.gguf", weights, "parallel")
    llm = graphllm.load(path, device="cpu", model_def=tmp_path / "parallel.py")
    have = llm.trace(IDS, ["*.self_attn", "*.mlp", "model.layers.?"])
    assert list(have)[3:6] == [f"model.layers.1{s}" for s in (".self_attn", ".mlp", "")]
    total = sum(have[f"model.layers.{layer}"] for layer in ("1.self_attn", "1.mlp", "0"))
    np.testing.assert_allclose(have["model.layers.1"], total, atol=1e-5)


# -------------------------------------------------------------------------------- pieces and state


@pytest.fixture(scope="module")
def windowed(tmp_path_factory):
    return windowed_model.windowed(tmp_path_factory.mktemp("windowed"))


def test_long_prompts_are_traced_in_chunks(windowed, monkeypatch):
    """Chunks of 16 tokens, or fewer if the values are large, give identical bits."""
    whole = Tracer(windowed_model.make_engine(windowed, tokens=windowed_model.CONTEXT)).trace(
        windowed_model.IDS, "*"
    )
    assert {len(value) for value in whole.values()} == {len(windowed_model.IDS)}
    tracer = Tracer(windowed_model.make_engine(windowed))
    for most, rows in ((tracing.MAX_STEP_BYTES, 16), (100_000, 5), (1, 1)):
        monkeypatch.setattr(tracing, "MAX_STEP_BYTES", most)
        tracer._last = None
        have = tracer.trace(windowed_model.IDS, "*")
        assert tracer._last.rows == rows
        for name, value in whole.items():
            np.testing.assert_array_equal(have[name], value, name)


def test_a_value_without_token_rows_is_that_of_the_last_step(windowed):
    """No scope of a decoder has such a value, but a user's module may."""
    engine = windowed_model.make_engine(windowed)
    leaf = engine.decode_plan().leaves["q_start"]
    assert leaf.meta.rows.name == "Q"
    have = [np.array([0, 16]), np.array([0, 3])]
    np.testing.assert_array_equal(tracing._join_steps(have, leaf), have[1])


def test_a_trace_does_not_change_later_results(llama):
    """Later requests and a stream that was under way give the same results."""
    ask = {"max_tokens": 20, "temperature": 0, "ignore_eos": True}
    want, logits = llama.generate("hello world", **ask).ids, llama.logits(IDS)
    other = llama.generate("hello", **ask).text
    unfinished = llama.stream("hello", **ask)
    begun = next(unfinished)
    for patch in ({}, {"*.k_proj": np.zeros_like}):
        llama.trace("hello world", "*.mlp", patch)
        done = llama.generate("hello world", **ask)
        assert done.ids == want
        llama.trace(IDS, "*.mlp", patch)
        np.testing.assert_array_equal(llama.logits(IDS), logits)
    assert begun + "".join(unfinished) == other


def test_the_last_plan_is_kept(llama):
    """It is reused for other prompts and functions, and replaced by the plan of another trace."""
    before = len(llama.engine.all_plans())
    llama.trace(IDS, ["lm_head", "*.mlp"], {"model.layers.0": np.zeros_like})
    plan, plans = llama._tracer._last.plan, llama.executor.cache_sizes()["plans"]
    have = llama.trace(IDS[:4], ["*.mlp", "lm_head"], {"model.layers.0": np.ones_like})
    assert llama._tracer._last.plan is plan and len(have["lm_head"]) == 4
    del plan
    for i in range(3):
        llama.trace(IDS, f"model.layers.{i}.mlp")
    assert llama.executor.cache_sizes()["plans"] == plans == before + 1


# ----------------------------------------------------------------------------------------- patches


@pytest.mark.parametrize("arch", ARCHS)
def test_an_identity_patch_gives_identical_bits(arch, paths):
    llm = graphllm.load(paths[arch], device="cpu", kv_type="f32", strict=True)
    want = llm.trace(IDS, "*")
    have = llm.trace(IDS, "*", {"*": lambda value: value})
    assert list(have) == list(want)
    for name, value in want.items():
        np.testing.assert_array_equal(have[name], value, name)


@pytest.mark.parametrize("device", ["cpu", "reference"])
@pytest.mark.parametrize("module, last", [("self_attn", "o_proj"), ("mlp", "down_proj")])
def test_a_patch_with_zeros_equals_zero_weights(device, module, last, tmp_path, paths):
    at = f"model.layers.1.{module}"
    weights = tiny.llama_weights()
    weights[f"{at}.{last}.weight"] *= 0
    silent = tiny.write_llama(tmp_path / "silent.gguf", weights)
    want = graphllm.load(silent, device=device, kv_type="f32").logits(IDS)
    llm = graphllm.load(paths["llama"], device=device, kv_type="f32")
    have = llm.trace(IDS, ["lm_head", at], {at: np.zeros_like})
    np.testing.assert_allclose(have["lm_head"], want, atol=2e-5)
    assert np.abs(have["lm_head"] - llm.logits(IDS)).max() > 0.1 and not have[at].any()


def test_patched_keys_reach_later_chunks(windowed):
    """Through the cache: with keys of zero, attention is the mean of the visible values."""
    engine = windowed_model.make_engine(windowed)
    name, heads = "model.layers.0.self_attn", (-1, tiny.KV, 32)
    have = Tracer(engine).trace(
        windowed_model.IDS, [f"{name}.v_proj", f"{name}.o_proj"], {f"{name}.k_proj": np.zeros_like}
    )
    v = have[f"{name}.v_proj"].reshape(heads)
    means = np.cumsum(v, 0) / np.arange(1, len(v) + 1)[:, None, None]
    seen = np.repeat(means, tiny.HEADS // tiny.KV, 1).reshape(len(v), -1)
    want = seen @ engine.executor.weights.raw(f"{name}.o_proj.weight").view("<f4").T
    np.testing.assert_allclose(have[f"{name}.o_proj"], want, atol=1e-5)


def test_a_patch_with_the_value_of_the_reference(paths):
    """Replacing a layer's value removes the deviation of all layers before it."""
    reference = graphllm.load(paths["llama"], device="reference")
    want = reference.trace(IDS, "*")
    crooked = {"model.layers.0.mlp": lambda x: 2 * x}
    mended = {"model.layers.1": lambda x: want["model.layers.1"]}
    llm = graphllm.load(paths["llama"], device="cpu", kv_type="f32")
    assert nmse(llm.trace(IDS, "lm_head", crooked)["lm_head"], want["lm_head"]) > 1e-2
    have = llm.trace(IDS, ["*.layers.1", "lm_head"], crooked | mended)
    np.testing.assert_array_equal(have["model.layers.1"], want["model.layers.1"])
    assert nmse(have["lm_head"], want["lm_head"]) < 1e-10


def test_patches_of_a_module_and_of_its_last_submodule(llama):
    """Both return the same value; the patch of the outer one is applied second."""
    inner, outer = "model.layers.1.mlp.down_proj", "model.layers.1.mlp"
    both = [inner, outer]
    plain = llama.trace(IDS, both)
    np.testing.assert_array_equal(plain[inner], plain[outer])
    once = llama.trace(IDS, both, {outer: np.zeros_like})
    np.testing.assert_array_equal(once[inner], plain[inner])
    assert not once[outer].any()
    once = llama.trace(IDS, both, {inner: np.zeros_like})
    assert not once[inner].any() and not once[outer].any()
    twice = llama.trace(IDS, both, {outer: lambda x: x + 1, inner: lambda x: 0 * x + 5})
    assert (twice[inner] == 5).all() and (twice[outer] == 6).all()


def test_the_first_matching_pattern_applies(llama):
    given = {"model.layers.1.mlp": np.ones_like, "*.mlp": np.zeros_like}
    have = llama.trace(IDS, "*.mlp", given)
    assert [value.mean() for value in have.values()] == [0, 1, 0]


def test_a_patch_gets_a_copy_and_is_called_once_per_step(llama):
    """Also if no traced value depends on it."""
    plain, seen = llama.trace(IDS, ["model.layers.0", "*.mlp"]), []

    def overwrite(value):
        seen.append(value.copy())
        value[:] = np.nan
        return seen[-1]

    have = llama.trace(IDS, "model.layers.0", {"model.layers.1.mlp": overwrite})
    assert list(have) == ["model.layers.0"] and len(seen) == 1
    np.testing.assert_array_equal(seen[0], plain["model.layers.1.mlp"])
    have = llama.trace(IDS, "*.mlp", {"model.layers.1.mlp": overwrite})
    np.testing.assert_array_equal(have["model.layers.1.mlp"], plain["model.layers.1.mlp"])
    assert np.isfinite(have["model.layers.2.mlp"]).all()


def test_equal_nodes_are_patched_separately():
    """Two nodes that compute the same share one step, but only one of them is replaced."""
    x = feed("x", (Var("T", 1, 8), 4), "f32")
    with record_scope_values() as values:
        with scope("a"):
            a = ops.silu(x)
        with scope("b"):
            b = ops.silu(x)
        y = ops.add(a, ops.scale(b, factor=10.0))
    data = np.arange(1, 13, dtype=np.float32).reshape(3, 4)
    silu = data / (1 + np.exp(-data))
    executor = GuardedExecutor(Arrays({}), ("cpu", "reference"))
    executor.place_model({"y": y})
    for call, want in ((None, 11 * silu), (np.zeros_like, 10 * silu)):
        taps = [Tap("a", values["a"], call), Tap("b", values["b"]), Tap("y", y)]
        plan = executor.tap(taps)
        assert [s.node.op for s in plan.steps].count("silu") == 1
        found = executor.run(plan, {"x": data})
        np.testing.assert_allclose(found["y"], want, rtol=1e-5)
        np.testing.assert_allclose(found["b"], silu, rtol=1e-5)


def test_patching_a_view():
    """Strided rows become dense ones, and views of them follow; other views are rejected."""
    wide = feed("x", (Var("T", 1, 8), 12), "f32")
    with record_scope_values() as values:
        with scope("part"):
            part = ops.silu(wide).slice(1, 4, 10)
        y = ops.scale(part.heads(3).slice(2, 1, 2), factor=1.0)
        with scope("turned"):
            turned = ops.silu(wide).reshape(wide.shape[0], 3, 4).permute(0, 2, 1)
    executor = Executor(Arrays({}), ("cpu", "reference"))
    executor.place_model({"y": y, "turned": turned})
    data = np.arange(1, 37, dtype=np.float32).reshape(3, 12)
    given = data[:, :6] * 1.5
    plan = executor.tap([Tap("part", values["part"], lambda x: given), Tap("y", y)])
    found = executor.run(plan, {"x": data})
    np.testing.assert_array_equal(found["part"], given)
    np.testing.assert_array_equal(found["y"], given.reshape(3, 3, 2)[:, :, 1:])
    with pytest.raises(GraphError, match="turned: rows that are not contiguous"):
        executor.tap([Tap("turned", values["turned"], np.zeros_like)])


@pytest.mark.parametrize("split", [{}, {"gpu_layers": 2}, {"place": {"*.1.mlp.*": "reference"}}])
def test_a_memory_of_its_own(remote, paths, split):  # noqa: F811
    """Values and patches are copied to the host and back; state stays on the device."""
    reference = graphllm.load(paths["llama"], device="reference")
    llm = graphllm.load(paths["llama"], device="remote", kv_type="f32", **split)
    patch = {"model.layers.1.self_attn.q_proj": lambda x: x[:, ::-1].copy()}
    for given in ({}, patch):
        want, have = (each.trace(IDS, "*", given) for each in (reference, llm))
        assert worst(have, want) < 1e-12
    llm.trace(IDS, "lm_head", patch)
    plan = llm._tracer._last.plan
    (at,) = (i for i, step in enumerate(plan.steps) if step.node.op == "host_call")
    assert plan.steps[at].memory == HOST and plan.steps[at].backend.name == "reference"
    assert {c.source for c in plan.copies()} == {"remote", HOST}
    homes: dict[str, set[str]] = {}
    for name, memory, _ in llm.executor.buffers.values():
        homes.setdefault(name, set()).add(memory)
    assert all(len(homes[f"full.{i}.{e}"]) == 1 for i in range(tiny.LAYERS) for e in "kv")


@pytest.mark.cuda
@pytest.mark.parametrize("arch", ARCHS)
def test_a_gpu(arch, paths):
    """Values and patches are copied to the host and back.

    Matrix products of many tokens are computed in f16 there; see test_cuda_models.py.
    """
    need_gpu()
    reference = graphllm.load(paths[arch], device="reference")
    gpu = graphllm.load(paths[arch], device="cuda", kv_type="f32", strict=True)
    patch = {"model.layers.1.self_attn.q_proj": lambda x: x[:, ::-1].copy()}
    for ids in (IDS, IDS[:2]):
        for given in ({}, patch, {"*": lambda x: x}):
            want, have = (llm.trace(ids, "*", given) for llm in (reference, gpu))
            assert worst(have, want) < 1e-3
    alone = {name: gpu.trace(IDS, name)[name] for name in gpu.scopes()}
    assert worst(alone, reference.trace(IDS, "*")) < 1e-3


# ------------------------------------------------------------------------------------ bad requests


@pytest.mark.parametrize(
    "asked, names",
    [
        ("model.layers.1.self_atn.o_proj", "model.layers.1.self_attn.o_proj, "),
        ("*.mpl", r"\*.mlp, "),
        ("model.layers.*.self_atn", r"model.layers.\*.self_attn, "),
        ("lmhead", "lm_head, "),
        ("model.layers.3.mlp", "model.layers.2.mlp, |model.layers.1.mlp, |model.layers.0.mlp, "),
    ],
)
def test_an_unknown_scope_lists_the_nearest(llama, asked, names):
    wanted = rf"no scope of the model matches {re.escape(repr(asked))}; nearest: (?:{names})"
    for call in ((["*.mlp", asked],), ("*.mlp", {asked: np.zeros_like})):
        with pytest.raises(RequestError, match=wanted):
            llama.trace(IDS, *call)
    assert len(nearest_scopes(asked, llama.scopes())) == 3


@pytest.mark.parametrize(
    "call, message",
    [
        (([], "lm_head"), "the prompt is empty"),
        ((IDS * 20, "lm_head"), "220 tokens do not fit a context of 128"),
        (([1, 5000], "lm_head"), r"token id 5000 is not in 0\.\.399"),
        ((IDS, []), "scopes is empty"),
        ((IDS, "*.mlp", {"lm_head": 5}), "patch of 'lm_head' is 5, not a function of an array"),
    ],
)
def test_bad_requests(llama, call, message):
    with pytest.raises(RequestError, match=message):
        llama.trace(*call)


@pytest.mark.parametrize(
    "function, message",
    [
        (lambda x: x[:4], r"returned float32\[4,60\], not float32\[11,60\]"),
        (lambda x: x.astype("f8"), r"returned float64\[11,60\], not float32\[11,60\]"),
        (lambda x: None, r"returned a NoneType, not float32\[11,60\]"),
        (lambda x: x.tolist(), r"returned a list, not float32\[11,60\]"),
    ],
)
def test_an_invalid_replacement_is_reported_with_its_scope(llama, function, message):
    want = llama.logits(IDS)
    with pytest.raises(RequestError, match=f"the patch of 'model.layers.1.mlp' {message}"):
        llama.trace(IDS, "lm_head", {"model.layers.1.mlp": function})
    np.testing.assert_array_equal(llama.logits(IDS), want)


def test_an_exception_of_a_patch_propagates(llama):
    want = llama.trace(IDS, "lm_head", {"model.layers.1.mlp": lambda x: x})

    def fail(value):
        raise LookupError("my own")

    with pytest.raises(LookupError, match="my own"):
        llama.trace(IDS, "lm_head", {"model.layers.1.mlp": fail})
    have = llama.trace(IDS, "lm_head", {"model.layers.1.mlp": lambda x: x})
    np.testing.assert_array_equal(have["lm_head"], want["lm_head"])


def test_a_patch_cannot_run_the_model(llama):
    def nested(value):
        llama.logits(IDS[:3])
        return value

    with pytest.raises(RequestError, match="trace of this model is running"):
        llama.trace(IDS, "lm_head", {"model.layers.1.mlp": nested})


# -------------------------------------------------------------------------------------- real model


@pytest.fixture(scope="module")
def demo():
    """Return the reference model, ids, and the values of all its scopes for them."""
    reference = graphllm.load("demo", device="reference", context=256)
    ids = reference.encode(TEXTS[0])[:24]
    return reference, ids, reference.trace(ids, "*")


@pytest.mark.realmodel
@pytest.mark.parametrize("how", [{}, {"no_fuse": ["all"]}], ids=["fused", "unfused"])
def test_every_scope_of_the_real_model_in_float(demo, how):
    """They differ by float32 rounding only; the test of the logits requires 1e-6."""
    _, ids, want = demo
    cpu = graphllm.load("demo", device="cpu", context=256, **FLOAT, **how)
    assert list(want) == expected("gemma3", 18)
    assert worst(cpu.trace(ids, "*"), want) < 1e-10


@pytest.mark.realmodel
@pytest.mark.parametrize("how", [{}, {"no_fuse": ["all"]}], ids=["fused", "unfused"])
def test_every_scope_of_the_real_model_quantised(demo, how):
    """With 8-bit activations, the default.

    As in the test of the logits, the error is at most 3e-3 if the reference starts each scope from
    the CPU's own values. Without that, small differences of large values add up over the layers.
    """
    reference, ids, want = demo
    cpu = graphllm.load("demo", device="cpu", context=256, **how)
    have, reference_values = cpu.trace(ids, "*"), {}

    def forced(name: str):
        def patch(value):
            reference_values[name] = value
            return have[name]

        return patch

    reference.trace(ids, "lm_head", {name: forced(name) for name in have})
    assert worst(have, {name: reference_values[name] for name in have}) < 3e-3
    assert worst(have, want) < 2e-2 and nmse(have["lm_head"], want["lm_head"]) < 3e-3


@pytest.mark.realmodel
@pytest.mark.parity
def test_every_scope_of_the_real_model_agrees_with_transformers(demo):
    """Module by module, except that in transformers Gemma's embedding scales its rows."""
    import hf

    reference, ids, have = demo
    config = reference.decoder.cfg
    want = hf.returned(hf.gemma3(config, reference.decoder.weights), ids)
    want["model.embed_tokens"] = want["model.embed_tokens"] / config.embed_scale
    assert worst(have, {name: want[name] for name in have}) < 1e-8


@pytest.mark.realmodel
def test_the_example_of_the_api_page():
    page = (Path(__file__).parents[2] / "docs" / "api.md").read_text("utf-8")
    section = page.split("\n## Tracing and patching\n")[1].split("\n## ")[0]
    code, output = re.findall(r"```\w*\n(.*?)```", section, re.DOTALL)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(code, {})
    assert printed.getvalue() == output
