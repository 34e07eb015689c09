"""Operands that kernels may read before they wait, computed from writes. No GPU is needed."""

from __future__ import annotations

import numpy as np
import pytest
from paper_cuda import paper_fixture  # noqa: F401
from random_models import MIXTURES, decoder, engine

from graphllm import ops
from graphllm.backends.cuda.kernels.experts import _EXPERTS
from graphllm.backends.cuda.runtime.dependencies import InFlight, Ordering, Region
from graphllm.backends.cuda.runtime.work import Launch
from graphllm.graph.tensor import Var, feed, weight
from graphllm.runtime.executor import Executor
from graphllm.weights import Arrays

ARENA, STATE = object(), object()
IDS = Region(ARENA, 0, 64)
OTHER = Region(ARENA, 64, 128)
FILES = ("experts_gemv.cu", "experts_unaligned.cu")
EARLY, LATE, ALONE = Ordering(), Ordering(triggers_after_wait=True), Ordering(overlaps=False)


def in_flight(*launches: tuple[Region, Ordering]) -> InFlight:
    found = InFlight()
    for writes, ordering in launches:
        found.add((writes,), ordering)
    return found


@pytest.mark.parametrize(
    "region, overlaps",
    [((ARENA, 0, 64), True), ((ARENA, 63, 70), True), ((ARENA, 64, 70), False),
     ((STATE, 0, 64), False), ((ARENA, 10, 10), False)],
)  # fmt: skip
def test_regions_overlap_within_one_buffer(region, overlaps):
    other = Region(*region)
    assert IDS.overlaps(other) == other.overlaps(IDS) == overlaps or region == (ARENA, 10, 10)


def test_the_first_launch_of_a_sequence_may_read_everything():
    assert not InFlight().writes_any([IDS, OTHER])


def test_launches_that_trigger_early_keep_all_before_them_in_flight():
    found = in_flight((IDS, EARLY), *[(OTHER, EARLY)] * 5)
    assert found.writes_any([IDS]) and found.writes_any([OTHER])
    assert not found.writes_any([Region(STATE, 0, 64)])


def test_what_precedes_a_launch_that_waits_first_has_completed():
    """Its own writes, and those of launches after it, may still be in flight."""
    found = in_flight((IDS, EARLY), (OTHER, LATE))
    assert not found.writes_any([IDS]) and found.writes_any([OTHER])
    found.add((Region(STATE, 0, 4),), EARLY)
    assert found.writes_any([OTHER]) and not found.writes_any([IDS])


def test_the_writer_itself_may_run_although_it_waits_first():
    assert in_flight((IDS, LATE)).writes_any([IDS])


def test_a_launch_without_overlap_completes_all_before_it():
    found = in_flight((IDS, EARLY), (OTHER, ALONE))
    assert not found.writes_any([IDS]) and found.writes_any([OTHER])


def test_a_host_call_completes_all_before_it():
    found = in_flight((IDS, EARLY))
    found.drain()
    assert not found.writes_any([IDS])


# ----------------------------------------------------------------------------------- paper plans


@pytest.mark.parametrize("computed", [False, True])
def test_a_norm_whose_weight_is_computed_does_not_overlap(computed, paper):
    """Norms load their weight before they wait."""
    x, w = feed("x", (Var("T", 1, 4), 256), "f32"), weight("w", (256,), "f32")
    used = ops.scale(w, factor=2.0) if computed else w
    values = {"w": np.ones(256, np.float32)}
    device = paper((9, 0))
    executor = Executor(Arrays(values), ("cuda", "reference"))
    executor.bind(executor.compile({"y": ops.rms_norm(x, used, eps=1e-5)}))
    launches = [
        launch for steps, work in device.built for step, part in zip(steps, work)
        if step.node.op == "rms_norm" for launch in part
    ]  # fmt: skip
    assert launches and all(launch.programmatic != computed for launch in launches)


def ids_ready(launch: Launch) -> bool:
    """The field of the struct Experts that lets a kernel read its ids before it waits."""
    at = _EXPERTS.fields["ids_ready"].offset
    return bool(int.from_bytes(launch.args[0][at : at + 4], "little"))


@pytest.mark.parametrize("name", MIXTURES)
def test_only_the_down_projection_reads_its_ids_early(name, paper):
    """It follows the gated unit, which has waited for the router."""
    device = paper((9, 0))
    made = engine(decoder(name, 0, "f16", hidden_size=64), ("cuda",))
    made.executor.bind(made.plan(["logits"], 1))
    found: dict[str, set[bool]] = {}
    for steps, work in device.built:
        for step, part in zip(steps, work):
            for launch in part:
                if isinstance(launch, Launch) and launch.function.module.file in FILES:
                    found.setdefault(step.node.op, set()).add(ids_ready(launch))
    assert found.pop("head_linear", {False}) == {False}
    assert found.pop("expert_linear") == {True}
    assert set(found) <= {"expert_gated", "expert_clamped"}
    assert all(ready == {False} for ready in found.values())
