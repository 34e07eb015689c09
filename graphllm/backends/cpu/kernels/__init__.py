"""CPU kernels, one module per op family."""
