"""Matrix products of many tokens through cuBLASLt, which is loaded by the first product."""

from __future__ import annotations

import ctypes
from ctypes import byref
from dataclasses import dataclass
from functools import cached_property
from typing import Any
from weakref import WeakKeyDictionary

from ....errors import GraphllmError
from ....graph.dtype import BF16, F16, F32, DType
from .device import CudaDevice

E4M3 = DType("e4m3", 1, 1)  # elements of factors

# Values of enumerations: cudaDataType, then those of cublasLt.h.
_CUDA_DTYPES = {F32.name: 0, F16.name: 2, BF16.name: 14, E4M3.name: 28}
_R_32F, _COMPUTE_32F, _OP_T, _EPILOGUE_BIAS = 0, 68, 1, 4
_DESC_TRANSA, _DESC_EPILOGUE, _DESC_BIAS = 3, 7, 8
_LAYOUT_BATCH, _LAYOUT_BATCH_STRIDE = 5, 6
_PREF_WORKSPACE, _PREF_ALIGNMENTS = 1, (5, 6, 7, 8)
_WORKSPACE = 32 << 20  # bytes, as NVIDIA recommends for Hopper
_INT, _INT64, _POINTER = ctypes.c_int, ctypes.c_int64, ctypes.c_void_p


@dataclass(frozen=True)
class Matmul:
    """y = scale x w^T + bias + residual: dense w [rows, depth], x [T, depth], residual and y
    [T, rows].

    Operands are device addresses (0: none); strides are bytes from one row to the next. x and w are
    of ``dtype``, y, bias and residual of ``out_dtype``. ``batch`` products of one x are
    computed together; matrix i is ``i * w_batch_stride`` bytes after w, and its result
    ``i * y_batch_stride`` bytes after y.
    """

    dtype: DType
    out_dtype: DType
    rows: int
    depth: int
    x: int
    x_stride: int
    w: int
    y: int
    y_stride: int
    bias: int = 0
    residual: int = 0
    residual_stride: int = 0
    scale: float = 1.0
    batch: int = 1
    w_batch_stride: int = 0
    y_batch_stride: int = 0

    @cached_property
    def alignments(self) -> tuple[int, int, int, int]:
        """Alignment in bytes (at most 256) of every row of w, x, residual and y."""
        y = (self.y, self.y_stride, self.y_batch_stride)
        residual = (self.residual, self.residual_stride) if self.residual else y
        parts = ((self.w, self.w_batch_stride), (self.x, self.x_stride), residual, y)
        aligned_w, aligned_x, aligned_residual, aligned_y = (
            min(256, *(n & -n or 256 for n in part)) for part in parts
        )
        return aligned_w, aligned_x, aligned_residual, aligned_y

    @cached_property
    def key(self) -> tuple[Any, ...]:
        """Everything that the choice of an algorithm depends on, except the number of tokens."""
        return (
            self.dtype.name, self.out_dtype.name, self.rows, self.depth, self.x_stride,
            self.y_stride, bool(self.bias), bool(self.residual), self.residual_stride, self.batch,
            self.w_batch_stride, self.y_batch_stride, self.alignments,
        )  # fmt: skip


class _HeuristicResult(ctypes.Structure):
    """cublasLtMatmulHeuristicResult_t."""

    _fields_ = (
        ("algorithm", ctypes.c_uint64 * 8), ("workspace", ctypes.c_size_t), ("state", _INT),
        ("waves", ctypes.c_float), ("reserved", _INT * 4),
    )  # fmt: skip


@dataclass
class MatmulPlan:
    """Descriptors and the algorithm for products of one shape.

    ``loaded``: whether its kernel is loaded, as the first launch does, which can take 10 ms.
    """

    task: Any  # cublasLtMatmulDesc_t
    w: Any  # cublasLtMatrixLayout_t, this and the next three
    x: Any
    residual: Any
    y: Any
    found: _HeuristicResult
    loaded: bool = False


