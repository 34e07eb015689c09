"""Whole models on a GPU: against the reference and the CPU, split between GPU and CPU, and at the
limit of memory. Skipped, with the reason, where no GPU can be used."""

from __future__ import annotations

import re

import numpy as np
import pytest
import tiny_models as tiny
from cuda_cases import ARCHS, IDS, disagreement, greedy, need_gpu
from fusion_cases import nmse

import graphllm
from graphllm import tokenizer
from graphllm.backends.cuda.runtime.device import CudaDevice
from graphllm.checkpoints.gguf import GgufCheckpoint
from graphllm.checkpoints.model_shapes import ModelShape
from graphllm.checkpoints.random_weights import RandomCheckpoint
from graphllm.engine.request import Sampling
from graphllm.errors import ModelFileError, OutOfMemory

pytestmark = pytest.mark.cuda
LONG = [int(i) for i in np.random.default_rng(3).integers(3, 300, 100)]
TEXT = (
    "Rivers that begin in the mountains carry sand and stones down to the plain, where they turn "
    "slow and wide. In spring the snow melts, the water rises over the banks, and the fields on "
    "both sides are covered with fine mud; farmers have lived on that mud for five thousand years. "
    "They learned to measure the height of the water, to build dikes and canals, and to write down "
    "in every year how much grain had been brought in, and who had to give how much of it to whom."
)
NEAR, EXACT = 1e-3, 1e-4  # NMSE of logits, with quantised weights and in f32
WIDE = {"DIM": 256, "HEADS": 8, "KV": 2, "WIDTH": 32, "HIDDEN": 256}  # whole blocks


@pytest.fixture(autouse=True)
def _gpu():
    need_gpu()


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Small random models by architecture and format of the matrices."""
    folder = tmp_path_factory.mktemp("cuda")

    def get(arch: str = "llama", kind: str = ""):
        path = folder / f"{arch}{kind}.gguf"
        with pytest.MonkeyPatch.context() as patch:
            for name, value in WIDE.items() if kind else ():
                patch.setattr(tiny, name, value)
            return path if path.exists() else tiny.write_tiny(path, arch, kind)

    return get


@pytest.fixture(scope="module")
def reference(files):
    """The reference's model and its greedy answer, by architecture."""
    made = {}

    def get(arch: str = "llama"):
        if arch not in made:
            llm = graphllm.load(files(arch), device="reference")
            made[arch] = llm, greedy(llm)
        return made[arch]

    return get


# -------------------------------------------------------------------------------------- GPU only


@pytest.mark.parametrize("arch", ARCHS)
def test_small_models_agree_with_the_reference(files, reference, arch):
    llm, want = reference(arch)
    gpu = graphllm.load(files(arch), device="cuda", kv_type="f32", strict=True)
    assert nmse(gpu.logits(LONG), llm.logits(LONG)) < EXACT
    assert not disagreement(greedy(gpu), want, llm)
    assert not disagreement(greedy(gpu), want, llm)  # with a cached prompt and a captured graph


def check(file, ids, exact: bool = False, **more) -> None:
    """Compare the GPU's logits with the CPU's without quantised activations, for all ids and for a
    few, which use other kernels. With quantised activations the GPU may deviate as much as the CPU
    does."""
    kinds = [("cpu", "float"), ("cuda", "float"), ("cpu", "auto"), ("cuda", "auto")]
    models = {
        f"{device} {linear}": graphllm.load(file, device=device, linear=linear, **more)
        for device, linear in kinds[: 2 if exact else 4]
    }
    for count in (len(ids), 3):
        logits = {name: llm.logits(ids[:count]) for name, llm in models.items()}
        want = logits.pop("cpu float")
        apart = {name: nmse(each, want) for name, each in logits.items()}
        print(f"NMSE of {count} tokens: {apart}")
        assert apart["cuda float"] < (EXACT if exact else NEAR)
        assert exact or apart["cuda auto"] < max(NEAR, 2 * apart["cpu auto"])


