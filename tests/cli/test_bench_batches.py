"""`graphllm bench -b`, `bench --load` and `plan -b`: many sequences, measured and predicted."""

from __future__ import annotations

import json
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from random import Random
from threading import Thread
from types import SimpleNamespace
from typing import Any

import pytest
import tiny_models as tiny
from running_server import Running
from typer.testing import CliRunner

import graphllm
from graphllm.checkpoints.random_weights import RandomCheckpoint
from graphllm.cli import app
from graphllm.cli.bench_batches import parse_tests
from graphllm.cli.load_spec import parse_load
from graphllm.engine.request import Sampling
from graphllm.errors import RequestError
from graphllm.profiler import (
    batch_bench,
    batch_prediction,
    http_costs,
    http_load,
    load_prediction,
    load_test,
    prediction,
    roofline,
)
from graphllm.profiler.batch_bench import BatchTest
from graphllm.profiler.batch_limits import check_batch, kv_bytes, kv_memory_of, sequence_bytes
from graphllm.profiler.bench import Test, filler_prompts, step_bytes
from graphllm.profiler.load_prediction import predict_load
from graphllm.profiler.load_requests import (
    RANDOM_IDS,
    LoadRequest,
    read_requests,
    synthetic_requests,
)
from graphllm.profiler.record import Recorder
from graphllm.profiler.roofline import Ceilings
from graphllm.runtime import executor

GB_S, STEP = 10e9, 5e-6


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return tiny.write_tiny(tmp_path_factory.mktemp("batches") / "m.gguf", "gemma3")


@pytest.fixture(scope="module")
def llm(path):
    return graphllm.load(path, device="cpu", threads=1, context=128, max_sequences=4)


@pytest.fixture
def measured(monkeypatch):
    """Give the CPU ceilings at which only bytes and the fixed overhead count."""
    flops = {kind: {1: 1e18} for kind in ("float", "integer")}
    own = Ceilings("cpu", "", "2026-01-01T00:00:00+00:00", 1, {"read": {1: GB_S}}, flops, {1: STEP})
    monkeypatch.setattr(roofline, "load_cached", lambda name: own)
    monkeypatch.setattr(roofline, "load_or_measure", lambda name, show: own)


def call(*words: str) -> str:
    result = CliRunner().invoke(app, [*words])
    assert result.exit_code == 0, (result.output, result.exception)
    return result.stdout


# ----------------------------------------------------------------------------------------- batches


def test_prompts_share_no_prefix():
    """Also beyond the size of the vocabulary, and between repetitions."""
    every = [tuple(ids[:2]) for number in range(3) for ids in filler_prompts(40, 9, 90, number)]
    assert len(set(every)) == len(every) == 120


def test_a_test_runs_pure_phases(llm):
    """One prefill step, one that continues all requests, and a decode step for each token."""
    test, engine = BatchTest(16, 6, 4), llm.engine
    before = engine.batcher.steps
    prefill, decode = batch_bench.time_once(engine, test, 0)
    assert engine.batcher.steps - before == 1 + 1 + 6 and min(prefill, decode) > 0


def test_result_has_the_keys_of_llama_batched_bench(llm):
    seen = []
    found = batch_bench.run(llm, BatchTest(16, 6, 3), 2, seen.append).as_dict()
    assert seen == [0, 1, 2, 3]
    assert (found["pp"], found["tg"], found["pl"], found["n_kv"]) == (16, 6, 3, 3 * 22)
    assert found["speed_pp"] == pytest.approx(3 * 16 / found["t_pp"])
    assert found["speed_tg"] == pytest.approx(3 * 6 / found["t_tg"])
    assert found["speed"] == pytest.approx(found["n_kv"] / found["t"])
    assert found["t"] == pytest.approx(found["t_pp"] + found["t_tg"], rel=0.5)
    moved = step_bytes(llm.engine.decode_plan(3), 16 + 1 + 3, 3)
    assert found["gb_s"] == pytest.approx(moved * 6 / found["t_tg"] / 1e9)


