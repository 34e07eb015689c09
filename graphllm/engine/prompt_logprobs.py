"""Log-probabilities of the tokens of a prompt, from the hidden states that its prefill computes.

The logits of all tokens of a prompt can be far larger than those that a step samples from, so they
are computed by plans of their own, a bounded number of rows at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from .. import ops
from ..compiler.plan import Plan
from ..graph.tensor import Tensor, Var, feed
from ..model.batch import Limits
from ..runtime.executor import Executor
from .step_result import StepResult, TokenLogprobs

LOGITS, LOGPROBS = "prompt.logits", "prompt.logprobs"  # outputs, see `prompt_outputs`
_OUTPUTS = (LOGPROBS, "prompt.top_ids", "prompt.top_logprobs")  # of `prompt_plan`


def prompt_outputs(
    head: Callable[[Tensor], Tensor], width: int, vocab: int, limits: Limits
) -> dict[str, Tensor]:
    """Return the outputs of the log-probabilities by name, and the logits that they are made from.

    Args:
        head: computes logits [P, vocab] from hidden states [P, width].
        width: size of a hidden state.
        vocab: size of the vocabulary.
        limits: limits of the graph.
    """
    rows = Var("P", 1, limits.logits_rows(vocab))
    logits = head(feed("prompt.hidden", (rows, width), "f32"))
    top_ids = ops.top_ids(logits, n=min(limits.top_logprobs, vocab))
    found = (
        ops.logprobs(logits, feed("prompt.ids", (rows, 1), "i32")),
        top_ids,
        ops.logprobs(logits, top_ids),
    )
    return {LOGITS: logits, **dict(zip(_OUTPUTS, found))}


def prompt_plan(executor: Executor, outputs: Mapping[str, Tensor]) -> Plan:
    """Return the plan of `prompt_outputs`."""
    return executor.compile({name: outputs[name] for name in _OUTPUTS})


def prompt_logprobs(
    executor: Executor,
    outputs: Mapping[str, Tensor],
    hidden: np.ndarray,
    ids: np.ndarray,
    count: int,
) -> list[TokenLogprobs]:
    """Return the log-probabilities of ``ids`` [P] i32 after tokens with the ``hidden`` states.

    Args:
        executor: executor of the placed graph.
        outputs: outputs of the graph by name.
        hidden: hidden states [P, width] f32.
        ids: token ids.
        count: number of the most likely tokens to return.
    """
    plan = prompt_plan(executor, outputs)
    most, found = plan.vars["P"].hi, list[TokenLogprobs]()
    for at in range(0, len(ids), most):
        own = ids[at : at + most]
        feeds = {"prompt.hidden": hidden[at : at + most], "prompt.ids": own[:, None]}
        values = executor.run(plan, feeds)
        logprobs, top_ids, top_logprobs = (values[name] for name in _OUTPUTS)
        result = StepResult(own, logprobs, top_ids, top_logprobs)
        found += [result.token(row, count) for row in range(len(own))]
    return found
