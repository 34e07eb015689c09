"""linear on the GPU: every format, every kernel, and counts of tokens around where they change."""

from __future__ import annotations

import pytest
from cuda_cases import need_gpu, normal, run_bounded
from test_ops_generated import report

from graphllm.backends import Options
from graphllm.backends.cuda.linear import FEW
from graphllm.dtype import dtype
from graphllm.ops import Arg, Sample
from graphllm.quant import FORMATS, WEIGHT_FORMATS

pytestmark = pytest.mark.cuda
TOKENS = (1, 2, 3, 5, 7, 8, 9, 17, 40)
# Many tokens are multiplied in half precision: bf16 has 8 bits, f16 11.
HALF = {"bf16": 2e-2, "f32": 0.0}


@pytest.fixture(autouse=True)
def _gpu():
    need_gpu()


def sample(tokens: int, shape: tuple[int, int], kind: str, x: str = "f32", bias: bool = False):
    args = (
        Arg(("T", shape[1]), dtype(x)),
        Arg(shape, dtype(kind), leaf="weight", make=normal),
        Arg(shape[:1], leaf="weight") if bias else None,
    )
    return Sample(args, {}, {"T": tokens})


def wide(kind: str, **more):
    """A row more than kernels take at a time, and rows of odd and even counts of blocks."""
    shapes = [(65, 768), (130, 1024)]
    shapes += [] if dtype(kind).block == 256 else [(33, 96)]
    return [sample(t, shape, kind, **more) for t in TOKENS for shape in shapes]


@pytest.mark.parametrize("kind", WEIGHT_FORMATS)
def test_counts_of_tokens(kind):
    wrong = run_bounded("linear", wide(kind, bias=True), least=HALF.get(kind, 4e-3))
    assert not wrong, report(wrong)


@pytest.mark.parametrize("kind", WEIGHT_FORMATS)
def test_few_tokens_are_exact(kind):
    """Float activations lose nothing but by the order of the sum."""
    few = [s for s in wide(kind) if s.env["T"] <= FEW]
    wrong = run_bounded("linear", few, Options(linear="float"), 0.0 if kind != "bf16" else 3e-5)
    assert not wrong, report(wrong)


@pytest.mark.parametrize("kind", FORMATS)
def test_quantised_activations(kind):
    """Exact but for the order of the sum, at any count of tokens."""
    x = "a8_32" if dtype(kind).block == 32 else "a8_256"
    wrong = run_bounded("linear", wide(kind, x=x, bias=True))
    assert not wrong, report(wrong)