def test_batches_that_do_not_fit(llm, path, monkeypatch):
    groups, limits = llm.decoder.caches, llm.limits
    check_batch(groups, limits, [(100, 28)] * 4)
    for requests, words in (
        ([(100, 29)], "100 prompt tokens and 29 decoded tokens exceed the context of 128"),
        ([(9, 1)] * 5, "5 requests are more than the 4"),
        ([(0, 1)], "no tokens"),
    ):
        with pytest.raises(RequestError, match=words):
            check_batch(groups, limits, requests)
    monkeypatch.setattr(RandomCheckpoint, "raw", lambda *_: pytest.fail("a weight was loaded"))
    for words, message in (
        (("-p", "3000", "-b", "1,400"), r"400 sequences of 3\d+ tokens need [\d.]+ GB of KV cache"),
        (("-p", "9000", "-b", "1"), "exceed the model's context of 4096"),
        (("-b", "600"), "a step computes at most 512 tokens"),
    ):
        asked = ["bench", "--random", "llama-7b", *words, "--no-ceiling", "--device", "cpu"]
        failed = CliRunner().invoke(app, asked)
        assert isinstance(failed.exception, RequestError)
        with pytest.raises(RequestError, match=message):
            raise failed.exception


def test_kv_memory_is_that_of_the_pools(path):
    """With the bytes that a batch needs, it runs without preemption, and one more does not."""
    given = {"context": 128, "max_sequences": 4, "device": "cpu"}
    defaults = {"kv_type": None, "threads": 1, "linear": "auto", "no_fuse": (), "no_kernels": ()}
    rest = {"model_def": None, "type": None, "place": None, "strict": False}
    rest |= {"deterministic": False, "low_mem": False, "prefill": "auto"}
    needed = kv_memory_of(path, given | defaults | rest, [(40, 4), (128, 1)])
    llm = graphllm.load(path, threads=1, kv_memory=needed, **given)
    groups = llm.decoder.caches
    assert needed == kv_bytes(groups, llm.limits, [40] * 4)
    pools = [node.meta.bound().nbytes for node in llm.decoder.pools.values()]
    assert needed == sum(pools)
    batch_bench.time_once(llm.engine, BatchTest(30, 8, 4), 0)  # checks that all run at once
    assert not llm.engine.scheduler.preempted
    with pytest.raises(RequestError, match="blocks of the KV cache"):
        check_batch(groups, replace(llm.limits, kv_blocks=7), [(100, 28)] * 4)


@pytest.mark.parametrize("words", [("-n", "0"), ("-p", "0"), ("-b", "0"), ("-b", "1", "-d", "9")])
def test_unusable_lists(path, words):
    failed = CliRunner().invoke(app, ["bench", str(path), "-b", "2", *words, "--no-ceiling"])
    assert isinstance(failed.exception, RequestError) and words[-2] in str(failed.exception)


def test_combinations():
    assert [t.name for t in parse_tests([8, 16], [4], [1, 2])] == [
        "pp8 tg4 x 1", "pp8 tg4 x 2", "pp16 tg4 x 1", "pp16 tg4 x 2",
    ]  # fmt: skip


def test_command_line_of_batches(path, measured):
    words = ("bench", str(path), "-p", "12", "-n", "3", "-b", "1,3", "-r", "1", "-t", "1")
    words = (*words, "--device", "cpu", "--ceiling")
    table = call(*words).splitlines()
    assert table[1].split("|")[1:7] == [
        "     PP ", "     TG ", "    B ", "    N_KV ", "   T_PP s ", "         S_PP t/s ",
    ]  # fmt: skip
    assert [row.split("|")[3].strip() for row in table[3:]] == ["1", "3"]
    rows = json.loads(call(*words, "-o", "json"))
    assert [row["pl"] for row in rows] == [1, 3]
    assert all(row["predicted_tg"] > 0 and row["share"] > 0 for row in rows)
    head, *lines = call(*words, "-o", "csv").splitlines()
    assert "speed_tg" in head and "samples" not in head and len(lines) == 2


