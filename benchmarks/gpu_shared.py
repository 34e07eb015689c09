"""What the parts of gpu.py share: the backend, its ceiling, the GPU's own clock, models."""

from __future__ import annotations

import gc
import itertools
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

from graphllm import backends
from graphllm.api import LLM
from graphllm.backends import Backend
from graphllm.backends.probe_results import ProbeResults
from graphllm.checkpoints.random_weights import RandomCheckpoint
from graphllm.errors import GraphllmError, RequestError
from graphllm.loading.load import build_decoder
from graphllm.model.decoder import Limits
from graphllm.runtime.decode_loop import DecodeLoop

ORDER = ("cuda", "reference")
Model = tuple[str, str]  # shape and format


def cuda() -> Backend:
    """The backend. RequestError where it cannot be used."""
    backend = backends.find("cuda")
    ok, reason = backend.available()
    if not ok:
        raise RequestError(f"no GPU to measure: {reason}")
    return backend


@cache
def rates(nbytes: int = 4 << 30) -> ProbeResults:
    """What memory, cache and arithmetic give, by blocks a processor."""
    measure = cuda().measure
    assert measure is not None
    return measure(nbytes, lambda *_: None)


def share(bytes_a_second: float) -> str:
    """A rate, and how much of the best read it is: ``3354 GB/s  73.6 %``."""
    ceiling = max(rates().memory["read"].values())
    return f"{bytes_a_second / 1e9:7.0f} GB/s {bytes_a_second / ceiling:6.1%}"


def memory_in_use() -> int:
    """Bytes of the GPU's memory that are taken, by whomever."""
    from cupy.cuda import runtime

    free, total = runtime.memGetInfo()
    return int(total - free)


def loaded(model: Model, context: int) -> LLM:
    """A model with random weights, on the GPU."""
    gc.collect()  # the one before: its cycles hold GPU memory
    file = RandomCheckpoint(*model)
    limits = Limits(context=context)
    return LLM(file, build_decoder(file), {"backends": ORDER}, limits)


def picked(only: list[Model], usual: tuple[Model, ...]) -> Iterator[Model]:
    """The models that a part runs on."""
    yield from only or usual


class Marks:
    """Events around the work of each step of a one-segment `DecodeLoop`, without the copy of ids.

    An event costs a microsecond, so wall times are taken without events."""

    def __init__(self, steps: DecodeLoop, device: Any) -> None:
        from cupy.cuda import Event, get_elapsed_time

        self._event, self._elapsed, self._stream = Event, get_elapsed_time, device.gpu.stream
        self._marks: list[Any] = []
        if not steps.lookahead:
            raise GraphllmError("the steps are not one segment on the GPU")
        work, *copies = steps.launchers
        steps.launchers = [self._mark, work, self._mark, *copies]

    def _mark(self) -> None:
        self._marks.append(self._event())
        self._marks[-1].record(self._stream)

    def seconds(self, skip: int = 4) -> tuple[list[float], list[float]]:
        """Of each step, and between each and the next; the first ``skip``, among which is the one
        that a graph is made in, are not counted."""
        marks = self._marks[2 * skip :]
        marks[-1].synchronize()
        gaps = [self._elapsed(a, b) / 1e3 for a, b in itertools.pairwise(marks)]
        return gaps[::2], gaps[1::2]


Lines = Iterator[str]
Part = Callable[[], Lines]
ModelPart = Callable[[list[Model]], Lines]
