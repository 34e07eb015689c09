"""Shared by the parts of gpu.py: backend, ceilings, GPU timing, models."""

from __future__ import annotations

import gc
import itertools
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

from graphllm import backends
from graphllm.api import LLM
from graphllm.backends import Backend, Options
from graphllm.backends.probe_results import ProbeResults
from graphllm.checkpoints.random_weights import RandomCheckpoint
from graphllm.errors import GraphllmError, RequestError
from graphllm.loading.load import build_decoder
from graphllm.model.decoder import Limits
from graphllm.runtime.decode_loop import DecodeLoop

ORDER = ("cuda", "reference")
Model = tuple[str, str]  # shape and format


def cuda() -> Backend:
    """Return the CUDA backend; RequestError if it is not usable."""
    backend = backends.find("cuda")
    ok, reason = backend.available()
    if not ok:
        raise RequestError(f"no GPU to measure: {reason}")
    return backend


@cache
def measure_ceilings(nbytes: int = 4 << 30) -> ProbeResults:
    """Measure ceilings of memory, cache and arithmetic, by blocks per multiprocessor."""
    measure = cuda().measure
    assert measure is not None
    return measure(nbytes, lambda *_: None)


def share(bytes_a_second: float) -> str:
    """Format a rate and its share of the read bandwidth: ``3354 GB/s  73.6 %``."""
    ceiling = max(measure_ceilings().memory["read"].values())
    return f"{bytes_a_second / 1e9:7.0f} GB/s {bytes_a_second / ceiling:6.1%}"


def memory_in_use() -> int:
    """Return the bytes of GPU memory in use, by any process."""
    from cupy.cuda import runtime

    free, total = runtime.memGetInfo()
    return int(total - free)


def load_random(model: Model, context: int, kv_type: str = "f16", prefill: str = "auto") -> LLM:
    """Load a model with random weights on the GPU."""
    gc.collect()  # reference cycles of the previous model hold GPU memory
    file = RandomCheckpoint(*model)
    limits = Limits(context=context, kv_dtype=kv_type)
    settings = {"backends": ORDER, "options": Options(prefill=prefill)}
    return LLM(file, build_decoder(file), settings, limits)


def select_models(only: list[Model], default: tuple[Model, ...]) -> Iterator[Model]:
    """Yield the models that a part runs on: those asked for, or its defaults."""
    yield from only or default


class StepEvents:
    """Events around the work of each step of a one-segment `DecodeLoop`, without the copy of ids.

    An event costs a microsecond, so wall times are taken without events."""

    def __init__(self, steps: DecodeLoop, device: Any) -> None:
        from cupy.cuda import Event, get_elapsed_time

        self._event, self._elapsed, self._stream = Event, get_elapsed_time, device.gpu.stream
        self._events: list[Any] = []
        if not steps.lookahead:
            raise GraphllmError("the steps are not one segment on the GPU")
        work, *copies = steps.launchers
        steps.launchers = [self._record, work, self._record, *copies]

    def _record(self) -> None:
        self._events.append(self._event())
        self._events[-1].record(self._stream)

    def seconds(self, skip: int = 4) -> tuple[list[float], list[float]]:
        """Return the seconds of each step and of each gap, without the first ``skip`` steps.

        The CUDA graph is captured in one of the first steps.
        """
        events = self._events[2 * skip :]
        events[-1].synchronize()
        gaps = [self._elapsed(a, b) / 1e3 for a, b in itertools.pairwise(events)]
        return gaps[::2], gaps[1::2]


Lines = Iterator[str]
Part = Callable[[], Lines]
ModelPart = Callable[[list[Model]], Lines]
