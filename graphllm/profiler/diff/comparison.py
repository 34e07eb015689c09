"""`graphllm.diff`: compare two executors on one prompt, op by op.

The first side runs its plan as it is: fused, quantized and placed. The second side runs the same
steps unfused, with the same quantized activations, twice: each step from the first side's operands
(the isolated deviation, checked against the op's tolerance), and each step from its own operands
(the cumulative deviation). For two files on one backend only the cumulative deviation is defined.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np

from ... import backends as registry
from ...backends import Options
from ...checkpoints.checkpoint import Checkpoint, open_checkpoint
from ...compiler.fusion import ALL
from ...engine.program import Program
from ...errors import RequestError
from ...graph import rewrite
from ...graph.fused_op import decompose
from ...graph.tensor import Tensor
from ...ops import get
from ...runtime.executor import Executor, Progress
from ...terminal import escape_control
from .deviation import Deviation, as_float64, deviation, error_bounds, shapes, tolerance
from .models import Model, config_of, load_model, programs, sequence_of
from .replay import (
    StepInputs,
    StepItem,
    decomposed,
    group_items,
    result_name,
    run_cumulative,
    run_instrumented,
    run_isolated,
    step_items,
)

PROMPT = "The capital of France is"


@dataclass(frozen=True)
class DiffRow:
    """One result of one step.

    Attributes:
        tolerance: tolerance of the op, as a share of the largest value of a row.
        isolated: deviation from the same operands; None if two files are compared.
        cumulative: deviation with the second side's own operands.
        diverged: whether the deviation is beyond the tolerance.
    """

    step: int
    op: str
    parts: tuple[str, ...]  # ops that a fused op replaces
    scope: str
    origin: str
    backend: str
    kernel: str
    inputs: tuple[str, ...]
    shape: str
    tolerance: float
    isolated: Deviation | None
    cumulative: Deviation
    diverged: bool

    def as_dict(self) -> dict[str, Any]:
        """Return the JSON form."""
        own = {f.name: getattr(self, f.name) for f in fields(self)}
        own["isolated"] = self.isolated and self.isolated.as_dict()
        return {**own, "cumulative": self.cumulative.as_dict()}


@dataclass(frozen=True)
class Diff:
    """Result of `diff`: names of both sides, token ids, and rows in execution order."""

    sides: tuple[str, str]
    ids: tuple[int, ...]
    rows: tuple[DiffRow, ...]

    @property
    def first(self) -> DiffRow | None:
        """First row whose deviation is beyond the op's tolerance, or None."""
        return next((row for row in self.rows if row.diverged), None)

    def as_dict(self) -> dict[str, Any]:
        """Return the JSON form."""
        first = self.first.as_dict() if self.first else None
        rows = [row.as_dict() for row in self.rows]
        return {"sides": self.sides, "ids": self.ids, "first": first, "rows": rows}

    def table(self) -> str:
        """Return a line for each result, followed by the verdict."""
        lines = [f"{self.sides[0]} against {self.sides[1]}, {len(self.ids)} tokens", *_table(self)]
        return "\n".join(map(escape_control, [*lines, "", *self.verdict()]))

    def verdict(self) -> list[str]:
        """Return a few lines on the first divergence, or one that there is none."""
        row = self.first
        if row is None:
            return [f"no divergence: {len(self.rows)} results are within their ops' tolerance"]
        found = row.isolated or row.cumulative
        at = ",".join(map(str, found.worst))
        made_of = f" ({', '.join(row.parts)})" if row.parts else ""
        beyond = sum(row.diverged for row in self.rows)
        return [
            f"first divergence ({beyond} of {len(self.rows)} results diverge):",
            f"  {row.scope}: {row.op}{made_of}",
            f"  {row.backend} kernel {row.kernel}: {' '.join(row.inputs)} -> {row.shape}",
            f"  worst at [{at}]: {found.got:.8g}, expected {found.want:.8g}",
            f"  {found.relative:.1e} of the row's largest value, NMSE {found.nmse:.1e}; "
            f"tolerance of the op {row.tolerance:.0e}",
        ]


def _table(diff: Diff) -> Iterator[str]:
    wide = [max(map(len, column)) for column in zip(*((r.scope, r.op) for r in diff.rows))]
    yield (
        f"{'scope':<{wide[0]}} {'op':<{wide[1]}} {'backend':<9} {'tol':>5} {'isolated':>10} "
        f"{'of row':>7} {'NMSE':>7} {'cosine':>8} {'cumulative':>10} {'NMSE':>7} {'cosine':>8}"
    )
    for row in diff.rows:
        alone, chain = row.isolated, row.cumulative
        share = f"{alone.relative:>7.0e}" if alone else f"{'-':>7}"
        yield (
            f"{row.scope:<{wide[0]}} {row.op:<{wide[1]}} {row.backend:<9} {row.tolerance:>5.0e} "
            f"{_figures(alone, share)} {_figures(chain)}{' <-' * row.diverged}"
        )


