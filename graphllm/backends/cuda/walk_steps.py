"""Steps of walks: which ops one can do, and their records (the structs of walk_*.cuh)."""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from typing import Any

from ...dtype import F32
from .. import Bound
from ..touched import Touched, touched
from .attention import argument, merged_bytes, pieces_fit, sizes, splits
from .device import Site, Spot, Work, ceil
from .elementwise import ACTIVATIONS
from .kv import heads_of, pool_of, turned_whole
from .layouts import PLANES
from .linear import Job, activation, matrices
from .linear_many import PLAIN, items_of
from .quantise import targets
from .rope import turn
from .walk import CHUNK, WARPS, Task, runs, walk

_WIDEST = 8192  # of a row that is normed
_UNIT = 256  # results that a warp quantises at a time
_HEADS = 4  # that go over keys together
_MOST_PIECES, _KEPT = 64, 1024  # of a part of the heads; keys whose slots are kept

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
    addresses = [spot.address if spot else 0 for spot in (h, w, x, w2, total)]
    words = struct.pack("<5Qi2fi", *addresses, h.width, eps, eps2, 0)
    return [Task("norm", words + targets(forms), 8 * h.width, everywhere=True)]


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


def _product(site: Site, jobs: Sequence[Job], gate: bytes = b"", keep: Any = None) -> Task | None:
    """The struct Linear for up to three matrices of one format and activation."""
    x, w, k = jobs[0].x, jobs[0].w, jobs[0].depth
    name = w.dtype.name
    each = 16 // w.dtype.nbytes if name in PLAIN else items_of(w.dtype)
    wanted = F32.name if name in PLAIN else activation(w.dtype)
    if x.dtype.name != wanted or k % each or x.address % 16:
        return None
    items, rest = k // each, 0 if name in PLAIN else x.dtype.row_nbytes(k) - k
    sides = [last - first for first, last in PLANES.get(name, ())[1:]]
    blocks = CHUNK * each // w.dtype.block  # of a chunk
    places, slot = [], 16 * CHUNK
    for size in sides:
        places.append(slot)
        slot += ceil(blocks * size + 30, 16) * 16
    rows = jobs[0].rows if gate else sum(job.rows for job in jobs)
    shift = (CHUNK // blocks).bit_length() - 1
    three = [*sides, 0, 0, 0][:3], [*places, 0, 0, 0][:3]
    words = struct.pack(
        "<Q8i6i", x.address, -1, k, items, rest, rows, bool(gate), shift, 0, *three[0], *three[1]
    )  # fmt: skip
    stage = 4 * k if name in PLAIN else k + rest
    words += matrices(jobs) + gate.ljust(80, b"\0")
    return Task(name.upper(), words, stage, slot, keep=keep)


def _products(site: Site, jobs: Sequence[Job]) -> list[Task] | None:
    """Those of one format and activation together."""
    together: dict[tuple[int, str], list[Job]] = {}
    for job in jobs:
        together.setdefault((job.x.address, job.w.dtype.name), []).append(job)
    made = [
        _product(site, own[i : i + 3]) for own in together.values() for i in range(0, len(own), 3)
    ]
    return None if None in made else made  # type: ignore[return-value]


@_step("linear")
def linear(site: Site) -> list[Task] | None:
    return _products(site, [Job(site.x, site.w, site.op("bias"), site.out)])


@_step("linear_add")
def linear_add(site: Site) -> list[Task] | None:
    return _products(site, [Job(site.x, site.w, site.op("bias"), site.out, site.r)])


def _jobs(site: Site, outs: Sequence[Spot]) -> list[Job]:
    """One for each activation, weight and bias of a fused op."""
    groups = zip(site.inputs[::3], site.inputs[1::3], site.inputs[2::3])
    return [Job(x, w, bias, out) for (x, w, bias), out in zip(groups, outs) if x and w]


@_step("linears")
def linears(site: Site) -> list[Task] | None:
    return _products(site, _jobs(site, site.results))


@_step("gated")
def gated(site: Site) -> list[Task] | None:
    """Both matrices must be of one form."""
    forms = site.results
    quantised = bool(site.attrs["dtypes"])
    place = Spot(site.scratch, forms[0].meta, site.out.operand) if quantised else site.out
    jobs = _jobs(site, [place, place])
    first, second = ((job.x.address, job.w.dtype, job.w.meta.shape) for job in jobs)
    if first != second or len(forms) > 2:
        return None
    counts = site.device.alloc(4 * ceil(jobs[0].rows, _UNIT))
    act = ACTIVATIONS[site.attrs["act"], site.attrs["kind"]]
    gate = struct.pack("<qqQ", act, _UNIT, counts.address)
    gate += targets(forms if quantised else [])
    task = _product(site, jobs, gate, counts)
    return [task] if task else None


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
    words += struct.pack("<if", width, float(site.attrs["eps"]))
    macros = {"POOL": site.k_pool.dtype.name.upper(), "DEPTH": width}
    return [Task("rope", words, 0, macros=macros)]


@_step("attention")
@_step("attention_quantise")
def attention(site: Site) -> list[Task] | None:
    """The struct Attend."""
    heads, kv_heads, depth, width = sizes(site.node)
    shared = heads // kv_heads
    together = next(n for n in (1, 2, _HEADS) if n >= shared or n == _HEADS)
    items = kv_heads * ceil(shared, together)
    processors = site.device.gpu.processors
    whole = site.out.dtype.block <= 32 or all(
        min(together, shared - h) * width % _UNIT == 0 for h in range(0, shared, together)
    )
    if not pieces_fit(site.node) or items > processors or not whole:
        return None
    pieces = min(splits(site.node), processors // items, _MOST_PIECES)
    parts = site.scratch + merged_bytes(site.node)
    counts = site.device.alloc(4 * items)
    words = argument(site, 0, parts, pieces) + targets([site.out])
    words += struct.pack("<Q2i", counts.address, items, 0)
    macros = {
        "POOL": site.k.dtype.name.upper(), "DEPTH": depth, "WIDTH": width, "HEADS": together
    }  # fmt: skip
    stage = 4 * (together * (WARPS * (2 + width) + _MOST_PIECES + width) + 1 + _KEPT)
    return [Task("attend", words, stage, macros=macros, keep=counts)]
