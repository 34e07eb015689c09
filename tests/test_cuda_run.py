"""What runs on the GPU while the host goes on: steps ahead of their ids, copies both ways."""

from __future__ import annotations

import numpy as np
import pytest
from cuda_cases import need_gpu
from test_kv import CONTEXT, GREEDY, IDS, drawn, engine, windowed

from graphllm.backends import Options
from graphllm.backends.cuda import BACKEND
from graphllm.tensor import Meta

pytestmark = pytest.mark.cuda


@pytest.fixture(autouse=True)
def _gpu():
    need_gpu()


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return windowed(tmp_path_factory.mktemp("run"))


@pytest.fixture
def ahead(path):
    return engine(path, backends=("cuda",))


@pytest.fixture
def plain(path, monkeypatch):
    """Waits for every step."""
    held = engine(path, backends=("cuda",))
    held.prepare()
    monkeypatch.setattr(held.executor.devices["cuda"], "ring", lambda operand: None)
    return held


def test_a_step_is_begun_before_the_last_one_is_read(ahead):
    drawn(ahead, IDS[:20], 4)
    env = {"T": 1, "S": 1, "Q": 2, "N": 1}
    assert ahead.executor.repeat(ahead.decode_plan(), {}, env, "ids").ahead == 1


@pytest.mark.parametrize("length", [1, 16, 40, 119, 120])
def test_the_same_tokens_up_to_the_end_of_the_context(ahead, plain, length):
    have, want = (list(e.generate(IDS[:length], GREEDY, ())) for e in (ahead, plain))
    assert have == want and len(have) == CONTEXT - length + 1


def test_requests_in_any_order_after_steps_too_many(ahead, plain):
    rng = np.random.default_rng(8)
    for _ in range(25):
        common, new = int(rng.integers(0, 90)), int(rng.integers(1, 25))
        prompt = [*IDS[:common], *(int(i) for i in rng.integers(3, 90, new))]
        count = int(rng.integers(1, CONTEXT + 1 - len(prompt)))
        assert drawn(ahead, prompt, count) == drawn(plain, prompt, count)


@pytest.mark.parametrize("nbytes", [0, 1, (1 << 20) + 1, (32 << 20) - 1, (100 << 20) + 77])
def test_what_is_sent_arrives(nbytes):
    device = BACKEND.open_device(Options())
    data = np.random.default_rng(nbytes).integers(0, 256, nbytes, np.uint8)
    buffers = [device.prepare(None, data, Meta.of((nbytes,), "i8")) for _ in range(2)]
    for buffer in buffers:
        np.testing.assert_array_equal(buffer[:nbytes], data)
