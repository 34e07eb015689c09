"""Checks of the files: tokenizer, configuration, weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ..errors import GraphError, GraphllmError, UnusedTensors
from ..loading.load import build_model
from ..model.config_keys import IGNORED
from ..tokenizer.edge_cases import EDGE_CASES
from .case import TEXT, Case, ValidatedDirectory, build_graph
from .report import FAILED, PASSED, SKIPPED, Check

_MAX_SHOWN = 6  # differences listed in a report


def tokenizer(case: Case) -> Check:
    """Check that hard texts are encoded and decoded as by transformers' tokenizer."""
    if not case.file.has_vocabulary:
        return Check("tokenizer", SKIPPED, "no tokenizer")
    try:
        own = case.file.tokenizer()
    except GraphllmError as error:
        if isinstance(case.file, ValidatedDirectory):
            case.file.ignore_vocabulary = True  # so that the other checks can be made
        return Check("tokenizer", FAILED, str(error))
    other = _transformers_tokenizer(case.file.path)
    if isinstance(other, str):
        return Check("tokenizer", SKIPPED, other)
    wrong, texts = [], (*EDGE_CASES, TEXT)
    # Nobody reads the text that an encoder's ids decode to, so it is not cleaned up.
    options = {"clean_up_tokenization_spaces": False} if case.spec.is_encoder else {}
    for text in texts:
        clean = text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
        for special in (True, False):
            want = other(clean, add_special_tokens=special).input_ids
            have = own.encode(text, special, parse_special=True)
            if have != want:
                wrong.append(f"{_excerpt(text)}: ids {_first_difference(have, want)}")
                continue
            shown, again = other.decode(want, **options), own.decode(want, skip_special=False)
            if shown != again:
                decoded = f"{_excerpt(again)}, expected {_excerpt(shown)}"
                wrong.append(f"{_excerpt(text)}: its ids decode to {decoded}")
    if wrong:
        text = f"{len(wrong)} of {2 * len(texts)} texts differ: {wrong[0]}"
        return Check("tokenizer", FAILED, text, tuple(wrong[:_MAX_SHOWN]))
    return Check("tokenizer", PASSED, f"{len(texts)} texts are encoded and decoded alike")


def _transformers_tokenizer(folder: Path) -> Any:
    """Return the tokenizer of transformers, or a string that says why there is none."""
    try:
        from transformers import AutoTokenizer

        from .hf_oracle import quiet

        with quiet():
            return AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except Exception as error:  # transformers raises many kinds
        return f"transformers cannot load it: {' '.join(str(error).split())[:200]}"


def _excerpt(text: str) -> str:
    return repr(text if len(text) <= 40 else text[:37] + "...")


def _first_difference(have: list[int], want: list[int]) -> str:
    """Return the first difference of two lists of ids."""
    same = [a == b for a, b in zip(have, want)]
    at = same.index(False) if False in same else len(same)
    return f"differ from {at} on: {have[at : at + 4]}, expected {want[at : at + 4]}"


def config(case: Case) -> Check:
    """Check that every key of the configuration is used, known to be ignorable, or null."""
    keys = case.file.keys(case.spec)
    case.spec.config(keys)
    keys.finish()
    used = sorted(k for k in keys.values if k in keys.read_names)
    ignored = sorted(k for k in keys.values if k not in keys.read_names)
    reasons = [f"ignored: {k} ({IGNORED.get(k, 'null')})" for k in ignored]
    lines = [f"used: {', '.join(used)}", *reasons]
    text = f"{len(used)} keys used, {len(ignored)} ignored"
    return Check("config", PASSED, text, tuple(lines))


def weights(case: Case) -> Check:
    """Check that the model uses every weight of the file and no other."""
    extra: list[str] = []
    try:
        needed = _needed(case)
    except GraphError as error:
        raise GraphError(f"the graph cannot be built: {error}") from None
    except UnusedTensors as error:
        if not isinstance(case.file, ValidatedDirectory):
            raise
        extra = error.names
        case.file.dropped.update(extra)  # so that the other checks can be made
        needed = _needed(case)
    lines = list(case.oracle.lines) if case.oracle else []
    if extra:
        first = f"{extra[0]}" + (f" and {len(extra) - 1} more" if len(extra) > 1 else "")
        text = f"the model file does not use {first}"
        return Check("weights", FAILED, text, (*(f"unused: {n}" for n in extra), *lines))
    text = f"{needed} tensors, none missing, none unused"
    return Check("weights", PASSED, "; ".join([text, *lines]))


def _needed(case: Case) -> int:
    """Build the model; return the number of weights it uses."""
    model = build_model(case.file, case.spec)
    build_graph(model, case.tokens + case.new)
    return len(set(model.used) & set(model.weights.names()))
