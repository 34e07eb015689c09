"""Profiles of a small model: rows, accounting of the wall time, the JSON report."""

from __future__ import annotations

import json
import re
import statistics
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import tiny_models as tiny
from typer.testing import CliRunner

import graphllm
from graphllm import ops, system_info
from graphllm.backends import TimestampLog
from graphllm.cli import app
from graphllm.cli.output import OutputError
from graphllm.engine.request import Sampling
from graphllm.errors import RequestError
from graphllm.profiler.accounting import Pass, account
from graphllm.profiler.bench import Result, Test
from graphllm.profiler.compare.comparison import compare
from graphllm.profiler.html import render_page
from graphllm.profiler.profile import Phase, Profile, Roofline
from graphllm.profiler.record import GROUP_KEYS, Recorder, Run, totals
from graphllm.profiler.speed import speed

PROMPT, DECODE, REPEAT = 20, 6, 3


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return tiny.write_tiny(tmp_path_factory.mktemp("profile") / "m.gguf", "llama")


@pytest.fixture(scope="module", params=["cpu", "reference"])
def llm(request, path):
    return graphllm.load(path, device=request.param, context=128)


@pytest.fixture(scope="module")
def found(llm):
    return llm.profile(list(range(3, 3 + PROMPT)), DECODE, REPEAT)


def test_one_row_per_step(llm, found):
    decode = found["decode"]
    steps = llm.engine.decode_plan().steps
    assert [row.op for row in decode.rows] == [step.node.op for step in steps]
    assert all(len(row.times) == DECODE * REPEAT for row in decode.rows)
    assert all(ns >= 0 for row in decode.rows for ns in row.times)
    assert {row.layer for row in decode.rows} >= {0, None}
    assert all(":" in row.origin for row in decode.rows)
    assert {len(row.times) for row in found["prefill"].rows} == {REPEAT}


def test_accounting_adds_up(found):
    for phase in found.phases:
        own = phase.accounting
        assert own.wall == sum(p.end - p.start for p in phase.passes)
        assert own.wall == own.ops + own.copies + own.gaps + own.host + own.unattributed
        assert own.ops == sum(row.ns for row in phase.rows if not row.copy) > 0
        assert min(own.gaps, own.host) >= 0 and own.attributed > 0.97


def test_row_has_the_declared_cost_of_its_runs(found):
    (row,) = (r for r in found["decode"].rows if r.scope == "lm_head" and r.weight)
    calls = len(row.times)
    rows, columns = (int(n) for n in row.inputs[1].partition("[")[2].rstrip("]").split(","))
    assert row.flops == calls * 2 * rows * columns


def test_rows_are_grouped_by_every_key(found):
    rows = found["decode"].rows
    for by in GROUP_KEYS:
        sums = totals(rows, by)
        assert sum(total.ns for total in sums.values()) == sum(row.ns for row in rows)
        assert list(sums.values()) == sorted(sums.values(), key=lambda total: -total.ns)
        assert found.table(by)
    with pytest.raises(ValueError, match="by = 'name' must be one of op"):
        found.table("name")


def test_top_rows_and_the_rest(found):
    lines = found.table(top=2).split("\n\n")[1].splitlines()
    kinds = len(totals(found["decode"].rows))
    assert lines[4].startswith(f"{kinds - 2} more") and lines[5].startswith("all ops")


def test_report_is_consistent_json(found):
    report = json.loads(json.dumps(found.as_dict()))
    assert (report["schema"], report["version"]) == ("graphllm.profile", 2)
    for phase in report["phases"]:
        assert phase["passes"][0]["start"] == 0
        assert sum(phase["closing"][k] for k in phase["closing"] if k != "wall") == phase[
            "closing"]["wall"]  # fmt: skip
        rows = {(row["plan"], row["step"]): row for row in phase["rows"]}
        seen: dict[int, int] = {}
        for run in phase["runs"]:
            nth = seen[run["plan"]] = seen.get(run["plan"], -1) + 1
            for piece in run["segments"]:
                steps = range(piece["first"], piece["first"] + piece["count"])
                took = sum(rows[run["plan"], step]["times"][nth] for step in steps)
                window = phase["passes"][run["pass"]]
                assert window["start"] <= run["called"] <= piece["begin"]
                assert piece["begin"] + took <= window["end"]
        for arena in phase["arena"]:
            assert all(s["offset"] + s["nbytes"] <= arena["nbytes"] for s in arena["spans"])
            assert all(s["first"] <= s["last"] for s in arena["spans"])


def test_limit_is_the_binding_ceiling(found):
    row = replace(found["decode"].rows[0], bytes=1e6, flops=1e6, integer=False)
    roofline = Roofline("", False, "", bytes_s=1e9, float_flop_s=1e10, integer_flop_s=1e8)
    assert roofline.limit(row) == (1e6, "memory")
    assert roofline.limit(replace(row, integer=True)) == (1e7, "arithmetic")
    assert replace(roofline, bytes_s=0.0, float_flop_s=0.0).limit(row) == (0.0, "")


# ------------------------------------------------------------------------------ speed, interference


