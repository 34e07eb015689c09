"""Steps of walks: which ops one can do, and their records (the structs of walk_*.cuh)."""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence

from ...dtype import F32
from .. import Bound
from ..touched import Touched, touched
from .attention import argument, merged_bytes, pieces_fit, sizes, splits
from .device import Site, Spot, Work
from .elementwise import ACTIVATIONS
from .kv import heads_of, pool_of, turned_whole
from .linear import Job, activation, matrices
from .linear_many import PLAIN, items_of
from .quantise import targets
from .rope import turn
from .walk import WARPS, Task, runs, walk

_WIDEST = 8192  # of a row that is normed
_MOST_PIECES, _KEPT = 64, 1024  # of a head; keys of a piece whose slots are kept

Builder = Callable[[Site], "Sequence[Task] | None"]
BUILDERS: dict[str, Builder] = {}  # by op


def _step(op: str) -> Callable[[Builder], Builder]:
    def register(build: Builder) -> Builder:
        BUILDERS[op] = build
        return build

    return register


def tasks(site: Site) -> Sequence[Task] | None:
    """The records of a step for one token, None where it must be launched."""
    build = BUILDERS.get(site.node.op)
    if build is None or site.most(site.out.meta.rows) != 1:
        return None
    return build(site)


def walks(steps: Sequence[Bound], sites: Sequence[Site]) -> dict[int, list[Work]]:
    """The work of the steps that walks go over, by index."""
    found: list[tuple[Sequence[Task], Touched] | None] = []
    for step, site in zip(steps, sites):
        made = tasks(site)
        found.append((made, touched(step, sites[0].address_of)) if made else None)
    work: dict[int, list[Work]] = {}
    for run in runs(found):
        launch = walk(run, sites[0].device)
        if launch is not None:
            work |= {run.start + i: [] for i in range(launch.steps)} | {run.start: [launch]}
    return work


# ------------------------------------------------------------------------------------------ norms


def _norm(
    h: Spot, w: Spot, eps: float, forms: Sequence[Spot], x: Spot | None = None,
    total: Spot | None = None, w2: Spot | None = None, eps2: float = 0.0,
) -> list[Task] | None:  # fmt: skip
    """The struct Norm."""
    if len(h.meta.inner) != 1 or h.width > _WIDEST or len(forms) > 2:
        return None
    if h.width % 4 or h.address % 16:
        return None
    addresses = [spot.address if spot else 0 for spot in (h, w, x, w2, total)]
    words = struct.pack("<5Qi2fi", *addresses, h.width, eps, eps2, 8 * h.width)
    local = {form.address: (8 + 4 * i) * h.width for i, form in enumerate(forms)}
    stage = (8 + 4 * len(forms)) * h.width
    return [Task("norm", words + targets(forms), stage, everywhere=True, local=local)]


def _quantised(floats: int, out: Spot) -> Task:
    """The struct Norm for a row that is not normed, once all of it is there."""
    width = out.width
    words = struct.pack("<5Qi2fi", floats, 0, 0, 0, 0, width, 0, 0, 4 * width)
    stage, local = 8 * width, {out.address: 4 * width}
    return Task("norm", words + targets([out]), stage, everywhere=True, meets=True, local=local)


@_step("rms_norm")
def rms_norm(site: Site) -> list[Task] | None:
    return _norm(site.x, site.w, float(site.attrs["eps"]), [site.out])


@_step("norm_quantise")
def norm_quantise(site: Site) -> list[Task] | None:
    return _norm(site.x, site.w, float(site.attrs["eps"]), site.results)


@_step("norm_add")
def norm_add(site: Site) -> list[Task] | None:
    return _norm(site.h, site.w, float(site.attrs["eps"]), [], site.x, site.out)


@_step("norm_add_norm")
def norm_add_norm(site: Site) -> list[Task] | None:
    total, *forms = site.results
    eps, eps2 = float(site.attrs["eps"]), float(site.attrs["eps2"])
    return _norm(site.h, site.w, eps, forms, site.x, total, site.w2, eps2)


@_step("gather_rows")
def gather_rows(site: Site) -> list[Task] | None:
    """The struct Copy."""
    x, nbytes = site.x, site.x.width * 4
    if x.dtype != F32 or site.out.dtype != F32 or len(x.meta.inner) != 1:
        return None
    words = struct.pack(
        "<QqQQq", x.address, x.row_stride, site.rows.address, site.out.address, nbytes // 4
    )
    return [Task("copy", words, 0, everywhere=True)]


# --------------------------------------------------------------------------------------- products


