"""What memory gives at best: measured, kept, read back, shown."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import datetime, timedelta, timezone

import pytest

from graphllm.backends.cpu.ceiling import KINDS, counts
from graphllm.backends.cpu.isa import usable_cores
from graphllm.cli import show
from graphllm.cli.bench import _ceiling
from graphllm.errors import RequestError
from graphllm.profiler import ceilings, rates
from graphllm.profiler.ceilings import Ceiling

SMALL = 4 << 20


def nobody(what, done, total):
    assert 0 <= done <= total


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """A cache directory of its own, and a small buffer to go over."""
    monkeypatch.setattr(ceilings, "cache_dir", lambda: tmp_path / "cache")
    monkeypatch.setattr(ceilings, "room", lambda: SMALL)
    monkeypatch.setattr(rates, "WIDTH", 256)
    return tmp_path / "cache"


def made(**changes) -> Ceiling:
    rates = {"read": {1: 1e10, 2: 3e10, 4: 2e10}, "float": {1: 2e10}}
    date = datetime.now(timezone.utc).isoformat(timespec="seconds")
    return replace(Ceiling("cpu", ceilings.machine(), date, SMALL, rates), **changes)


def test_measured_and_kept(cache):
    assert ceilings.kept("cpu") is None
    found = ceilings.measure("cpu", nobody)
    assert set(found.rates) == set(KINDS) and found.nbytes == SMALL
    for by_count in found.rates.values():
        assert list(by_count) == list(counts(usable_cores())) and min(by_count.values()) > 1e8
    assert set(found.flops) == set(rates.KINDS) and set(found.steps) == set(counts(usable_cores()))
    assert set(found.shares) == set(rates.FORMATS) and 0 < max(found.shares.values()) <= 1
    assert all(rate > 1e7 for by_count in found.flops.values() for rate in by_count.values())
    assert ceilings.kept("cpu") == found and found.fresh()
    assert [p.name for p in cache.iterdir()] == ["ceilings.json"]


def test_counts_of_threads():
    assert list(counts(1)) == [1] and list(counts(4)) == [1, 2, 3, 4]
    assert list(counts(16)) == [1, 2, 4, 8, 16] and list(counts(12)) == [1, 2, 4, 8, 12]


def test_the_best_is_over_as_many_threads_or_fewer():
    found = made()
    assert [found.best(n) for n in (1, 2, 3, 4, 0)] == [2e10, 3e10, 3e10, 3e10, 3e10]
    assert made(rates={"read": {4: 1e10}}).best(2) == 0.0


def test_only_a_fresh_one_of_this_machine_is_used_again(cache, monkeypatch):
    calls = []

    def measure(backend, show, nbytes=0):
        calls.append(backend)
        return made()

    monkeypatch.setattr(ceilings, "measure", measure)
    now = datetime.now(timezone.utc)
    for kept in (
        made(date=(now - timedelta(hours=25)).isoformat()),
        made(date=(now + timedelta(hours=2)).isoformat()),
        made(machine="another"),
    ):
        ceilings._keep(kept)
        assert ceilings.kept("cpu") == kept and not kept.fresh()
        ceilings.current("cpu", nobody)
    assert calls == ["cpu"] * 3
    ceilings._keep(made(date=(now - timedelta(hours=23)).isoformat()))
    assert ceilings.current("cpu", nobody) == ceilings.kept("cpu") and len(calls) == 3
    assert ceilings.current("reference", nobody) is None


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", "null", '{"cpu": 3}', '{"cpu": {"rates": []}}', '{"cpu": {"rates": {}}}'],
)
def test_a_damaged_file_counts_for_nothing(cache, text):
    cache.mkdir()
    (cache / "ceilings.json").write_text(text)
    assert ceilings.kept("cpu") is None
    ceilings._keep(made())
    assert ceilings.kept("cpu") == made(date=ceilings.kept("cpu").date)


def test_others_stay_in_the_file(cache):
    ceilings._keep(made(backend="gpu"))
    ceilings._keep(made())
    assert set(json.loads((cache / "ceilings.json").read_text())) == {"cpu", "gpu"}
    assert ceilings.kept("gpu") == made(backend="gpu", date=ceilings.kept("gpu").date)


def test_a_cache_that_is_a_file(cache):
    cache.write_text("")
    ceilings._keep(made())
    assert ceilings.kept("cpu") is None


def test_memory_that_is_not_there(monkeypatch):
    monkeypatch.setattr(ceilings, "free_bytes", lambda: 1 << 30)
    with pytest.raises(RequestError, match=r"needs 1\.3 GB; 1\.1 GB are free"):
        ceilings.room()
    for free, size in ((3 << 29, 1 << 30), (3 << 30, 3 << 29), (64 << 30, 2 << 30)):
        monkeypatch.setattr(ceilings, "free_bytes", lambda free=free: free)
        assert ceilings.room() == size
    with pytest.raises(RequestError, match="reference does not measure"):
        ceilings.measure("reference", nobody)


def test_doctor_shows_it(cache, capsys):
    show.doctor(measure=False)
    assert "memory: not measured (graphllm doctor --measure)" in capsys.readouterr().out
    show.doctor(measure=True)
    kept = ceilings.kept("cpu")
    for measure in (None, False):
        out = capsys.readouterr().out if measure is None else shown(capsys)
        assert f"memory gives {kept.best() / 1e9:.1f} GB/s, measured {kept.date}\n" in out
        assert "read, GB/s by threads: 1: " in out and "float matrix-vector, GB/s" in out
    ceilings._keep(made(machine="another box"))
    assert "on another box\n" in shown(capsys)


def shown(capsys) -> str:
    show.doctor(measure=False)
    return capsys.readouterr().out


def test_bench_says_whether_it_measured(cache, capsys, monkeypatch):
    found = _ceiling("auto")
    assert found is not None and f"measured at {found.date}" in capsys.readouterr().err
    assert _ceiling("cpu") == found and f"kept from {found.date}" in capsys.readouterr().err
    assert _ceiling("reference") is None and capsys.readouterr().err == ""
    ceilings._keep(made(machine="another"))

    def full():
        raise RequestError("no room")

    monkeypatch.setattr(ceilings, "room", full)
    assert _ceiling("cpu") is None and capsys.readouterr().err == "note: no ceiling: no room\n"
