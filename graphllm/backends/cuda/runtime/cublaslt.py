"""Matrix products of many tokens by cuBLASLt, which is loaded when the first one runs."""

from __future__ import annotations

import ctypes
from ctypes import byref
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

from ....errors import GraphllmError
from ....graph.dtype import BF16, F16, F32, DType
from .device import CudaDevice

_KINDS = {F32.name: 0, F16.name: 2, BF16.name: 14}  # cudaDataType
_FLOAT, _SUMS_IN_FLOAT, _TURNED, _ADD_BIAS = 0, 68, 1, 4  # of cublasLt's enumerations
_DESC_TRANSA, _DESC_EPILOGUE, _DESC_BIAS = 3, 7, 8
_LAYOUT_COUNT, _LAYOUT_STEP = 5, 6
_WISH_WORKSPACE, _WISH_ALIGNMENTS = 1, (5, 6, 7, 8)
_WORKSPACE = 32 << 20  # bytes, as NVIDIA recommends for Hopper
_WORD, _LONG, _AT = ctypes.c_int, ctypes.c_int64, ctypes.c_void_p


@dataclass(frozen=True)
class Product:
    """y = x w^T + bias + added for dense w [rows, depth], x [T, depth], added and y [T, rows].

    x and w are of ``kind``, y of ``result``, bias and added float32; 0: none. Addresses, and bytes
    from row to row. ``count`` such products of one x go together: ``w_step`` and ``y_step`` bytes
    lead from one matrix, and from its y, to the next.
    """

    kind: DType
    result: DType
    rows: int
    depth: int
    x: int
    x_stride: int
    w: int
    y: int
    y_stride: int
    bias: int = 0
    added: int = 0
    added_stride: int = 0
    count: int = 1
    w_step: int = 0
    y_step: int = 0

    @cached_property
    def aligned(self) -> tuple[int, int, int, int]:
        """Bytes that divide all addresses of w, x, added and y, 256 at most."""
        y = (self.y, self.y_stride, self.y_step)
        added = (self.added, self.added_stride) if self.added else y
        parts = ((self.w, self.w_step), (self.x, self.x_stride), added, y)
        w, x, added_to, to = (min(256, *(n & -n or 256 for n in part)) for part in parts)
        return w, x, added_to, to

    @cached_property
    def shape(self) -> tuple[Any, ...]:
        """What the library's choice depends on, but for the count of tokens."""
        return (
            self.kind.name, self.result.name, self.rows, self.depth, self.x_stride, self.y_stride,
            bool(self.bias), bool(self.added), self.added_stride, self.count, self.w_step,
            self.y_step, self.aligned,
        )  # fmt: skip


class _Found(ctypes.Structure):
    """cublasLtMatmulHeuristicResult_t."""

    _fields_ = (
        ("algorithm", ctypes.c_uint64 * 8), ("workspace", ctypes.c_size_t), ("state", _WORD),
        ("waves", ctypes.c_float), ("reserved", _WORD * 4),
    )  # fmt: skip


@dataclass
class Way:
    """How the library goes about products of one shape."""

    task: Any  # cublasLtMatmulDesc_t
    w: Any  # cublasLtMatrixLayout_t, this and the next three
    x: Any
    added: Any
    y: Any
    found: _Found