# -------------------------------------------------------------------------------------- prediction


@pytest.mark.parametrize("lengths", [[5], [128], [60, 60, 50, 9], [1, 2, 100, 128]])
def test_predicted_prefill_steps_are_those_of_the_engine(llm, lengths):
    engine, recorder = llm.engine, Recorder()
    with engine.lock.hold("a test"):
        engine.clear_cache()
        prompts = filler_prompts(len(lengths), 128, engine.vocab)
        requests = [
            engine.submit(ids[:length], Sampling(seed=0, max_tokens=1), (), ())
            for ids, length in zip(prompts, lengths)
        ]
        while not all(each.done for each in requests):
            engine.step((recorder, recorder))
    names = ("T", "S", "kv_sum")
    ran = [[run.env.get(name) for name in names] for run in recorder.runs]
    steps = batch_prediction.prefill_steps(engine.limits, lengths)
    assert ran == [[env[name] for name in names] for env in steps]


def test_a_batch_of_one_is_predicted_as_a_test(llm, measured):
    engine = llm.engine
    step = batch_prediction.predict_step(engine, [20], 1)
    assert step == pytest.approx(prediction.predict_test(engine, Test(0, 1, 20), 1), rel=0.01)
    assert batch_prediction.predict_prefill(engine, [40], 1) == pytest.approx(
        prediction.predict_test(engine, Test(40, 0), 1), rel=0.05
    )


def test_a_decode_step_of_many_reads_the_weights_once(llm, measured):
    """With unlimited arithmetic, it takes the time of its bytes and the overhead of its steps."""
    engine = llm.engine
    plan = engine.decode_plan(4)
    want = step_bytes(plan, 31, 4) / GB_S + len(plan.steps) * STEP
    assert batch_prediction.predict_step(engine, [30] * 4, 1) == pytest.approx(want)
    assert step_bytes(plan, 31, 4) < 2 * step_bytes(engine.decode_plan(), 31)


def test_plan_predicts_batches(path, measured):
    found = graphllm.dry_run(path, device="cpu", threads=1, batches=[1, 4], depth=30)
    one, four = found.batches
    assert (one.sequences, four.sequences, four.depth) == (1, 4, 30)
    assert four.step_s < 4 * one.step_s and four.prefill_s > one.prefill_s
    budget = 10 * four.sequence_bytes
    few = graphllm.dry_run(path, device="cpu", kv_memory=budget, batches=[4], depth=30, context=64)
    assert few.batches[0].fits == budget // few.batches[0].sequence_bytes >= 10
    llm = graphllm.load(path, device="cpu", max_sequences=4, context=64)
    assert few.batches[0].sequence_bytes == sequence_bytes(llm.decoder.caches, llm.limits, 31)
    lines = call("plan", str(path), "--device", "cpu", "-b", "1,4", "-d", "30").splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("sequences "))
    assert [line.split()[0] for line in lines[start + 1 : start + 3]] == ["1", "4"]
    report = json.loads(call("plan", str(path), "--device", "cpu", "-b", "4", "--json"))
    assert report["batches"][0]["sequences"] == 4


# ------------------------------------------------------------------------------------------- load


def test_synthetic_requests_are_replayable():
    made = [synthetic_requests(400, 20.0, [3, 9], [2, 4], 90, seed) for seed in (5, 5, 6)]
    assert made[0] == made[1] != made[2]
    times = [each.arrival_s for each in made[0]]
    assert times == sorted(times) and times[-1] == pytest.approx(400 / 20, rel=0.15)
    assert {len(each.prompt) for each in made[0]} == {3, 9}
    assert {each.max_tokens for each in made[0]} == {2, 4}
    assert {each.arrival_s for each in synthetic_requests(5, 0.0, [3], [2], 90, 0)} == {0.0}


