"""Ceilings: measured, cached, read back, shown by `doctor` and `bench`."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from datetime import datetime, timedelta, timezone
from pathlib import Path
from types import SimpleNamespace

import pytest

from graphllm import system_info
from graphllm.backends.cpu.runtime import probe_kernels, roofline_probes
from graphllm.backends.cpu.runtime.cores import usable_cores
from graphllm.backends.cpu.runtime.roofline_probes import MEMORY_PROBES, thread_counts
from graphllm.backends.cuda.runtime import roofline_probes as cuda_probes
from graphllm.backends.probe_results import ProbeResults
from graphllm.cache import CacheFile
from graphllm.cli import doctor
from graphllm.cli.bench import _ceiling
from graphllm.errors import RequestError
from graphllm.profiler import kernel_probes, roofline
from graphllm.profiler.roofline import Ceilings

SMALL = 4 << 20


def ignore_progress(what, done, total):
    assert 0 <= done <= total


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """A temporary cache directory."""
    return use_cache(tmp_path / "cache", monkeypatch)


def use_cache(folder: Path, patch: pytest.MonkeyPatch) -> Path:
    patch.setattr(roofline, "_CACHE_FILE", CacheFile("ceilings.json", root=folder))
    return folder


@pytest.fixture(scope="module")
def measurement(tmp_path_factory):
    """The cache directory and the ceilings of this machine, measured with small probes."""
    with pytest.MonkeyPatch.context() as patch:
        folder = use_cache(tmp_path_factory.mktemp("ceilings") / "cache", patch)
        patch.setattr(roofline, "probe_bytes", lambda: SMALL)
        patch.setattr(kernel_probes, "WIDTH", 256)
        patch.setattr(kernel_probes, "MIN_SECONDS", 0.0)
        patch.setattr(roofline_probes, "SECONDS", 0.0)
        return folder, roofline.measure("cpu", ignore_progress)


@pytest.fixture
def measured(cache, measurement, monkeypatch):
    """Measuring takes no time: it saves and returns the one measurement."""

    def measure(backend: str, show: roofline.Show) -> Ceilings:
        roofline.save(measurement[1])
        return measurement[1]

    monkeypatch.setattr(roofline, "measure", measure)


def made(**changes) -> Ceilings:
    rates = {"read": {1: 1e10, 2: 3e10, 4: 2e10}, "float": {1: 2e10}}
    date = datetime.now(timezone.utc).isoformat(timespec="seconds")
    return replace(Ceilings("cpu", roofline.machine_name(), date, SMALL, rates), **changes)


def test_measurement_is_cached(cache, measurement, monkeypatch):
    assert roofline.load_cached("cpu") is None
    folder, found = measurement
    use_cache(folder, monkeypatch)
    assert set(found.rates) == set(MEMORY_PROBES) and found.nbytes == SMALL
    assert set(found.flops) == set(kernel_probes.KINDS) and set(found.peaks) == set(
        probe_kernels.multiply_add_loops()
    )
    tables = [found.rates, found.caches, found.flops, found.peaks]
    for by_count in [row for table in tables for row in table.values()]:
        assert list(by_count) == list(thread_counts(usable_cores()))
        assert min(by_count.values()) > 1e7
    assert set(found.steps) == set(thread_counts(usable_cores()))
    ((kind, overheads),) = found.kernel_overheads.items()
    assert kind == "attention" and set(overheads) == set(found.steps)
    assert all(0 <= seconds < 1e-3 for seconds in overheads.values())
    assert set(found.shares) == set(found.many) == set(kernel_probes.FORMATS)
    assert (
        0 < max(found.shares.values()) <= 1
        and min(min(row.values()) for row in found.many.values()) > 0
    )
    assert set(found.spreads) == {kind for table in tables for kind in table}
    assert all(0 <= n < 1 for row in found.spreads.values() for n in row.values())
    assert found.others is None or 0 <= found.others <= 1
    assert roofline.load_cached("cpu") == found and found.is_fresh()
    assert [p.name for p in folder.iterdir()] == ["ceilings.json"]


def test_devices_with_their_own_memory_compute_larger_linears(monkeypatch):
    asked = []

    def time_linear(backend, threads, form, rows, tokens):
        asked.append((rows, tokens))

    for name in ("_attention", "_elementwise", "step_overhead"):
        monkeypatch.setattr(kernel_probes, name, lambda *args: None)
    monkeypatch.setattr(kernel_probes, "time_linear", time_linear)
    rows = {}
    for memory in ("host", "gpu"):
        monkeypatch.setattr(kernel_probes, "find", lambda name: SimpleNamespace(memory=memory))  # noqa: B023
        kernel_probes.measure("any", lambda threads: 1e12, [0], 1 << 30, ignore_progress)
        rows[memory] = {rows for rows, tokens in asked if tokens > 1}
        asked.clear()
    assert rows == {"host": {4096}, "gpu": {16 * 4096, 1024}}  # and one that is mostly overhead


def test_the_overhead_of_a_small_batch_on_a_device(monkeypatch):
    """What a small linear takes beyond the rate that a large one reaches at 16 tokens."""
    rate = 2e12

    def time_linear(backend, threads, form, rows, tokens):
        flops = 2.0 * rows * 4096 * tokens
        seconds = flops / rate + (5e-6 if rows == 1024 else 0.0)
        return kernel_probes.StepSample("float", 1.0, flops, [seconds])

    for name in ("_attention", "_elementwise", "step_overhead"):
        monkeypatch.setattr(kernel_probes, name, lambda *args: None)
    monkeypatch.setattr(kernel_probes, "time_linear", time_linear)
    monkeypatch.setattr(kernel_probes, "find", lambda name: SimpleNamespace(memory="gpu"))
    found = kernel_probes.measure("any", lambda threads: 1e12, [0], 1 << 30, ignore_progress)
    assert found.kernel_overheads == {"matmul": {0: pytest.approx(5e-6)}}


def test_counts_of_threads():
    assert list(thread_counts(1)) == [1] and list(thread_counts(4)) == [1, 2, 3, 4]
    assert list(thread_counts(16)) == [1, 2, 4, 8, 16]
    assert list(thread_counts(12)) == [1, 2, 4, 8, 12]


def test_bandwidth_is_the_best_up_to_a_number_of_threads():
    found = made()
    assert [found.bytes_s(n) for n in (1, 2, 3, 4, 0)] == [2e10, 3e10, 3e10, 3e10, 3e10]
    assert made(rates={"read": {4: 1e10}}).bytes_s(2) == 0.0
    assert made(rates={"read": {1: 1e10}, "write": {1: 2e10}, "copy": {1: 3e10}}).bytes_s() == 1e10


def test_kernel_rates_and_peaks():
    found = made(flops={"float": {1: 1e11, 2: 2e11}}, peaks={"f32": {1: 3e11, 2: 4e11}})
    assert [found.flop_s("float", n) for n in (1, 2, 0)] == [1e11, 2e11, 2e11]
    blocks = replace(found, counted="blocks")  # counts are not of threads
    assert blocks.flop_s("f32", 1) == 4e11 and blocks.bytes_s(1) == 3e10
    assert found.flop_s("f32", 1) == 3e11 and found.flop_s("f16") == found.flop_s("integer") == 0


def test_peaks_do_not_depend_on_kernel_rates():
    found = made(
        flops={"float": {1: 9e11}, "integer": {1: 9e11}},
        peaks={"f32": {1: 3e11, 2: 4e11}, "f16": {1: 8e11}, "int8": {1: 5e11}},
    )
    assert [found.peak_flop_s("float", n) for n in (1, 2, 0)] == [3e11, 4e11, 4e11]
    assert found.peak_flop_s("integer") == 5e11 and made().peak_flop_s("float") == 0.0
    several = replace(found, roofs={"float": ("f32", "f16", "float"), "integer": ("int8",)})
    assert several.peak_flop_s("float") == 9e11


def test_profiles_use_peaks_as_ceilings(cache):
    """Not the rates of kernels, which are for predictions."""
    from graphllm.profiler.capture import add_roofline

    roofline.save(made(flops={"integer": {1: 9e11}}, peaks={"f32": {1: 3e11}, "int8": {1: 5e11}}))
    roofs = {}
    add_roofline(roofs, "cpu", 1)
    assert (roofs["cpu"].float_flop_s, roofs["cpu"].integer_flop_s) == (3e11, 5e11)


def test_best_repetition_and_spread():
    found = ProbeResults()
    found.add(found.memory, "read", 2, 10.0, [4.0, 2.0, 2.5])
    assert found.memory == {"read": {2: 5.0}} and found.spreads["read"][2] == pytest.approx(0.2)


def test_only_fresh_measurements_of_this_machine_are_reused(cache, monkeypatch):
    calls = []

    def measure(backend, show, nbytes=0):
        calls.append(backend)
        return made()

    monkeypatch.setattr(roofline, "measure", measure)
    now = datetime.now(timezone.utc)
    for kept in (
        made(date=(now - timedelta(hours=25)).isoformat()),
        made(date=(now + timedelta(hours=2)).isoformat()),
        made(machine="another"),
    ):
        roofline.save(kept)
        assert roofline.load_cached("cpu") == kept and not kept.is_fresh()
        roofline.load_or_measure("cpu", ignore_progress)
    assert calls == ["cpu"] * 3
    roofline.save(made(date=(now - timedelta(hours=23)).isoformat()))
    assert (
        roofline.load_or_measure("cpu", ignore_progress) == roofline.load_cached("cpu")
        and len(calls) == 3
    )
    assert roofline.load_or_measure("reference", ignore_progress) is None


OLD = {"backend": "cpu", "machine": "m", "date": "2026-01-01T00:00:00+00:00", "nbytes": 1,
       "rates": {"read": {"1": 1e10}}, "flops": {}, "steps": {}, "shares": {}}  # fmt: skip


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", "null", '{"cpu": 3}', '{"cpu": {"version": 2}}', json.dumps({"cpu": OLD}),
     json.dumps({"cpu": {**OLD, "version": 2}}), '{"cpu": {"version": 3, "rates": {}}}'],
)  # fmt: skip
def test_a_damaged_cache_file_is_ignored(cache, text):
    cache.mkdir()
    (cache / "ceilings.json").write_text(text)
    assert roofline.load_cached("cpu") is None
    roofline.save(made())
    assert roofline.load_cached("cpu") == made(date=roofline.load_cached("cpu").date)


def test_entries_of_other_backends_are_kept(cache):
    roofline.save(made(backend="gpu"))
    roofline.save(made())
    assert set(json.loads((cache / "ceilings.json").read_text())) == {"cpu", "gpu"}
    assert roofline.load_cached("gpu") == made(backend="gpu", date=roofline.load_cached("gpu").date)


def test_a_cache_directory_that_is_a_file(cache):
    cache.write_text("")
    roofline.save(made())
    assert roofline.load_cached("cpu") is None


def test_too_little_memory(monkeypatch):
    monkeypatch.setattr(roofline, "free_bytes", lambda: 1 << 30)
    with pytest.raises(RequestError, match=r"needs 1\.3 GB; 1\.1 GB are free"):
        roofline.probe_bytes()
    for free, size in ((3 << 29, 1 << 30), (3 << 30, 3 << 29), (64 << 30, 2 << 30)):
        monkeypatch.setattr(roofline, "free_bytes", lambda free=free: free)
        assert roofline.probe_bytes() == size
    with pytest.raises(RequestError, match="reference has no probes"):
        roofline.measure("reference", ignore_progress)


@pytest.mark.parametrize("backend", ["cpu", "cuda"])
def test_probes_are_found_by_a_process_that_imported_nothing_else(backend):
    code = f"from graphllm.backends import find; print(find({backend!r}).measure is not None)"
    command = [sys.executable, "-c", code]
    assert subprocess.run(command, capture_output=True, text=True).stdout == "True\n"


def test_doctor_shows_ceilings(measured, capsys):
    doctor.doctor(measure=False)
    assert "memory: not measured (graphllm doctor --measure)" in capsys.readouterr().out
    doctor.doctor(measure=True)
    kept = roofline.load_cached("cpu")
    for measure in (None, False):
        out = capsys.readouterr().out if measure is None else shown(capsys)
        first = f"memory bandwidth {kept.bytes_s() / 1e9:.1f} GB/s, measured {kept.date} on "
        assert first + roofline.machine_name() in out and "multiply-adds: f16 " in out
        for title in ("read, GB/s ", "f32 multiply-add, GFLOP/s", "fixed overhead of a step, us"):
            (row,) = (line for line in out.splitlines() if line.strip().startswith(title))
            assert len(row.split(title)[1].split()) >= usable_cores()
    roofline.save(made(machine="another box"))
    lines = [line.strip() for line in shown(capsys).splitlines()]
    (at,) = (i for i, line in enumerate(lines) if line.endswith(" on another box"))
    assert lines[at + 1] == "unreliable: measured on another machine; measure again"


def test_table():
    found = made(
        flops={"float": {1: 5e11}}, steps={1: 4e-6, 2: 5e-6}, shares={"q4_0": 0.5},
        many={"q4_0": {16: 0.51, 512: 1.02}}, caches={"L2 2 MB": {1: 2e11}},
        kernel_overheads={"attention": {1: 6e-6}, "matmul": {1: 5e-6}},
        peaks={"int8": {4: 3e12}}, spreads={"read": {1: 0.011, 2: 0.25}},
        how={"int8": "vpdpbusd", "f16": "not here"},
    )  # fmt: skip
    assert found.lines()[1:] == [
        "by threads                          1        2        4  spread",
        "read, GB/s                       10.0     30.0     20.0     25%",
        "float, GB/s                      20.0",
        "L2 2 MB, GB/s                   200.0",
        "int8 multiply-add, GFLOP/s                         3000",
        "float at 512 tokens, GFLOP/s      500",
        "fixed overhead of a step, us      4.0      5.0",
        "attention overhead, us            6.0",
        "small-batch overhead, us          5.0",
        "share of memory bandwidth of a linear at 1 token: q4_0 50%",
        "share of FLOP/s of a linear at 16 tokens: q4_0 51%",
        "share of FLOP/s of a linear at 512 tokens: q4_0 102%",
        "multiply-adds: f16 not here; int8 vpdpbusd",
    ]


def test_the_share_of_a_linear_between_two_measured_numbers_of_tokens():
    """Its time is interpolated: 16 tokens take twice as long per token as 512."""
    found = made(many={"q4_0": {16: 0.5, 512: 1.0}})
    shares = [found.linear_share("q4_0", n) for n in (1, 2, 16, 264, 512, 4096)]
    middle = 264 / ((32 + 512) / 2)
    second = 2 / (1 + (32 - 1) / 15)  # one token counts as at the full rate
    assert shares == [1.0, pytest.approx(second), 0.5, pytest.approx(middle), 1.0, 1.0]
    assert found.linear_share("f16", 16) == 1.0


def test_reasons_to_measure_again():
    now = datetime.now(timezone.utc)
    plain = f"measured {now.isoformat()} on {roofline.machine_name()}"
    assert made(date=now.isoformat()).provenance() == plain
    assert made(date=now.isoformat(), others=0.04).provenance() == plain
    busy = made(date=now.isoformat(), others=0.38).provenance()
    assert busy == (
        f"{plain}; unreliable: other processes used 38% of the processor time; measure again"
    )
    old = made(date=now.isoformat(), machine="a box", others=0.5)
    old = old.provenance(now + timedelta(days=3))
    assert old.endswith(
        "on a box; unreliable: measured on another machine, measured 3 days ago, other processes "
        "used 50% of the processor time; measure again"
    )


def test_load_by_other_processes(monkeypatch):
    """From total, busy and own processor seconds."""
    times = iter([(100.0, 40.0, 7.0), (200.0, 90.0, 27.0), None, (1.0, 1.0, 1.0), (1.0, 1.0, 1.0)])
    monkeypatch.setattr(system_info, "_processor_seconds", lambda: next(times))
    watch = system_info.OtherProcesses()
    assert watch.share() == pytest.approx(0.3)
    assert watch.share() is None  # not available on this system
    assert system_info.OtherProcesses().share() is None  # no time has passed
    monkeypatch.undo()
    share = system_info.OtherProcesses().share()
    assert share is None or 0 <= share <= 1


def shown(capsys) -> str:
    doctor.doctor(measure=False)
    return capsys.readouterr().out


def test_bench_reports_the_measurement(measured, capsys, monkeypatch):
    found = _ceiling("auto")
    assert found is not None and f"measured {found.date}" in capsys.readouterr().err
    assert _ceiling("cpu") == found and f"cached: measured {found.date}" in capsys.readouterr().err
    assert _ceiling("reference") is None and capsys.readouterr().err == ""
    roofline.save(made(machine="another"))

    def full(*asked):
        raise RequestError("no room")

    monkeypatch.setattr(roofline, "measure", full)
    assert _ceiling("cpu") is None and capsys.readouterr().err == "note: no ceiling: no room\n"


class FakeGpu:
    """The parts of a GPU that the probes use; the fastest run of anything takes 1 ms."""

    index, processors = 0, 100

    def __init__(self, capability):
        self.capability, self.launches = capability, []

    def prepare(self, launch):
        function = launch.function
        assert f"void {function.name}(" in function.module.text and launch.block == (512,)
        self.launches.append((function.name, launch.grid))

    def time_runs(self, work, rounds):
        return [1e-3] + [2e-3] * (rounds - 1)


@pytest.mark.parametrize("capability, kinds", [((9, 0), 3), ((7, 5), 2)])
def test_gpu_probes(monkeypatch, capability, kinds):
    gpu = FakeGpu(capability)
    device = SimpleNamespace(gpu=gpu, alloc=lambda nbytes: SimpleNamespace(address=0))
    monkeypatch.setattr(cuda_probes, "CudaDevice", lambda options: device)
    monkeypatch.setattr(cuda_probes, "_l2_bytes", lambda device: 50 << 20)
    found = cuda_probes.measure(1 << 30, ignore_progress)
    assert found.counted != "threads" and len(found.peaks) == kinds and set(found.how) >= {"f16"}
    assert set(found.memory) == {"read", "write", "copy"}
    assert {r for row in found.memory.values() for r in row.values()} == {1000 * 2.0**30}
    assert found.caches == {"L2 50 MB": {n: 25 * 2**20 * n * 1e5 for n in (1, 2, 4)}}
    each = 512 * 4096 * 8 * 100 * 1000  # multiply-adds/s at one block per multiprocessor
    assert found.peaks["f32"] == {n: 2 * n * each for n in (1, 2, 4)}
    assert found.peaks["int8"] == {n: 8 * n * each for n in (1, 2, 4)}
    assert found.spreads["read"][4] == pytest.approx(0.5)
    assert ("copy_all", (400,)) in gpu.launches
