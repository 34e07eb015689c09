#pragma once
// The matrices of one or several linears, as a kernel argument.

#include "formats.cuh"

struct Matrix {
    Planes w;
    const float* bias;  // or null
    u8* y;
    i64 y_stride;
    const u8* residual;  // a row per token, or null
    i64 residual_stride, rows;
};

struct Matrices {
    Matrix m[3];  // unused ones have no rows
};

// Find the matrix of a group of SIZE rows. The rows of all matrices are numbered consecutively, each
// matrix rounded up to whole groups; `row` becomes the number of the group's first row in its matrix.
template <int SIZE>
__device__ __forceinline__ void find_matrix(const Matrices& all, int& row, Matrix& m) {
#pragma unroll
    for (int i = 1; i < 3; i++) {
        int above = ((int)m.rows + SIZE - 1) / SIZE * SIZE;
        if (row >= above) row -= above, m = all.m[i];
    }
}

// Store one result, with bias and residual.
__device__ __forceinline__ void finish(const Matrix& m, int token, int row, float value) {
    if (m.bias) value += m.bias[row];
    if (m.residual) value += ((const float*)(m.residual + token * m.residual_stride))[row];
    ((float*)(m.y + token * m.y_stride))[row] = value;
}
