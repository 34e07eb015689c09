"""What CUDA sources need."""

from __future__ import annotations

import re

from graphllm.backends.cuda.runtime import source


def needs_tensor_cores(made: source.Module) -> bool:
    """Whether it has instructions of capability 8.0, in its file or in a header of it."""
    seen, texts = {"common.cuh"}, [made.text]
    for text in texts:
        new = set(re.findall(r'#include "(\w+\.cuh)"', text)) - seen
        seen |= new
        texts += [source._headers()[name] for name in sorted(new)]
    return any(re.search(r"m16n8k16|cp\.async", text) for text in texts)
