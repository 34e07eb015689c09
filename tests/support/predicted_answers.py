"""Draft tokens for the answers of random models, which repeat nothing but are known."""

from __future__ import annotations

import random

import numpy as np
import pytest
from request_runs import Answer, Request, ids_of

from graphllm.engine import speculation
from graphllm.engine.device_drafts import DeviceDrafts
from graphllm.engine.engine import Engine
from graphllm.engine.prompt_lookup import PromptLookup
from graphllm.engine.speculation import Speculation
from graphllm.ops import drafts


class Counting(Speculation):
    """``accepted``, ``rejected``: numbers of draft tokens."""

    accepted = rejected = 0

    def accept(self, chunks, sampled):
        found = super().accept(chunks, sampled)
        accepted = sum(len(chunk.drafts) for chunk in found[0])
        self.accepted += accepted
        self.rejected += sum(len(chunk.drafts) for chunk in chunks) - accepted
        return found


def speculate(engine: Engine, fixed: int) -> None:
    """Let an engine compute so many draft tokens of each sequence; 0: as many as pay."""
    rows = engine.limits.step_sequences
    engine.batcher.speculation = Counting(engine.scheduler, rows, fixed)


def predict_answers(patch: pytest.MonkeyPatch, asked: list[Request], want: list[Answer]) -> None:
    """Predict three of four tokens right, since the answers of a random model repeat nothing."""
    known = [prompt + ids_of(ids) for (prompt, _), ids in zip(asked, want)]
    rng = random.Random(0)

    class Predictions(PromptLookup):
        def update(self):
            own = self._tokens
            self.next = next((t[len(own) :] for t in known if t[: len(own)] == own), [])

        def rates(self, count):
            return [0.9**n for n in range(1, min(count, len(self.next)) + 1)]

        def predict(self, count):
            return tuple(t if rng.random() < 0.75 else 5 for t in self.next[:count])

    patch.setattr(speculation, "PromptLookup", Predictions)


def look_up_on_device(engine: Engine) -> None:
    """Let the device of an engine that speculates predict the draft tokens of single requests."""
    batcher = engine.batcher
    batcher.device_drafts = DeviceDrafts(batcher.runner, engine.scheduler, batcher.speculation)


def predict_on_device(patch: pytest.MonkeyPatch, asked: list[Request], want: list[Answer]) -> None:
    """The same for `look_up_on_device`, by the NumPy body of the op."""
    predict_answers(patch, asked, want)
    known = [prompt + ids_of(ids) for (prompt, _), ids in zip(asked, want)]
    rng = random.Random(0)

    def look_up(tokens, count):
        own = tokens.tolist()
        rest = next((t[len(own) :] for t in known if t[: len(own)] == own), [])[:count]
        found = [t if rng.random() < 0.75 else 5 for t in rest]
        return np.array([*found, *[-1] * (count - len(found))], np.int32)

    patch.setattr(drafts, "_look_up", look_up)
