"""Attention on the GPU: split-KV and tiled kernels, every feature, every pool dtype."""

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
SHAPES = (((4, 2), 64), ((3, 1), 96), ((8, 1), 128), ((2, 2), 256), ((8, 2), (128, 64)))


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


@pytest.mark.parametrize("kind", CACHED)
@pytest.mark.parametrize("heads, width", SHAPES)
def test_few_tokens(heads, width, kind):
    wrong = run_bounded("attention", samples(FEW, heads, width, kind, [({}, ()), *_FEATURES]))
    assert not wrong, report(wrong)


@pytest.mark.parametrize("kind", CACHED)
@pytest.mark.parametrize("heads, width", SHAPES)
def test_many_tokens(heads, width, kind):
    """In half precision, except with float32 pools."""
    least = 0.0 if kind == "f32" else 4e-3
    features = [({}, ()), *_FEATURES]
    wrong = run_bounded("attention", samples(MANY, heads, width, kind, features), least=least)
    assert not wrong, report(wrong)
