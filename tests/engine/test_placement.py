"""Placement on two memories: pins, copies, states, GPU offload, disabled kernels. The backend
`remote` runs the reference's kernels in a memory of its own."""

from __future__ import annotations

import json
import sys

import pytest
from remote_memory import RemoteDevice, remote  # noqa: F401
from tiny_models import LAYERS, llama_weights, write_llama

import graphllm
from graphllm import backends, cli
from graphllm.backends.order import ORDER
from graphllm.compiler.plan import HOST
from graphllm.engine.request import Sampling
from graphllm.errors import OutOfMemory, PlacementError, RequestError
from graphllm.runtime import gpu_offload
from graphllm.runtime.executor import Executor

IDS = [1, 17, 130, 131, 8, 252]
MORE = [*IDS, 40, 41, 42, 43]
SPLITS = {
    "all": {},
    "a layer between": {"place": {"model.layers.1.*": "reference"}},
    "two islands": {"place": {"model.layers.0.*": "reference", "model.layers.2.*": "reference"}},
    "half a layer": {"place": {"model.layers.1.mlp.*": "reference"}},
    "no head": {"place": {"lm_head": "reference"}},
    "no layers": {"gpu_layers": 0},
    "the output only": {"gpu_layers": 1},
    "two layers": {"gpu_layers": 3},
    "no attention": {"no_kernels": ("remote:attention",)},
    "no writes": {"no_kernels": ("remote:kv_write",)},
    "no advance": {"no_kernels": ("remote:advance",)},
    "no sampling": {"no_kernels": ("remote:sample", "remote:penalise")},
    "no norms": {"no_kernels": ("remote:rms_norm",)},
}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return write_llama(tmp_path_factory.mktemp("tiny") / "tiny.gguf", llama_weights())


def answers(llm) -> list[list[int]]:
    """Generate greedily beyond a cache block, after a common prefix, and with penalties."""
    found = []
    for prompt, count, more in ((IDS, 70, {}), (MORE, 8, {}), (IDS, 8, {"repeat_penalty": 1.7})):
        ids = llm.engine.generate(prompt, Sampling(temperature=0.0, **more), ())
        found.append([next(ids) for _ in range(count)])
    return found


@pytest.fixture(scope="module")
def plain(tiny):
    return answers(graphllm.load(tiny, device="reference"))


@pytest.mark.parametrize("split", SPLITS)
def test_a_split_changes_no_token(remote, tiny, plain, split):  # noqa: F811
    """The next step reads in one memory what `advance` wrote in the other."""
    llm = graphllm.load(tiny, device="remote", kv_type="f32", **SPLITS[split])
    assert answers(llm) == plain
    assert llm.logits(IDS).shape == (len(IDS), 400)
    plan = llm.engine.decode_plan()
    crossing = {copies.source for copies in plan.copies()}
    assert crossing == (set() if split in ("all", "no layers") else {"remote", HOST})


def test_a_split_with_kernels_of_the_cpu(remote, tiny, plain):  # noqa: F811
    """One segment per run of steps on a backend."""
    place = {"model.layers.1.*": "cpu"}
    llm = graphllm.load(tiny, kv_type="f32", linear="float", place=place)
    assert answers(llm) == plain
    assert [b.name for b in llm.executor.backends] == ["remote", "cpu", "reference"]
    assert [s[0].backend.name for s in llm.engine.decode_plan().segments()] == [
        "remote",
        "cpu",
        "remote",
    ]


def test_states_lie_where_they_are_written(remote, tiny):  # noqa: F811
    """Each state has one memory, although plans without `advance` are compiled as well."""
    llm = graphllm.load(
        tiny, device="remote", kv_type="f32", place={"model.layers.0.*": "reference"}
    )
    answers(llm)
    llm.logits(IDS)
    homes: dict[str, set[str]] = {}
    for name, memory, _ in llm.executor.buffers.values():
        homes.setdefault(name, set()).add(memory)
    assert {name for name, memories in homes.items() if len(memories) > 1} == {
        "q_start",
        "table.full",
    }  # feeds are copied to both
    assert homes["full.0.k"] == {HOST} and homes["full.1.k"] == homes["pos"] == {"remote"}


