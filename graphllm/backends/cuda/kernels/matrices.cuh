#pragma once
// The matrices of one or several linears, as an argument of a kernel.

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
    Matrix m[3];  // those that are not there have no rows
};

// The matrix that a group of SIZE rows is in, of those that lie one below the other, each in whole
// groups: `row` becomes the number of its first row there.
template <int SIZE>
__device__ __forceinline__ void find_matrix(const Matrices& all, int& row, Matrix& m) {
#pragma unroll
    for (int i = 1; i < 3; i++) {
        int above = ((int)m.rows + SIZE - 1) / SIZE * SIZE;
        if (row >= above) row -= above, m = all.m[i];
    }
}

// One result, where it belongs.
__device__ __forceinline__ void finish(const Matrix& m, int token, int row, float value) {
    if (m.bias) value += m.bias[row];
    if (m.residual) value += ((const float*)(m.residual + token * m.residual_stride))[row];
    ((float*)(m.y + token * m.y_stride))[row] = value;
}
