"""Kernels and buffers that the CUDA backend chooses. No GPU is needed: nothing runs."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from cases import groups
from cuda_requirements import needs_tensor_cores
from fusion_cases import NOT_ON_CPU, named
from linear_cases import INTEGER_BLOCKS
from op_runs import OPS
from paper_cuda import Empty, Paper, paper_fixture  # noqa: F401
from random_models import MIXTURES, SPECS, WIDE, decoder, engine

from graphllm import ops
from graphllm.api import LLM
from graphllm.backends import Kernel, Options
from graphllm.backends.cuda import BACKEND, MIN_CAPABILITY
from graphllm.backends.cuda.runtime import source
from graphllm.backends.cuda.runtime.work import Launch, max_shared
from graphllm.checkpoints.model_shapes import MIX, SHAPES, TYPES
from graphllm.formats import WEIGHT_FORMATS
from graphllm.formats.quantization import Blocks
from graphllm.graph.dtype import CACHED, dtype
from graphllm.graph.tensor import Tensor, Var, feed, weight
from graphllm.loading.load import build_decoder
from graphllm.model.decoder import Limits
from graphllm.runtime.executor import Executor
from graphllm.weights import Arrays

# Macros of gemv_ring.cu that follow from the depth of a matrix. A plan compiles its own modules,
# which may differ from those that tests compile in these macros alone.
OF_DEPTH = {"ROW_ITEMS", "ROW_LANES", "ITEMS", "ROWS"}


def without_depth(made: source.Module) -> source.Module:
    """The module without the macros of gemv_ring.cu that follow from the depth."""
    if made.file != "gemv_ring.cu":
        return made
    assert dict(made.defines).keys() > OF_DEPTH
    return replace(made, defines=tuple(d for d in made.defines if d[0] not in OF_DEPTH))


KNOWN = set(map(without_depth, source.MODULES))  # modules that test_cuda_compile.py compiles
ALL = "llama-1b"  # the shape that is tested with all formats


def unknown(device: Paper) -> set[str]:
    return {str(made) for made in device.modules if without_depth(made) not in KNOWN}


@pytest.mark.parametrize("capability", [MIN_CAPABILITY, (8, 0)])
def test_tensor_cores_are_used_where_they_are_new_enough(capability, paper):
    device = paper(capability)
    for name in OPS:
        for group in groups(ops.get(name)):
            assert group.cases  # creates the weights
            executor = Executor(Arrays(group.weights), ("cuda", "reference"))
            for few in (False, True):
                bounds = {"T": (0, 4)} if few and "T" in group.samples[0].env else {}
                executor.bind(executor.compile({"y": group.node}, bounds))
    assert any(map(needs_tensor_cores, device.modules)) == (capability >= (8, 0))


@pytest.mark.parametrize(
    "capability, shape", [(MIN_CAPABILITY, ALL), *(((9, 0), name) for name in SHAPES)]
)
def test_models_use_known_modules_only(shape, capability, paper):
    """Plans of one, few and many tokens; one shape is tested with all weight formats."""
    device, cut = paper(capability), replace(SHAPES[shape], layers=2, vocab=512)
    kinds = TYPES if shape == ALL else (MIX, "f16")
    for kind, cache in [*((kind, "f16") for kind in kinds), *((MIX, kind) for kind in CACHED)]:
        file = Empty(cut, kind)
        llm = LLM(file, build_decoder(file), {"backends": ("cuda",)}, Limits(kv_dtype=cache))
        for tokens in (1, 2, 4, 7, 16, 512):
            llm.executor.bind(llm.engine.plan(["ids.filtered"], tokens))
    assert device.modules and not unknown(device)
    assert any(map(needs_tensor_cores, device.modules)) == (capability >= (8, 0))


@pytest.mark.parametrize("capability", [MIN_CAPABILITY, (8, 0), (8, 6), (8, 9), (9, 0), (12, 0)])
@pytest.mark.parametrize("shape", ["gemma3-1b", "mixtral-8x7b", "gpt-oss-20b"])
@pytest.mark.parametrize("deterministic", [False, True])
def test_launches_have_the_shared_memory_of_the_gpu(shape, capability, deterministic, paper):
    """Heads of 256, and experts in f16 and in blocks, at few and at many tokens."""
    if deterministic and capability < (8, 0):
        pytest.skip("refused")
    device = paper(capability, Options(deterministic=deterministic))
    cut = replace(SHAPES[shape], layers=2, vocab=512)
    for kind in ("f16", MIX):
        file = Empty(cut, kind)
        options = {"backends": ("cuda",), "options": device.options}
        llm = LLM(file, build_decoder(file), options, Limits(tokens=2048))
        for tokens in (1, 16, 64, 2048):
            llm.executor.bind(llm.engine.plan(["ids"], tokens))
    launches = [w for _, work in device.built for part in work for w in part]
    own = [w for w in launches if isinstance(w, Launch)]
    assert own and max(w.shared for w in own) <= max_shared(capability)
    assert not unknown(device)


@pytest.mark.parametrize("shape", [(151_936, 1024), (17_000_000,), (300, 7), (5,)])
def test_grids_of_casts_are_legal(shape, paper):
    device = paper((9, 0))
    y = ops.cast(feed("x", shape, "f32"), dtype="f16")
    executor = Executor(Arrays({}), ("cuda",))
    executor.bind(executor.compile({"y": y}))
    ((_, ((launch,),)),) = device.built
    first, second = launch.grid
    assert 0 < first < 1 << 31 and 0 < second < 1 << 16
    assert first * second * math.prod(launch.block) >= math.prod(shape)


@pytest.mark.parametrize("name", MIXTURES)
def test_mixtures_run_entirely_on_the_gpu(name, paper):
    """Every step of plans of one, few and many tokens, with known modules."""
    device = paper((9, 0))
    for variant in range(len(SPECS[name].tiny)):
        made = engine(decoder(name, variant, "f16"), ("cuda", "reference"), 512)
        for tokens in (1, 2, 7, 40, 512):
            plan = made.plan(["ids.filtered"], tokens)
            missed = {s.node.op for s in plan.steps if s.backend.name != "cuda"}
            assert not missed, (name, variant, tokens)
            made.executor.bind(plan)
    assert not unknown(device)


# Each linear of the samples of linears_quantise has its own activation.
@pytest.mark.parametrize("name", sorted(NOT_ON_CPU - {"linears_quantise"}))
def test_every_rule_finds_its_own_parts(name, paper):
    """Rules that only this backend has; a fused op that the kernel refuses stays in parts."""
    paper((9, 0))
    found = 0
    for group in groups(ops.get(name)):
        assert group.cases  # creates the weights
        outputs = named(group.op(*group.node.src, **group.node.attrs))
        fits = isinstance(BACKEND.select(group.node, Options()), Kernel)
        fits = fits and "f32" not in group.node.attrs.get("dtypes", ())  # which no node would read
        for without, wanted in (((), fits), ((name,), False)):
            options = Options(without=without)
            plan = Executor(Arrays(group.weights), ("cuda",), options).compile(outputs)
            assert (name in [s.node.op for s in plan.steps]) == wanted, group.samples[0].label
        found += fits
    assert found


@pytest.mark.parametrize("capability, tokens, cache, files", [
    ((9, 0), 1, "f16", ["attention_decode.cu", "attention_merge_few.cu"]),
    ((8, 0), 1, "f16", ["attention_decode.cu", "attention_merge_few.cu"]),
    ((7, 5), 1, "f16", ["kv_cache.cu", "attention_split_kv.cu", "attention_merge_few.cu"]),
    ((9, 0), 1, "q8_0", ["kv_cache.cu", "attention_decode.cu", "attention_merge_few.cu"]),
    ((9, 0), 16, "f16", ["attention_decode.cu", "attention_merge_few.cu"]),
    ((9, 0), 64, "f16", ["kv_cache.cu", "attention_tiled.cu"]),
])  # fmt: skip
def test_attention_of_few_tokens_rotates_their_heads(capability, tokens, cache, files, paper):
    """In one launch, if the GPU has tensor cores for f16 and the cache is f16."""
    device, shape = paper(capability), replace(SHAPES["llama-1b"], layers=1, vocab=512)
    file = Empty(shape, "q8_0")
    llm = LLM(file, build_decoder(file), {"backends": ("cuda",)}, Limits(kv_dtype=cache))
    plan = llm.engine.plan(["logits"], tokens)
    llm.executor.bind(plan)
    fused = "rope_attention_quantise" in [step.node.op for step in plan.steps]
    assert fused == (tokens <= 16 and cache == "f16")
    launches = [w for _, work in device.built for part in work for w in part]
    made = [w.function.module.file for w in launches if isinstance(w, Launch)]
    assert [f for f in made if f.startswith(("attention", "kv_cache"))] == files


def post_norm_layer(x: Tensor, starts: Tensor, dim: int) -> Tensor:
    """A layer of BERT over x [T, dim] with biases, whose weights are called w0 .. w5."""

    def linear(x: Tensor, n: int, rows: int) -> Tensor:
        w = weight(f"w{n}", (rows, int(x.shape[1])), "f16")
        return ops.linear(x, w, weight(f"b{n}", (rows,), "f32"))

    def norm(x: Tensor) -> Tensor:
        return ops.layer_norm(x, weight("norm", (dim,), "f32"), weight("b0", (dim,), "f32"), eps=1)

    x = norm(x)
    q, k, v = (linear(x, n, dim).heads(dim // 64) for n in range(3))
    attended = ops.packed_attention(q, k, v, starts, scale=0.1, window=0)
    x = norm(ops.add(x, linear(attended.flatten(), 3, dim)))
    return norm(ops.add(x, linear(ops.gelu(linear(x, 4, 4 * dim), kind="erf"), 5, dim)))


@pytest.mark.parametrize("capability", [(8, 0), (9, 0)])
def test_post_norm_layers_of_many_tokens_store_halves(capability, paper):
    """The residual stream, too; one product for queries, keys and values, and one with GELU."""
    device, dim, t = paper(capability), 512, Var("T", 1, 8192)
    x, starts = feed("x", (t, dim), "f32"), feed("starts", (Var("Q", 2, 9),), "i32")
    shapes = dict.fromkeys(range(4), (dim, dim)) | {4: (4 * dim, dim), 5: (dim, 4 * dim)}
    arrays = {f"w{n}": np.zeros(shape, np.float16) for n, shape in shapes.items()}
    arrays |= {f"b{n}": np.zeros(shape[0], np.float32) for n, shape in shapes.items()}
    arrays["norm"] = np.ones(dim, np.float32)
    executor = Executor(Arrays(arrays), ("cuda",))
    plan = executor.compile({"y": post_norm_layer(x, starts, dim)})
    assert [step.node.op for step in plan.steps] == [
        "layer_norm_quantise", "linears_quantise", "packed_attention_quantise",
        "linear_add_quantise", "layer_norm_quantise", "linear_quantise", "linear_add_quantise",
        "layer_norm",
    ]  # fmt: skip
    executor.bind(plan)
    own = {dict(part.defines)["ACT"] for part in device.modules if part.file == "gemm_halves.cu"}
    assert own == ({"-1", "2"} if capability == (9, 0) else set())
    few = executor.compile({"y": post_norm_layer(x, starts, dim)}, {"T": (1, 256)})
    assert {"linears", "linear_add"} <= {step.node.op for step in few.steps}


@pytest.mark.parametrize("name", MIXTURES)
def test_a_mixture_is_few_steps(name, paper):
    """In a decode plan: routing in one step, products in two, and the sum with the residual in one
    (with another addend if there are shared experts without a gate)."""
    paper((9, 0))
    for variant in range(len(SPECS[name].tiny)):
        model = decoder(name, variant, "f16", hidden_size=64)
        made = engine(model, ("cuda",))
        layers = sum(layer.moe for layer in model.cfg.layers)
        had = Counter(step.node.op for step in made.plan(["logits"], 1).steps)
        assert had["route"] == had["expert_linear"] == layers
        assert had["expert_gated"] + had["expert_clamped"] == layers
        mixture = model.cfg.moe
        apart = mixture.shared_intermediate_size and not mixture.shared_gate
        assert had["combine_add"] == (0 if apart else layers)
        assert had["norm_router"] == (0 if mixture.shared_intermediate_size else layers)
        assert not {"top_k", "pick", "sum_norm", "softmax"} & set(had)


@pytest.mark.parametrize("kind", ["q4_k", "mxfp4", "q8_0"])
def test_experts_of_one_token_are_chosen_and_summed_by_their_products(kind, paper):
    """In a plan of one token, and without `deterministic`."""
    alone = Options(without=("moe_add",))
    for options, tokens, op in ((Options(), 1, "moe_add"), (alone, 1, "expert_linear_add"),
                                (Options(), 2, "combine_add"),
                                (Options(deterministic=True), 1, "combine_add")):  # fmt: skip
        paper((9, 0), options)
        made = engine(decoder("mixtral", 0, kind, **WIDE), ("cuda",), options=options)
        had = Counter(step.node.op for step in made.plan(["logits"], tokens).steps)
        sums = {"moe_add", "expert_linear_add", "combine_add"}
        assert {name: had[name] for name in sums & set(had)} == {op: 2}
        assert had["route"] == had["expert_gated"] == (0 if op == "moe_add" else 2)
        assert had["expert_linear"] == (2 if op == "combine_add" else 0)


@pytest.mark.parametrize("capability", [MIN_CAPABILITY, (8, 0), (9, 0)])
@pytest.mark.parametrize("kind", WEIGHT_FORMATS)
def test_experts_of_every_format_use_known_modules(kind, capability, paper):
    """Few tokens use the GEMV, many use groups if there are tensor cores: small ones first."""
    device = paper(capability)
    made = engine(decoder("mixtral", 0, kind, **WIDE), ("cuda",), 512)
    for tokens in (1, 6, 14, 40, 512):
        before, device.modules = device.modules, set()
        made.executor.bind(made.plan(["logits"], tokens))
        own = {part.file for part in device.modules if part.file.startswith("experts_")}
        grouped = tokens > 6 and kind != "f32" and capability >= (8, 0)
        small = tokens < 40 and kind in INTEGER_BLOCKS
        kernel = "experts_small_groups.cu" if small else "experts_gemm.cu"
        assert own == {kernel if grouped else "experts_gemv.cu"}
        device.modules |= before
    assert not unknown(device)


@pytest.mark.parametrize("tokens", [1, 512])
@pytest.mark.parametrize("name", WEIGHT_FORMATS)
def test_a_tied_embedding_is_stored_once(name, tokens, paper):
    paper((9, 0))
    kind, t = dtype(name), Var("T", 1, tokens)
    w, stored = weight("w", (4, 256), kind), np.zeros((4, kind.row_nbytes(256)), np.uint8)
    stored = Blocks(stored, kind, 256) if kind.quantised else stored.view(kind.numpy)
    y = ops.linear(ops.embedding(feed("ids", (t,), "i32"), w), w)
    executor = Executor(Arrays({"w": stored}), ("cuda",))
    executor.bind(executor.compile({"y": y}))
    assert executor.buffers.packed == 1