def test_requests_of_a_file(tmp_path):
    rows = [
        {"arrival_s": 2, "prompt_tokens": 5, "max_tokens": 3},
        {"arrival_s": 0.5, "prompt": [4, 5], "max_tokens": 1},
        {"prompt": "ab", "max_tokens": 2},
    ]
    file = tmp_path / "load.jsonl"
    file.write_text("\n".join(map(json.dumps, rows)) + "\n\n")
    found = read_requests(file, lambda text: [ord(c) - 90 for c in text], 1)
    assert [each.arrival_s for each in found] == [0, 0.5, 2]
    assert [each.prompt for each in found[:2]] == [[7, 8], [4, 5]]
    ids = Random(1).choices(range(RANDOM_IDS), k=5)
    assert found[2].prompt == ids and found[2].max_tokens == 3


@pytest.mark.parametrize(
    "line, words",
    [
        ("{", "load.jsonl:1: not JSON"),
        ("3", "not an object"),
        ('{"prompt_tokens": 3}', "max_tokens = None"),
        ('{"prompt_tokens": 3, "max_tokens": 0}', "max_tokens = 0"),
        ('{"prompt_tokens": true, "max_tokens": 1}', "prompt_tokens = True"),
        ('{"max_tokens": 1}', "give prompt or prompt_tokens"),
        ('{"prompt": [-1], "max_tokens": 1}', "string or token ids"),
        ('{"prompt": [], "max_tokens": 1}', "the prompt is empty"),
        ('{"prompt": [1], "max_tokens": 1, "arrival_s": -1}', "arrival_s = -1"),
        ('{"prompt": [1], "max_tokens": 1, "at": 1}', "unknown field 'at'"),
        ("", "contains no request"),
    ],
)
def test_invalid_requests(tmp_path, line, words):
    file = tmp_path / "load.jsonl"
    file.write_text(line + "\n")
    with pytest.raises(RequestError, match=words):
        read_requests(file, lambda text: [], 0)


def test_a_load_test_sleeps_between_arrivals(llm, monkeypatch):
    """And times count from the arrivals: requests that share a prompt find it in the cache."""
    ids = filler_prompts(1, 100, llm.engine.vocab)[0]
    requests = [LoadRequest(0.0, ids, 3), LoadRequest(0.0, ids[:9], 1), LoadRequest(0.4, ids, 5)]
    slept, sleep = [], load_test.time.sleep
    monkeypatch.setattr(load_test.time, "sleep", lambda s: slept.append(s) or sleep(s))
    found = load_test.run(llm, requests, Sampling(seed=3), lambda done: None)
    assert 1 <= len(slept) <= 3 and 0 < sum(slept) <= 0.4  # no busy waiting
    assert [each.output_tokens for each in found.requests] == [3, 1, 5]
    assert found.wall_s > 0.4 > found.busy_s > 0
    for each in found.requests:
        assert 0 <= each.queue_s < each.ttft_s <= each.end_s
        assert each.end_s == pytest.approx(each.ttft_s + sum(each.intervals_s))
    assert found.requests[2].cached_tokens >= 64
    cached = sum(each.cached_tokens for each in found.requests)
    assert found.hit_rate == pytest.approx(cached / 209)
    # The third request decodes alone: 4 of its steps read the weights, as do those with a prompt.
    one = step_bytes(llm.engine.decode_plan(), 1)
    assert found.nbytes >= found.steps * one * 0.8 and found.preemptions == 0
    whole = found.as_dict()
    assert whole["output_tok_s"] == pytest.approx(9 / found.wall_s)
    assert whole["itl_s"]["p50"] <= whole["itl_s"]["p90"] <= whole["itl_s"]["p99"]


def test_command_line_of_a_load_test(path, tmp_path):
    words = ("bench", str(path), "--load", "rate=0,prompt=4-9,output=2-3,requests=6,parallel=4")
    words = (*words, "-t", "1", "--no-ceiling", "--device", "cpu")
    found = json.loads(call(*words, "-o", "json"))
    assert len(found["requests"]) == 6 and found["max_sequences"] == 4
    assert found["predicted"] is None and "time to first token, p90" in call(*words)
    assert found["phases"]["decode"]["steps"] >= 2 and found["phases"]["prefill"]["steps"] >= 2
    assert "decode step, mean, ms" in call(*words)
    file = tmp_path / "load.jsonl"
    file.write_text('{"prompt_tokens": 7, "max_tokens": 2}\n')
    text = call("bench", str(path), "--load", str(file), "--no-ceiling", "--device", "cpu")
    assert "1 requests, 7 prompt and 2 output tokens" in text
    for wrong in (("-b", "2"), ("-p", "3"), ("-d", "4"), ("-o", "csv")):
        assert isinstance(CliRunner().invoke(app, [*words, *wrong]).exception, RequestError)