@pytest.mark.parametrize("kind", ["f16", "q8_0", "q4_0", "q4_k", "q6_k"])
@pytest.mark.parametrize("arch", ARCHS)
def test_formats_agree_with_the_cpu(files, arch, kind):
    shape = ModelShape(
        arch, 3, 256, 8, 2, 256, 384, 32, tied=True, context=128, bias=arch == "qwen2",
        window=16 if arch == "gemma3" else 0,
    )  # fmt: skip
    check(RandomCheckpoint(shape, kind) if kind == "f16" else files(arch, kind), LONG)


@pytest.mark.realmodel
def test_the_demo_agrees_with_the_cpu(demo_path):
    check(demo_path, tokenizer.load(demo_path).encode(TEXT))


@pytest.mark.parametrize("kind", ["f32", "q4_k_m"])
def test_the_demo_architecture_agrees_with_the_cpu(kind):
    """The demo's shape with random weights; the prompt exceeds its windows of 512."""
    ids = [int(i) for i in np.random.default_rng(4).integers(3, 262_000, 600)]
    more = {"kv_type": "f32"} if kind == "f32" else {}
    check(RandomCheckpoint("gemma3-270m", kind), ids, kind == "f32", context=1024, **more)


def test_a_request_with_penalties(files, reference):
    """Another plan that shares the state."""
    llm, _ = reference()
    gpu = graphllm.load(files(), device="cuda", kv_type="f32")
    greedy(gpu)
    settings = {"max_tokens": 40, "temperature": 0.0, "repeat_penalty": 1.5, "ignore_eos": True}
    got, want = (m.generate("hello there", **settings).ids for m in (gpu, llm))
    assert not disagreement(got, want, llm)


# ------------------------------------------------------------------------------------- two memories


def on(llm, name: str) -> set[str]:
    """Ops of the decode plan on a backend, without copies."""
    return set(llm.placement().get(name, {})) - {"copy"}


@pytest.mark.parametrize("arch", ARCHS)
def test_an_op_switched_off_changes_no_token(files, reference, arch):
    llm, want = reference(arch)
    off = graphllm.load(files(arch), device="cuda", kv_type="f32", no_kernels=("cuda:rms_norm",))
    assert "rms_norm" in on(off, "cpu") and not any("norm" in op for op in on(off, "cuda"))
    assert any("switched off (cuda:rms_norm)" in line for line in off.misses())
    says = r"copies from cuda:0 to host: \d+, of [\d,]+ bytes in all, for "
    assert re.search(says, "\n".join(off.misses()))
    assert "copies from host to cuda:0: " in off.engine.decode_plan().explain()
    assert not disagreement(greedy(off), want, llm)


@pytest.mark.parametrize("switch", ["attention", "kv_write", "advance", "sample", "linear"])
def test_other_ops_switched_off(files, reference, switch):
    """States that both backends read are copied in each step; pools are not."""
    llm, want = reference()
    off = graphllm.load(files(), device="cuda", kv_type="f32", no_kernels=(f"cuda:{switch}",))
    assert switch not in on(off, "cuda")
    assert sum(copies.nbytes for copies in off.engine.decode_plan().copies()) < 64 << 10
    assert not disagreement(greedy(off), want, llm)


@pytest.mark.parametrize("arch", ARCHS)
def test_a_layer_on_the_cpu_changes_no_token(files, reference, arch):
    """The rest is two segments, each a CUDA graph and copies."""
    llm, want = reference(arch)
    place = {"model.layers.1.*": "cpu"}
    split = graphllm.load(files(arch), device="cuda", kv_type="f32", place=place)
    assert not disagreement(greedy(split), want, llm)
    assert any("pinned by model.layers.1.*=cpu" in line for line in split.misses())
    plan = split.engine.decode_plan()
    own = [s for s in plan.steps if s.node.scope.startswith("model.layers.1")]
    assert {s.backend.name for s in own if s.node.op != "copy"} == {"cpu"}
    segments = split.engine.executor.segments(plan)
    assert [steps[0].backend.name for _, steps in segments] == ["cuda", "cpu", "cuda"]
    for segment, steps in segments[::2]:
        copies = sum(s.node.op == "copy" for s in steps)
        assert segment.replays and segment.submissions <= 1 + copies


def test_a_profile_of_two_memories(files):
    split = graphllm.load(files(), device="cuda", place={"model.layers.1.*": "cpu"})
    profile = split.profile("hello there", decode=8)
    assert {row.backend for row in profile["decode"].rows} == {"cuda", "cpu"}
    assert all(row.ns >= 0 for row in profile["decode"].rows)


