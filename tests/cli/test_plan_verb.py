"""`graphllm plan`: planning from a header alone, for absent devices, and predictions."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from cuda_cases import need_gpu
from remote_memory import RemoteDevice, remote  # noqa: F401
from tiny_models import DIM, KV, LAYERS, WIDTH, llama_weights, write_llama

import graphllm
from graphllm import backends, ops
from graphllm.backends.order import ORDER
from graphllm.checkpoints.gguf import GgufCheckpoint
from graphllm.checkpoints.random_weights import RandomCheckpoint
from graphllm.errors import ModelFileError, PlacementError, RequestError
from graphllm.profiler import bench, kernel_probes, prediction, roofline, step_times
from graphllm.profiler.bench import Test
from graphllm.profiler.roofline import Ceilings

GPU, CPU = ORDER[:2]
DATE = "2026-01-01T00:00:00+00:00"
GB_S, GFLOP_S, STEP = 10e9, 500e9, 5e-6


def call(*words: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-m", "graphllm", "plan", *words],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return write_llama(tmp_path_factory.mktemp("tiny") / "tiny.gguf", llama_weights())


def header_of(path: Path, to: Path) -> Path:
    """Write the header of a file without its data."""
    with GgufCheckpoint(path) as file:
        end = min(t.offset for t in file.tensors.values())
    with open(path, "rb") as whole:
        to.write_bytes(whole.read(end))
    return to


@pytest.fixture
def measured(monkeypatch):
    """Give every backend ceilings, except the backends in the returned list."""
    missing: list[str] = []
    by_count = {1: 1.0, 2: 2.0}
    rates = {"read": {n: n * GB_S for n in by_count}}
    flops = {kind: {n: n * GFLOP_S for n in by_count} for kind in ("float", "integer")}

    def load_cached(name: str) -> Ceilings | None:
        counted = "blocks" if name == GPU else "threads"
        steps = {1: STEP, 2: STEP}
        own = Ceilings(name, "a machine", DATE, 1, rates, flops, steps, counted=counted)
        return None if name in missing else own

    monkeypatch.setattr(roofline, "load_cached", load_cached)
    return missing


# ----------------------------------------------------------------------------------- header alone


def test_a_header_is_enough(tiny, tmp_path):
    head = header_of(tiny, tmp_path / "head.gguf")
    assert head.stat().st_size < tiny.stat().st_size
    with pytest.raises(ModelFileError, match="end past the file's"):
        graphllm.load(head)
    whole, alone = graphllm.dry_run(tiny).as_dict(), graphllm.dry_run(head).as_dict()
    assert (whole.pop("model"), alone.pop("model")) == (str(tiny), str(head))
    assert whole == alone


def test_tensors_without_data_cannot_be_read(tiny):
    with GgufCheckpoint(tiny, data=False) as file, pytest.raises(ModelFileError) as error:
        file.raw("token_embd.weight")
    want = f"{tiny}: tensor 'token_embd.weight': the file was opened without its data"
    assert str(error.value) == want


@pytest.mark.realmodel
def test_the_demo_from_its_header(demo_path, tmp_path):
    """The time is printed, not checked, since it depends on the machine."""
    head = header_of(demo_path, tmp_path / "demo.gguf")
    start = time.perf_counter()
    done = call(str(head), "--json")
    print(f"{time.perf_counter() - start:.2f} s")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["token"]["nbytes"] > 0.9 * (demo_path.stat().st_size - head.stat().st_size)


def test_a_truncated_header_is_an_error(tiny, tmp_path):
    head = header_of(tiny, tmp_path / "head.gguf")
    head.write_bytes(head.read_bytes()[:-200])
    with pytest.raises(ModelFileError, match=r"head\.gguf"):
        graphllm.dry_run(head)


# ------------------------------------------------------------------------------------------ facts


def test_a_plan_equals_a_run(tiny):
    """Steps, memory and context are those of the loaded model."""
    one = {"device": CPU, "max_sequences": 1}
    llm, found = graphllm.load(tiny, **one), graphllm.dry_run(tiny, **one)
    assert found.token.ops == llm.placement() and found.device == llm.device
    assert (found.context, found.kv_type) == (llm.limits.context, llm.limits.kv_dtype)
    (host,) = found.memory.values()
    executor = llm.executor
    held = {name: operand.buffer.nbytes for name, _, operand in executor.buffers.values()}
    pools = {name.removeprefix("kv.") for name in llm.engine.outputs if name.startswith("kv.")}
    assert host.kv == sum(held[name] for name in pools)
    assert host.kv == 2 * LAYERS * 128 * KV * WIDTH * 2
    assert host.arena == executor.arenas["host"].nbytes
    assert host.total == host.weights + host.kv + host.state + host.arena
    plan = llm.engine.decode_plan()
    assert found.token.nbytes == bench.step_bytes(plan, found.token.cached + 1)
    chunk = llm.engine.generation_plans()[0]
    assert found.prefill.flops == bench.step_flops(chunk, 0, found.prefill.tokens)


def test_misses_and_copies(remote, tiny):  # noqa: F811
    place = {"model.layers.1.*": "reference"}
    llm = graphllm.load(tiny, device="remote", place=place)
    found = graphllm.dry_run(tiny, device="remote", place=place)
    plan = llm.engine.decode_plan()
    assert list(map(str, found.token.copies)) == list(map(str, plan.copies()))
    assert found.token.copies and found.prefill.copies
    misses = {(m.op, m.backend, m.why): m.steps for m in found.token.misses}
    assert misses == plan.misses() and misses
    assert set(found.memory) == {"remote", "host"}
    layer = found.memory["host"]
    assert layer.kv * (LAYERS - 1) == found.memory["remote"].kv and layer.weights


# --------------------------------------------------------------------------------------- elsewhere


def test_an_absent_gpu(tiny, capsys):
    """Its kernels are selected, and all layers fit, since its memory size is unknown."""
    found = graphllm.dry_run(tiny, device=GPU)
    assert found.device == GPU and set(found.token.ops) == {GPU}
    (memory,) = found.memory
    assert memory == backends.find(GPU).memory != "host"
    assert found.notes[0].startswith(f"{GPU} is not usable here: ")
    assert found.notes[1].startswith(f"all {LAYERS} layers on {GPU}: ")
    assert GPU not in graphllm.dry_run(tiny).token.ops  # it is used on request only


def test_layers_by_free_bytes(tiny):
    def layers(free: int | None, gpu_layers: int | str = "auto") -> int:
        run = graphllm.dry_run(tiny, device=GPU, free=free, gpu_layers=gpu_layers)
        pattern = "attention"
        ops = run.token.ops.get(GPU, {})
        return sum(count for op, count in ops.items() if op.startswith(pattern))

    assert layers(None) == layers(10**12) == LAYERS
    assert layers(0) == 0
    assert layers(None, 2) == 1  # the other one is the output layer


def test_free_bytes_of_a_present_device(remote, tiny, monkeypatch):  # noqa: F811
    monkeypatch.setattr(RemoteDevice, "room", 0)
    assert "remote" not in graphllm.dry_run(tiny, device="remote").token.ops
    assert "remote" in graphllm.dry_run(tiny, device="remote", free=10**12).token.ops


@pytest.mark.cuda
def test_a_present_gpu(tiny):
    """A dry run equals a run; the device reports its free memory; arithmetic is measured."""
    need_gpu()
    llm, found = graphllm.load(tiny, device=GPU), graphllm.dry_run(tiny, device=GPU)
    assert found.token.ops == llm.placement()
    assert not [note for note in found.notes if "not usable" in note]
    assert "free there" in found.notes[0]
    own = kernel_probes.measure(GPU, lambda n: 1e12, [0], 64 << 20, lambda what, done, total: None)
    # With other programs on the GPU, the overhead of a step may be below the noise: 0.
    assert own.flops["float"][0] > 1e13 and 0 <= own.steps[0] < 1e-3


# ------------------------------------------------------------------------------------------- time


def test_time_is_bytes_or_operations_and_steps(tiny, measured):
    """A decode step is bound by bytes, a long prefill of a wide model by FLOPs."""
    found = graphllm.dry_run(tiny, device=CPU, threads=1)
    steps = sum(found.token.ops[CPU].values())
    assert found.token.seconds == pytest.approx(found.token.nbytes / GB_S + steps * STEP, rel=0.05)
    wide = graphllm.dry_run(RandomCheckpoint("qwen2-1.5b", "q8_0"), device=CPU, threads=1)
    assert wide.prefill.seconds == pytest.approx(wide.prefill.flops / GFLOP_S, rel=0.05)
    assert wide.token.seconds == pytest.approx(wide.token.nbytes / GB_S, rel=0.05)
    (basis,) = found.basis
    assert found.lacking == [] and basis.startswith(
        f"{CPU}: 10.0 GB/s, measured {DATE} on a machine"
    )
    model = RandomCheckpoint("qwen2-1.5b", "q8_0")
    twice = graphllm.dry_run(model, device=GPU, threads=1)  # threads do not matter
    assert twice.token.seconds == pytest.approx(wide.token.seconds / 2, rel=0.05)


def test_slower_formats(tiny, monkeypatch):
    """By the bytes of each format in decode, by the FLOPs of each in prefill."""
    rates = {"read": {1: GB_S}}, {"float": {1: GFLOP_S}, "integer": {1: GFLOP_S}}
    seconds = []
    for share, many in ((1.0, 1.0), (0.5, 1.0), (1.0, 0.5)):
        parts = {"shares": {"q8_0": share}, "many": {"q8_0": {512: many}}}
        own = Ceilings(CPU, "a machine", DATE, 1, *rates, **parts)
        monkeypatch.setattr(roofline, "load_cached", lambda name, own=own: own)
        run = graphllm.dry_run(RandomCheckpoint("qwen2-1.5b", "q8_0"), device=CPU, threads=1)
        seconds.append((run.token.seconds, run.prefill.seconds))
    (token, prompt), by_bytes, by_operations = seconds
    assert by_bytes == (pytest.approx(2 * token, rel=0.03), prompt)
    assert by_operations == (token, pytest.approx(2 * prompt, rel=0.05))


def test_attention_of_a_decode_step_takes_longer(tiny, monkeypatch):
    """By its overhead in each layer, where that exceeds the overhead of any step."""
    rates = {"read": {1: GB_S}}, {"float": {1: GFLOP_S}, "integer": {1: GFLOP_S}}, {1: 2e-6}
    seconds = []
    for overhead in (0.0, 1e-6, 7e-6):
        longer = {"attention": {1: overhead}, "matmul": {1: 1e-3}}  # not of one token
        own = Ceilings(CPU, "a machine", DATE, 1, *rates, kernel_overheads=longer)
        monkeypatch.setattr(roofline, "load_cached", lambda name, own=own: own)
        run = graphllm.dry_run(RandomCheckpoint("qwen2-1.5b", "q8_0"), device=CPU, threads=1)
        seconds.append((run.token.seconds, run.prefill.seconds))
    (token, prompt), short, long = seconds
    assert short == (token, prompt)
    assert long == (pytest.approx(token + 28 * 5e-6, rel=1e-9), prompt)


def test_linears_of_few_tokens_take_longer(tiny, monkeypatch):
    """By their overhead, in decode steps of several sequences; each layer has four."""
    rates = {"read": {1: GB_S}}, {"float": {1: GFLOP_S}, "integer": {1: GFLOP_S}}, {1: 2e-6}
    steps = []
    for overhead in (0.0, 9e-6):
        own = Ceilings(CPU, "", DATE, 1, *rates, kernel_overheads={"matmul": {1: overhead}})
        monkeypatch.setattr(roofline, "load_cached", lambda name, own=own: own)
        run = graphllm.dry_run(
            RandomCheckpoint("qwen2-1.5b", "f16"), device=CPU, threads=1, batches=[1, 16]
        )
        steps.append([each.step_s for each in run.batches])
    (one, many), (same, more) = steps
    assert same == one and more == pytest.approx(many + (4 * 28 + 1) * 7e-6, rel=1e-6)


def test_operations_of_fused_steps_by_kind(tiny):
    """The FLOPs of the parts, by kind, sum to those of the fused step."""
    kinds: dict[str, set[str]] = {}
    env = step_times.step_env(16, 0)
    for step in graphllm.load(tiny, device=CPU, threads=1).engine.generation_plans()[0].steps:
        found = list(kernel_probes.operations(step.node, env))
        cost = ops.get(step.node.op).node_cost(step.node, env)
        assert sum(flops for *_, flops in found) == pytest.approx(cost.flops)
        kinds.setdefault(step.node.op, set()).update((kind, form) for kind, form, *_ in found)
    assert kinds["gated"] == {("float", "f32"), ("elementwise", "")}
    assert kinds["attention"] == {("attention", "")} and kinds["linear_add"] == kinds["gated"]
    assert kinds["embedding"] == {("elementwise", "")}


def test_missing_rates(tiny):
    """A kind without a rate uses that of float matrix products; without that, no prediction."""
    (step, *_) = (
        step
        for step in graphllm.load(tiny, device=CPU, threads=1).engine.generation_plans()[0].steps
        if step.node.op == "attention"
    )  # fmt: skip
    env, flops = step_times.step_env(16, 0), {"attention": {1: 4e9}, "float": {1: 8e9}}
    cost = ops.get(step.node.op).node_cost(step.node, env).flops
    for known, rate in ((("attention", "float"), 4e9), (("float",), 8e9), ((), 0)):
        own = Ceilings(CPU, "", DATE, 1, {}, {kind: flops[kind] for kind in known})
        parts = list(kernel_probes.operations(step.node, env))
        assert step_times.compute_seconds(parts, own, 1) == (cost / rate if rate else None)


def test_a_bench_test_is_predicted(tiny, measured):
    llm = graphllm.load(tiny, device=CPU, threads=1)
    token = graphllm.dry_run(tiny, device=CPU, threads=1).token.seconds
    assert prediction.predict_test(llm.engine, Test(0, 8, 16), 1) == pytest.approx(
        8 * token, rel=0.1
    )
    assert prediction.predict_test(llm.engine, Test(16, 0, 16), 1) > 0
    measured.append(CPU)
    assert prediction.predict_test(llm.engine, Test(0, 8, 16), 1) is None
    assert prediction.predict_test(llm.engine, Test(16, 0, 16), 1) is None


def test_nothing_is_predicted_without_ceilings(tiny, measured):
    measured += [GPU, CPU]
    found = graphllm.dry_run(tiny, device=CPU)
    assert found.token.seconds is found.prefill.seconds is None and not found.basis
    how = "(run graphllm doctor --measure on that machine)"
    assert found.lacking == [f"no prediction: {CPU} was not measured {how}"]
    (line,) = graphllm.dry_run(tiny, device="reference").lacking
    assert line == "no prediction: reference has no speed measurement"


def test_old_ceilings_without_arithmetic(tiny, monkeypatch):
    old = Ceilings(CPU, "a machine", DATE, 1, {"read": {1: GB_S}})
    monkeypatch.setattr(roofline, "load_cached", lambda name: old)
    found = graphllm.dry_run(tiny, device=CPU)
    assert found.prefill.seconds is None and found.token.seconds is not None
    assert found.lacking[0].startswith(f"no prediction of prefill: the arithmetic of {CPU} was not")


# ------------------------------------------------------------------------------------ command line


def test_command_line(tiny):
    done = call(str(tiny), "--device", GPU, "--no-kernel", f"{GPU}:sample")
    assert done.returncode == 0 and done.stderr == ""
    lines = done.stdout.splitlines()
    assert lines[0] == f"{tiny}: llama 0M F32"
    assert lines[1].startswith("context 128, KV cache f16, ")
    assert f"decode step, on {CPU}: sample (1): {GPU}: switched off ({GPU}:sample)" in lines
    assert any(line.startswith("decode step needs copies from ") for line in lines)
    (row,) = (line.split() for line in lines if line.startswith("sample "))
    assert row == ["sample", "1", "1"]


def test_json_and_random_shapes():
    done = call("--random", "llama-7b", "--type", "q4_0", "--device", GPU, "--free", "3", "--json")
    found = json.loads(done.stdout)
    assert set(found["memory"]) == {"host", backends.find(GPU).memory}
    total = sum(m["weights"] for m in found["memory"].values())
    assert total == pytest.approx(3.8e9, rel=0.02)
    assert found["memory"][backends.find(GPU).memory]["total"] < 3e9
    assert {"prefill", "token", "notes", "basis", "lacking"} <= set(found)


@pytest.mark.parametrize(
    "words, message",
    [
        ((), "give a MODEL, or --random SHAPE"),
        (("no.gguf",), "no.gguf: no such file"),
        (("--random", "llama-1b", "--device", "tpu"), "unknown backend 'tpu'"),
        (("--random", "llama-1b", "--free", "-1"), "free = -1000000000 must be"),
        (("--random", "llama-1b", "--place", "x"), "--place 'x' must be PATTERN=BACKEND"),
        (("--random", "llama-1b", "--device", GPU, "--place", "x=cpu"), "no node of the model"),
    ],
)
def test_invalid_input_is_one_line(words, message):
    done = call(*words)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("error: ") and message in done.stderr
    assert done.stderr.count("\n") == 1


def test_a_backend_without_kernels_cannot_be_planned(tiny, monkeypatch):
    broken = backends.Backend("broken", lambda: (False, "no import"), lambda options: None)
    find = backends.find
    monkeypatch.setattr(backends, "find", lambda n: broken if n == "broken" else find(n))
    with pytest.raises(PlacementError, match="cannot be planned for: no import"):
        graphllm.dry_run(tiny, device="broken")
    with pytest.raises(RequestError, match="context = 0"):
        graphllm.dry_run(tiny, context=0)


def test_tied_weights_of_one_layout_are_counted_once(tmp_path):
    """A tied head and embedding are stored once in GPU memory."""
    tied = write_llama(tmp_path / "tied.gguf", llama_weights(tied=True))
    weights = sum(np.asarray(w).nbytes for w in llama_weights(tied=True).values())
    (memory,) = graphllm.dry_run(tied, device=GPU).memory.values()
    assert memory.weights == weights and weights > 4 * DIM
