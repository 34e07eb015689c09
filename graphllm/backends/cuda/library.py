"""Matrix products of many tokens by cuBLAS, which is loaded when the first one runs."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np

from ...dtype import BF16, F16, F32, DType
from .device import CudaDevice

_KINDS = {F32.name: 0, F16.name: 2, BF16.name: 14}  # cudaDataType
_ONE, _ZERO = np.ones(1, np.float32), np.zeros(1, np.float32)


@cache
def _handle(device: CudaDevice) -> Any:
    from cupy_backends.cuda.libs import cublas

    device.gpu.use()
    return cublas.create()


def product(
    device: CudaDevice, kind: DType, x: int, w: int, y: int, y_stride: int,
    tokens: int, rows: int, depth: int, *, add: bool,
) -> None:  # fmt: skip
    """y = x w^T, or y + x w^T with ``add``: x [tokens, depth] and w [rows, depth], dense, of
    ``kind``; y float32, its rows ``y_stride`` bytes apart. Sums are float32."""
    from cupy_backends.cuda.libs import cublas

    if not tokens:
        return
    turned, plain, code = cublas.CUBLAS_OP_T, cublas.CUBLAS_OP_N, _KINDS[kind.name]
    with device.gpu.stream:  # CuPy sets the handle's stream to the current one in every call
        cublas.gemmEx(
            _handle(device), turned, plain, rows, tokens, depth, _ONE.ctypes.data,
            w, code, depth, x, code, depth, (_ONE if add else _ZERO).ctypes.data,
            y, _KINDS[F32.name], y_stride // 4, cublas.CUBLAS_COMPUTE_32F,
            cublas.CUBLAS_GEMM_DEFAULT,
        )  # fmt: skip
