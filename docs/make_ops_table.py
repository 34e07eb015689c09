"""Writes docs/ops.md: which backend runs which op, on which dtypes and weight formats.

    python docs/make_ops_table.py

Nothing is listed by hand: the ops' own samples are offered to each backend, as the tests do.
"""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.append(str(ROOT / "tests" / "support"))

from cases import Group, groups  # noqa: E402

from graphllm import backends, ops  # noqa: E402
from graphllm.backends import Backend, Kernel, Options  # noqa: E402
from graphllm.backends.order import ORDER  # noqa: E402
from graphllm.graph.dtype import F32, DType  # noqa: E402
from graphllm.graph.tensor import WEIGHT  # noqa: E402
from graphllm.ops import Arg, OpDef, Sample  # noqa: E402

WIDTH = 100
ONE, MANY = 1, 512  # tokens of a step
COLUMNS = 256  # of a weight: whole blocks of every format

HEAD = """# Ops and backends

Made by `python docs/make_ops_table.py` from the ops' declarations and the backends' registrations:
the samples that every op declares are offered to each backend, in the order in which backends are
asked.

*yes*: it runs all of them; *some*: all but the ones below; *parts*: the op is a fused one, which
this backend leaves in its parts; *-*: the next backend runs it. The reference is a NumPy formula
for each op that is not fused.
"""
FORMATS = """## Weight formats

How each op's kernel multiplies a weight of each format, in a step of 1 token and, where that
differs, after a slash in one of 512. *int8*: the stored blocks as they are, with activations in
blocks of int8. *f32*, *f16*, *bf16*: the weights become floats, or are, and meet activations of
that type. *yes*: it only reads them. *parts*, *-*: as above.
"""
OPS = """## The ops

With the dtypes that their operands have in the samples, in the order of the call.
"""


# -------------------------------------------------------------------------------- op by backend


def dtypes(op: OpDef, samples: list[Group]) -> str:
    """The dtypes that each operand has in the samples."""
    seen: dict[str, set[str]] = {}
    for group in samples:
        for index, arg in enumerate(group.args):
            if arg is not None:
                seen.setdefault(op.operand(index), set()).add(arg.dtype.name)
    return "; ".join(f"{name}: {', '.join(sorted(kinds))}" for name, kinds in seen.items())


def refusals(backend: Backend, samples: list[Group]) -> list[str]:
    """Why the backend does not take some of the contiguous samples; one entry a sample."""
    answers = [backend.select(g.node, Options()) for g in samples if g.contiguous]
    return [answer for answer in answers if not isinstance(answer, Kernel)]


def support(backend: Backend, op: OpDef, samples: list[Group]) -> str:
    """How much of them it takes, in a word."""
    refused = len(refusals(backend, samples))
    if not refused:
        return "yes"
    return "some" if refused < sum(g.contiguous for g in samples) else missing(op)


def missing(op: OpDef) -> str:
    return "parts" if op.fusion else "-"


def exceptions(found: Sequence[Backend]) -> Iterator[str]:
    """A line for each op of which a backend takes some samples."""
    for name, op in sorted(ops.registry().items()):
        samples = groups(op)
        for backend in found:
            if support(backend, op, samples) == "some":
                reasons = sorted({*refusals(backend, samples)})
                yield from wrapped(f"- `{name}` on {backend.name}, not where: {'; '.join(reasons)}")


# ------------------------------------------------------------------------------ format by backend


def is_matrix(arg: Arg | None) -> bool:
    return arg is not None and arg.leaf == "weight" and len(arg.shape) == 2


def formats_of(op: OpDef) -> list[DType]:
    """The formats of weight matrices in the op's samples, plain ones first."""
    args = {arg.dtype for s in op.samples for arg in s.args if arg is not None and is_matrix(arg)}
    return sorted(args, key=lambda form: (form.block, form.name))


def with_format(op: OpDef, form: DType, x: DType, tokens: int) -> Group:
    """The op's first sample with weights of this format, activations of dtype ``x``, and so many
    tokens."""
    sample = op.samples[0]
    args: list[Arg | None] = []
    for arg, after in zip(sample.args, (*sample.args[1:], None)):
        if arg is None:
            args.append(None)
            continue
        shape = tuple(tokens if isinstance(dim, str) else dim for dim in arg.shape)
        if is_matrix(arg):
            arg = replace(arg, dtype=form)
            shape = (*shape[:-1], COLUMNS)
        elif is_matrix(after) and len(shape) == 2:
            arg = replace(arg, dtype=x)
            shape = (*shape[:-1], COLUMNS)
        args.append(replace(arg, shape=shape, layout="contiguous"))
    return Group(op, op.name, [Sample(tuple(args), sample.attrs)])


def activation(backend: Backend, form: DType, tokens: int) -> DType | None:
    """What a linear's kernel makes of float32 activations; None where there is no kernel."""
    node = with_format(ops.get("linear"), form, F32, tokens).node
    kernel = backend.select(node, Options())
    if not isinstance(kernel, Kernel):
        return None
    source = kernel.lower(node, Options())[0] if kernel.lower else node.src[0]
    assert source is not None
    return source.dtype


def multiplied(backend: Backend, op: OpDef, form: DType, tokens: int) -> str:
    """What the backend does with a weight of this format."""
    x = activation(backend, form, tokens)
    node = with_format(op, form, x or F32, tokens).node
    if x is None or not isinstance(backend.select(node, Options()), Kernel):
        return missing(op)
    if not any(source.dtype == x for source in node.sources if source.base.op != WEIGHT):
        return "yes"
    return "int8" if x.name.startswith("a8_") else x.name


def cell(backend: Backend, op: OpDef, form: DType) -> str:
    one, many = (multiplied(backend, op, form, tokens) for tokens in (ONE, MANY))
    return one if one == many else f"{one} / {many}"


# ---------------------------------------------------------------------------------------- the page


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """As Markdown that is aligned for whoever reads it as it is."""
    widths = [max(map(len, column)) for column in zip(head, *rows)]
    for cells in (head, ["-" * width for width in widths], *rows):
        yield "| " + " | ".join(f"{c:<{width}}" for c, width in zip(cells, widths)) + " |"


def wrapped(text: str) -> list[str]:
    return textwrap.wrap(text, WIDTH, subsequent_indent="  ", break_on_hyphens=False)


def description(name: str, op: OpDef) -> list[str]:
    told = op.fusion.build if op.fusion else op.reference
    text = " ".join((told.__doc__ or "").split("\n\n")[0].split())
    return wrapped(f"- `{name}`: {text} ({dtypes(op, groups(op))})")


def page() -> str:
    """The whole of docs/ops.md."""
    found, known = [backends.find(name) for name in ORDER], sorted(ops.registry().items())
    rows = [[f"`{name}`", *(support(b, op, groups(op)) for b in found)] for name, op in known]
    lines = [HEAD, *table(["op", *ORDER], rows), "", *exceptions(found), "", FORMATS]
    readers = [op for _, op in known if any(form.block > 1 for form in formats_of(op))]
    for backend in found:
        rows = [
            [form.name, *(cell(backend, op, form) for op in readers)]
            for form in formats_of(ops.get("linear"))
        ]
        lines += [*table([backend.name, *(f"`{op.name}`" for op in readers)], rows), ""]
    lines += [OPS, *(line for name, op in known for line in description(name, op))]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    (ROOT / "docs" / "ops.md").write_text(page(), "utf-8")
