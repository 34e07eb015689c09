"""`graphllm diff`: correct backends agree, a faulty kernel is named, invalid input."""

from __future__ import annotations

import json
import subprocess
import sys

import numpy as np
import pytest
from cuda_cases import need_gpu
from faulty_kernels import inject_fault
from remote_memory import remote  # noqa: F401
from tiny_models import llama_weights, write_llama, write_tiny

import graphllm
from graphllm.backends import Backend, Kernel
from graphllm.compiler.placement import Choice
from graphllm.compiler.plan import Step
from graphllm.errors import PlacementError, RequestError
from graphllm.formats import A8_32
from graphllm.formats.activations import quantise_act
from graphllm.graph.dtype import F32
from graphllm.graph.tensor import Meta, Tensor, feed
from graphllm.profiler.diff import replay
from graphllm.profiler.diff.deviation import as_float64, deviation, error_bounds

IDS = [1, 5, 300, 17, 9, 9, 250, 3, 44, 101, 7]
COMMAND = [sys.executable, "-m", "graphllm", "diff"]


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return write_tiny(tmp_path_factory.mktemp("diff") / "tiny.gguf", "llama")


# --------------------------------------------------------------------------------- correct backends


@pytest.mark.parametrize("arch", ["llama", "qwen2", "gemma3"])
@pytest.mark.parametrize(
    "how",
    [{}, {"fused": True}, {"no_fuse": ["all"]}, {"backends": ("reference", "reference")}],
    ids=["fused", "own parts", "unfused", "reference"],
)
def test_correct_backends_agree(arch, how, tmp_path):
    path = write_tiny(tmp_path / "tiny.gguf", arch)
    found = graphllm.diff(path, ids=IDS, **how)
    assert found.first is None, found.table()
    ops = {row.op for row in found.rows}
    assert ("linears" in ops) == ("no_fuse" not in how and "backends" not in how)
    last = found.rows[-1]
    assert (last.scope, last.shape) == ("lm_head", f"f32[{len(IDS)},{last.shape[7:-1]}]")
    assert all(row.cumulative.nmse < 1e-6 and row.cumulative.cosine > 0.999 for row in found.rows)


def test_every_step_has_a_row_per_result(path):
    """Isolated deviations are smaller than cumulative ones."""
    found = graphllm.diff(path, ids=IDS, no_fuse=["all"])
    assert [row.op for row in found.rows].count("kv_write") == 6
    assert len({row.step for row in found.rows}) == len(found.rows)
    fused = graphllm.diff(path, ids=IDS)
    rows = [row for row in fused.rows if row.op == "rope_write"]
    assert len(rows) == 9 and rows[0].parts == ("rope", "rope", "kv_write", "kv_write")
    assert rows[0].backend == "cpu" and rows[0].inputs[0] == "f32[11,6,10]"


def test_groups_do_not_change_the_result(path, monkeypatch):
    """Smaller groups give the same rows."""
    found = []
    for nbytes in (replay.GROUP_BYTES, 20_000):
        monkeypatch.setattr(replay, "GROUP_BYTES", nbytes)
        found.append(graphllm.diff(path, ids=IDS))
    assert found[0] == found[1]


@pytest.mark.parametrize("second", ["remote", "cpu", "reference"])
def test_a_plan_with_copies_between_memories(remote, path, second):  # noqa: F811
    """Copies have no rows; their values are compared where they are computed."""
    place = {"model.layers.1.*": "reference"}
    found = graphllm.diff(path, ("remote", second), ids=IDS, place=place)
    assert found.first is None, found.table()
    assert {row.backend for row in found.rows} == {"remote", "reference"}
    assert "copy" not in {row.op for row in found.rows}
    homes = {row.backend for row in found.rows if ".layers.1." in row.scope}
    assert homes == {"reference"}


