"""SIMD code generation: vectors of 16 lanes, and elementary functions on them."""