class CublasLt:
    """A cuBLASLt handle on one device. The library's matrices are column-major: y^T = w x^T."""

    def __init__(self, device: CudaDevice) -> None:
        from cupy.cuda import runtime
        from cupy_backends.cuda.libs import cublas  # noqa: F401  (loads the library)

        device.gpu.use()
        self._stream = device.gpu.stream.ptr
        name = f"libcublasLt.so.{runtime.runtimeGetVersion() // 1000}"
        self._lib, holding_gil = ctypes.CDLL(name), ctypes.PyDLL(name)
        # By whether the kernel is loaded: short calls hold the GIL, as launches do.
        self._matmul = self._lib.cublasLtMatmul, holding_gil.cublasLtMatmul
        for each in self._matmul:
            each.argtypes = (*[_POINTER] * 14, ctypes.c_size_t, _POINTER)
        self._handle = self._create("cublasLtCreate")
        self._workspace = device.alloc(_WORKSPACE)
        self._one, self._zero = ctypes.c_float(1), ctypes.c_float(0)
        self._plans: dict[tuple[Any, ...], MatmulPlan] = {}

    def run(self, p: Matmul, tokens: int) -> None:
        """Enqueue the product for ``tokens`` rows of x on the device's stream."""
        if tokens:
            self.launch(p, self._plan(p, tokens))

    def launch(self, p: Matmul, plan: MatmulPlan) -> None:
        """Enqueue the product with a given plan."""
        if p.bias:
            self._set("MatmulDesc", plan.task, _DESC_BIAS, ctypes.c_uint64(p.bias))
        self._check("product", p, self._matmul[plan.loaded](
            self._handle, plan.task, byref(ctypes.c_float(p.scale)), p.w, plan.w, p.x, plan.x,
            byref(self._one if p.residual else self._zero), p.residual or p.y, plan.residual,
            p.y, plan.y, byref(plan.found.algorithm), self._workspace.address, _WORKSPACE,
            self._stream,
        ))  # fmt: skip
        plan.loaded = True

    def _plan(self, p: Matmul, tokens: int) -> MatmulPlan:
        """The library's first choice, cached."""
        key = (p.key, tokens)
        if key not in self._plans:
            self._plans[key] = self.candidates(p, tokens, 1)[0]
        return self._plans[key]

    def candidates(self, p: Matmul, tokens: int, limit: int) -> list[MatmulPlan]:
        """At most ``limit`` plans, sorted by the library's own estimate, the fastest first."""
        task = self._create("cublasLtMatmulDescCreate", _COMPUTE_32F, _R_32F)
        self._set("MatmulDesc", task, _DESC_TRANSA, _INT(_OP_T))
        if p.bias:
            self._set("MatmulDesc", task, _DESC_EPILOGUE, _INT(_EPILOGUE_BIAS))
            self._set("MatmulDesc", task, _DESC_BIAS, ctypes.c_uint64(p.bias))
        y_step = p.y_batch_stride
        layouts = (
            self._layout(p, p.dtype, p.depth, p.rows, p.dtype.nbytes * p.depth, p.w_batch_stride),
            self._layout(p, p.dtype, p.depth, tokens, p.x_stride, 0),
            self._layout(p, p.out_dtype, p.rows, tokens, p.residual_stride or p.y_stride, y_step),
            self._layout(p, p.out_dtype, p.rows, tokens, p.y_stride, y_step),
        )
        preference = self._create("cublasLtMatmulPreferenceCreate")
        found, count = (_HeuristicResult * limit)(), _INT()
        self._set("MatmulPreference", preference, _PREF_WORKSPACE, ctypes.c_size_t(_WORKSPACE))
        for attribute, alignment in zip(_PREF_ALIGNMENTS, p.alignments):
            self._set("MatmulPreference", preference, attribute, ctypes.c_uint32(alignment))
        status = self._lib.cublasLtMatmulAlgoGetHeuristic(
            self._handle, task, *layouts, preference, limit, found, byref(count)
        )
        self._lib.cublasLtMatmulPreferenceDestroy(preference)
        plans = [
            MatmulPlan(task, *layouts, each) for each in found[: count.value] if not each.state
        ]
        self._check("choice of an algorithm", p, status or (0 if plans else -1))
        return plans

    def _layout(
        self, p: Matmul, dtype: DType, rows: int, columns: int, stride: int, batch_stride: int
    ) -> Any:
        """A layout descriptor; strides in bytes."""
        layout = self._create(
            "cublasLtMatrixLayoutCreate", _CUDA_DTYPES[dtype.name], ctypes.c_uint64(rows),
            ctypes.c_uint64(columns), _INT64(stride // dtype.nbytes),
        )  # fmt: skip
        if p.batch > 1:
            elements = batch_stride // dtype.nbytes
            self._set("MatrixLayout", layout, _LAYOUT_BATCH, _INT(p.batch))
            self._set("MatrixLayout", layout, _LAYOUT_BATCH_STRIDE, _INT64(elements))
        return layout

    def _create(self, function: str, *args: Any) -> Any:
        """The handle or descriptor that the library's ``function`` creates."""
        handle = _POINTER()
        status = getattr(self._lib, function)(byref(handle), *args)
        if status:
            raise GraphllmError(f"cuBLASLt error {status} in {function}")
        return handle

    def _set(self, kind: str, handle: Any, attribute: int, value: Any) -> None:
        size = ctypes.c_size_t(ctypes.sizeof(value))
        name = f"cublasLt{kind}SetAttribute"
        status = getattr(self._lib, name)(handle, attribute, byref(value), size)
        if status:
            raise GraphllmError(f"cuBLASLt error {status} in {name}, attribute {attribute}")

    @staticmethod
    def _check(what: str, p: Matmul, status: int) -> None:
        if status:
            raise GraphllmError(f"cuBLASLt error {status} in the {what} for {p}")


_INSTANCES: WeakKeyDictionary[CudaDevice, CublasLt] = WeakKeyDictionary()


def instance(device: CudaDevice) -> CublasLt:
    """The handle of ``device``, created at the first call."""
    if device not in _INSTANCES:
        _INSTANCES[device] = CublasLt(device)
    return _INSTANCES[device]


def matmul(device: CudaDevice, p: Matmul, tokens: int) -> None:
    """Enqueue the product for ``tokens`` rows of x on the device's stream; sums are float32."""
    instance(device).run(p, tokens)