@pytest.mark.realmodel
@pytest.mark.parametrize(
    "how",
    [{}, {"no_fuse": ["all"]}, {"fused": True}, {"linear": "float"}, {"kv_type": "q8_0"}],
    ids=["integer", "unfused", "own parts", "float", "cache of 8 bits"],
)
def test_the_real_model_agrees(demo_path, how):
    found = graphllm.diff("demo", **how)
    assert found.first is None, found.table()
    assert found.rows[-1].cumulative.cosine > 0.99
    quantised = any(row.shape.startswith("a8_") for row in found.rows)
    assert quantised == (how.get("linear") != "float")


# ----------------------------------------------------------------------------------- faulty kernels


@pytest.mark.parametrize("no_fuse", [[], ["all"]], ids=["fused", "unfused"])
@pytest.mark.parametrize(
    "op, scope, operand",
    [
        ("rms_norm", "model.layers.1.input_layernorm", "w"),
        ("linear", "lm_head", "w"),
    ],
)
def test_a_kernel_off_by_1_percent_is_the_first_divergence(
    path, monkeypatch, op, scope, operand, no_fuse
):
    inject_fault(monkeypatch, op, scope, operand)
    found = graphllm.diff(path, ids=IDS, no_fuse=no_fuse)
    first = found.first
    assert first is not None and (first.op, first.scope, first.kernel) == (
        op,
        scope,
        "faulty",
    )
    assert first.isolated.got == pytest.approx(1.01 * first.isolated.want, rel=1e-4)
    assert [row for row in found.rows if row.diverged] == [first]
    before = [r for r in found.rows if r.step < first.step and ".layers.1." not in r.scope]
    assert all(r.cumulative.nmse < 1e-6 for r in before)
    assert first.cumulative.nmse == pytest.approx(1e-4, rel=0.05)
    for words in (scope, op, "kernel faulty", "f32[11,60]", "worst at ["):
        assert words in "\n".join(found.verdict())


@pytest.mark.realmodel
@pytest.mark.parametrize(
    "op, scope, operand",
    [("norm_quantise", "model.norm", "w"), ("norm_add_norm", "model.layers.3.post_att", "w2")],
)
def test_a_fused_kernel_of_the_real_model_off_by_1_percent(
    demo_path, monkeypatch, op, scope, operand
):
    """Also for quantized results, in which single rounding steps are allowed."""
    inject_fault(monkeypatch, op, scope, operand)
    found = graphllm.diff("demo")
    first = found.first
    assert first is not None and (first.kernel, first.op) == ("faulty", op)
    assert first.scope.startswith(scope)
    assert {row.step for row in found.rows if row.diverged} == {first.step}


# ---------------------------------------------------------------------------------------- two files


def test_two_files(path, tmp_path):
    """Equal weights agree; a changed matrix is the first divergence."""
    same = graphllm.diff(path, ids=IDS, against=path)
    assert same.first is None and len(same.rows) > 50
    assert all(row.isolated is None and row.cumulative.max == 0 for row in same.rows)
    weights = llama_weights()
    weights["model.layers.1.mlp.up_proj.weight"] *= np.float32(1.001)
    found = graphllm.diff(path, ids=IDS, against=write_llama(tmp_path / "b.gguf", weights))
    assert found.first.scope == "model.layers.1.mlp.up_proj" and found.first.op == "linear"
    halves = {k: v.astype(np.float16) if v.ndim == 2 else v for k, v in llama_weights().items()}
    found = graphllm.diff(path, ids=IDS, against=write_llama(tmp_path / "c.gguf", halves))
    assert found.first is not None and found.rows[-1].cumulative.nmse < 1e-5


# ------------------------------------------------------------------------------------------ numbers


def test_deviation_has_place_and_size():
    want = np.array([[1.0, -4.0], [0.5, 0.25]])
    got = want + np.array([[0.0, 0.1], [0.0, 0.05]])
    found = deviation(got, want)
    assert found.max == pytest.approx(0.1) and found.relative == pytest.approx(0.1)
    assert found.worst == (1, 1) and (found.got, found.want) == (pytest.approx(0.3), 0.25)
    assert found.nmse == pytest.approx(0.0125 / (17 + 0.3125))
    assert 0.999 < found.cosine < 1