def test_profile_compare_and_bench_show_one_speed(found, tmp_path):
    """Median and spread of the passes without profiling."""
    path = tmp_path / "p.json"
    path.write_text(json.dumps(found.as_dict()))
    compared = compare(path, path)
    for phase, other in zip(found.phases, compared.phases):
        plain = [each.plain for each in phase.passes]
        want = statistics.median(plain)
        spread = statistics.stdev(plain) / want
        test = Test(0, phase.tokens)
        bench = Result(test, tuple(plain), 0.0, "").as_dict()
        report = json.loads(path.read_text())["phases"][found.phases.index(phase)]
        for shown in (bench, report["speed"]):
            assert shown["tok_s"] == phase.tok_s == pytest.approx(1e9 * phase.tokens / want)
            assert shown["spread"] == pytest.approx(spread) and shown["passes"] == REPEAT
        wall = other.rows[0]
        assert wall.a_ns == wall.b_ns == pytest.approx(1e9 / phase.tok_s)
        assert other.spreads == (phase.speed.spread, phase.speed.spread)
        rate = f"{phase.tok_s:.1f}"
        heading = f"{phase.name}: {phase.tokens} tokens, {rate} tok/s (± {spread:.1%}, 3 passes)"
        assert heading in found.table()
        assert f"{rate} (± {spread:.1%}) -> {rate} (± {spread:.1%}) tok/s" in compared.table()


def test_speed_of_some_passes():
    found = speed(20, [5_000_000, 3_000_000, 4_000_000])
    assert (found.ns, found.tok_s, found.spread) == (4e6, 5000.0, 0.25)
    assert str(found) == "5000.0 tok/s (± 25.0%, 3 passes)"
    assert str(speed(20, [4_000_000])) == "5000.0 tok/s"


def test_load_by_other_processes_is_reported(llm, tmp_path, monkeypatch):
    """In the table, in JSON and on the HTML page."""
    monkeypatch.setattr(system_info, "_processor_seconds", iter([(0, 0, 0), (10, 9, 5)]).__next__)
    busy = llm.profile([3, 4, 5], 2, 1)
    assert busy.other_load == 0.4
    note = "the machine was busy: other processes used 40% of the processor time"
    assert busy.load_note.startswith(note) and f"note: {busy.load_note}\n" in busy.table()
    report = json.loads(json.dumps(busy.as_dict()))
    assert report["busy"] == {"others": 0.4, "note": busy.load_note}
    assert json.dumps(report["busy"]["note"])[1:-1] in render_page(report)
    calm = replace(busy, other_load=0.05, phases=())
    assert calm.load_note == "" and "busy" not in calm.table()


def test_interference_is_reported(llm):
    """Computed from the times of runs, as in a comparison."""
    plan, long = llm.engine.decode_plan(), 10**8
    passes, steps = (Pass(0, 1000, long), Pass(1000, 2000, long)), len(plan.steps)

    def run(at: int, ns: int) -> Run:
        ends = at + ns * np.arange(steps + 1)
        return Run(plan, {"T": 1}, at, int(ends[-1]), (ends,), (ends[:-1],))

    for slow, note in ((2, ""), (8, "a quarter of the runs of decode took at least 225% longer")):
        phase = Phase("decode", 1, passes, (run(0, 2), run(1000, slow)), {})
        found = Profile((phase,), {}, {}, {}).load_note
        assert note in found and bool(found) == bool(note)
        brief = replace(phase, passes=(Pass(0, 1000, 900), Pass(1000, 2000, 900)))
        assert Profile((brief,), {}, {}, {}).load_note == ""


def test_unreliable_ceilings_are_reported(found):
    roofline = Roofline("", False, "unreliable: busy; measure again", 1e9, 0.0, 0.0)
    assert (
        "ceilings of cpu: unreliable: busy" in replace(found, rooflines={"cpu": roofline}).table()
    )


# --------------------------------------------------------------------------------------- accounting


def a_run(plan, called: int, returned: int, *ends: list[int]) -> Run:
    pieces = tuple(np.array(each) for each in ends)
    return Run(plan, {}, called, returned, pieces, tuple(each[:-1] for each in pieces))


class _Plan:
    """A plan of five steps without copies."""

    def __init__(self, llm) -> None:
        self.steps = llm.engine.decode_plan().steps[:5]


def test_time_is_attributed_by_cause(llm):
    plan = _Plan(llm)
    first = a_run(plan, 10, 75, [20, 30, 40], [50, 55, 60, 70])
    second = a_run(plan, 90, 140, [100, 105, 110], [110, 120, 125, 130])
    own = account([Pass(0, 150, 1)], [first, second])
    assert own.ops == 20 + 20 + 10 + 20 and own.copies == 0
    assert own.gaps == (10 + 10 + 5) + (10 + 0 + 10)
    assert own.host == 10 + 15 + 10 and own.unattributed == 0


def test_asynchronous_runs_have_no_host_time(llm):
    plan = _Plan(llm)
    first = a_run(plan, 0, 1, [5, 10, 20], [20, 30, 40, 50])
    second = a_run(plan, 2, 3, [52, 60, 70], [70, 80, 90, 100])
    own = account([Pass(0, 103, 1)], [first, second])
    assert (own.gaps, own.host, own.ops) == (5 + 2, 3, 45 + 48)
    assert own.unattributed == 0


