"""`graphllm.validate`: run the checks in order on a directory or on small random models."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

from ..checkpoints.checkpoint import Checkpoint, checkpoint_path
from ..errors import GraphllmError, RequestError
from ..model.spec import ModelSpec
from ..runtime.executor import Progress
from . import file_checks, hf_oracle, output_checks
from .case import Case, ValidatedDirectory
from .layer_check import hidden_states
from .oracle import FunctionOracle, OracleFunction, check_function, load_oracle
from .oracle_record import Oracle
from .report import FAILED, SKIPPED, Check, Report, Run
from .tiny_models import tiny_models

CheckFunction = Callable[[Case], Check]

SELF_CHECKS: tuple[tuple[str, CheckFunction], ...] = (
    ("steps", output_checks.steps),
    ("fusion", output_checks.fusion),
    ("backends", output_checks.backends),
)
ORACLE_CHECKS: tuple[tuple[str, CheckFunction], ...] = (
    ("layers", hidden_states),
    ("logits", output_checks.logits),
    ("greedy", output_checks.greedy),
    ("perplexity", output_checks.perplexity),
)
FILE_CHECKS: tuple[tuple[str, CheckFunction], ...] = (
    ("tokenizer", file_checks.tokenizer),
    ("config", file_checks.config),
    ("weights", file_checks.weights),
)
CHECKS = (*FILE_CHECKS, *ORACLE_CHECKS, *SELF_CHECKS)
ENCODER_ORACLE_CHECKS: tuple[tuple[str, CheckFunction], ...] = (
    ("layers", hidden_states),
    ("hidden", output_checks.hidden),
)
ENCODER_CHECKS = (
    *FILE_CHECKS, *ENCODER_ORACLE_CHECKS, ("batches", output_checks.batches), *SELF_CHECKS[1:],
)  # fmt: skip


def validate(
    model: str | Path | None = None,
    *,
    model_def: str | Path | ModelSpec | None = None,
    tiny: bool = False,
    oracle: str | Path | None = None,
    device: str = "auto",
    tokens: int = 64,
    new: int = 16,
    progress: Progress | None = None,
) -> Report:
    """Validate a model against transformers or another oracle, and its backends against each other.

    Errors of the model are in the report.

    Args:
        model: a Hugging Face directory; with ``tiny`` a model type or a model file.
        model_def: model file to use instead of the built-in one.
        tiny: validate the TINY configurations of a model file with random weights.
        oracle: Python file with ``oracle(config, weights, ids)`` or a torch module of that name
            (`graphllm.validation.oracle`); overrides that of the model file.
        device: first backend.
        tokens: tokens of text to prefill.
        new: tokens to decode after them.
        progress: progress callback.

    Raises:
        RequestError: the arguments name nothing that can be validated.
    """
    if tokens < 2 or new < 1 or tokens + new > 512:
        raise RequestError(
            f"tokens = {tokens} must be at least 2, new = {new} at least 1, their sum at most 512"
        )
    show = progress or (lambda what, done, total: None)
    show("checks", 0, len(CHECKS))  # importing transformers takes seconds
    function = None if oracle is None else load_oracle(Path(oracle))
    if tiny:
        spec = _model_spec(model, model_def)
        runs = [
            _run(spec.name + f" {i}", file, spec, device, made, tokens, new, show)
            for i, (file, made) in enumerate(tiny_models(spec, function))
        ]
        return Report(spec.name, tuple(runs))
    if model is None:
        raise RequestError("pass a Hugging Face directory, or --tiny with a model type or file")
    path = checkpoint_path(model)
    if not path.is_dir():
        hint = {".py": "; use --tiny for a model file", ".gguf": "; use diff to compare backends"}
        hint_text = hint.get(path.suffix, "")
        raise RequestError(f"{path}: not a Hugging Face directory{hint_text}")
    file = ValidatedDirectory(path, None if model_def is None else _model_spec(None, model_def))
    spec = file.spec()
    try:
        known = _oracle(file, spec, function)
    except RequestError:
        spec.config(file.keys(spec))  # its error may be more specific
        raise
    run = _run(str(path), file, spec, device, known, tokens, new, show)
    return Report(str(path), (run,))


def _model_spec(model: str | Path | None, model_def: str | Path | ModelSpec | None) -> ModelSpec:
    """Return the model spec of ``--tiny``. Raises RequestError or ModelFileError."""
    from .. import models

    if isinstance(model_def, ModelSpec):
        return model_def
    if (model is None) == (model_def is None):
        raise RequestError("--tiny needs either a model type or a model file (--model-def)")
    if model_def is not None:
        return models.spec_of_file(model_def)
    if Path(str(model)).suffix == ".py":
        return models.spec_of_file(Path(str(model)))
    return models.spec_of_model_type(str(model), "--tiny")


def _oracle(
    file: ValidatedDirectory, spec: ModelSpec, function: OracleFunction | None
) -> Oracle | None:
    """Return the oracle of the directory, or None. RequestError without transformers."""
    function = function or spec.oracle
    if function is not None:
        check_function(spec)
        weights = file.weights(spec, spec.config(file.keys(spec)))
        return FunctionOracle(function, file.metadata, weights)
    hf_oracle.require_transformers()
    if not hf_oracle.has_model(file.architecture, spec):
        return None
    try:
        return hf_oracle.TransformersOracle.load(file, spec)
    except RequestError as error:
        raise RequestError(f"{error}{_remote_code_hint(file)}") from None


def _remote_code_hint(file: Checkpoint) -> str:
    """Return how to compare with the code that the directory has for its model, or ""."""
    stated = file.metadata.get("auto_map")
    if not stated:
        return ""
    names = sorted(
        {str(n).partition(".")[0] for n in stated.values()} if isinstance(stated, dict) else ()
    )
    code = ", ".join(f"{name}.py" for name in names) or "its code"
    return f"; {code} (auto_map) is not run: an --oracle FILE may import it and return its module"


def _run(
    title: str, file: Checkpoint, spec: ModelSpec, device: str, oracle: Oracle | None, tokens: int,
    new: int, show: Progress,
) -> Run:  # fmt: skip
    case = Case(title, file, spec, device, oracle, tokens, new, show)
    checks = tuple(_checks(case))
    name = case.loaded.device if case.loaded else device
    return Run(title, oracle.name if oracle else "", name, checks)


def _checks(case: Case) -> Iterator[Check]:
    """Run all checks in order; those that cannot run are skipped with a reason."""
    broken, checks = "", ENCODER_CHECKS if case.spec.is_encoder else CHECKS
    for done, (name, check) in enumerate(checks):
        case.progress("checks", done, len(checks))
        compares = (name, check) in (*ORACLE_CHECKS, *ENCODER_ORACLE_CHECKS)
        if compares and case.oracle is None:
            text = f"no oracle to compare with{_remote_code_hint(case.file)}"
            yield Check(name, SKIPPED, text)
            continue
        if broken:
            yield Check(name, SKIPPED, f"skipped because {broken} failed")
            continue
        try:
            yield check(case)
        except GraphllmError as error:
            yield Check(name, FAILED, str(error))
            broken = name
