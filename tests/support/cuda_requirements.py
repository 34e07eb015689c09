"""What CUDA sources need."""

from __future__ import annotations

import re
from functools import cache

from graphllm.backends.cuda.runtime import source


def needs_tensor_cores(made: source.Module) -> bool:
    """Whether it has instructions of capability 8.0, in its file or in a header of it."""
    return _needs_tensor_cores(made.file)


@cache  # modules of one file differ in their macros only
def _needs_tensor_cores(file: str) -> bool:
    seen, texts = {"common.cuh"}, [(source.SOURCES / file).read_text("utf-8")]
    for text in texts:
        new = set(re.findall(r'#include "(\w+\.cuh)"', text)) - seen
        seen |= new
        texts += [source._headers()[name] for name in sorted(new)]
    return any(re.search(r"m16n8k16|cp\.async", text) for text in texts)
