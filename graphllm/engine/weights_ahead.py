"""Weights that another thread packs while plans are compiled and texts are opened."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from threading import Event, Thread

from ..compiler.plan import HOST, Plan
from ..graph.tensor import WEIGHT
from ..runtime.executor import Executor


@contextmanager
def weights_ahead(executor: Executor, plan: Plan) -> Iterator[None]:
    """Prepare the weights of ``plan`` in the host's memory in another thread during the block.

    Packing runs in native code, beside Python. `Executor.bind` waits for the weights that it needs,
    and raises the error of one that cannot be prepared.
    """
    stop = Event()

    def run() -> None:
        reads = ((step, i, s) for step in plan.steps for i, s in enumerate(step.node.src) if s)
        with suppress(Exception):  # `bind` tries the same weight again
            for step, index, source in reads:
                if source.base.op == WEIGHT and step.memory == HOST and not stop.is_set():
                    executor.weight(step, index)

    thread = Thread(target=run, name="graphllm weights", daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
    thread.join()  # not after an error, which is raised without waiting