@pytest.mark.parametrize(
    "text, words",
    [
        ("rate=1,prompt=2", "output= is missing"),
        ("rate=1,rate=1,prompt=2,output=3", "'rate=1' must be one of"),
        ("rate=1,prompts=2,output=3", "'prompts=2' must be one of"),
        ("rate=inf,prompt=2,output=3", "rate=inf must be a number"),
        ("rate=1,prompt=0-3,output=3", "must be at least 1"),
        ("rate=1,prompt=2,output=3,requests=0", "one number above 0"),
        ("rate=1,prompt=2,output=3,parallel=1-3", "one number above 0"),
        ("rate=1,prompt=2,output=300", "exceeds the context"),
    ],
)
def test_invalid_loads(path, text, words):
    result = CliRunner().invoke(app, ["plan", str(path), "-c", "128", "--load", text])
    assert isinstance(result.exception, RequestError) and words in str(result.exception)


# -------------------------------------------------------------------------------- predicted loads


def test_a_predicted_load_is_scheduled_as_the_engine_schedules_it(llm, measured):
    """All at once: the simulated steps are those that the engine runs, and end as they do."""
    load = parse_load("rate=0,prompt=20-60,output=1-9,requests=7,parallel=4,seed=2")
    steps = llm.engine.batcher.steps
    ran = load_test.run(llm, load.requests, Sampling(seed=0), lambda done: None)
    found = predict_load(llm.engine, llm.decoder.caches, load.requests, 1)
    assert found.steps == ran.steps and llm.engine.batcher.steps > steps
    assert [(each.prompt_tokens, each.output_tokens) for each in found.times.requests] == [
        (each.prompt_tokens, each.output_tokens) for each in ran.requests
    ]
    order = [sorted(range(7), key=lambda i: times[i].end_s) for times in
             (found.times.requests, ran.requests)]  # fmt: skip
    assert order[0] == order[1]
    llm.engine.manager.check()
    assert llm.engine.scheduler.running == llm.engine.scheduler.waiting == 0
    assert set(llm.engine.manager.held.values()) == {0}


def test_predicted_times_add_up(llm, measured):
    """One request takes the predicted times of its steps; a rate is kept up to the capacity."""
    alone = LoadRequest(1.5, filler_prompts(1, 40, 90)[0], 5)
    (found,) = predict_load(llm.engine, llm.decoder.caches, [alone], 1).times.requests
    prefill = batch_prediction.predict_prefill(llm.engine, [40], 1)
    step = batch_prediction.predict_step(llm.engine, [42], 1)
    host = load_prediction._HOST_S + load_prediction._HOST_SEQUENCE_S
    assert found.queue_s == 0 and found.arrival_s == 1.5
    assert found.ttft_s == pytest.approx(prefill + host, rel=0.05)
    assert found.end_s == pytest.approx(found.ttft_s + 4 * (step + host), rel=0.05)
    whole = predict(llm, "rate=0,prompt=40,output=30,requests=80,parallel=4")
    capacity = whole.capacity
    assert whole.times.rates["requests_s"] == pytest.approx(capacity.requests_s, rel=0.1)
    assert {kind for kind, own in whole.phases.items() if own.steps} == {"prefill", "decode"}
    assert whole.busy_s == pytest.approx(whole.times.wall_s) and capacity.full == "compute"
    slow = predict(
        llm, f"rate={capacity.requests_s / 4},prompt=40,output=30,requests=80,parallel=4"
    )
    assert slow.times.rates["requests_s"] == pytest.approx(capacity.requests_s / 4, rel=0.3)
    assert slow.times.percentiles()["ttft_s"]["p50"] < whole.times.percentiles()["ttft_s"]["p50"]


