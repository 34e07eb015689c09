"""Asynchronous work on the GPU: steps ahead of the host, and copies in both directions."""

from __future__ import annotations

import itertools
import time

import numpy as np
import pytest
from cuda_cases import need_gpu
from windowed_model import CONTEXT, GREEDY, IDS, generate_ids, make_engine, windowed

from graphllm.backends import Options
from graphllm.backends.cuda import BACKEND
from graphllm.checkpoints.model_shapes import ModelShape
from graphllm.checkpoints.random_weights import RandomCheckpoint
from graphllm.engine.engine import Engine
from graphllm.graph.tensor import Meta
from graphllm.loading.load import build_decoder
from graphllm.model.decoder import Limits
from graphllm.profiler.record import Recorder
from graphllm.runtime.executor import Executor

SLACK = 200_000  # nanoseconds by which two clocks may differ

pytestmark = pytest.mark.cuda


@pytest.fixture(autouse=True)
def _gpu():
    need_gpu()


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return windowed(tmp_path_factory.mktemp("run"))


@pytest.fixture
def ahead(path):
    return make_engine(path, backends=("cuda",))


@pytest.fixture
def plain(path, monkeypatch):
    """An engine that waits for every step."""
    engine = make_engine(path, backends=("cuda",))
    engine.prepare()
    monkeypatch.setattr(engine.executor.devices["cuda"], "ring", lambda operand: None)
    return engine


def test_a_step_starts_before_the_last_one_is_read(ahead):
    generate_ids(ahead, IDS[:20], 4)
    env = {"T": 1, "S": 1, "Q": 2, "N": 1}
    assert ahead.executor.decode_loop(ahead.decode_plan(), {}, env, "ids").lookahead == 1


@pytest.mark.parametrize("length", [1, 16, 40, 119, 120])
def test_the_same_tokens_up_to_the_end_of_the_context(ahead, plain, length):
    have, want = (list(e.generate(IDS[:length], GREEDY, ())) for e in (ahead, plain))
    assert have == want and len(have) == CONTEXT - length + 1


def test_requests_after_unread_steps(ahead, plain):
    rng = np.random.default_rng(8)
    for _ in range(25):
        common, new = int(rng.integers(0, 90)), int(rng.integers(1, 25))
        prompt = [*IDS[:common], *(int(i) for i in rng.integers(3, 90, new))]
        count = int(rng.integers(1, CONTEXT + 1 - len(prompt)))
        assert generate_ids(ahead, prompt, count) == generate_ids(plain, prompt, count)


# ------------------------------------------------------------------------------------------ graphs


@pytest.mark.parametrize("kind", ["f16", "q8_0", "q4_k_m", "fp8", "w8a8"])
def test_long_steps_from_graphs_have_the_bits_of_launches(kind, monkeypatch):
    """Steps of more lengths than graphs are kept, in an order that captures, replays and drops."""
    file = RandomCheckpoint(ModelShape("llama", 2, 512, 8, 2, 1024, 512, context=1024), kind)
    decoder = build_decoder(file)
    executor = Executor(decoder.weights, ("cuda", "reference"), strict=True)
    engine = Engine(decoder, executor, Limits(tokens=512, context=1024))
    plan = engine.plan(["logits"], 512)
    lengths = [*[700, 600] * 5, 513, 1023, 900, 800, *[700] * 5]
    ids = [int(i) for i in np.random.default_rng(3).integers(0, 512, 1024)]

    def computed(graphs: int) -> tuple[list[np.ndarray], list[bool]]:
        monkeypatch.setattr("graphllm.backends.cuda.runtime.segment.MAX_GRAPHS", graphs)
        found, replayed = [], []
        for length in lengths:
            with engine.evaluation(ids[:length]) as sequence:
                for part in (ids[:512], ids[512:length]):
                    last = np.array([len(part) - 1])
                    found.append(sequence.append(plan, part, last, ("logits",))["logits"])
                    ((segment, _),) = executor.segments(plan)
                    replayed.append(segment.replays)
        return found, replayed

    want, launched = computed(0)
    have, replayed = computed(4)
    assert not any(launched)
    if kind == "w8a8":  # launches alone, which one graph replays at any length
        assert all(replayed[1:])
    else:
        assert all(replayed[6::2])  # steps of 512 tokens
        rest = [n for n, used in zip(lengths, replayed[1::2]) if used]
        assert rest == [700, 600] * 2 + [700] * 2
    for a, b in zip(have, want):
        np.testing.assert_array_equal(a.view(np.uint32), b.view(np.uint32))


