"""Ramps: their computation from the times of thread blocks, and tables, JSON and errors of them."""

from __future__ import annotations

import json
from types import SimpleNamespace

import numpy as np
import pytest
import tiny_models as tiny
from typer.testing import CliRunner

import graphllm
from graphllm.backends import TimestampLog, find
from graphllm.backends.block_times import BlockTimes
from graphllm.cli import app
from graphllm.cli.error_messages import error_message
from graphllm.errors import RequestError
from graphllm.profiler import roofline
from graphllm.profiler.html import render_page
from graphllm.profiler.ramp_record import MAX_RUNS, RampRecorder
from graphllm.profiler.ramps import clock_resolution, ramp, rate_curve
from graphllm.profiler.record import Recorder
from graphllm.profiler.trace import trace

GB = 10**9  # bytes per second of one byte per nanosecond


def blocks(*lives: tuple[int, int]) -> tuple[np.ndarray, np.ndarray]:
    """One launch with blocks of these starts and ends."""
    starts, ends = np.array(lives, np.int64).reshape(-1, 2).T
    return starts, ends


def of(launches, begin: int, end: int, nbytes: float, bytes_s: float) -> tuple:
    return tuple(ramp(launches, begin, end, nbytes, bytes_s))


# ------------------------------------------------------------------------------------- computation


def test_blocks_that_run_together():
    """1,000 bytes in 100 ns are the ceiling, from 100 to 200."""
    own = [blocks(*[(100, 200)] * 4)]
    assert of(own, 0, 250, 1000, 10 * GB) == (250, 100, 50, 150, True)
    assert of(own, 100, 200, 1000, 10 * GB) == (100, 0, 0, 0, True)
    assert of(own, 0, 250, 1000, 12.5 * GB) == (250, 100, 50, 150, True)  # 80 % exactly


def test_blocks_that_start_one_after_the_other():
    """Each reads a byte per nanosecond: 1, 2, 3, 4, 3, 2, 1 of them, 10 ns each."""
    own = [blocks((0, 40), (10, 50), (20, 60), (30, 70))]
    assert of(own, 0, 70, 160, 5 * GB) == (70, 30, 30, 60, True)
    assert of(own, 0, 70, 160, 3.75 * GB) == (70, 20, 20, 40, True)
    assert of(own, 0, 70, 160, 1.25 * GB) == (70, 0, 0, 0, True)


def test_a_dip_between_two_waves_is_below_but_no_ramp():
    own = [blocks((5, 45), (5, 45), (55, 95), (55, 95))]
    assert of(own, 0, 100, 160, 2 * GB) == (100, 5, 5, 20, True)


def test_a_launch_that_never_reaches_the_level():
    own = [blocks(*[(0, 100)] * 4)]
    assert of(own, 0, 120, 1000, 13 * GB) == (120, 120, 0, 120, False)
    assert of(own, 0, 120, 0, 13 * GB) == (120, 120, 0, 120, False)
    assert of([], 0, 120, 1000, 13 * GB) == (120, 120, 0, 120, False)
    assert of([blocks((3, 3))], 0, 120, 1000, 13 * GB) == (120, 120, 0, 120, False)
    assert of([blocks((0, 10))], 5, 5, 1000, GB) == (0, 0, 0, 0, False)


def test_blocks_that_return_at_once_read_nothing():
    """Thousands of them, as in a grid for the upper bound of rows, change nothing."""
    work = [(100, 200)] * 4
    for count in (1, 5000):
        own = [blocks(*work, *[(100, 101)] * count)]
        assert of(own, 0, 250, 1000, 10 * GB) == (250, 100, 50, 150, True)
    late = [blocks(*work * 25, (100, 900))]  # one late block does not make the others idle
    assert of(late, 0, 900, 1000, 10 * GB)[1:3] == (100, 700)


def test_a_block_that_starts_early_waits():
    """Its life counts from the end of the launch before."""
    own = [blocks((20, 200), (90, 200), (100, 200))]
    assert of(own, 100, 200, 1000, 10 * GB) == (100, 0, 0, 0, True)
    assert of(own, 100, 200, 1000, 13 * GB) == (100, 100, 0, 100, False)
    assert of([blocks((20, 90), (100, 200))], 100, 200, 1000, 10 * GB)[4]