# ------------------------------------------------------------------------------------ what fits


@pytest.mark.parametrize("count", [0, 1, 2, 3, 4, "all"])
def test_number_of_layers_on_the_gpu(files, reference, count):
    llm, want = reference()
    split = graphllm.load(files(), device="cuda", kv_type="f32", gpu_layers=count)
    layers = 3 if count == "all" else max(count - 1, 0)
    assert (split.gpu_offload.layers, split.gpu_offload.output) == (layers, count != 0)
    assert str(split.gpu_offload) in split.notes()
    assert not disagreement(greedy(split), want, llm)


def test_quantised_layers_on_both_sides(files):
    """Each backend packs its own layers' weights."""
    split = graphllm.load(files("qwen2", "q4_k"), device="cuda", gpu_layers=2)
    cpu = graphllm.load(files("qwen2", "q4_k"), device="cpu")
    assert nmse(split.logits(LONG), cpu.logits(LONG)) < NEAR
    off = graphllm.load(files("qwen2", "q4_k"), device="cuda", no_kernels=("cuda:quantise_act",))
    assert any("quantise" in op for op in on(off, "cpu"))  # quantised activations cross backends
    assert nmse(off.logits(LONG[:3]), cpu.logits(LONG[:3])) < NEAR


@pytest.mark.cuda(alone=True)
def test_layers_that_do_not_fit(monkeypatch):
    """The reported free memory decides; here it is less than what is free."""
    file = RandomCheckpoint("llama-1b", "f16")
    whole = graphllm.load(file, device="cuda", context=2048, max_sequences=1)
    used = whole.gpu_offload.free_bytes - whole.executor.devices["cuda"].free()
    assert used <= whole.gpu_offload.needed_bytes < whole.gpu_offload.free_bytes
    stored = sum(t.nbytes for t in file.tensors.values())
    assert used <= stored + (1 << 30)
    del whole
    less = 2 << 30
    monkeypatch.setattr(CudaDevice, "free", lambda device: less)
    split = graphllm.load(file, device="cuda", context=2048, max_sequences=1)
    assert (
        0 < split.gpu_offload.layers < 16
        and split.gpu_offload.output
        and split.gpu_offload.needed_bytes <= less
    )
    assert f"on cpu: {split.gpu_offload.needed_bytes / 1e9:.2f} GB of 2.15 GB free there" in str(
        split.gpu_offload
    )
    ids = split.engine.generate(IDS, Sampling(temperature=0.0), ())
    assert len([next(ids) for _ in range(4)]) == 4


def test_out_of_memory_for_the_cache():
    shape = ModelShape("llama", 2, 256, 4, 4, 512, 384, context=2**27)
    try:
        model = RandomCheckpoint(shape, "f16")
        graphllm.load(model, device="cuda", gpu_layers="all", context=2**27)
    except OutOfMemory as error:  # `pytest.raises` would keep the bound buffers alive
        said, memory, needed, free = str(error), error.memory, error.needed, error.free
    assert memory == "cuda:0" and needed > free > 0
    assert re.match(r"no memory for full\S+: [\d.]+ GB are needed in cuda:0, [\d.]+ GB are", said)
    llm = graphllm.load(RandomCheckpoint(shape, "f16"), device="cuda", context=256)
    assert llm.gpu_offload.layers == 2 and llm.logits(IDS).shape == (len(IDS), 384)


def test_an_infinite_scale_stops_the_load(files, tmp_path):
    """The error names the tensor and the row, as on the CPU."""
    path = tmp_path / "bad.gguf"
    path.write_bytes(files("llama", "q4_k").read_bytes())
    with GgufCheckpoint(path) as file:
        info = file.info("blk.1.ffn_up.weight")
    with open(path, "r+b") as raw:
        raw.seek(info.offset + 7 * info.dtype.row_nbytes(256))
        raw.write(b"\xff\xff")
    says = "^tensor 'model.layers.1.mlp.up_proj.weight': row 7 has an infinite or NaN q4_k scale$"
    with pytest.raises(ModelFileError, match=says):
        graphllm.load(path, device="cuda")
