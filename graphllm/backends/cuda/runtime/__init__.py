"""The CUDA device: memory, compilation, launches, graphs, timestamps, roofline probes."""
