"""CUDA kernels, one module per op family, with their CUDA C++ sources."""