def test_launches_of_an_op_share_its_bytes_by_time():
    """A preparation of 10 ns by one block, then 4 blocks of 90 ns that started early."""
    own = [blocks((0, 10)), blocks(*[(4, 100)] * 4)]
    times, rates = rate_curve(own, 0, 370)
    assert rates[times[:-1] == 0] == [1.0] and rates[times[:-1] == 50].size == 0
    assert rates[(times[:-1] <= 50) & (times[1:] > 50)] == [4.0]
    assert of(own, 0, 100, 370, 5 * GB) == (100, 10, 0, 10, True)


@pytest.mark.parametrize("seed", range(4))
def test_the_curve_has_all_bytes_and_a_sample_of_blocks_is_alike(seed):
    rng = np.random.default_rng(seed)
    starts = np.sort(rng.integers(0, 10_000, 3000))
    ends = starts + rng.integers(1000, 1400, 3000)
    times, rates = rate_curve([(starts, ends)], 0, 1e6)
    assert (np.diff(times) * rates).sum() == pytest.approx(1e6) and rates.min() > -1e-6
    whole = ramp([(starts, ends)], 0, 12_000, 1e6, 110 * GB)
    part = ramp([(starts[::7], ends[::7])], 0, 12_000, 1e6, 110 * GB)
    assert whole.reached and part.reached and 0 < whole.below < whole.time
    assert part.below == pytest.approx(whole.below, abs=600)
    assert part.up == pytest.approx(whole.up, abs=300)


def test_large_times_lose_nothing():
    at = 4 * 10**15
    starts, ends = blocks((at + 100, at + 200))
    assert of([(starts, ends)], at, at + 250, 100, GB) == (250, 100, 50, 150, True)


def test_resolution_of_the_clock():
    assert clock_resolution(np.array([64, 0, 96, 64, 1024])) == 32
    assert clock_resolution(np.array([7, 7])) == clock_resolution(np.array([], np.int64)) == 0


# --------------------------------------------------------------------------- recorder and profile


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return tiny.write_tiny(tmp_path_factory.mktemp("ramps") / "m.gguf", "llama")


@pytest.fixture
def recording(monkeypatch):
    """The reference backend records blocks: 10 that run from the middle to the end of each step.

    Its bandwidth is measured as 1 GB/s. Steps of the op ``embed`` call a library.
    """
    backend = find("reference")
    monkeypatch.setattr(backend, "block_times", True)
    known = SimpleNamespace(
        bytes_s=lambda threads=0: 1e9, peak_flop_s=lambda kind, threads=0: 0.0, date="2026-01-01",
        is_fresh=lambda: True, remeasure_reason=lambda: "",
    )  # fmt: skip
    monkeypatch.setattr(roofline, "load_cached", lambda name: known)
    seen = []

    def record(segment, steps, log: TimestampLog) -> None:
        count = len(steps)
        ends = np.arange(count + 1) * 1000 + 32
        log.runs[-1] = ends, ends[:-1]
        if log.blocks is None:
            return
        made = [
            (BlockTimes(np.full(10, at + 512), np.full(10, at + 1000), 3),)
            for at in ends[:-1].tolist()
        ]
        calls = [step.node.op.startswith("embed") for step in steps]
        log.blocks.append([None if c else m for c, m in zip(calls, made)])
        seen.append(segment)

    class Recording:
        def __init__(self, segment, steps) -> None:
            self.segment, self.steps = segment, steps

        def run(self, log) -> None:
            self.segment.run(log)
            if log is not None:
                record(self, self.steps, log)

    original, made = RampRecorder.run, {}

    def run(self, plan, segments, env) -> None:
        own = [(made.setdefault(s, Recording(s, steps)), steps) for s, steps in segments]
        original(self, plan, own, env)

    monkeypatch.setattr(RampRecorder, "run", run)
    return seen


@pytest.fixture
def found(path, recording):
    with graphllm.load(path, device="reference", context=128) as llm:
        yield llm.profile(list(range(3, 12)), 20, 1, ramps=True)


def test_every_step_has_ramps(found, recording):
    decode = found["decode"].ramps
    assert decode.runs == MAX_RUNS and found["prefill"].ramps.runs == 1
    assert len(recording) == MAX_RUNS + 1 + 1 + 3  # and those of the warm-up
    assert [s.row.op for s in decode.steps] == [row.op for row in found["decode"].rows]
    for step in decode.steps:
        if step.row.op.startswith("embed"):
            assert not step.calls
            continue
        assert len(step.calls) == MAX_RUNS and step.every == 3
        nbytes = step.row.bytes / MAX_RUNS
        for each in step.calls:
            assert each.time == 1000 and each.reached == (nbytes / 488 >= 0.8), step.row
            if each.reached:
                assert (each.up, each.down, each.below) == (512, 0, 512)
    reached = {each.reached for step in decode.steps for each in step.calls}
    assert reached == {False, True}