def test_the_plan_and_the_model_name_copies(remote, tiny):  # noqa: F811
    llm = graphllm.load(
        tiny, device="remote", kv_type="f32", place={"model.layers.1.*": "reference"}
    )
    # The activation of 60 floats in and out; to the host also pos, slot and kv_len.
    there, back = llm.misses()[-2:]
    assert there.startswith(
        "a token needs copies from remote to host: 4, of 252 bytes in all, for "
    )
    copies = "copies from host to remote: 1, of 240 bytes in all, for rms_norm, add"
    assert back == f"a token needs {copies}"
    why = "remote: pinned by model.layers.1.*=reference"
    assert f"attention ran on reference (1 steps per token): {why}" in llm.misses()
    explained = llm.engine.decode_plan().explain()
    assert f"\n  {copies}\n" in explained
    assert f"\n      1  attention ran on reference: {why}\n" in explained


def test_a_cache_is_not_copied(remote, tiny):  # noqa: F811
    """A disabled op moves the other users of its pools to its own backend."""
    llm = graphllm.load(tiny, device="remote", no_kernels=("remote:attention",))
    assert llm.placement()["reference"] == {"attention": LAYERS, "kv_write": 2 * LAYERS}
    assert (
        "attention ran on reference (3 steps per token): remote: switched off (remote:attention)"
        in (llm.misses())
    )
    why = [line for line in llm.misses() if line.startswith("kv_write")]
    assert len(why) == LAYERS and "'full.0.k' stays in one memory with attention of " in why[0]
    # q, k and v of 6 + 2 + 2 heads of 10, for each of 3 layers, and what addresses them
    (to_host,) = (c for c in llm.engine.decode_plan().copies() if c.target == HOST)
    assert to_host.nbytes < 2 * LAYERS * 10 * 10 * 4


# ------------------------------------------------------------------------------------ GPU offload


def test_offload_fills_the_memory(remote, tiny, plain, monkeypatch):  # noqa: F811
    """The last layers and the output go first; never more than the memory holds."""
    whole = graphllm.load(tiny, device="remote", kv_type="f32").gpu_offload
    assert str(whole) == f"all {LAYERS} layers on remote: 0.54 GB of 1099.51 GB free there"
    seen = []
    for room in range(whole.needed_bytes, gpu_offload.MARGIN, -16384):
        monkeypatch.setattr(RemoteDevice, "room", room)
        llm = graphllm.load(tiny, device="remote", kv_type="f32")
        assert llm.gpu_offload.needed_bytes <= room or not llm.gpu_offload.output
        assert llm.gpu_offload.needed_by_all_bytes == whole.needed_bytes
        seen.append((llm.gpu_offload.layers, llm.gpu_offload.output))
    assert seen == sorted(seen, reverse=True)
    assert set(seen) == {(3, True), (2, True), (1, True), (0, True), (0, False)}
    assert answers(llm) == plain
    assert str(llm.gpu_offload).startswith("0 of 3 layers on remote, the first 3 on reference: ")
    assert str(llm.gpu_offload).endswith(", all would need 0.54 GB")


def test_a_shared_matrix_goes_with_the_output(remote, tmp_path, monkeypatch):  # noqa: F811
    """A tied head counts once, and the first attempt fits."""
    tied = write_llama(tmp_path / "tied.gguf", llama_weights(tied=True))
    whole = graphllm.load(tied, device="remote", kv_type="f32").gpu_offload
    placed, place_model = [], Executor.place_model
    monkeypatch.setattr(
        Executor, "place_model", lambda self, *rest: (placed.append(1), place_model(self, *rest))
    )
    monkeypatch.setattr(RemoteDevice, "room", whole.needed_bytes - 1)
    llm = graphllm.load(tied, device="remote", kv_type="f32")
    assert (llm.gpu_offload.layers, llm.gpu_offload.output) == (
        2,
        True,
    ) and llm.gpu_offload.needed_bytes < whole.needed_bytes
    assert len(placed) == 2  # all layers, then those that fit


def test_layers_that_do_not_fit_are_the_first(remote, tiny):  # noqa: F811
    llm = graphllm.load(tiny, device="remote", gpu_layers="2")
    steps = [s for s in llm.engine.decode_plan().steps if s.node.op != "copy"]
    where = {s.node.scope.split(".self_attn")[0]: s.backend.name for s in steps}
    assert where["model.embed_tokens"] == where["model.layers.0"] == "reference"
    assert where["model.layers.1"] == "reference" and where["model.layers.2"] == "remote"
    assert where["lm_head"] == where["model.norm"] == where[""] == "remote"
    assert str(llm.gpu_offload).startswith(
        "1 of 3 layers and the output on remote, the first 2 on reference: "
    )
    why = [line for line in llm.misses() if line.startswith("attention")]
    assert why == [
        "attention ran on reference (2 steps per token): remote: not among the last 1 of 3 layers"
    ]


