"""Checks of the outputs: logits, greedy tokens and perplexity; and self-consistency."""

from __future__ import annotations

from typing import Any

import numpy as np

from .. import backends as registry
from ..engine.encoder_engine import EncoderEngine
from ..model.batch import source_tokens
from ..profiler.diff.comparison import Diff, diff
from .case import Case
from .report import FAILED, PASSED, SKIPPED, Check

# Allowed deviation of logits as a share of their range: in float32, and in half precision.
EXACT, HALVES = 1e-4, 2e-2
TIE = 1e-2  # difference of two logits up to which either may be chosen
PERPLEXITY = 1e-3, 2e-2


def logits(case: Case) -> Check:
    """Compare the logits of all ids, computed in one prefill."""
    return _outputs_check("logits", case)


def hidden(case: Case) -> Check:
    """Compare the last hidden states of an encoder."""
    return _outputs_check("hidden", case)


def _outputs_check(name: str, case: Case) -> Check:
    have, want = case.compute(), case.record.logits
    if have.shape != want.shape:
        text = f"shape {list(have.shape)}, expected {list(want.shape)}"
        return Check(name, FAILED, text)
    return _logits_check(name, case, have, want, "the oracle")


def _logits_check(
    name: str, case: Case, have: np.ndarray, want: np.ndarray, reference: str
) -> Check:
    difference, limit = np.abs(have - want), EXACT if case.exact else HALVES
    share = float(difference.max() / (want.max() - want.min() or 1.0))
    row, column = np.unravel_index(int(np.argmax(difference)), difference.shape)
    values = f"{have[row, column]:.6g}, expected {want[row, column]:.6g}"
    text = f"largest deviation from {reference} {share:.0e} of the range (allowed: {limit:.0e})"
    figures: dict[str, Any] = {"largest share": share, "allowed": limit}
    status = PASSED if share <= limit else FAILED
    return Check(name, status, text, (f"worst at token {row}, id {column}: {values}",), (figures,))


def greedy(case: Case) -> Check:
    """Compare the greedy tokens after the text, each decoded after the oracle's tokens."""
    want, at = case.record.logits, max(1, case.tokens - 1)
    with case.decoder_engine.evaluation(case.ids) as sequence:
        list(sequence.logits(case.ids[:at], last=True))
        steps = [sequence.step_logits([token])[0] for token in case.ids[at:-1]]
    other, ties, margins = [], 0, []
    for row, own in enumerate(steps, at - case.source):
        second, first = np.sort(want[row])[-2:]
        margins.append(float(first - second))
        if own.argmax() != want[row].argmax():
            ties += margins[-1] <= TIE
            other += [] if margins[-1] <= TIE else [(row, int(own.argmax()), margins[-1])]
    if other:
        row, token, margin = other[0]
        text = f"{len(other)} of {len(steps)} tokens differ, the first after {row + 1} ids"
        line = f"{token}, expected {want[row].argmax()}, whose margin is {margin:.3g}"
        return Check("greedy", FAILED, f"{text}: {line}")
    same = f"{len(steps) - ties} of {len(steps)} tokens equal"
    tied = f", {ties} ties (within {TIE})" if ties else ""
    return Check("greedy", PASSED, f"{same}{tied}; smallest margin {min(margins):.2g}")


def perplexity(case: Case) -> Check:
    """Compare the perplexity of the text; that of the target of an encoder-decoder."""
    scored = case.ids[case.source :] if case.source else case.ids[: case.tokens]
    have, want = (
        _perplexity(each[: len(scored)], scored) for each in (case.compute(), case.record.logits)
    )
    limit = PERPLEXITY[not case.exact]
    off = abs(have / want - 1)
    what = "a text" if case.file.has_vocabulary else "random ids"
    what = "the target" if case.source else what
    text = f"{have:.4f}, oracle {want:.4f}, over {len(scored) - 1} tokens of {what}"
    figures = {"own": have, "oracle": want, "allowed": limit}
    return Check("perplexity", PASSED if off <= limit else FAILED, text, rows=(figures,))


def _perplexity(logits: np.ndarray, ids: list[int]) -> float:
    rows = logits[:-1].astype(np.float64)
    rows = rows - rows.max(axis=1, keepdims=True)
    likely = rows[np.arange(len(rows)), ids[1:]] - np.log(np.exp(rows).sum(axis=1))
    return float(np.exp(-likely.mean()))


# -------------------------------------------------------------------------------- self-consistency


def steps(case: Case) -> Check:
    """Check that decoding token by token gives the logits of one prefill."""
    whole = case.compute()
    with case.decoder_engine.evaluation(case.ids) as sequence:
        if case.source:
            sequence.encode(case.ids[: case.source])
        rest = case.ids[case.source :]
        alone = np.concatenate([sequence.step_logits([token]) for token in rest])
    return _logits_check("steps", case, alone, whole, "one prefill")


def batches(case: Case) -> Check:
    """Check that an encoder computes a sequence the same way alone and among others."""
    assert isinstance(case.engine, EncoderEngine)
    alone, others = case.compute(), [case.ids[:1], case.ids[: len(case.ids) // 2 + 1]]
    batch = [others[0], case.ids, others[1]][: max(1, case.engine.limits.tokens // len(case.ids))]
    found = case.engine.hidden(batch)[batch.index(case.ids)]
    return _logits_check("batches", case, found, alone, "the sequence alone")


def fusion(case: Case) -> Check:
    """Compare fused steps with their parts."""
    return _diff_check("fusion", case, (case.model.device,), fused=True)


def backends(case: Case) -> Check:
    """Compare the first backend with each usable backend after it."""
    first = case.model.device
    behind = [
        n for n in registry.fallbacks(first) if n != first and registry.find(n).available()[0]
    ]
    if not behind:
        return Check("backends", SKIPPED, f"only {first} is usable")
    checks = [_diff_check("backends", case, (first, other)) for other in behind]
    bad = next((check for check in checks if check.status == FAILED), None)
    return bad or Check("backends", PASSED, "; ".join(check.summary for check in checks))


def _diff_check(name: str, case: Case, names: tuple[str, ...], fused: bool = False) -> Check:
    ids = source_tokens(case.ids[: case.source]) or case.ids[: case.tokens]
    kv_type = None if case.spec.is_encoder else "f32"
    found: Diff = diff(
        case.file, names, ids=ids, fused=fused, linear="float", kv_type=kv_type,
        progress=case.progress,
    )  # fmt: skip
    text = f"{found.sides[0]} against {found.sides[1]}: "
    if found.first is None:
        text += f"{len(found.rows)} results are within their ops' tolerance"
        return Check(name, PASSED, text)
    lines = found.verdict()
    return Check(name, FAILED, f"{text}{lines[0]} {lines[1].strip()}", tuple(lines[1:]))
