"""The sampling program: from the logits of a forward pass to the tokens of the next step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from .. import ops
from ..graph.tensor import Tensor, Var, feed, state
from ..model.batch import ADVANCED, FED, SEQUENCE, Batch, Limits, StepVariable, step_vars
from ..ops.penalties import FACTORS, WINDOWS
from ..ops.sampling import mask_words
from ..ops.sampling_filters import FILTERS

# Stages between the logits and `ops.sample`, as suffixes of the outputs sampled after them: none, a
# bitmap of the ids that may be sampled, which `ops.sample` reads; `ops.bias_logits`, which applies
# the bitmap; also `ops.penalise`, also `ops.filter_logits`. A step runs as many as the row that
# needs most of them; the later ones change no logits of the other rows.
STAGES = ("", ".masked", ".biased", ".penalised", ".filtered")
BIASED = STAGES.index(".biased")  # the stage whose most likely ids are the candidates of beams
PROCESSED = STAGES.index(".penalised")  # the stage that logits processors change
PLACED, ACCEPTED = "placed", "accepted"  # outputs, see `draft_outputs`


def sampler_variables(limits: Limits, vocab: int) -> list[StepVariable]:
    """Return the step variables of sampling; see the ops of `sampling_outputs`."""
    _, s, _, _ = step_vars(limits)
    fed: dict[str, dict[str, tuple[int, ...]]] = {
        "f32": {"temperature": (), "top_p": (), "min_p": (), "bias": (limits.biases,),
                "penalty_factors": (len(FACTORS),), "filters": (len(FILTERS),)},
        "i32": {"top_k": (), "filter_top_k": (), "min_tokens": (), "sample_index": (),
                "penalty_windows": (len(WINDOWS),), "bias_ids": (limits.biases,),
                "allowed": (limits.allowed,), "early_stop": (limits.stops,),
                "breakers": (limits.breakers,), "mask": (mask_words(vocab),)},
        "i64": {"seed": ()},
    }  # fmt: skip
    return [
        StepVariable("count", (s,), "i32", ADVANCED, SEQUENCE),
        StepVariable("history", (s, limits.history), "i32", ADVANCED, SEQUENCE),
        *(
            StepVariable(name, (s, *inner), kind, FED, SEQUENCE)
            for kind, names in fed.items()
            for name, inner in names.items()
        ),
    ]


def sampling_outputs(logits: Tensor, batch: Batch) -> dict[str, Tensor]:
    """Sample from ``logits`` [N, vocab], as they are and processed; return outputs by name.

    Row r of the logits belongs to sequence r of the batch; there may be fewer rows than sequences.

    Returns:
        ``sampled`` [N], the sampled token ids; ``ids`` [T], the same written to the step's state,
        so that the next step can start at once (this needs a row for each sequence);
        both also with the suffixes of `STAGES`; ``top_ids`` [N, K], the most likely ids, and
        ``top_logprobs`` [N, K]; ``logprobs`` [N, 1] with each suffix, those of the sampled ids;
        ``candidate_ids`` [N, C], the most likely ids after `ops.bias_logits`, and
        ``candidate_logprobs`` [N, C]. Log-probabilities are those of ``logits`` as they are; those
        of candidates have the biases added.
        ``processed`` [N, vocab] are the logits after biases and penalties. The host may change
        them: outputs with the suffix ``.fed`` are sampled from the inputs ``fed.processed`` and
        ``fed.logits`` (for the log-probabilities), [R, vocab] each.
    """
    vocab = logits.meta.inner[0]
    v = {each.name: each.leaf() for each in sampler_variables(batch.limits, vocab)}
    biased = ops.bias_logits(
        logits, v["bias_ids"], v["bias"], v["allowed"], v["early_stop"], v["count"],
        v["min_tokens"], v["mask"],
    )  # fmt: skip
    processed = ops.penalise(
        biased, v["history"], batch.kv_len, v["breakers"], v["penalty_factors"],
        v["penalty_windows"],
    )  # fmt: skip
    groups = [t for c in batch.caches for t in (batch.slot[c.name], batch.table[c.name])]
    outputs = {"processed": processed, **_most_likely("", logits, batch.limits)}
    candidates = ops.top_ids(biased, n=min(batch.limits.candidates, logits.meta.inner[0]))
    outputs["candidate_ids"] = candidates
    outputs["candidate_logprobs"] = ops.logprobs(logits, candidates, biased)
    stages = (logits, logits, biased, processed, _filtered(processed, v))
    for suffix, x in zip(STAGES, stages):
        sampled = _sampled(x, v, v["mask"] if suffix == ".masked" else None)
        outputs |= _sample_outputs(suffix, logits, sampled)
        outputs[f"ids{suffix}"] = ops.advance(
            sampled, batch.ids, batch.pos, batch.kv_len, v["count"], v["history"], *groups,
            block=batch.limits.block,
        )  # fmt: skip
    if batch.limits.drafts:
        outputs |= draft_outputs(outputs, batch, v["count"], groups)
    rows = Var("R", 1, fed_rows(batch.limits, vocab))
    fed = {name: feed(f"fed.{name}", (rows, vocab), "f32") for name in ("logits", "processed")}
    sampled = _sampled(_filtered(fed["processed"], v), v)
    outputs |= _sample_outputs(".fed", fed["logits"], sampled)
    return outputs | _most_likely(".fed", fed["logits"], batch.limits)


def draft_outputs(
    outputs: Mapping[str, Tensor], batch: Batch, count: Tensor, groups: Sequence[Tensor]
) -> dict[str, Tensor]:
    """Return outputs of steps whose draft tokens the device accepts and predicts, by name.

    ``placed``: the token ids of the step [T]; ``accepted``, with the suffixes of `STAGES` before
    penalties: the drafts of the next step [D]. See `ops.place_drafts` and `ops.accept_drafts`.
    Penalties would need the last tokens of each row.

    Args:
        outputs: those of `sampling_outputs`, for ``sampled``.
        batch: inputs of the graph.
        count: the step variable.
        groups: slots and table of each cache group.
    """
    limits = batch.limits
    drafts = state("draft.ids", (limits.drafts,), "i32")
    tokens = state("draft.tokens", (limits.context + limits.drafts + 1,), "i32")
    progress = state("draft.progress", (2,), "i32")
    placed = ops.place_drafts(
        progress, drafts, tokens, batch.ids, batch.pos, batch.kv_len, count, *groups,
        block=limits.block,
    )  # fmt: skip
    accepted = {
        ACCEPTED + suffix: ops.accept_drafts(outputs[f"sampled{suffix}"], drafts, tokens, progress)
        for suffix in STAGES[:PROCESSED]
    }
    return {PLACED: placed, **accepted}


def fed_rows(limits: Limits, vocab: int) -> int:
    """Return the largest number of rows that the outputs with the suffix ``.fed`` sample from."""
    return min(limits.sequences, limits.logits_rows(vocab))


def _filtered(x: Tensor, v: Mapping[str, Tensor]) -> Tensor:
    return ops.filter_logits(
        x, v["filters"], v["filter_top_k"], v["seed"], v["count"], v["sample_index"]
    )


def _sampled(x: Tensor, v: Mapping[str, Tensor], mask: Tensor | None = None) -> Tensor:
    return ops.sample(
        x, v["temperature"], v["top_k"], v["top_p"], v["min_p"], v["seed"], v["count"],
        v["sample_index"], mask,
    )  # fmt: skip


def _sample_outputs(suffix: str, logits: Tensor, sampled: Tensor) -> dict[str, Tensor]:
    logprobs = ops.logprobs(logits, sampled.reshape(sampled.shape[0], 1))
    return {f"sampled{suffix}": sampled, f"logprobs{suffix}": logprobs}


def _most_likely(suffix: str, logits: Tensor, limits: Limits) -> dict[str, Tensor]:
    ids = ops.top_ids(logits, n=min(limits.top_logprobs, logits.meta.inner[0]))
    return {f"top_ids{suffix}": ids, f"top_logprobs{suffix}": ops.logprobs(logits, ids)}
