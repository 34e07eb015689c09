"""Times of thread blocks: their entries in plans without a GPU, and on a GPU what is recorded."""

from __future__ import annotations

import ctypes
import itertools
from dataclasses import replace
from math import prod
from types import SimpleNamespace

import numpy as np
import pytest
from cuda_cases import need_gpu
from paper_cuda import Empty, paper_fixture  # noqa: F401
from windowed_model import CONTEXT, GREEDY, IDS, generate_ids, make_engine, windowed

import graphllm
from graphllm import ops
from graphllm.api import LLM
from graphllm.backends import TimestampLog
from graphllm.backends.cuda.runtime import block_times
from graphllm.backends.cuda.runtime.block_times import ENTRY, MAX_BLOCKS, BlockEntries, BlockTable
from graphllm.backends.cuda.runtime.source import SUPPORT
from graphllm.backends.cuda.runtime.work import HostCall, Launch
from graphllm.checkpoints.model_shapes import SHAPES
from graphllm.graph.tensor import Var, feed, weight
from graphllm.loading.load import build_decoder
from graphllm.model.decoder import Limits
from graphllm.profiler import roofline
from graphllm.profiler.ramp_record import RampRecorder
from graphllm.profiler.record import Recorder
from graphllm.runtime.executor import Executor
from graphllm.weights import Arrays

# ------------------------------------------------------------------------------------------ entries


def launch(*grid: int) -> Launch:
    return Launch(SUPPORT["read_clock"], grid, (32,), ())


@pytest.mark.parametrize("count", [1, 2, 4095, 4096, 4097, 8192, 12_289, 1_000_003])
def test_a_sample_of_the_blocks_is_even_and_bounded(count):
    own = BlockEntries.of(launch(count), 7)
    recorded = range(0, count, own.every)
    assert own.count == len(recorded) <= MAX_BLOCKS and own.every % 2 == 1
    assert own.every == 1 if count <= MAX_BLOCKS else own.count > MAX_BLOCKS / 4
    # The largest index that a kernel stores to: block / every.
    assert (count - 1) // own.every == own.count - 1


def test_every_column_of_an_even_grid_is_sampled():
    own = BlockEntries.of(launch(2, 4096), 0)
    assert {block % 2 for block in range(0, 8192, own.every)} == {0, 1}


def test_entries_of_a_table_are_read_by_step():
    work = [
        [launch(3), launch(2, 2)], [HostCall(lambda: None), launch(5)], [launch(0, 4)], [launch(1)],
    ]  # fmt: skip
    table = BlockTable(work)
    assert table.count == 3 + 4 + 5 + 1 and table.nbytes == 16 * 13
    assert table.find(2, 0) is None and table.find(1, 0) is None
    entries = np.zeros(table.count, ENTRY)
    entries["start"], entries["end"] = np.arange(13), np.arange(13) + 100
    first, calls, empty, last = table.read(entries.view(np.uint8), 1000)
    assert calls is None and empty == ()
    assert [each.starts.tolist() for each in first] == [[1000, 1001, 1002], [*range(1003, 1007)]]
    assert last[0].ends.tolist() == [1112] and last[0].every == 1
    argument = table.find(3, 0).argument(1 << 40)
    assert argument == ((1 << 40) + 16 * 12).to_bytes(8, "little") + (1).to_bytes(8, "little")


