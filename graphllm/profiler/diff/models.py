"""The models that `diff` compares: loading for one prompt, and the programs that compute it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from ...checkpoints.checkpoint import Checkpoint
from ...engine.program import Program
from ...graph import rewrite
from ...graph.tensor import STATE
from ...loading.load import model_spec
from ...loading.loaded_encoder import LoadedEncoder, encoder_arguments
from ...loading.loaded_model import LoadedModel
from ...model.batch import source_tokens
from ...model.config import ModelConfig
from ...ops import get
from .replay import StepInputs

Model = LoadedModel | LoadedEncoder

_FORCED = 8  # at least the tokens that a target begins with


def load_model(file: Checkpoint, tokens: int, given: Mapping[str, Any]) -> Model:
    """Load a model for a prompt of this many tokens.

    RequestError: an argument has no meaning for an encoder.
    """
    spec = model_spec(file, given.get("model_def"))
    if not spec.is_encoder:
        most = 2 * tokens + _FORCED if spec.is_encoder_decoder else tokens + 1
        return LoadedModel.load(file, context=most, max_sequences=1, **given)
    return LoadedEncoder.load(file, **encoder_arguments(given, {"kv_type": None}))


def sequence_of(model: Model, ids: Sequence[int]) -> list[int]:
    """Return the tokens to compute for a prompt: of an encoder-decoder the source and a target.

    The target has the tokens that all targets begin with.
    """
    model.check_ids(ids)
    seq2seq = getattr(model, "seq2seq", None)
    return [*ids] if seq2seq is None else [*source_tokens(ids), *seq2seq.start]


def config_of(model: Model) -> ModelConfig:
    """Return the configuration of a model."""
    return model.decoder.cfg if isinstance(model, LoadedModel) else model.encoder.cfg


def programs(llm: Model, tokens: Sequence[int]) -> Iterator[tuple[Program, StepInputs]]:
    """Yield the programs that compute ``tokens``, each after the one before it was run."""
    with llm.engine.evaluation(tokens) as evaluation:
        for index, program in enumerate(evaluation.programs(tokens)):
            state = _written_states(llm, program) if index else {}
            yield program, StepInputs(program.feeds, program.env, state)


def _written_states(llm: Model, program: Program) -> dict[str, np.ndarray]:
    """Return the states that the program writes, as they are now."""
    plan = llm.executor.compile(program.outputs, program.bounds)
    steps = [(step.node, get(step.node.op).written(step.node)) for step in plan.steps]
    leaves = {rewrite.root(s) for node, own in steps for i in own if (s := node.src[i]) is not None}
    return {leaf.name: llm.executor.get_state(leaf.name) for leaf in leaves if leaf.op == STATE}
