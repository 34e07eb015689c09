"""Batches of an encoder on a device that runs ahead of the host."""

from __future__ import annotations

import lazy_device
import numpy as np
import pytest

from graphllm import ops
from graphllm.engine import batch_runner
from graphllm.engine.batch_runner import BatchRunner
from graphllm.graph.dtype import F32
from graphllm.graph.tensor import weight
from graphllm.model.encoder import EncoderBatch
from graphllm.runtime.executor import Executor
from graphllm.weights import Arrays

TOKENS, WIDTH = 8, 4


@pytest.fixture
def runner(monkeypatch):
    """A runner of which each text's output is the mean of its ids."""
    lazy_device.install(monkeypatch)
    monkeypatch.setattr(batch_runner, "on_host", lambda executor: False)
    inputs = EncoderBatch(TOKENS, TOKENS)
    table = np.arange(40, dtype=np.float32)[:, None] * np.ones(WIDTH, np.float32)
    hidden = ops.embedding(inputs.ids, weight("table", table.shape, F32))
    outputs = {"mean": ops.pool(hidden, inputs.q_start, kind="mean")}
    return BatchRunner(
        Executor(Arrays({"table": table}), ("lazy", "reference")), outputs, TOKENS, 0
    )


@pytest.mark.parametrize(
    "lengths", [[4] * 10, [8] * 5, [2] * 12, [4, 4, 8, 4, 4, 2, 2, 2, 2, 1, 1, 1, 8, 3, 5]]
)
def test_texts_get_their_own_outputs(runner, lengths):
    """A batch is launched before the outputs of the last one are read, mostly of the same plan."""
    texts, found = [[index] * length for index, length in enumerate(lengths)], {}
    for _ in range(2):
        for batch, (means,) in runner.run_batches(["mean"], texts, None, None):
            found |= {index: means[row].tolist() for row, index in enumerate(batch)}
        assert found == {index: [float(index)] * WIDTH for index in range(len(texts))}
        found.clear()


def test_a_loop_that_was_given_up_leaves_nothing_to_the_next(runner):
    texts = [[index] * 8 for index in range(6)]
    batches = runner.run_batches(["mean"], texts, None, None)
    next(batches)
    batches.close()  # one batch was launched, and not taken
    found = [means[0, 0] for _, (means,) in runner.run_batches(["mean"], texts, None, None)]
    assert found == [0, 1, 2, 3, 4, 5]