def test_pins_have_priority_over_offload(remote, tiny):  # noqa: F811
    llm = graphllm.load(
        tiny, device="remote", gpu_layers=3, place={"model.layers.0.mlp.*": "remote"}
    )
    assert (
        llm.gpu_offload.first == 1 and llm.gpu_offload.layers == 3
    )  # including a part of the first
    own = [s for s in llm.engine.decode_plan().steps if s.node.scope.startswith("model.layers.0.")]
    assert {s.backend.name for s in own if ".mlp" in s.node.scope} == {"remote"}
    assert "reference" in {s.backend.name for s in own}


def test_layers_that_a_user_pins_are_counted(remote, tiny):  # noqa: F811
    llm = graphllm.load(tiny, device="remote", place={"model.layers.[01].*": "reference"})
    says = "1 of 3 layers and the output on remote, the others pinned: 0.54 GB of 1099.51 GB free "
    assert str(llm.gpu_offload) == says + "there"


@pytest.mark.parametrize("asked", ["some", "-1", -1, "1.5", ""])
def test_a_bad_count_of_layers(tiny, asked):
    with pytest.raises(RequestError, match=r"gpu_layers = .* must be auto, all or a"):
        graphllm.load(tiny, device="reference", gpu_layers=asked)


def test_layers_without_a_device_of_their_own(tiny):
    llm = graphllm.load(tiny, device="reference", gpu_layers=2)
    assert llm.gpu_offload is None
    assert llm.notes() == ["gpu_layers = 2 has no effect: reference uses host memory"]


@pytest.mark.parametrize("room", [1000, 10_000, 60_000])
def test_no_room_is_one_line(remote, tiny, monkeypatch, room):  # noqa: F811
    """For weights, the cache and intermediates."""
    monkeypatch.setattr(RemoteDevice, "room", room)
    with pytest.raises(OutOfMemory) as caught:
        graphllm.load(tiny, device="remote", gpu_layers="all", context=128)
    error = caught.value
    assert error.needed > error.free == room and error.memory == "remote"
    assert str(error).startswith(f"no memory for {error.what}: ") and "are free; " in str(error)


def test_out_of_memory_names_the_allocation(remote, tiny, monkeypatch):  # noqa: F811
    """Each allocation of a load fails in turn."""
    made, alloc, seen = [], RemoteDevice.alloc, set()

    def failing(device, nbytes):
        made.append(nbytes)
        if len(made) == last:
            raise MemoryError
        return alloc(device, nbytes)

    monkeypatch.setattr(RemoteDevice, "alloc", failing)
    for last in range(1, 200):
        made.clear()
        try:
            graphllm.load(tiny, device="remote")
        except OutOfMemory as error:
            assert error.needed == made[-1] and error.free == RemoteDevice.room
            seen.add(error.what)
        if len(made) < last:
            break
    assert {"intermediates", "full.0.k", "pos", "tensor 'model.norm.weight'"} <= seen


# -------------------------------------------------------------------------------------- switches


def test_an_op_is_switched_off_by_name(remote, tiny, plain):  # noqa: F811
    llm = graphllm.load(tiny, device="remote", kv_type="f32", no_kernels=("remote:rms_norm",))
    assert "rms_norm" not in llm.placement()["remote"]
    assert llm.placement()["reference"] == {"rms_norm": 2 * LAYERS + 1}
    assert (
        "rms_norm ran on reference (7 steps per token): remote: switched off (remote:rms_norm)"
        in (llm.misses())
    )
    with pytest.raises(PlacementError, match=r"rms_norm would run on reference .*switched off"):
        graphllm.load(tiny, device="remote", no_kernels=("remote:rms_norm",), strict=True)


@pytest.mark.parametrize(
    "switch, says",
    [
        ("rms_norm", "begin with one of"),
        ("gpu:rms_norm", "begin with one of"),
        ("cpu:rmsnorm", "end in the name of an op, which 'rmsnorm' is not"),
        ("cpu:copy", "name another op"),
        ("cpu:contiguous", "name another op"),
    ],
)
def test_a_bad_switch(tiny, switch, says):
    with pytest.raises(RequestError, match=f"no_kernels = '{switch}' .*must {says}"):
        graphllm.load(tiny, device="reference", no_kernels=(switch,))


def test_a_disabled_op_is_not_fused(tiny):
    """No fused op of the CPU contains a disabled op."""
    llm = graphllm.load(tiny, device="cpu", no_kernels=("cpu:rms_norm",))
    assert not any("norm" in op for op in llm.placement()["cpu"])
    assert llm.placement()["reference"]["rms_norm"] == 2 * LAYERS + 1


