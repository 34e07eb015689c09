"""A CUDA backend that plans without a GPU."""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from graphllm.api import LLM
from graphllm.backends import Options
from graphllm.backends.cuda import BACKEND
from graphllm.backends.cuda.runtime.device import CudaDevice
from graphllm.backends.cuda.runtime.work import Launch
from graphllm.checkpoints.model_shapes import ModelShape
from graphllm.checkpoints.random_weights import RandomCheckpoint
from graphllm.loading.load import build_decoder
from graphllm.model.decoder import Limits


class Paper(CudaDevice):
    """A GPU that builds segments and runs nothing.

    ``modules`` are the modules of all launches; ``built`` has the steps of every segment with their
    launches and host calls.
    """

    def __init__(self, capability: tuple[int, int], options: Options) -> None:
        self.options = options
        self.memory, self.modules, self.built = "paper", set(), []
        self.gpu = SimpleNamespace(
            capability=capability, processors=72, max_clusters=lambda launch: 72 // launch.cluster,
            library=SimpleNamespace(cuTensorMapEncodeTiled=lambda *arguments: 0),
        )  # fmt: skip

    def alloc(self, nbytes):
        return SimpleNamespace(address=1 << 40, nbytes=nbytes)

    def free(self):
        return None

    def prepare(self, pack, raw, meta):
        return self.alloc(0)

    def constant(self, table):
        return 1 << 40

    def live(self, header, var):
        return 1 << 40

    def build(self, steps, header):
        work, _ = self.work(steps, header)
        self.modules |= {w.function.module for part in work for w in part if isinstance(w, Launch)}
        self.built.append((list(steps), work))


class Empty(RandomCheckpoint):
    """Weights of zeros, which take no memory."""

    def raw(self, name):
        info = self.info(name)
        shape = (math.prod(info.shape[:-1]), info.dtype.row_nbytes(info.shape[-1]))
        return np.broadcast_to(np.zeros(1, np.uint8), shape)


def plan_on_paper(
    device: Paper, shape: ModelShape, kind: str, tokens: int = 1
) -> list[tuple[str, list[Launch]]]:
    """Ops of a plan of two layers of a model in order, each with its launches."""
    file = Empty(replace(shape, layers=2), kind)
    options = {"backends": ("cuda",), "options": device.options}
    llm = LLM(file, build_decoder(file), options, Limits())
    llm.executor.bind(llm.engine.plan(["ids"], tokens))
    return [
        (step.node.op, [w for w in part if isinstance(w, Launch)])
        for steps, work in device.built
        for step, part in zip(steps, work)
    ]


@pytest.fixture(name="paper")
def paper_fixture(monkeypatch):
    """A function that makes the backend usable, with a GPU of the given capability."""

    def made(capability: tuple[int, int], options: Options | None = None) -> Paper:
        device = Paper(capability, options or Options())
        monkeypatch.setattr(BACKEND, "probe", lambda: (True, "on paper"))
        monkeypatch.setattr(BACKEND, "open_device", lambda options: device)
        return device

    return made
