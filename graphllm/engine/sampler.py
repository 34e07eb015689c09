"""The sampling program: from the logits of a forward pass to the tokens of the next step."""

from __future__ import annotations

from .. import ops
from ..graph.tensor import Tensor
from ..model.batch import ADVANCED, FED, SEQUENCE, STEP, Batch, Limits, StepVariable, step_vars


def sampler_variables(limits: Limits) -> list[StepVariable]:
    """Return the step variables of sampling; see `ops.sample`, `ops.penalise`, `ops.advance`."""
    _, s, _, _ = step_vars(limits)
    floats = ("temperature", "top_p", "min_p", "repeat", "presence", "frequency")
    ints = ("top_k", "min_tokens", "sample_index")
    return [
        *(StepVariable(name, (s,), "i32", ADVANCED, SEQUENCE) for name in ("count", "done")),
        StepVariable("history", (s, limits.history), "i32", ADVANCED, SEQUENCE),
        StepVariable("stop", (limits.stops,), "i32", FED, STEP),
        *(StepVariable(name, (s,), "f32", FED, SEQUENCE) for name in floats),
        *(StepVariable(name, (s,), "i32", FED, SEQUENCE) for name in ints),
        StepVariable("seed", (s,), "i64", FED, SEQUENCE),
    ]


def sampling_outputs(logits: Tensor, batch: Batch) -> dict[str, Tensor]:
    """Sample from ``logits`` [N, vocab], with and without penalties; return outputs by name.

    Row r of the logits belongs to sequence r of the batch; there may be fewer rows than sequences.

    Returns:
        ``sampled`` [N], the sampled token ids; ``ids`` [T], the same written to the step's state,
        so that the next step can start at once (this needs a row for each sequence);
        ``sampled.penalised`` and ``ids.penalised``, both after `ops.penalise`.
    """
    v = {each.name: each.leaf() for each in sampler_variables(batch.limits)}
    penalised = ops.penalise(
        logits, v["history"], v["count"], v["stop"], v["repeat"], v["presence"], v["frequency"],
        v["min_tokens"],
    )  # fmt: skip
    groups = [t for c in batch.caches for t in (batch.slot[c.name], batch.table[c.name])]
    outputs = {}
    for suffix, x in (("", logits), (".penalised", penalised)):
        sampled = ops.sample(
            x, v["temperature"], v["top_k"], v["top_p"], v["min_p"], v["seed"], v["count"],
            v["sample_index"],
        )  # fmt: skip
        outputs[f"sampled{suffix}"] = sampled
        outputs[f"ids{suffix}"] = ops.advance(
            sampled, v["stop"], batch.ids, batch.pos, batch.kv_len, v["count"], v["done"],
            v["history"], *groups, block=batch.limits.block,
        )  # fmt: skip
    return outputs
