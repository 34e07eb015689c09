"""Costs by request: what a profile of several requests charges each of them."""

from __future__ import annotations

import json

import pytest
import tiny_models as tiny
from typer.testing import CliRunner

import graphllm
from graphllm.cli import app
from graphllm.errors import RequestError
from graphllm.profiler.bench import filler_prompts
from graphllm.profiler.schema import read_profile

LENGTHS, DECODE, REPEAT = (60, 60, 50, 9), 5, 2  # more than the 128 tokens of a step


@pytest.fixture(scope="module", params=["llama", "gemma3"])  # the second one has windows
def llm(request, tmp_path_factory):
    path = tiny.write_tiny(tmp_path_factory.mktemp("costs") / "m.gguf", request.param)
    return graphllm.load(path, device="cpu", context=128, max_sequences=4)


@pytest.fixture(scope="module")
def prompts(llm):
    found = filler_prompts(len(LENGTHS), max(LENGTHS), llm.decoder.cfg.vocab)
    return [ids[:length] for ids, length in zip(found, LENGTHS)]


@pytest.fixture(scope="module")
def found(llm, prompts):
    return llm.profile(prompts, DECODE, REPEAT)


def test_costs_add_up_to_the_attributed_wall_time(found):
    for phase in found.phases:
        own = phase.accounting
        assert own.attributed > 0.97
        assert sum(c.ns for c in phase.requests) == pytest.approx(own.wall - own.unattributed)
        assert sum(c.gaps for c in phase.requests) == pytest.approx(own.gaps)
        assert sum(c.host for c in phase.requests) == pytest.approx(own.host)
        rows = sum(row.bytes for row in phase.rows)
        assert sum(c.bytes for c in phase.requests) == pytest.approx(rows)
    wall = sum(phase.accounting.wall for phase in found.phases)
    assert sum(cost.ns for cost in found.requests) == pytest.approx(wall, rel=0.03)


def test_each_request_has_the_flops_that_it_has_alone(llm, prompts, found):
    for ids, cost in zip(prompts, found.requests):
        assert cost.tokens % REPEAT == 0
        decoded = cost.tokens // REPEAT - len(ids)  # some of them while others were prefilled
        assert decoded >= DECODE
        alone = llm.profile(ids, decoded, 1)
        (own,) = alone.requests
        rows = sum(row.flops for phase in alone.phases for row in phase.rows)
        assert own.flops == pytest.approx(rows)
        assert cost.flops == pytest.approx(REPEAT * own.flops)
        assert cost.ops.keys() == own.ops.keys()


def test_time_follows_the_work(found):
    """Equal requests cost the same; attention costs more for a longer one."""
    decode = found["decode"].requests
    tokens = {cost.tokens for cost in decode}
    assert tokens == {DECODE * REPEAT}
    linear = next(name for name in decode[0].ops if name.startswith("linear"))
    assert len({round(cost.ops[linear].ns) for cost in decode}) == 1
    attention = next(name for name in decode[0].ops if name.startswith("attention"))
    times = [cost.ops[attention].ns for cost in decode]
    assert times[0] >= times[2] > times[3] > 0
    assert all(cost.host == decode[0].host > 0 for cost in decode)
    prefill = [sum(op.ns for op in cost.ops.values()) for cost in found["prefill"].requests]
    assert prefill[0] == pytest.approx(prefill[1])  # 60 tokens each, all in the first step
    assert min(prefill) > 0


def test_costs_are_in_the_report_and_the_table(found, tmp_path):
    file = tmp_path / "report.json"
    file.write_text(json.dumps(found.as_dict()))
    report = read_profile(file)
    file.write_text(json.dumps({**report, "requests": [{"request": 0}]}))
    with pytest.raises(RequestError, match=r"requests: \[0\]\.tokens is missing"):
        read_profile(file)
    assert [cost["request"] for cost in report["requests"]] == list(range(len(LENGTHS)))
    for cost in report["requests"]:
        whole = sum(op["ns"] for op in cost["ops"].values()) + cost["gaps"] + cost["host"]
        assert cost["ns"] == pytest.approx(whole)
    assert len(report["phases"][0]["requests"]) == len(LENGTHS)
    lines = found.table().splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("request "))
    assert [int(line.split()[0]) for line in lines[start + 1 : start + 5]] == [0, 1, 2, 3]
    assert "of the wall time" in lines[start + 5]


def test_a_batch_that_does_not_fit_is_rejected(llm, prompts):
    with pytest.raises(RequestError, match="5 requests are more than the 4"):
        llm.profile([*prompts, [5, 6]], 1)
    with pytest.raises(RequestError, match="exceed the context of 128"):
        llm.profile([prompts[0], list(range(3, 120))], 10)


def test_command_line_profiles_a_batch(tmp_path):
    path, out = tiny.write_tiny(tmp_path / "m.gguf", "llama"), tmp_path / "r.json"
    asked = ["profile", str(path), "-b", "3", "--prompt-tokens", "9", "-n", "3", "-r", "1"]
    result = CliRunner().invoke(app, [*asked, "-c", "64", "-o", str(out)])
    assert result.exit_code == 0, result.output
    assert "prefill: 27 tokens" in result.output and "decode: 9 tokens" in result.output
    report = json.loads(out.read_text())
    assert report["settings"]["sequences"] == len(report["requests"]) == 3
    refused = CliRunner().invoke(app, ["profile", str(path), "-b", "3", "-p", "x"])
    assert "give --prompt-tokens, not --prompt" in str(refused.exception)