@pytest.mark.parametrize("nbytes", [0, 1, (1 << 20) + 1, (32 << 20) - 1, (100 << 20) + 77])
def test_sent_bytes_arrive(nbytes):
    device = BACKEND.open_device(Options())
    data = np.random.default_rng(nbytes).integers(0, 256, nbytes, np.uint8)
    buffers = [device.prepare(None, data, Meta.of((nbytes,), "i8")) for _ in range(2)]
    for buffer in buffers:
        np.testing.assert_array_equal(buffer[:nbytes], data)


# -------------------------------------------------------------------------------------- timestamps


def noted(engine, count: int) -> tuple[list[int], list]:
    """Ids that are sampled while steps are timed, and the runs."""
    engine.clear_cache()
    times = Recorder(), Recorder()
    ids = list(itertools.islice(engine.generate(IDS[:20], GREEDY, (), profile=times), count))
    return ids, times[1].runs


def test_timed_steps_are_replayed_and_run_ahead(ahead, plain):
    want = generate_ids(plain, IDS[:20], 40)
    for _ in range(3):
        ids, runs = noted(ahead, 40)
        assert ids == want and 39 <= len(runs) <= 41  # the last steps may not be read
    ((segment, _),) = ahead.executor.segments(ahead.decode_plan())
    assert segment.timed.sequence.replayed and segment.timed.sequence.submissions == 1


def test_times_are_in_order_on_the_clock_of_the_host(ahead):
    noted(ahead, 5)
    begun = time.perf_counter_ns()
    _, runs = noted(ahead, 60)
    over, last = time.perf_counter_ns(), begun
    for run in runs:
        ((ends,), (starts,)) = run.ends, run.starts
        assert (np.diff(ends) >= 0).all() and (starts <= ends[1:]).all()
        assert last - SLACK <= ends[0] and ends[-1] <= over + SLACK
        assert (np.diff(ends) > 0).mean() > 0.9  # except steps that end with their predecessor
        last = int(ends[-1])


def test_more_runs_than_entries_of_the_timestamp_ring(ahead, monkeypatch):
    from graphllm.backends.cuda.runtime.segment import TimedSequence

    monkeypatch.setattr(TimedSequence, "RING_SIZE", 3)
    ids, runs = noted(ahead, 17)
    assert len(ids) == 17 and len(runs) >= 16
    ends = [int(run.ends[0][-1]) for run in runs]
    assert ends == sorted(ends)


def test_library_calls_have_times(ahead):
    """Prefill is not one graph, and uses cuBLASLt."""
    engine, times = ahead, (Recorder(), Recorder())
    for _ in range(2):
        engine.clear_cache()
        next(engine.generate(IDS[:100], GREEDY, (), profile=times))
    assert times[0].runs
    assert all(run.times.sum() > 0 and (run.times >= 0).all() for run in times[0].runs)


def test_runs_without_times_use_the_plain_build(ahead):
    generate_ids(ahead, IDS[:20], 4)
    ((segment, _),) = ahead.executor.segments(ahead.decode_plan())
    assert segment.timed is None
    work = [w for part in segment.work for w in part]
    assert not any("TIMED_BUILD" in str(w.function.module) for w in work)


@pytest.mark.parametrize("staging_bytes", [None, 200_000])
def test_many_arrays_are_sent_at_once(staging_bytes, monkeypatch):
    """Small ones by a kernel, large ones and those at odd addresses alone; nothing else changes."""
    from graphllm.backends.cuda.runtime import staging

    if staging_bytes is not None:  # so that the two buffers are swapped
        monkeypatch.setattr(staging, "_STAGING_BYTES", staging_bytes)
    device = BACKEND.open_device(Options())
    stager, rng = staging.Stager(device.gpu), np.random.default_rng(5)
    sizes = [0, 1, 3, 4, 15, 16, 17, 100, 4095, 65_535, 65_536, 65_537, 150_000, *range(20, 60)]
    offsets, end = [], 0
    for size in sizes:
        offsets.append(end + (7 if size == 33 else 0))
        end += -(-size // 16) * 16 + 32
    target, want = device.alloc(end), np.zeros(end, np.uint8)
    for count in (len(sizes), 1, 2, 33):
        parts = []
        for size, offset in zip(sizes[-count:], offsets[-count:]):
            data = rng.integers(0, 256, size, np.uint8)
            want[offset : offset + size] = data
            parts.append((data, target.address + offset))
        stager.sender(parts)()
        for data, _ in parts:
            data[:] = 0  # the caller may change them at once
    assert (target[:] == want).all()
