"""`graphllm compare`: no false alarms from noise, detection of slowed kernels, invalid input."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import tiny_models as tiny
from compare_cases import LAYERS, Machine, run_interleaved, steps, write
from typer.testing import CliRunner

import graphllm
from graphllm.cli import app
from graphllm.errors import RequestError
from graphllm.profiler.compare import interleaved_runs
from graphllm.profiler.compare.comparison import WALL, Comparison, compare
from graphllm.profiler.compare.samples import load_samples
from graphllm.profiler.compare.statistics import (
    estimate_changes,
    holm_adjust,
    shared_change,
    t_quantile,
    t_tail,
)
from graphllm.profiler.compare.step_matching import label, match_steps
from graphllm.profiler.schema import read_profile

SLOWED = {"gated q5_0": 1.2}


def changed(found: Comparison) -> dict[tuple[str, str], str]:
    return {(name, row.label): row.verdict for name, row in found.changed}


# ------------------------------------------------------------------------- false alarms and misses


def test_identical_interleaved_runs_raise_no_false_alarm(tmp_path):
    """At most one false alarm in all rows of twenty comparisons of five pairs."""
    machine = Machine(seed=1)
    alarms = [changed(compare(*run_interleaved(machine, 5, tmp_path))) for _ in range(20)]
    assert sum(map(bool, alarms)) <= 1, alarms


def test_identical_files_raise_no_false_alarm(tmp_path):
    machine = Machine(seed=2)
    alarms = []
    for _ in range(20):
        a, b = (write(tmp_path, name, machine.process()) for name in "ab")
        found = compare(a, b)
        assert "s of prefill are too short for fewer than 5 pairs" in found.phases[0].hidden
        alarms.append(changed(found))
    assert sum(map(bool, alarms)) <= 1, alarms


@pytest.mark.parametrize("load", [0.5, 0.8])
def test_a_busy_machine_raises_no_false_alarm(tmp_path, load):
    """With constant interference, few files give no verdicts and enough files do."""
    calm, busy, alarms = Machine(seed=3), Machine(seed=4, drift=0.1, load=load), []
    for _ in range(5):
        a = write(tmp_path, "a", calm.process())
        b = write(tmp_path, "b", busy.process())
        found = compare(a, b)
        assert not found.changed and "no verdicts: " in found.table()
        assert f"the machine was busy; {b}: a quarter of the runs" in found.phases[1].hidden
        assert all(phase.hidden for phase in compare(*run_interleaved(busy, 3, tmp_path)).phases)
        enough = compare(*run_interleaved(busy, 5, tmp_path))
        assert not any(phase.hidden for phase in enough.phases)
        alarms.append(changed(enough))
    assert sum(map(bool, alarms)) <= 1, alarms


@pytest.mark.parametrize("op", ["gated q5_0", "linear q8_0", "linear q4_k", "attention"])
def test_a_kernel_slowed_by_20_percent_is_flagged(tmp_path, op):
    """No other op is flagged, and the wall time only if the op dominates it."""
    machine = Machine(seed=5)
    found = compare(*run_interleaved(machine, 5, tmp_path, slow={op: 1.2}))
    flags = changed(found)
    assert flags[("decode", op)] == "slower"
    assert set(flags.values()) == {"slower"} and {row for _, row in flags} <= {op, WALL}
    (row,) = (row for _, row in found.changed if row.label == op and row in found.phases[1].rows)
    assert row.low < 0.2 < row.high and row.high - row.low < 0.12
    assert (("decode", WALL) in flags) == (op == "linear q8_0")
    back = compare(*run_interleaved(machine, 5, tmp_path, slow={op: 1 / 1.2}))
    assert changed(back)[("decode", op)] == "faster"


def test_one_file_per_side_suffices_for_a_large_op(tmp_path):
    """In at least four of five comparisons; nothing else is ever flagged."""
    machine, seen = Machine(seed=6), 0
    for _ in range(10):
        a = write(tmp_path, "a", machine.process())
        b = write(tmp_path, "b", machine.process(slow=SLOWED))
        flags = changed(compare(a, b))
        seen += ("decode", "gated q5_0") in flags
        assert {row for _, row in flags} <= {"gated q5_0", WALL}
    assert seen >= 8


def test_one_slow_scope_is_found(tmp_path):
    site = "model.layers.3.gated_q5_0"
    files = run_interleaved(Machine(seed=7), 5, tmp_path, slow={site: 1.3})
    assert ("decode", "gated q5_0") not in changed(compare(*files))
    assert changed(compare(*files, by="scope"))[("decode", site)] == "slower"


# ----------------------------------------------------------------------------------- shared change


def test_machine_drift_is_removed(tmp_path):
    """With one file per side a shared change may be drift and is removed from the rows."""
    machine = Machine(seed=8, drift=0.0)  # no drift of its own
    a = write(tmp_path, "a", machine.process())
    b = write(tmp_path, "b", machine.process(slow={"all": 1.06}))
    found = compare(a, b)
    shared = found.phases[1].shared
    assert (
        shared is not None and shared.taken_out and shared.change == pytest.approx(0.06, abs=0.02)
    )
    assert not found.changed
    assert "slower (" in found.table() and "machine drift or a change common" in found.table()
    (wall, linear) = (
        next(r for r in found.phases[1].rows if r.label == label) for label in (WALL, "linear q8_0")
    )
    assert wall.change == pytest.approx(wall.b_ns / wall.a_ns - 1) and wall.change > 0.03
    assert abs(linear.change) < 0.02  # without the shared change
    both = write(tmp_path, "c", machine.process(slow={"all": 1.06, **SLOWED}))
    assert set(changed(compare(a, both))) <= {("decode", "gated q5_0"), ("prefill", "gated q5_0")}
    assert changed(compare(a, both))


def test_a_slower_row_is_never_called_faster(tmp_path):
    """Even if all others took longer still."""
    slow = {op if not weight else f"{op} {weight}": 1.15 for op, _, _, _, weight, _ in steps()}
    machine = Machine(seed=21, drift=0.0)
    a = write(tmp_path, "a", machine.process())
    b = write(tmp_path, "b", machine.process(slow={**slow, "gated q5_0": 0.98}))
    found = compare(a, b)
    (row,) = (row for row in found.phases[1].rows if row.label == "gated q5_0")
    assert row.change < -0.1 and row.verdict == "faster"
    c = write(tmp_path, "c", machine.process(slow={**slow, "gated q5_0": 1.02}))
    assert not compare(a, c).changed


def test_a_change_of_all_ops_in_every_pair_is_a_change(tmp_path):
    """Machine drift would not repeat in every pair."""
    found = compare(*run_interleaved(Machine(seed=9), 5, tmp_path, slow={"all": 1.25}))
    shared = found.phases[1].shared
    assert shared is not None and not shared.taken_out and shared.low > 0.1
    assert changed(found)[("decode", WALL)] == "slower"
    assert changed(found)[("decode", "gated q5_0")] == "slower"
    assert "more than machine drift; rows are as measured" in found.table()


def test_unchanged_rows_get_the_verdict_same(tmp_path):
    found = compare(*run_interleaved(Machine(seed=10), 8, tmp_path), min_effect=0.05)
    rows = {row.label: row for row in found.phases[1].rows}
    assert {rows[name].verdict for name in ("linear q8_0", "gated q5_0", "sample")} == {"same"}
    assert rows["scale"].verdict == "unclear"  # less than a microsecond
    assert "no row is slower or faster by more than 5 %" in found.table()


def test_a_larger_min_effect_gives_more_verdicts_same(tmp_path):
    files = run_interleaved(Machine(seed=11), 5, tmp_path)
    counts = [
        sum(row.verdict == "same" for phase in compare(*files, min_effect=effect).phases
            for row in phase.rows)
        for effect in (0.01, 0.05, 0.2)
    ]  # fmt: skip
    assert counts == sorted(counts) and counts[0] < counts[1] < counts[2]


# --------------------------------------------------------------------------------------- statistics


def test_student_t_distribution():
    """Compare with published tables."""
    for df, chance, t in ((1, 0.025, 12.706), (4, 0.0005, 8.610), (8, 5e-5, 7.120),
                          (30, 0.025, 2.0423), (4, 0.5, 0.0)):  # fmt: skip
        assert t_quantile(chance, df) == pytest.approx(t, abs=2e-3)
        assert t_tail(t, df) == pytest.approx(chance, rel=1e-3)
    assert t_tail(-2.0423, 30) == pytest.approx(0.975, abs=1e-4)


def test_holm_adjustment():
    """The smallest p-value times n, the next times n - 1, and so on, made monotonic."""
    assert holm_adjust([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert holm_adjust([0.9, 0.5]) == [1.0, 1.0]
    assert holm_adjust([]) == []


def test_shared_change_is_a_weighted_median():
    logs = np.array([[0.0, 0.1, 5.0], [0.2, 0.2, -3.0]])
    assert shared_change(logs, np.array([1.0, 1.0, 1.0])).tolist() == [0.1, 0.2]
    assert shared_change(logs, np.array([1.0, 1.0, 0.01])).tolist() == [5.0, -3.0]


def test_coverage_of_intervals():
    """For processes with the prior variance, and with three times its standard deviation."""
    rng = np.random.default_rng(0)
    variance = np.full(8, 2 * 0.02**2)
    for factor, pairs in ((1.0, 5), (3.0, 5), (1.0, 2), (3.0, 12), (1.0, 1), (1.8, 1)):
        draws = [rng.normal(0, factor * 0.02 * math.sqrt(2), (pairs, 8)) for _ in range(300)]
        found = [estimate_changes(each, variance) for each in draws]
        missed = np.mean([np.abs(each.mean) > each.margin() for each in found])
        assert missed < 0.06, (factor, pairs, missed)


def test_more_pairs_give_narrower_intervals(tmp_path):
    machine = Machine(seed=12)
    widths = []
    for pairs in (1, 3, 10):
        rows = compare(*run_interleaved(machine, pairs, tmp_path)).phases[1].rows
        (row,) = (row for row in rows if row.label == "linear q8_0")
        widths.append(row.high - row.low)
    assert widths == sorted(widths, reverse=True) and widths[2] < widths[0] / 3


def test_steps_use_the_best_pass_and_wall_time_the_median(tmp_path):
    found = Machine(seed=13).process()
    row = found["phases"][1]["rows"][4]
    row["times"] = [9000] * 16 + [7000] * 9 + [70000] * 7 + [8000] * 16
    found["phases"][1]["passes"] = [{"start": 0, "end": 9, "plain": ns} for ns in (5, 3, 4)]
    timed = load_samples([write(tmp_path, "a", found)])[0].phases["decode"]
    assert timed.times[4] == 16 * 7000 and timed.speed.ns == 4
    short = Machine(seed=13).process()
    for phase in short["phases"]:  # a file with one pass
        phase["runs"] = [run for run in phase["runs"] if not run["pass"]]
        phase["passes"] = phase["passes"][:1]
        for each in phase["rows"]:
            each["times"] = each["times"][: len(phase["runs"])]
    both = load_samples([tmp_path / "a.json", write(tmp_path, "b", short)])
    assert [p.phases["decode"].times[4] for p in both] == [
        16 * 9000,
        both[1].phases["decode"].times[4],
    ]
    assert both[0].phases["decode"].speed.ns == 4


def test_a_prompt_of_several_chunks_is_no_interference(tmp_path):
    """The last chunk is short and is compared with the last chunks of other passes."""
    found = Machine(seed=20).process()
    prefill = found["phases"][0]
    prefill["runs"] = [{**run, "pass": i} for i, run in enumerate(prefill["runs"]) for _ in "abc"]
    for each in prefill["rows"]:
        each["times"] = [ns for _ in range(3) for ns in (9000, 10000, 1000)]
    path = write(tmp_path, "a", found)
    timed = load_samples([path])[0].phases["prefill"]
    assert timed.interference == 0 and timed.times[4] == 3 * 9000
    prefill["rows"][4]["times"][:3] = [200_000] * 3
    assert load_samples([write(tmp_path, "b", found)])[0].phases["prefill"].interference > 0.1


# ----------------------------------------------------------------------------------------- matching


def row(op: str, scope: str, weight: str = "", shape: str = "f32[1]") -> dict:
    return {
        "op": op,
        "scope": scope,
        "weight": weight,
        "shape": shape,
        "layer": 0,
        "backend": "cpu",
    }


def test_fused_steps_match_their_parts():
    a = [row("embedding", "embed"), row("norm_quantise", "l.norm"), row("gated", "l.gate", "q4_k"),
         row("linear", "l.down", "q4_k"), row("advance", "")]  # fmt: skip
    b = [row("embedding", "embed"), row("rms_norm", "l.norm"), row("linear", "l.gate", "q4_k"),
         row("mul", "l"), row("linear", "l.down", "q8_0", "f16[1]"), row("copy", ""),
         row("advance", "")]  # fmt: skip
    found = match_steps(a, b)
    assert [(each.a, each.b) for each in found] == [
        ((0,), (0,)), ((1, 2), (1, 2, 3)), ((3,), (4,)), ((), (5,)), ((4,), (6,))
    ]  # fmt: skip
    assert [each.same for each in found] == [True, False, True, False, True]
    assert [label(each, a, b, "op") for each in found] == [
        "embedding",
        "norm_quantise + gated q4_k -> rms_norm .. mul",
        "linear q4_k -> linear q8_0",
        "copy",
        "advance",
    ]
    assert label(found[1], a, b, "scope") == "l.norm + l.gate -> l.norm .. l"
    assert label(found[2], a, b, "layer") == "layer 0"


def test_steps_of_one_side_only(tmp_path):
    machine = Machine(seed=14)
    fused, parts = machine.process(), machine.process()
    rows = parts["phases"][1]["rows"]
    extra = {**rows[3], "op": "quantise_act", "scope": "model.layers.0", "weight": ""}
    rows.insert(4, extra)
    a, b = write(tmp_path, "a", fused), write(tmp_path, "b", parts)
    found = {r.label: r for r in compare(a, b).phases[1].rows}
    assert found["quantise_act"].verdict == "only in B" and found["quantise_act"].a_ns == 0
    assert compare(a, b).as_dict()["phases"][1]["rows"][0]["low"] < 0
    turned = {r.label: r for r in compare(b, a).phases[1].rows}
    assert turned["quantise_act"].verdict == "only in A"
    assert "only in A" in compare(b, a).table() and "nan" not in compare(b, a).table()
    json.dumps(compare(b, a).as_dict(), allow_nan=False)


def test_rows_add_up_to_all_steps(tmp_path):
    files = run_interleaved(Machine(seed=15), 2, tmp_path)
    times = load_samples(files[0])[0].phases["decode"].times
    for by, count in (
        ("op", 12),
        ("layer", LAYERS + 1),
        ("scope", len(steps()) - 1),
        ("format", 5),
    ):
        found = compare(files[0][0], files[1][0], by=by).phases[1]
        assert len(found.rows) == 1 + count
        assert sum(r.a_ns for r in found.rows[1:]) == pytest.approx(times.sum() / found.tokens)


# ------------------------------------------------------------------------------------------ benches


def bench_file(folder: Path, name: str, factor: float, **more) -> Path:
    rng = np.random.default_rng(sum(name.encode()))
    found = [
        {"n_prompt": p, "n_gen": n, "n_depth": 0, "model_type": "llama 7B", "model_size": 9,
         "model_n_params": 99, "n_threads": 4, "type_k": "f16", **more,
         "samples_ns": [int(1e9 * factor * (1 + 0.02 * rng.random())) for _ in range(5)]}
        for p, n in ((512, 0), (0, 128))
    ]  # fmt: skip
    return write(folder, name, found)


def test_benches(tmp_path):
    a = bench_file(tmp_path, "a", 1.0)
    same = compare(a, bench_file(tmp_path, "b", 1.02))
    assert [phase.name for phase in same.phases] == ["pp512", "tg128"] and not same.changed
    slow = compare(a, bench_file(tmp_path, "c", 1.6), fail_above=0.2)
    assert set(changed(slow).values()) == {"slower"} and slow.failed
    assert "\ntg128 is " in slow.table() and "above 20 %" in slow.table()
    with pytest.raises(RequestError, match=r"d.json: model type is qwen2, but llama.* in .*a.json"):
        compare(a, bench_file(tmp_path, "d", 1.0, model_type="qwen2"))
    with pytest.raises(
        RequestError, match=r"e.json: model type is gemma3, but llama.* in .*a.json"
    ):
        compare(a, write(tmp_path, "e", Machine(seed=1).process()))


# ---------------------------------------------------------------------------------------- bad input


def bench_text(**more) -> str:
    test = {"n_prompt": 1, "n_gen": 0, "n_depth": 0, "model_type": "", "model_size": 1}
    return json.dumps([{**test, "model_n_params": 1, **more}])


def damaged(change) -> dict:
    found = Machine(seed=16).process()
    change(found)
    return found


@pytest.mark.parametrize("change, message", [
    (lambda p: p.update(schema="other"), r"not a profile \(written by `graphllm profile "),
    (lambda p: p.pop("schema"), "not a profile"),
    (lambda p: p.update(version=3), "version 3 is not supported; .* reads versions 1, 2"),
    (lambda p: p.pop("phases"), "phases is missing"),
    (lambda p: p.update(phases={}), "phases is not a list"),
    (lambda p: p["machine"].update(name=None), "machine.name is not a string"),
    (lambda p: p["phases"][1].pop("passes"), r"phases\[1\].passes is missing"),
    (lambda p: p["phases"][1].update(passes=[]), r"phases\[1\]: has no passes"),
    (lambda p: p["phases"][1]["passes"][0].update(plain=0), r"\[1\]: has a pass of 0 ns"),
    (lambda p: p["phases"][1].update(tokens=True), r"phases\[1\].tokens is not an integer"),
    (lambda p: p["phases"][0]["rows"][2].update(times=[1, 2.5, 3]),
     r"phases\[0\].rows\[2\].times\[1\] is not an integer"),
    (lambda p: p["phases"][0]["rows"][2].update(times=[1]),
     r"phases\[0\]: rows\[2\] has 1 times, but plan 0 has 3 runs"),
    (lambda p: p["phases"][0]["rows"][2].update(layer="3"), "layer is not an integer or null"),
    (lambda p: p["phases"][0]["runs"][0].update({"pass": 7}), "a run belongs to no pass"),
])  # fmt: skip
def test_invalid_profiles_are_rejected(tmp_path, change, message):
    path = write(tmp_path, "x", damaged(change))
    with pytest.raises(RequestError, match=message) as error:
        read_profile(path)
    assert str(error.value).startswith(f"{path}: ") and "\n" not in str(error.value)


def test_profiles_of_version_1_are_compared(tmp_path):
    """A profile of version 1 can be compared."""
    machine = Machine(seed=22)
    old = write(tmp_path, "a", {**machine.process(), "version": 1})
    found = compare(old, write(tmp_path, "b", machine.process()))
    assert [phase.name for phase in found.phases] == ["prefill", "decode"]


@pytest.mark.parametrize("text, message", [
    ("", "not JSON"), ("{", "not JSON"), ("\xff", "not a profile|not JSON"),
    ("[1]", r"\[0\] is not an object"), ("[]", "contains no test"), ("3", "not a profile"),
    ('{"schema": NaN}', "NaN is not a number"), ("[" * 99999, "not JSON"),
    (bench_text(samples_ns=[]), "a test has no samples"),
    (bench_text(samples_ns=[5, 0]), "a test has no samples, or a sample of 0 ns"),
    ('[{"n_prompt": 1}]', r"not written by `bench -o json`: \[0\].n_gen is missing"),
])  # fmt: skip
def test_invalid_files_are_rejected(tmp_path, text, message):
    path = tmp_path / "x.json"
    path.write_text(text, "utf-8")
    with pytest.raises(RequestError, match=message):
        compare(path, path)
    with pytest.raises(RequestError, match=r"none.json: No such file"):
        compare(path.with_name("none.json"), path)


@pytest.mark.parametrize("sections, message", [
    ({"model": {"type": "llama 7B"}}, "b.json: model type is llama 7B, but gemma3 in "),
    ({"settings": {"prompt_tokens": 7}}, "b.json: prompt_tokens is 7, but 6 in .*a.json"),
    ({"settings": {"depth": 4096}}, "b.json: depth is 4096, but 0 in .*a.json"),
])  # fmt: skip
def test_different_models_and_shapes_are_rejected(tmp_path, sections, message):
    machine = Machine(seed=17)
    a = write(tmp_path, "a", machine.process())
    b = write(tmp_path, "b", machine.process(**sections))
    with pytest.raises(RequestError, match=message):
        compare(a, b)
    found = compare(a, b, force=True)
    assert len(found.phases) == 2 and len(found.notes) == 1
    threads = write(tmp_path, "c", machine.process(settings={"threads": 1}))
    assert compare(a, threads).notes == ("threads: 2 -> 1",)


def test_other_incomparable_files_are_rejected(tmp_path):
    machine = Machine(seed=18)
    a, b = (write(tmp_path, name, machine.process()) for name in "ab")
    with pytest.raises(RequestError, match="2 files against 1: both sides need the same"):
        compare([a, b], a)
    with pytest.raises(RequestError, match="by = 'name' must be one of op, scope, layer"):
        compare(a, b, by="name")
    half = machine.process()
    half["phases"].pop()
    half = write(tmp_path, "half", half)
    with pytest.raises(
        RequestError, match=r"half.json: has phases prefill, but .*a.json has prefill"
    ):
        compare(a, half)
    assert [phase.name for phase in compare(a, half, force=True).phases] == ["prefill"]
    other = machine.process()
    other["phases"][0]["rows"][3]["op"] = "other"
    with pytest.raises(RequestError, match=r"o.json: the steps of prefill differ from .*a.json"):
        compare([a, write(tmp_path, "o", other)], [a, b])


# ------------------------------------------------------------------------------ on the command line


def call(*words: object):
    return CliRunner().invoke(app, ["compare", *map(str, words)])


def test_command_line(tmp_path):
    files = run_interleaved(Machine(seed=19), 5, tmp_path, slow=SLOWED)
    sides = [",".join(map(str, side)) for side in files]
    done = call(*sides)
    assert done.exit_code == 0 and "decode: gated q5_0 is " in done.output
    assert done.output.startswith(f"A: {files[0][0]}, 5 runs\n")
    short = call(*sides, "--top", 2)
    assert "more rows, none of them slower or faster" in short.output
    assert short.output.count("\n") < done.output.count("\n")
    failed = call(*sides, "--fail-above", "5%", "-o", "json")
    assert failed.exit_code == 1
    found = json.loads(failed.stdout)
    assert (found["schema"], found["version"]) == ("graphllm.comparison", 2)
    fails = {row["label"] for phase in found["phases"] for row in phase["rows"] if row["fails"]}
    assert "gated q5_0" in fails
    assert call(*sides, "--fail-above", "40 %").exit_code == 0
    assert call(*reversed(sides), "--fail-above", "5").exit_code == 0  # faster does not fail


@pytest.mark.parametrize("words, message", [
    (["a"], "give two files, A and B, or a MODEL and --against WHAT"),
    (["a", "b", "--against", "commit=HEAD"], "--against takes one MODEL, not also 'b'"),
    (["a", "b", "--with", "-n 3"], "--with '-n 3' needs --against"),
    (["a", "b", "--fail-above", "much"], "--fail-above 'much' must be a percentage, such as 5%"),
    (["a", "b", "--min-effect", "-1"], "--min-effect '-1' must be a percentage"),
    (["a", "b", "--top", "-1"], "--top -1 must be at least 0"),
    (["a", "b", "-o", "md"], "-o md must be text or json"),
    (["a", "--against", "rubbish"], "--against 'rubbish' must be backend=NAME, commit=REV or "),
    (["a", "--against", "commit="], "--against 'commit=' must be"),
    (["a", "--against", "--x 'y"], "--against \"--x 'y\": No closing quotation"),
    (["a", "--against", "backend=cpu", "-r", "1"], "-r 1 must be at least 2"),
])  # fmt: skip
def test_an_error_is_one_line(words, message):
    done = call(*words)
    assert isinstance(done.exception, RequestError) and message in str(done.exception)


# --------------------------------------------------------------------------------- interleaved runs


def test_interleaving_alternates_sides(tmp_path, monkeypatch):
    """Slowdown of the machine affects both sides alike; the first run of each is a warm-up."""
    ran = []
    monkeypatch.setattr(
        interleaved_runs, "_profile", lambda way, path: ran.append((way, path.name))
    )
    sides = [interleaved_runs.Variant(name, tmp_path, ()) for name in ("then", "now")]
    files = interleaved_runs.run_interleaved((sides[0], sides[1]), 3, tmp_path, lambda *_: None)
    names = [name for _, name in ran]
    assert names == [
        "B0.json", "A0.json", "A1.json", "B1.json", "B2.json", "A2.json", "A3.json", "B3.json"
    ]  # fmt: skip
    assert [path.name for path in files[0]] == ["A1.json", "A2.json", "A3.json"]
    assert {(way.name, name[0]) for way, name in ran} == {("then", "A"), ("now", "B")}


def test_variants_of_against():
    with interleaved_runs.variants(["m.gguf", "-n", "8"], "backend=reference") as (a, b):
        assert a.arguments == ("m.gguf", "-n", "8", "--device", "reference")
        assert b.arguments == ("m.gguf", "-n", "8") and a.root == b.root
    with interleaved_runs.variants(["m.gguf"], "--no-fuse all -t 1") as (a, b):
        assert a.arguments == ("m.gguf", "--no-fuse", "all", "-t", "1") and b.arguments == (
            "m.gguf",
        )


def git(folder: Path, *words: str) -> None:
    who = ["-c", "user.name=x", "-c", "user.email=x@y"]
    subprocess.run(["git", "-C", str(folder), *who, *words], check=True, capture_output=True)


def test_a_commit_is_checked_out_in_a_worktree(tmp_path, monkeypatch):
    home = (tmp_path / "repository").resolve()
    home.mkdir()
    monkeypatch.setattr(interleaved_runs, "_ROOT", home)
    with pytest.raises(RequestError, match=r"commit=HEAD: .* is not a git checkout of graphllm"):
        interleaved_runs.variants(["m"], "commit=HEAD").__enter__()
    git(home, "init")
    for name in ("models", "graphllm"):
        (home / name).mkdir()
        (home / name / "__init__.py").write_text(f"# {name}")
    for text in ("then", "now"):
        (home / "file").write_text(text)
        git(home, "add", ".")
        git(home, "commit", "-m", f"as it is {text}")
    (home / "file").write_text("changed since")
    with interleaved_runs.variants(["m"], "commit=HEAD~1") as (a, b):
        assert (a.root / "file").read_text() == "then" and b.root == home
        assert a.name.startswith("commit ") and a.name.endswith("as it is then")
        assert (a.root / "graphllm" / "models" / "__init__.py").read_text() == "# models"
        there = a.root
    assert not there.exists() and (home / "file").read_text() == "changed since"
    listed = subprocess.run(["git", "-C", str(home), "worktree", "list"], capture_output=True)
    assert len(listed.stdout.splitlines()) == 1
    with pytest.raises(
        RequestError, match=r"--against commit=never: .*repository has no such comm"
    ):
        interleaved_runs.variants(["m"], "commit=never").__enter__()


def test_a_small_model_against_another_backend(tmp_path):
    """End to end, with one process per run; every step is in a row."""
    path = tiny.write_llama(tmp_path / "tiny.gguf", tiny.llama_weights())
    words = [path, "--against", "backend=reference", "-r", "2", "-o", "json"]
    flags = "-n 4 -r 1 --prompt-tokens 8 --threads 1"
    command = [sys.executable, "-m", "graphllm", "compare", *map(str, words), "--with", flags]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert [phase["name"] for phase in found["phases"]] == ["prefill", "decode"]
    assert found["files"] == 2 and "--device reference" in found["sides"][0]
    labels = {row["label"] for row in found["phases"][1]["rows"]}
    assert "linear f32" in labels and any(" -> " in each for each in labels)
    again = [*command[:-1], "-n 4 -r 1 --rubbish"]
    failed = subprocess.run(again, capture_output=True, text=True)
    assert failed.returncode == 1 and failed.stderr.count("\n") == 1
    assert "No such option: --rubbish" in failed.stderr


def test_profiles_and_benches_are_read(tmp_path):
    """Files written by `graphllm profile` and `graphllm bench`."""
    path = tiny.write_llama(tmp_path / "tiny.gguf", tiny.llama_weights())
    llm = graphllm.load(path, context=64)
    written = write(tmp_path, "p", llm.profile([3, 4, 5], 3, 2).as_dict())
    assert {row["op"] for row in read_profile(written)["phases"][1]["rows"]} > {"linear"}
    assert not compare(written, written).changed
    command = [sys.executable, "-m", "graphllm", "bench", str(path), "-p", "4", "-n", "2"]
    done = subprocess.run([*command, "-r", "2", "--no-ceiling", "-o", "json"], capture_output=True)
    (tmp_path / "b.json").write_bytes(done.stdout)
    found = compare(tmp_path / "b.json", tmp_path / "b.json")
    assert [phase.name for phase in found.phases] == ["pp4", "tg2"] and not found.changed