def test_the_host_works_while_a_device_decodes():
    """The time of the host is hidden where a step is launched before the last one is read."""

    def plan(*memories: str) -> SimpleNamespace:
        return SimpleNamespace(steps=[SimpleNamespace(memory=memory) for memory in memories])

    host = load_prediction._HOST_S + 8 * load_prediction._HOST_SEQUENCE_S
    device, split, own = plan("gpu", "gpu"), plan("gpu", "host"), plan("host", "host")
    for long in (3 * host, host / 3):
        found = [
            load_prediction.with_host_time(long, each, 8, ahead)
            for each, ahead in ((device, True), (device, False), (split, True), (own, True))
        ]
        assert found == [max(long, host), long + host, long + host, long + host]
    each = load_prediction._ENQUEUE_S  # of a prefill step, whose ops a device may wait for
    enqueued = [
        load_prediction.with_enqueueing(seconds, of)
        for of in (device, split, own)
        for seconds in (0.5 * each, 9 * each)
    ]
    assert enqueued == [2 * each, 9 * each, each, 9 * each, 0.5 * each, 9 * each]


@pytest.mark.parametrize("prompt", ["2-90", "100-120"])
@pytest.mark.parametrize("rate", ["0", "300"])
def test_a_load_test_compiles_nothing(path, rate, prompt, monkeypatch):
    """Nor binds: a warm-up has done it, also for prompts of which a step does not hold six."""
    own = graphllm.load(path, device="cpu", threads=1, context=128, max_sequences=6)
    load = parse_load(f"rate={rate},prompt={prompt},output=1-8,requests=40,parallel=6,seed=1")
    warm_up = load_test.warm_up

    def refuse(*args: object) -> None:
        raise AssertionError("a plan was compiled, or bound")

    def then_refuse(*args: Any) -> None:
        warm_up(*args)
        monkeypatch.setattr(executor, "compile_plan", refuse)
        monkeypatch.setattr(own.engine.executor, "_bind", refuse)

    monkeypatch.setattr(load_test, "warm_up", then_refuse)
    found = load_test.run(own, load.requests, Sampling(seed=0), lambda done: None)
    assert len(found.requests) == 40


def predict(llm, text: str) -> load_prediction.LoadPrediction:
    return predict_load(llm.engine, llm.decoder.caches, parse_load(text).requests, 1)


def test_a_pool_that_is_full_is_predicted(path, measured):
    """Before any weight is loaded, with the preemptions that it costs."""
    load = parse_load("rate=0,prompt=60,output=60,requests=12,parallel=8")
    own = {"context": 128, "device": "cpu", "threads": 1}
    wide = prediction.dry_run(path, **own, load=load).load
    narrow = prediction.dry_run(path, **own, load=load, kv_memory=350_000).load
    assert wide.capacity.full == "compute" and wide.preemptions == 0
    assert narrow.capacity.full == "KV cache" and narrow.capacity.pool_sequences < 8
    assert narrow.times.rates["output_tok_s"] < wide.times.rates["output_tok_s"]
    text = call("plan", str(path), "--load", "rate=5,prompt=9,output=4,requests=3")
    assert "time to first token, p99, ms" in text and "full at" in text
    found = json.loads(call("plan", str(path), "--json", "--load", "rate=5,prompt=9,output=4"))
    assert found["load"]["capacity"]["sequences"] == 16 and len(found["load"]["requests"]) == 100


# ------------------------------------------------------------------------------------ over HTTP


