"""Attention on the GPU: all kernels, every feature, every pool dtype."""

from __future__ import annotations

import pytest
from cuda_cases import need_gpu, run_bounded
from op_runs import report

from graphllm.graph.dtype import CACHED, dtype
from graphllm.ops.attention import _FEATURES, PackedBatch, _sample

pytestmark = pytest.mark.cuda
FEW = (
    PackedBatch((1,), (77,)),
    PackedBatch((1, 1, 1), (700, 70, 16), block=16, slots=800, width=44),
    PackedBatch((2, 1, 7), (60, 64, 70), forget=13),
)
MANY = (
    PackedBatch((19,), (19,)),
    PackedBatch((64, 1), (64, 90), slots=256, width=12),
    PackedBatch((1, 1, 3, 70), (700, 513, 300, 200), block=16, slots=1760, width=44),
    PackedBatch((70, 3), (200, 130), block=64, slots=512, width=4),
    PackedBatch((20,), (300,), block=128, slots=512, width=3, forget=13),
)
SHAPES = (((6, 3), 64), ((3, 1), 96), ((8, 1), 128), ((2, 2), 256), ((8, 2), (128, 64)))


@pytest.fixture(autouse=True)
def _gpu():
    need_gpu()


def samples(batches, heads, width, kind, features):
    """Those whose keys have left a table's window keep that window."""
    return [
        _sample(
            batch, heads=heads, kind=dtype(kind), extras=extras,
            width=width if isinstance(width, tuple) else (width, width),
            attrs=tuple({**attrs, **({"window": batch.forget} if batch.forget else {})}.items()),
        )
        for batch in batches
        for attrs, extras in features
        if not (batch.forget and ("prefix" in extras or not attrs.get("causal", True)))
    ]  # fmt: skip


def tolerance(kind, batch) -> float:
    """Least tolerance: products on tensor cores are in half precision."""
    return 4e-3 if kind != "f32" and batch.block >= 16 else 0.0


@pytest.mark.parametrize("kind", CACHED)
@pytest.mark.parametrize("heads, width", SHAPES)
@pytest.mark.parametrize("batches", [FEW, MANY], ids=["few", "many"])
def test_attention(batches, heads, width, kind):
    wrong: list[str] = []
    for batch in batches:
        some = samples([batch], heads, width, kind, [({}, ()), *_FEATURES])
        wrong += run_bounded("attention", some, least=tolerance(kind, batch))
    assert not wrong, report(wrong)