def test_the_table_groups_as_the_profile_does(found):
    text = found.table(by="op")
    (table,) = (part for part in text.split("\n\n") if part.startswith("decode, ramps"))
    lines = table.splitlines()
    assert lines[0] == "decode, ramps: memory below 80% of 1 GB/s; 16 runs"
    sums = found["decode"].ramps.totals("op")
    assert len(lines) == 2 + len(sums) + 1 + 4 + 3
    for line, (name, total) in zip(lines[2:], sums.items()):
        calls, ms, each, up, down, below, never = line.removeprefix(name).split()
        assert (int(calls), float(each)) == (total.calls // 16, 1.0)
        assert float(ms) == pytest.approx(total.ns / 16 / 1e6, abs=1e-3)
        assert (up, down) == (("0.51", "0.00") if total.reached else ("-", "-"))
        assert below == f"{total.below / total.ns:.0%}"
        assert never == f"{1 - total.reached / total.calls:.0%}"
    assert lines[2 + len(sums)].startswith("all ")
    assert "advances by 0.49 us" in table and "one in up to 3 blocks" in table
    assert lines[-1].startswith("without ramps (library calls, other devices): embed")
    assert f"{len(sums) - 2} more" in found.table(top=2)


def test_the_report_has_them(found, path):
    report = json.loads(json.dumps(found.as_dict()))
    decode = report["phases"][1]["ramps"]
    assert {k: decode[k] for k in ("level", "bytes_s", "resolution", "runs")} == {
        "level": 0.8, "bytes_s": 1e9, "resolution": 488, "runs": 16,
    }  # fmt: skip
    steps = [step for step in found["decode"].ramps.steps if step.calls]
    assert [row["op"] for row in decode["rows"]] == [step.row.op for step in steps]
    for row in decode["rows"]:
        assert row["calls"] == 16 and row["ns"] == 16_000 and row["every"] == 3
        assert row["up"] == 512 * row["reached"] and row["below"] <= row["ns"]
    assert render_page(report) and trace(report)
    with graphllm.load(path, device="reference", context=128) as llm:
        plain = llm.profile([3, 4, 5], 2, 1)
    assert "ramps" not in plain.as_dict()["phases"][0] and "ramps" not in plain.table()


def test_runs_beyond_the_first_are_plain(path, recording):
    with graphllm.load(path, device="reference", context=128) as llm:
        plan = llm.engine.decode_plan()
        llm.profile([3, 4, 5], 2, 1)
        own = RampRecorder(1e9, 2)
        env = {"T": 1, "S": 1, "Q": 2, "N": 1}
        for _ in range(5):
            own.run(plan, llm.executor.segments(plan), env)
        assert len(own.runs) == 2 == own.ramps().runs
        none = RampRecorder(1e9, 0)
        none.run(plan, llm.executor.segments(plan), env)
        assert none.ramps().runs == 0 and none.ramps().resolution == 0
        times = Recorder()
        times.run(plan, llm.executor.segments(plan), env)
        assert len(times.runs) == 1


def test_a_backend_without_block_times_is_refused(path, monkeypatch):
    asked = ["profile", str(path), "-n", "2", "-r", "1", "--device", "cpu", "--ramps"]
    result = CliRunner().invoke(app, asked)
    assert isinstance(result.exception, RequestError) and not result.output
    want = "ramps = True needs a GPU of CUDA, whose kernels record them; in use: cpu, reference"
    assert error_message(result.exception) == f"{want} (--ramps)"
    monkeypatch.setattr(find("cpu"), "block_times", True)
    monkeypatch.setattr(roofline, "load_cached", lambda name: None)
    with graphllm.load(path, device="cpu", context=64) as llm:
        with pytest.raises(RequestError, match="bandwidth of cpu: run graphllm doctor --measure"):
            llm.profile([3, 4, 5], 2, 1, ramps=True)
        with pytest.raises(RequestError, match="ramps = 1"):
            llm.profile([3, 4, 5], 2, 1, ramps=1)