def test_http_on_the_cores_of_the_engine_is_predicted(llm, measured, monkeypatch):
    alone = LoadRequest(0.0, filler_prompts(1, 40, 90)[0], 5)
    costs = http_costs.HttpCosts(token_s=3.0, request_s=100.0)
    plain = predict_load(llm.engine, llm.decoder.caches, [alone], 1)
    shared = predict_load(llm.engine, llm.decoder.caches, [alone], 1, costs)
    (before,), (after,) = plain.times.requests, shared.times.requests
    assert after.ttft_s == pytest.approx(before.ttft_s + 103)
    assert after.end_s == pytest.approx(before.end_s + 100 + 5 * 3)
    assert shared.capacity.requests_s == pytest.approx(1 / (100 + 4 * 3), rel=0.01)
    assert plain.as_dict()["http"] is None and shared.as_dict()["http"]["token_s"] == 3
    monkeypatch.setattr(http_costs, "usable_cores", lambda: 2)
    assert http_costs.HttpCosts.on_shared_cores(1) is None
    own = http_costs.HttpCosts.on_shared_cores(2)
    assert 1e-6 < own.token_s < own.request_s < 1


@pytest.mark.parametrize(
    ("url", "local"),
    [
        ("http://127.0.0.1:80", True),
        ("http://[::1]:80/v1", True),
        ("http://localhost", True),
        ("http://10.0.0.1", False),
        ("https://example.org", False),
    ],
)
def test_a_server_on_this_machine_is_known(url, local):
    assert http_load.OpenAiServer(url).is_local is local


def test_a_server_is_measured_beside_its_prediction(path, measured, tmp_path):
    words = ("bench", str(path), "--load", "rate=200,prompt=9,output=2-5,requests=12,parallel=4")
    with graphllm.load(path, device="cpu", context=128, max_sequences=4) as llm:
        server = Running(llm, keys=["k"])
        url = f"http://127.0.0.1:{server.port}"
        found = json.loads(call(*words, "--url", url, "--api-key", "k", "-o", "json"))
        refused = CliRunner().invoke(app, [*words, "--url", f"{url}/v1"])
        lines = call("bench", *words[2:], "--url", f"{url}/v1/", "--api-key", "k").splitlines()
        file = tmp_path / "long.jsonl"
        file.write_text(
            '{"prompt_tokens": 5, "max_tokens": 1}\n{"prompt_tokens": 200, "max_tokens": 1}'
        )
        some = call("bench", "--load", str(file), "--url", url, "--api-key", "k")
        server.stop()
    assert found["server_model"] == "tiny" and found["failures"] == []
    load = parse_load(words[3])
    assert [each["output_tokens"] for each in found["requests"]] == [
        each.max_tokens for each in load.requests
    ]
    assert all(each["prompt_tokens"] == 9 for each in found["requests"])
    assert all(0 < each["ttft_s"] <= each["end_s"] for each in found["requests"])
    assert found["predicted"]["steps"] > 0
    assert "status 401" in str(refused.exception)
    assert "12 requests, 108 prompt and" in lines[1] and "predicted" not in "".join(lines)
    assert "request 1: status 400" in some and "1 requests, 5 prompt and 1 output" in some


@pytest.mark.parametrize(
    "answer, words",
    [
        (b"data: [1]\n\n", "an event is an error"),
        (b"data: {\n\n", "an event is not JSON"),
        (b'data: {"choices": [{"text": "a"}]}\n\n', "the stream was cut off"),
        (b"data: [DONE]\n\n", "the stream has no token"),
        (b"x" * 100, "the stream was cut off"),
    ],
)
def test_answers_that_are_no_streams(answer, words):
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.reply(b'{"data": [{"id": "m"}]}')

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            self.reply(answer)

        def reply(self, body: bytes) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *values: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = Thread(target=server.serve_forever, daemon=True)
        thread.start()
        url = f"http://127.0.0.1:{server.server_port}"
        result = CliRunner().invoke(app, [*LOAD, "--url", url])
        server.shutdown()
        thread.join()
    assert isinstance(result.exception, RequestError) and words in str(result.exception)
    for wrong in (url, "localhost", "ftp://a", "http://", "http://a:99999"):
        assert isinstance(CliRunner().invoke(app, [*LOAD, "--url", wrong]).exception, RequestError)


LOAD = ("bench", "--load", "rate=0,prompt=3,output=2,requests=2,parallel=2")