def _figures(found: Deviation | None, between: str = "") -> str:
    """Format the largest difference, NMSE and cosine as columns; dashes if there are none."""
    if found is None:
        return f"{'-':>10} {between} {'-':>7} {'-':>8}"
    share = f"{between} " if between else ""
    return f"{found.max:>10.2e} {share}{found.nmse:>7.0e} {found.cosine:>8.6f}"


# --------------------------------------------------------------------------------------- the call


def diff(
    model: str | Path | Checkpoint,
    backends: Sequence[str] = ("cpu", "reference"),
    *,
    prompt: str = PROMPT,
    ids: Sequence[int] | None = None,
    against: str | Path | Checkpoint | None = None,
    fused: bool = False,
    no_fuse: Sequence[str] = (),
    progress: Progress | None = None,
    **loading: Any,
) -> Diff:
    """Compare two executors on a prompt, op by op.

    Args:
        model: path or open model file.
        backends: the backend whose plan is compared, and a backend that comes after it in the
            priority order, or the same one.
        prompt: text of the prompt.
        ids: token ids of the prompt, at most one step; overrides ``prompt``.
        against: another file of the same architecture and shapes; both run unfused on the first
            backend.
        fused: compare the fused steps of the first backend with their parts.
        no_fuse: fusion rules to switch off on the first side.
        progress: progress callback.
        **loading: arguments of `graphllm.load`, as ``linear``, ``kv_type``, ``threads``, ``place``.

    Raises:
        RequestError: the sides are not comparable.
    """
    file = open_checkpoint(model)
    first, second = _names(backends, fused, against is not None)
    tokens = _tokens(file, prompt, ids)

    def opened(which: Checkpoint, rules: Sequence[str]) -> Model:
        own = {"device": first, "no_fuse": rules, "progress": progress, **loading}
        return load_model(which, len(tokens), own)

    if against is not None:
        other = open_checkpoint(against)
        check_same_shape(file, other)
        a, b = opened(file, (ALL,)), opened(other, (ALL,))
        _check_same_config(a, b)
        tokens = sequence_of(a, tokens)
        sides = f"{file.path} on {first}", f"{other.path}"
        return Diff(sides, tuple(tokens), tuple(_two_files(a, b, tokens)))
    llm = opened(file, no_fuse)
    tokens = sequence_of(llm, tokens)
    # "float": the second side quantizes activations only where the plan of the first side does.
    options = Options("float", llm.executor.options.threads, (ALL,))
    oracle = ReferenceExecutors(llm, registry.fallbacks(second), options, progress)
    rows = tuple(_one_file(llm, oracle, tokens))
    return Diff((first, f"{second}, unfused"), tuple(tokens), rows)


def _names(names: Sequence[str], fused: bool, files: bool) -> tuple[str, str]:
    """Return the backends of both sides. Raises RequestError or PlacementError."""
    wanted = 1 if files or fused else 2
    if len(names) != 2 and len(names) != wanted:
        raise RequestError(f"backends = {','.join(names)!r} must be two names, as in cpu,reference")
    first, second = (names[0], names[0]) if fused or files else (names[0], names[1])
    for name in (first, second):
        usable, reason = registry.find(name).available()
        if not usable:
            raise RequestError(f"backends: {name} is not usable: {reason}")
    order = registry.names()
    if order.index(second) < order.index(first):
        raise RequestError(
            f"backends = '{first},{second}' must be '{second},{first}': the second side runs the "
            "plan of the first"
        )
    return first, second


def _tokens(file: Checkpoint, prompt: str, ids: Sequence[int] | None) -> list[int]:
    if ids is None and not prompt:
        raise RequestError("the prompt is empty")
    found = list(ids) if ids is not None else file.tokenizer().encode(prompt, add_special=True)
    if not found:
        raise RequestError("the prompt has no tokens")
    return found


class ReferenceExecutors:
    """Makes executors of the second side, which share the weights of the first."""

    def __init__(
        self, llm: Model, names: Sequence[str], options: Options, progress: Progress | None
    ) -> None:
        self.llm, self.names, self.options, self.progress = llm, names, options, progress

    def executor(self) -> Executor:
        """Return a new executor."""
        weights = self.llm.executor.weights
        return Executor(weights, self.names, self.options, progress=self.progress)