def test_clock_differences_are_unattributed(llm):
    first = a_run(_Plan(llm), 10, 12, [4, 10, 20], [20, 30, 40, 50])
    own = account([Pass(0, 50, 1)], [first])
    assert own.wall == 50 == own.ops + own.gaps + own.host + own.unattributed


# ---------------------------------------------------------------------------------------- recorders


def test_runs_without_profiling_record_no_times(path):
    llm = graphllm.load(path, device="cpu", context=128)
    plan = llm.engine.decode_plan()
    ((segment, _),) = llm.executor.segments(plan)
    from graphllm.backends.cpu.runtime.step_interpreter import TIMESTAMPS

    assert segment._words[TIMESTAMPS] == 0
    log = TimestampLog()
    llm.profile([3, 4, 5], 2, 1)
    segment.run(log)
    assert len(log.runs) == 1 and segment._words[TIMESTAMPS] == 0


def test_two_recorders_of_one_plan_do_not_mix(llm):
    recorders = [Recorder(), Recorder()]
    for count, recorder in ((2, recorders[0]), (3, recorders[1]), (1, recorders[0])):
        llm.engine.clear_cache()
        drawn = llm.engine.generate([3, 4, 5], Sampling(seed=0), (), profile=(
            Recorder(), recorder))  # fmt: skip
        for _ in range(count + 1):
            next(drawn)
    assert [len(each.runs) for each in recorders] == [3, 3]
    calls = [run.called for run in recorders[0].runs]
    assert calls == sorted(calls)


# ------------------------------------------------------------------------------------- command line


def test_command_line_writes_reports(path, tmp_path):
    out = [tmp_path / name for name in ("report.json", "run.trace.json", "report.html")]
    asked = ["profile", str(path), "--prompt-tokens", "9", "-n", "3", "-r", "2", "-c", "64",
             "--by", "layer", "--top", "3", *(f"-o{each}" for each in out)]  # fmt: skip
    result = CliRunner().invoke(app, asked)
    assert result.exit_code == 0, result.output
    assert "prefill: 9 tokens" in result.output and "decode: 3 tokens" in result.output
    assert json.loads(out[0].read_text())["settings"]["prompt_tokens"] == 9
    assert "traceEvents" in json.loads(out[1].read_text())
    assert out[2].read_text().startswith("<!doctype html>")


def test_unwritable_output_is_rejected_before_the_run(path, tmp_path):
    asked = ["profile", str(path), "-n", "2", "-r", "1", "-o", str(tmp_path / "no" / "x.json")]
    result = CliRunner().invoke(app, asked)
    assert isinstance(result.exception, OutputError) and "No such file" in str(result.exception)
    assert not result.output


@pytest.mark.parametrize(
    "asked, words",
    [
        (["--by", "name"], "--by name must be one of"),
        (["-o", "x.txt"], "-o x.txt"),
        (["--top", "-1"], "--top -1"),
        (["-p", "a", "--prompt-tokens", "4"], "not both"),
        (
            ["--prompt-tokens", "60", "-n", "60", "-c", "64"],
            "60 prompt tokens and 60 decoded tokens",
        ),
        (["-r", "0"], "repeat = 0"),
    ],
)
def test_invalid_arguments(path, asked, words):
    result = CliRunner().invoke(app, ["profile", str(path), *asked])
    assert isinstance(result.exception, RequestError) and words in str(result.exception)


# ----------------------------------------------------------------------------------------- tutorial


def test_tutorial_finds_and_fixes_the_bottleneck(tmp_path, monkeypatch):
    """The two model files of docs/profiling.md."""
    monkeypatch.setattr(
        "graphllm.graph.op._REGISTRY", dict(ops.registry())
    )  # the model files declare ops
    text = (Path(__file__).parents[2] / "docs" / "profiling.md").read_text("utf-8")
    before, fixed, *_ = re.findall(r"```python\n(.*?)```", text, re.S)
    path = tiny.write_tiny(tmp_path / "m.gguf", "gemma3")
    found = []
    for name, code in (("before", before), ("after", before.split("class Model")[0] + fixed)):
        own = tmp_path / name / "my_gemma.py"
        own.parent.mkdir()
        own.write_text(code.replace("geglu", f"geglu_{name}"))  # an op can be declared only once
        llm = graphllm.load(path, model_def=own, device="cpu", context=64)
        found.append((llm.profile([3, 4, 5], 2, 1)["decode"].rows, llm.logits([3, 4, 5])))
    (slow, logits), (fast, same) = found
    np.testing.assert_allclose(logits, same, rtol=0.05, atol=0.05 * np.abs(logits).max())
    (place,) = {row.origin.rpartition("/")[2] for row in slow if row.op == "geglu_before"}
    assert place in text
    assert {row.op for row in slow if row.why} == {"geglu_before"}
    assert not any(row.why for row in fast) and "gated" in {row.op for row in fast}