def _product(jobs: Sequence[Job], act: int = -1) -> Task | None:
    """The struct Linear for up to three matrices of one format and activation; with ``act`` for two
    that give act(first) * second."""
    x, w, k = jobs[0].x, jobs[0].w, jobs[0].depth
    name, gated = w.dtype.name, act >= 0
    each = 16 // w.dtype.nbytes if name in PLAIN else items_of(w.dtype)
    wanted = F32.name if name in PLAIN else activation(w.dtype)
    if x.dtype.name != wanted or k % each or x.address % 16:
        return None
    items, rest = k // each, 0 if name in PLAIN else x.dtype.row_nbytes(k) - k
    rows = jobs[0].rows if gated else sum(job.rows for job in jobs)
    words = struct.pack("<Q8i", x.address, -1, k, items, rest, rows, gated, 0, act)
    stage = 4 * k if name in PLAIN else k + rest
    return Task(name.upper(), words + matrices(jobs), stage, reads=x.address)


def _products(jobs: Sequence[Job]) -> list[Task] | None:
    """Those of one format and activation together."""
    together: dict[tuple[int, str], list[Job]] = {}
    for job in jobs:
        together.setdefault((job.x.address, job.w.dtype.name), []).append(job)
    made = [_product(own[i : i + 3]) for own in together.values() for i in range(0, len(own), 3)]
    return None if None in made else made  # type: ignore[return-value]


@_step("linear")
def linear(site: Site) -> list[Task] | None:
    return _products([Job(site.x, site.w, site.op("bias"), site.out)])


@_step("linear_add")
def linear_add(site: Site) -> list[Task] | None:
    return _products([Job(site.x, site.w, site.op("bias"), site.out, site.r)])


def _jobs(site: Site, outs: Sequence[Spot]) -> list[Job]:
    """One for each activation, weight and bias of a fused op."""
    groups = zip(site.inputs[::3], site.inputs[1::3], site.inputs[2::3])
    return [Job(x, w, bias, out) for (x, w, bias), out in zip(groups, outs) if x and w]


@_step("linears")
def linears(site: Site) -> list[Task] | None:
    return _products(_jobs(site, site.results))


@_step("gated")
def gated(site: Site) -> list[Task] | None:
    """Both matrices must be of one form."""
    forms = site.results
    quantised = bool(site.attrs["dtypes"])
    place = Spot(site.scratch, forms[0].meta, site.out.operand) if quantised else site.out
    jobs = _jobs(site, [place, place])
    first, second = ((job.x.address, job.w.dtype, job.w.meta.shape) for job in jobs)
    if first != second or len(forms) > 1:
        return None
    task = _product(jobs, ACTIVATIONS[site.attrs["act"], site.attrs["kind"]])
    if task is None or not quantised:
        return [task] if task else None
    return [task, _quantised(site.scratch, forms[0])]


# -------------------------------------------------------------------------------------- attention


@_step("rope_write")
def rope_write(site: Site) -> list[Task] | None:
    """The struct Rope."""
    width = site.q.meta.inner[-1]
    if not turned_whole(site) or site.k_pool.dtype != site.v_pool.dtype:
        return None
    words = heads_of(site.q, site.address("q_norm")) + heads_of(site.k, site.address("k_norm"))
    words += heads_of(site.v, 0) + struct.pack("<Q", site.out.address)
    words += pool_of(site.k_pool, site.slot) + pool_of(site.v_pool, site.slot) + turn(site, width)
    words += struct.pack("<fi", float(site.attrs["eps"]), 0)
    macros = {"POOL": site.k_pool.dtype.name.upper(), "DEPTH": width}
    return [Task("rope", words, 0, macros=macros)]


@_step("attention")
@_step("attention_quantise")
def attention(site: Site) -> list[Task] | None:
    """The struct Attend."""
    heads, _, depth, width = sizes(site.node)
    processors, quantised = site.device.gpu.processors, site.out.dtype.quantised
    if not pieces_fit(site.node) or heads > processors:
        return None
    pieces = min(splits(site.node), processors // heads, _MOST_PIECES)
    floats = site.scratch if quantised else site.out.address
    parts = site.scratch + merged_bytes(site.node) if quantised else site.scratch
    counts = site.device.alloc(4 * heads)
    words = argument(site, floats, parts, pieces) + struct.pack("<Q2i", counts.address, heads, 0)
    macros = {"POOL": site.k.dtype.name.upper(), "DEPTH": depth, "WIDTH": width}
    stage = 4 * (WARPS * (2 + width) + _MOST_PIECES + 1 + _KEPT + 16)
    task = Task("attend", words, stage, macros=macros, keep=counts, items=heads)
    return [task, _quantised(floats, site.out)] if quantised else [task]
