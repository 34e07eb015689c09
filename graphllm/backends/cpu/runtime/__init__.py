"""The CPU device: thread pool, step interpreter, JIT compiler, kernel cache, roofline probes."""