def _one_file(llm: Model, oracle: ReferenceExecutors, tokens: Sequence[int]) -> Iterator[DiffRow]:
    before = oracle.executor()
    for program, run in programs(llm, tokens):
        own = replace(run, state={name: before.get_state(name) for name in run.state})
        before = chain = oracle.executor()  # inputs have other bounds in another program
        plan = llm.executor.compile(program.outputs, program.bounds)
        found = step_items(plan)
        chained = decomposed(found)
        for group in group_items(found, run.env):
            have = run_instrumented(llm.executor, plan, group, run)
            isolated_run = run_isolated(oracle.executor(), group, run, have)
            wanted = {name: chained[name] for item in group for name in item.names}
            cumulative_run = run_cumulative(chain, wanted, own)
            for item in group:
                yield from _rows(item, run, have, isolated_run, cumulative_run)


def _rows(
    item: StepItem,
    run: StepInputs,
    have: Mapping[str, np.ndarray],
    isolated_run: Mapping[str, np.ndarray] | None,
    cumulative_run: Mapping[str, np.ndarray],
) -> Iterator[DiffRow]:
    """Yield a row for each result of a step; ``isolated_run`` is None if it did not run."""
    node = item.step.node
    tol = tolerance(item.step)
    for name, result in zip(item.names, item.results):
        meta = result.meta.at(run.env)
        got = as_float64(have[name], meta)
        isolated = (
            deviation(got, as_float64(isolated_run[name], meta))
            if isolated_run is not None
            else None
        )
        cumulative = deviation(got, as_float64(cumulative_run[name], meta))
        within = error_bounds(item.step, meta.dtype).allow(isolated or cumulative)
        yield DiffRow(
            item.index, node.op, _parts(node), node.scope, node.origin, item.step.backend.name,
            item.step.kernel.name, tuple(shapes(node.src, dict(run.env))), str(meta), tol,
            isolated, cumulative, not within,
        )  # fmt: skip


def _parts(node: Tensor) -> tuple[str, ...]:
    return tuple(part.op for part in decompose(node).nodes) if get(node.op).fusion else ()


# --------------------------------------------------------------------------------------- two files


def check_same_shape(file: Checkpoint, other: Checkpoint) -> None:
    """Raise RequestError if the files differ in architecture or in a tensor's shape."""
    if file.architecture != other.architecture:
        have = f"architecture {other.architecture}, but {file.path} has {file.architecture}"
        raise RequestError(f"{other.path}: {have}")
    for name in (*file.tensors, *other.tensors):
        shapes = [f.tensors[name].shape if name in f.tensors else None for f in (other, file)]
        if shapes[0] != shapes[1]:
            a, b = ("missing" if shape is None else list(shape) for shape in shapes)
            raise RequestError(f"{other.path}: tensor {name!r} is {a}, but {b} in {file.path}")


def _check_same_config(llm: Model, other: Model) -> None:
    a, b = config_of(llm), config_of(other)
    for field in fields(a):
        if getattr(a, field.name) != getattr(b, field.name):
            raise RequestError(f"{other.file.path}: {field.name} differs from {llm.file.path}")


def _two_files(llm: Model, other: Model, tokens: Sequence[int]) -> Iterator[DiffRow]:
    """Yield rows for the ops that both graphs have at the same site."""
    for (program, run), (theirs, run_other) in zip(
        programs(llm, tokens), programs(other, tokens), strict=True
    ):
        yield from _compare_programs((llm, program, run), (other, theirs, run_other))


_Side = tuple["Model", Program, StepInputs]


def _compare_programs(mine: _Side, theirs: _Side) -> Iterator[DiffRow]:
    (llm, program, run), (_, other_program, _) = mine, theirs
    sites, others = _sites(program), _sites(other_program)
    pairs = [(node, others[site]) for site, node in sites.items() if site in others]
    outputs = {_name(i): node for i, (node, _) in enumerate(pairs)}
    plan = llm.executor.compile(outputs, program.bounds)
    steps = {step.node: step for step in plan.steps}
    nodes = [plan.outputs[_name(i)] for i in range(len(pairs))]
    found = [StepItem(i, steps[node], (node,)) for i, node in enumerate(nodes)]
    for group in group_items(found, run.env):
        both = [
            run_cumulative(
                side.executor, {_name(i.index): pairs[i.index][k] for i in group}, own, each.bounds
            )
            for k, (side, each, own) in enumerate((mine, theirs))
        ]
        for item in group:
            yield from _rows(item, run, both[0], None, both[1])


def _name(index: int) -> str:
    return result_name(index, 0)


def _sites(program: Program) -> dict[tuple[str, str, int], Tensor]:
    """Return the ops of a program by (scope, op, number of equal ones before)."""
    found: dict[tuple[str, str, int], Tensor] = {}
    seen: Counter[tuple[str, str]] = Counter()
    for node in rewrite.toposort(rewrite.merge(dict(program.outputs)).values()):
        if not node.is_leaf and not node.is_view:
            like = node.scope, node.op
            site = node.scope, node.op, seen[like]
            found[site] = node
            seen[like] += 1
    return found