class Library:
    """cuBLASLt on one device. Matrices are its columns first: y^T = w x^T."""

    def __init__(self, device: CudaDevice) -> None:
        from cupy.cuda import runtime
        from cupy_backends.cuda.libs import cublas  # noqa: F401  (loads the library)

        device.gpu.use()
        self._stream = device.gpu.stream.ptr
        self._lib = ctypes.CDLL(f"libcublasLt.so.{runtime.runtimeGetVersion() // 1000}")
        self._lib.cublasLtMatmul.argtypes = (
            _AT, _AT, _AT, _AT, _AT, _AT, _AT, _AT, _AT, _AT, _AT, _AT, _AT, _AT,
            ctypes.c_size_t, _AT,
        )  # fmt: skip
        self._handle = self._made("cublasLtCreate")
        self._workspace = device.alloc(_WORKSPACE)
        self._one, self._zero = ctypes.c_float(1), ctypes.c_float(0)
        self._ways: dict[tuple[Any, ...], Way] = {}

    def run(self, p: Product, tokens: int) -> None:
        """Put the product of so many tokens on the stream."""
        if tokens:
            self.go(p, self._way(p, tokens))

    def go(self, p: Product, way: Way) -> None:
        if p.bias:
            self._set("MatmulDesc", way.task, _DESC_BIAS, ctypes.c_uint64(p.bias))
        self._check("product", p, self._lib.cublasLtMatmul(
            self._handle, way.task, byref(self._one), p.w, way.w, p.x, way.x,
            byref(self._one if p.added else self._zero), p.added or p.y, way.added, p.y, way.y,
            byref(way.found.algorithm), self._workspace.address, _WORKSPACE, self._stream,
        ))  # fmt: skip

    def _way(self, p: Product, tokens: int) -> Way:
        """The library's choice, remembered by all that it depends on."""
        key = (p.shape, tokens)
        if key not in self._ways:
            self._ways[key] = self.choices(p, tokens, 1)[0]
        return self._ways[key]

    def choices(self, p: Product, tokens: int, most: int) -> list[Way]:
        """What the library would do, the best first by its own estimate."""
        task = self._made("cublasLtMatmulDescCreate", _SUMS_IN_FLOAT, _FLOAT)
        self._set("MatmulDesc", task, _DESC_TRANSA, _WORD(_TURNED))
        if p.bias:
            self._set("MatmulDesc", task, _DESC_EPILOGUE, _WORD(_ADD_BIAS))
            self._set("MatmulDesc", task, _DESC_BIAS, ctypes.c_uint64(p.bias))
        layouts = (
            self._layout(p, p.kind, p.depth, p.rows, p.kind.nbytes * p.depth, p.w_step),
            self._layout(p, p.kind, p.depth, tokens, p.x_stride, 0),
            self._layout(p, p.result, p.rows, tokens, p.added_stride or p.y_stride, p.y_step),
            self._layout(p, p.result, p.rows, tokens, p.y_stride, p.y_step),
        )
        wish, found, given = (
            self._made("cublasLtMatmulPreferenceCreate"),
            (_Found * most)(),
            _WORD(),
        )
        self._set("MatmulPreference", wish, _WISH_WORKSPACE, ctypes.c_size_t(_WORKSPACE))
        for attribute, least in zip(_WISH_ALIGNMENTS, p.aligned):
            self._set("MatmulPreference", wish, attribute, ctypes.c_uint32(least))
        status = self._lib.cublasLtMatmulAlgoGetHeuristic(
            self._handle, task, *layouts, wish, most, found, byref(given)
        )
        self._lib.cublasLtMatmulPreferenceDestroy(wish)
        ways = [Way(task, *layouts, each) for each in found[: given.value] if not each.state]
        self._check("choice", p, status or (0 if ways else -1))
        return ways

    def _layout(
        self, p: Product, kind: DType, rows: int, columns: int, stride: int, step: int
    ) -> Any:
        made = self._made(
            "cublasLtMatrixLayoutCreate", _KINDS[kind.name], ctypes.c_uint64(rows),
            ctypes.c_uint64(columns), _LONG(stride // kind.nbytes),
        )  # fmt: skip
        if p.count > 1:
            self._set("MatrixLayout", made, _LAYOUT_COUNT, _WORD(p.count))
            self._set("MatrixLayout", made, _LAYOUT_STEP, _LONG(step // kind.nbytes))
        return made

    def _made(self, function: str, *args: Any) -> Any:
        """What ``function`` creates."""
        made = _AT()
        status = getattr(self._lib, function)(byref(made), *args)
        if status:
            raise GraphllmError(f"cuBLASLt error {status} in {function}")
        return made

    def _set(self, what: str, of: Any, attribute: int, value: Any) -> None:
        size = ctypes.c_size_t(ctypes.sizeof(value))
        name = f"cublasLt{what}SetAttribute"
        status = getattr(self._lib, name)(of, attribute, byref(value), size)
        if status:
            raise GraphllmError(f"cuBLASLt error {status} in {name}, attribute {attribute}")

    @staticmethod
    def _check(what: str, p: Product, status: int) -> None:
        if status:
            raise GraphllmError(f"cuBLASLt error {status} at the {what} of {p}")


@cache
def of(device: CudaDevice) -> Library:
    return Library(device)


def product(device: CudaDevice, p: Product, tokens: int) -> None:
    """Put the product with so many tokens on the device's stream. Sums are float32."""
    of(device).run(p, tokens)