@pytest.mark.parametrize("tokens", [1, 16, 512])
def test_the_entries_of_a_plan_do_not_overlap(tokens, paper):
    device = paper((9, 0))
    file = Empty(replace(SHAPES["llama-1b"], layers=2, vocab=512), "q4_0")
    llm = LLM(file, build_decoder(file), {"backends": ("cuda",)}, Limits(tokens=512))
    llm.executor.bind(llm.engine.plan(["ids.filtered"], tokens))
    ((steps, work),) = device.built[-1:]
    table, at = BlockTable(work), 0
    for step, part in enumerate(work):
        for index, each in enumerate(part):
            own = table.find(step, index)
            if isinstance(each, HostCall) or 0 in each.grid:
                assert own is None
                continue
            assert own.first == at
            assert own.count == -(-prod(each.grid) // own.every)
            at += own.count
    assert at == table.count > len(steps)
    assert table.nbytes < 64 << 20  # of a plan


# ------------------------------------------------------------------------------- a simulated stream


class Memory:
    """A device buffer in host memory, at its own address."""

    def __init__(self, nbytes: int, stream: object) -> None:
        self.data = np.zeros(max(nbytes, 1), np.uint8)
        self.address, self.nbytes = self.data.ctypes.data, nbytes

    def __getitem__(self, where: slice) -> np.ndarray:
        return self.data[: self.nbytes][where].copy()


def at(address: int, count: int) -> np.ndarray:
    return np.ctypeslib.as_array((ctypes.c_int64 * count).from_address(address))


class Stream:
    """Runs launches one after the other, each for 1,000 ns, on the host.

    Block b of a launch starts b ns after the launch and ends b ns before its end.
    """

    def __init__(self) -> None:
        self.now, self.launched = 0, []
        self.captured: list[Launch] | None = None
        self.stream = SimpleNamespace(begin_capture=self.begin, end_capture=self.end)

    def begin(self) -> None:
        self.captured = []

    def end(self) -> SimpleNamespace:
        captured, self.captured = self.captured, None
        return SimpleNamespace(
            upload=lambda stream: None, launch=lambda stream: [self.run(each) for each in captured]
        )

    def use(self) -> None:
        pass

    def clock_offset(self) -> int:
        return 5000

    def prepare(self, launch: Launch):
        return lambda: self.run(launch)

    def run(self, launch: Launch) -> None:
        args = launch.args
        if self.captured is not None:
            self.captured.append(launch)
        elif launch.function.name == "begin_timestamps":
            at(args[0], 3 * args[1] + 3)[:] = [-1, -1, 0] * (args[1] + 1)
            at(args[0], 3)[[0, 2]] = self.now
        elif launch.function.name == "record_end":
            at(args[0], 3)[2] = self.now
        elif launch.function.name == "keep_timestamps":
            times, steps, kept, places, runs = args
            count = 3 * (steps + 1)
            done = at(runs, 1)
            at(kept + 8 * count * (int(done[0]) % places), count)[:] = at(times, count)
            done[0] += 1
        else:
            self.kernel(launch)

    def kernel(self, launch: Launch) -> None:
        self.launched.append(launch)
        place, sample = launch.args[-2:]
        own, blocks = at(place, 3), prod(launch.grid)
        own[0] = self.now if own[0] == -1 else min(own[0], self.now)
        to, every = int.from_bytes(sample[:8], "little"), int.from_bytes(sample[8:12], "little")
        for block in range(0, blocks, every):
            at(to + 16 * (block // every), 2)[:] = self.now + block, self.now + 1000 - block
        self.now += 1000
        own[2] = self.now


@pytest.mark.nvrtc  # CuPy without a GPU
def test_a_sequence_that_times_blocks(monkeypatch):
    """Builds and arguments of launches, and what the log has after each run."""
    from graphllm.backends.cuda.runtime import segment

    monkeypatch.setattr(segment, "Buffer", Memory)
    monkeypatch.setattr(block_times, "MAX_BLOCKS", 8)
    gpu, loaded = Stream(), []
    work = [
        [launch(3), launch(2, 2)], [HostCall(lambda: None), launch(5)], [launch(0, 4)],
        [launch(25)],
    ]  # fmt: skip
    made = segment.TimedSequence(gpu, work, lambda dim: 1, loaded.extend, True)
    log = TimestampLog(blocks=[])
    for run in range(3):
        begun = gpu.now + 5000
        made.recording_to(log)()
        log.collect()
        assert len(log.runs) == len(log.blocks) == run + 1
        first, calls, empty, last = log.blocks[run]
        ends, starts = log.runs[run]
        assert (ends - begun).tolist() == [0, 2000, 3000, 3000, 4000]
        assert (starts - begun).tolist() == [0, 2000, 3000, 3000]
        assert calls is None and empty == ()
        assert (first[0].starts - begun).tolist() == [0, 1, 2]
        assert (first[1].ends - begun).tolist() == [2000, 1999, 1998, 1997]
        assert (last[0].starts - begun).tolist() == [3000, 3005, 3010, 3015, 3020]
        assert (first[0].every, last[0].every) == (1, 5)
    defines = [dict(each.function.module.defines) for each in gpu.launched]
    assert all(each == {"TIMED_BUILD": "1", "BLOCK_TIMES": "1"} for each in defines)
    modules, launched = ({w.function.module for w in some} for some in (loaded, gpu.launched))
    assert modules >= launched


# ----------------------------------------------------------------------------------------- on a GPU


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return windowed(tmp_path_factory.mktemp("ramps"))


@pytest.fixture
def engine(path):
    need_gpu()
    return make_engine(path, backends=("cuda",))


def generated(engine, count: int, recorder) -> list[int]:
    """Ids whose decode steps ``recorder`` records."""
    engine.clear_cache()
    pair = Recorder(), recorder
    return list(itertools.islice(engine.generate(IDS[:20], GREEDY, (), profile=pair), count))


@pytest.mark.cuda
@pytest.mark.parametrize("most", [MAX_BLOCKS, 2])
def test_blocks_are_within_their_step(engine, most, monkeypatch):
    """Every block of every launch, or a sample, starts and ends while its step may run."""
    monkeypatch.setattr(block_times, "MAX_BLOCKS", most)
    generate_ids(engine, IDS[:20], 6)
    plan = engine.decode_plan()
    ((segment, steps),) = engine.executor.segments(plan)
    log = TimestampLog(blocks=[])
    for _ in range(4):  # launched, captured and replayed
        segment.run(log)
        log.collect()
    assert len(log.runs) == len(log.blocks) == 4
    assert segment.timed is None  # the build without blocks is another one
    for (ends, starts), blocks in zip(log.runs, log.blocks):
        assert len(blocks) == len(steps) and (np.diff(ends) >= 0).all()
        for index, (part, launches) in enumerate(zip(segment.work, blocks)):
            made = [each for each in part if isinstance(each, Launch) and 0 not in each.grid]
            assert len(launches) == len(made)
            for each, times in zip(made, launches):
                count = prod(each.grid)
                assert len(times.starts) == len(times.ends) == -(-count // times.every) <= most
                assert (times.starts <= times.ends).all()
                # The start of a step is that of its first block; others may be a bit earlier.
                assert times.starts.min() >= starts[index] - 2000
                assert times.ends.max() <= ends[index + 1]
                if times.every == 1:  # the last one to end
                    assert times.ends.max() >= ends[index] - 10_000
    assert {times.every for blocks in log.blocks for b in blocks for times in b} > {1} or most > 2


@pytest.mark.cuda
def test_recording_changes_no_token(engine, path):
    want = generate_ids(make_engine(path, backends=("cuda",)), IDS[:20], 30)
    for most in (8, 8, 64):
        own = RampRecorder(1e12, most)
        assert generated(engine, 30, own) == want
        ramps = own.ramps()
        assert min(most, 29) <= ramps.runs <= min(most, 31) and ramps.steps
        assert 0 < ramps.resolution <= 2000
        for step in ramps.steps:
            for each in step.calls:
                assert 0 <= each.up <= each.time and 0 <= each.down <= each.time
                assert each.up + each.down - 1e-3 <= each.below <= each.time + 1e-3 or (
                    not each.reached and each.below == each.time
                )
    ((segment, _),) = engine.executor.segments(engine.decode_plan())
    assert generated(engine, 30, Recorder()) == want and segment.timed is not None


@pytest.mark.cuda
@pytest.mark.usefixtures("engine")
def test_a_profile_with_ramps(path, monkeypatch):
    """Decode has ramps of its steps, whose times are those of the profile."""
    known = SimpleNamespace(
        bytes_s=lambda threads=0: 3e12, peak_flop_s=lambda kind, threads=0: 0.0, date="2026-01-01",
        is_fresh=lambda: True, remeasure_reason=lambda: "",
    )  # fmt: skip
    monkeypatch.setattr(roofline, "load_cached", lambda name: known)
    model_def = path.parent / "windowed.py"
    with graphllm.load(path, device="cuda", model_def=model_def, context=CONTEXT) as llm:
        found = llm.profile(IDS[:40], 24, 1, ramps=True)
    table = found.table()
    print(table)
    decode = found["decode"].ramps
    assert decode.runs == 16 and found["prefill"].ramps.runs >= 1
    timed = [step for step in decode.steps if step.calls]
    assert len(timed) > 0.9 * len(decode.steps)
    assert {len(step.calls) for step in timed} == {16}
    mean = sum(each.time for step in timed for each in step.calls) / 16
    profiled = sum(row.ns for row in found["decode"].rows) / 24
    assert 0.3 < mean / profiled < 3  # the same steps, timed alike
    assert "decode, ramps: memory below 80% of 3,000 GB/s; 16 runs" in table
    assert len(found.as_dict()["phases"][1]["ramps"]["rows"]) == len(timed)


@pytest.mark.cuda
@pytest.mark.usefixtures("engine")
def test_a_large_product_keeps_memory_busy():
    """A GEMV of 512 MB is above 80 % of 0.5 TB/s nearly all the time, and never of 100 TB/s."""
    rows, depth = 32_768, 8192
    y = ops.linear(feed("x", (Var("T", 0, 1), depth), "f32"), weight("w", (rows, depth), "f16"))
    executor = Executor(Arrays({"w": np.zeros((rows, depth), np.float16)}), ("cuda",))
    if executor.devices.of(executor.backends[0]).gpu.capability < (9, 0):
        pytest.skip("its memory may be slower")
    plan = executor.compile({"y": y})
    executor.run(plan, {"x": np.ones((1, depth), np.float32)}, {"T": 1})
    shares = []
    for bytes_s in (0.5e12, 100e12):
        own = RampRecorder(bytes_s, 4)
        for _ in range(4):
            own.run(plan, executor.segments(plan), {"T": 1})
        (call,) = [each.calls[-1] for each in own.ramps().steps if each.row.weight]
        print(bytes_s, call, own.ramps().resolution)
        shares.append(call.below / call.time)
    assert shares[0] < 0.2 and shares[1] == 1