# ------------------------------------------------------------------------------- the command line


def called(monkeypatch, capsys, *words) -> tuple[int, str, str]:
    monkeypatch.setattr(sys, "argv", ["graphllm", *map(str, words)])
    code = 0
    try:
        cli.main()
    except SystemExit as ended:
        code = ended.code
    done = capsys.readouterr()
    return code, done.out, done.err


@pytest.mark.parametrize("flag", ["-ngl", "--gpu-layers", "--n-gpu-layers"])
def test_run_says_where_layers_went(remote, tiny, monkeypatch, capsys, flag):  # noqa: F811
    words = ("run", tiny, "-p", "a", "-n", 2, "--device", "remote", flag, 2, "--json")
    code, out, err = called(monkeypatch, capsys, *words)
    where = json.loads(out)["gpu_layers"]
    assert not code and where["layers"] == 1 and where["of"] == 3 and where["output"]
    assert where["backend"] == "remote" and where["needed_bytes"] < where["free_bytes"]
    assert err == f"note: {where['text']}\n"


def test_run_out_of_memory(remote, tiny, monkeypatch, capsys):  # noqa: F811
    monkeypatch.setattr(RemoteDevice, "room", 1000)
    words = ("run", tiny, "-p", "a", "--device", "remote", "-ngl", "all")
    code, out, err = called(monkeypatch, capsys, *words)
    assert code == 1 and not out and err.count("\n") == 1
    assert err.startswith("error: no memory for ") and "0.00 GB are free" in err


def test_run_without_a_kernel(tiny, monkeypatch, capsys):
    words = ("run", tiny, "-p", "a", "-n", 2, "--device", "cpu", "--no-kernel", "cpu:sample")
    code, _, err = called(monkeypatch, capsys, *words)
    assert code == 0
    assert "note: sample ran on reference (1 steps per token): cpu: switched off" in err


# -------------------------------------------------------------------------------------- the order


def test_fallbacks_of_a_device():
    assert backends.names()[-3:] == list(ORDER) == ["cuda", "cpu", "reference"]
    assert backends.fallbacks("cuda") == ["cuda", "cpu", "reference"]
    assert backends.fallbacks("cpu") == ["cpu", "reference"]
    assert backends.fallbacks("reference") == ["reference"]
    assert backends.fallbacks("elsewhere") == ["elsewhere", "reference"]


@pytest.fixture
def no_gpu(monkeypatch):
    """A machine with CuPy but no usable GPU; opening the device is an error."""
    cuda = backends.find("cuda")
    monkeypatch.setattr(cuda, "probe", lambda: (False, "no NVIDIA driver is installed"))
    monkeypatch.setattr(cuda, "expected", lambda: True)
    monkeypatch.setattr(cuda, "open_device", None)
    return cuda


def test_an_installed_backend_that_is_not_used_is_reported(no_gpu, tiny, monkeypatch, capsys):
    words = ("run", tiny, "-p", "a", "-n", 1, "--json")
    code, out, err = called(monkeypatch, capsys, *words)
    assert not code and json.loads(out)["device"] == "cpu"
    assert err == "note: cuda is not used: no NVIDIA driver is installed\n"
    for device in ("cpu", "reference"):  # not requested
        assert not called(monkeypatch, capsys, *words, "--device", device)[2]
    monkeypatch.setattr(no_gpu, "expected", lambda: False)  # and not installed
    assert not called(monkeypatch, capsys, *words)[2]


def test_a_device_that_cannot_be_used_is_an_error(no_gpu, tiny, monkeypatch, capsys):
    code, out, err = called(monkeypatch, capsys, "run", tiny, "-p", "a", "--device", "cuda")
    says = "device = 'cuda' cannot be used: no NVIDIA driver is installed"
    assert (code, out, err) == (1, "", f"error: {says} (--device)\n")


def test_doctor_says_what_is_missing_in_a_line(no_gpu, monkeypatch, capsys):
    _, out, _ = called(monkeypatch, capsys, "doctor")
    lines = [line for line in out.splitlines() if line.startswith("cuda")]
    assert lines == ["cuda       not usable: no NVIDIA driver is installed"]


def test_the_cpu_opens_no_gpu(monkeypatch, tiny):
    """Nor does it probe for one."""
    monkeypatch.setattr(backends.find("cuda"), "probe", None)
    llm = graphllm.load(tiny, device="cpu")
    assert llm.executor.skipped == {} and set(llm.executor.devices) == {"cpu"}