@pytest.mark.parametrize("got, want, apart", [
    (np.nan, np.nan, 0.0), (np.inf, np.inf, 0.0), (np.nan, 1.0, np.inf), (-np.inf, np.inf, np.inf),
    (0.0, 0.0, 0.0), (1.0, 0.0, 1.0),
])  # fmt: skip
def test_deviation_of_nan_and_infinity(got, want, apart):
    found = deviation(np.array([[got, 2.0]]), np.array([[want, 2.0]]))
    assert found.max == apart and (found.relative > 0) == (apart > 0)
    json.dumps(found.as_dict(), allow_nan=False)


def test_quantized_activations_of_several_axes():
    """In the layout of an executor: the bytes of all axes but the first in one axis."""
    x = np.random.default_rng(0).standard_normal((3, 2, 64)).astype(np.float32)
    found = as_float64(quantise_act(x, A8_32).reshape(3, -1), Meta.of(x.shape, A8_32))
    np.testing.assert_allclose(found, x, atol=0.02)


def test_rounding_steps_of_fused_ops_are_allowed():
    """A few, not all of them; unfused results must meet the tolerance alone."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((64, 256)).astype(np.float32)
    meta = Meta.of((64, 256), A8_32)
    want = as_float64(quantise_act(x, A8_32), meta)
    one = want.copy()
    one[3, 7] += np.abs(want[3, :32]).max() / 127
    fused, alone = step_of("norm_quantise", {}), step_of("quantise_act", {})
    assert error_bounds(fused, A8_32).allow(deviation(one, want))
    assert not error_bounds(alone, A8_32).allow(deviation(one, want))
    assert not error_bounds(fused, A8_32).allow(deviation(want * 1.01, want))
    assert not error_bounds(fused, F32).allow(deviation(want * 1.001, want))


def test_half_precision_tolerance_of_a_backend():
    """Both a bound on each value and on NMSE, so that an error of 1 % is found."""
    rng = np.random.default_rng(0)
    want = rng.standard_normal((64, 256))
    noisy = deviation(want + 1e-3 * rng.standard_normal(want.shape), want)
    assert error_bounds(step_of("linear", {"linear": 6e-3}, "f16"), F32).allow(noisy)
    for halves, kind in (({}, "f16"), ({"linear": 6e-3}, "f32"), ({"gated": 6e-3}, "f16")):
        assert not error_bounds(step_of("linear", halves, kind), F32).allow(noisy)
    wrong = deviation(1.01 * want, want)
    assert not error_bounds(step_of("linear", {"linear": 2e-2}, "f16"), F32).allow(wrong)


def step_of(op: str, halves: dict[str, float], kind: str = "f32") -> Step:
    """Return a step of a backend with tolerances ``halves`` and one operand of dtype ``kind``."""
    backend = Backend("halves", lambda: (True, ""), lambda options: None)
    backend.half_tolerance = halves
    node = Tensor(op, (feed("x", (64, 256), kind),), {}, Meta.of((64, 256), "f32"))
    return Step(node, Kernel("halves", op, op, print), Choice(backend), "host")


# ------------------------------------------------------------------------------ on the command line


def call(*words: object) -> subprocess.CompletedProcess:
    return subprocess.run([*COMMAND, *map(str, words)], capture_output=True, text=True)


def test_command_line(path, tmp_path):
    done = call(path, "--ids", "1,5,300")
    assert done.returncode == 0, done.stderr
    assert "cpu against reference, unfused, 3 tokens" in done.stdout
    assert "no divergence: 40 results" in done.stdout
    other = write_llama(tmp_path / "other.gguf", llama_weights(seed=1))
    done = call(path, "--against", other, "--json")
    assert done.returncode == 1 and not done.stderr
    found = json.loads(done.stdout)
    assert found["first"]["op"] == "embedding" and found["first"]["isolated"] is None
    assert set(found) == {"sides", "ids", "first", "rows"} and found["rows"][0] == found["first"]


@pytest.mark.parametrize("words, message", [
    (["--backends", "cpu,abacus"], "unknown backend 'abacus'; known: "),
    (["--backends", "cpu"], "backends = 'cpu' must be two names, as in cpu"),
    (["--backends", "reference,cpu"], "'reference,cpu' must be 'cpu,reference'"),
    (["-p", ""], "the prompt is empty"),
    (["--ids", "1,x"], "--ids '1,x' must be comma-separated"),
    (["--ids", "99999"], "token id 99999 is not in 0.."),
    (["--ids", ",".join(["1"] * 129)], "129 tokens do not fit a context of 128"),
    (["--no-fuse", "glue"], "no fusion rule 'glue'"),
    (["--against", "none.gguf"], "none.gguf: no such file"),
])  # fmt: skip
def test_an_error_is_one_line(path, words, message):
    done = call(path, *words)
    assert done.returncode == 1 and done.stderr.startswith("error: "), done.stderr
    assert message in done.stderr and done.stderr.count("\n") == 1 and not done.stdout


def test_files_that_cannot_be_compared(path, tmp_path):
    other = write_tiny(tmp_path / "other.gguf", "qwen2")
    with pytest.raises(RequestError, match=r"other.gguf: architecture qwen2, but .*tiny.gguf has"):
        graphllm.diff(path, against=other)
    tied = write_llama(tmp_path / "tied.gguf", llama_weights(tied=True))
    with pytest.raises(RequestError, match=r"tied.gguf: tensor 'output.weight' is missing, but "):
        graphllm.diff(path, against=tied)
    turned = write_llama(tmp_path / "turned.gguf", llama_weights(), **{"rope.freq_base": 5e5})
    with pytest.raises(RequestError, match=r"turned.gguf: layers differs from .*tiny.gguf"):
        graphllm.diff(path, against=turned)
    with pytest.raises(RequestError, match="no tokens"):
        graphllm.diff(path, ids=[])
    with pytest.raises(PlacementError, match="unknown backend"):
        graphllm.diff(path, ("abacus", "cpu"))


# --------------------------------------------------------------------------------------- with a GPU


@pytest.mark.cuda
@pytest.mark.parametrize("arch", ["llama", "qwen2", "gemma3"])
@pytest.mark.parametrize("second", ["cpu", "reference", "cuda"])
@pytest.mark.parametrize("count", [1, 4, 11])
def test_cuda_agrees(arch, second, count, tmp_path):
    need_gpu()
    path = write_tiny(tmp_path / "tiny.gguf", arch)
    found = graphllm.diff(path, ("cuda", second), ids=IDS[:count])
    assert found.first is None, found.table()
    assert any(row.backend == "cuda" for row in found.rows)


@pytest.mark.cuda
@pytest.mark.realmodel
@pytest.mark.parametrize("second", ["cpu", "reference", "cuda"])
@pytest.mark.parametrize("words", [1, 4, 8])  # of 6 tokens: own kernels, tensor cores, the library
def test_cuda_agrees_on_the_real_model(demo_path, second, words):
    need_gpu()
    found = graphllm.diff("demo", ("cuda", second), prompt="The capital of France is " * words)
    assert found.first is None, found.table()


@pytest.mark.cuda
def test_a_faulty_kernel_on_the_gpu(path, monkeypatch):
    """The GPU kernel of one scope reads a scaled weight."""
    need_gpu()
    scope = "model.layers.1.input_layernorm"
    inject_fault(monkeypatch, "rms_norm", scope, "w", backend="cuda")
    first = graphllm.diff(path, ("cuda", "reference"), ids=IDS, no_fuse=["all"]).first
    assert first is not None and (first.op, first.scope, first.kernel) == (
        "rms_norm", scope, "faulty",
    )  # fmt: skip
