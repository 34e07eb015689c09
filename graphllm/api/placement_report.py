"""Where a loaded model's ops run, and why."""

from __future__ import annotations

from .. import backends as registry
from ..engine.engine import Engine
from ..model.decoder import Decoder
from ..runtime.executor import Executor
from ..runtime.gpu_offload import AUTO, Fit


class Placed:
    """What loading decided for a model: backends of its steps, layers on a device, what missed."""

    decoder: Decoder
    executor: Executor
    engine: Engine

    @property
    def device(self) -> str:
        """The first usable backend."""
        return self.executor.backends[0].name

    def placement(self) -> dict[str, dict[str, int]]:
        """Steps of one token, by backend and op."""
        counts: dict[str, dict[str, int]] = {}
        for step in self.engine.decode_plan().steps:
            ops = counts.setdefault(step.backend.name, {})
            ops[step.node.op] = ops.get(step.node.op, 0) + 1
        return counts

    def misses(self) -> list[str]:
        """A line for each kind of op that missed the first backend, with the reason; then one for
        what is copied between memories."""
        plan = self.engine.decode_plan()
        lines = [
            f"{op} ran on {backend} ({count} steps a token): {why}"
            for (op, backend, why), count in plan.misses().items()
        ]
        return lines + [f"a token needs {copies}" for copies in plan.copies()]

    @property
    def fit(self) -> Fit | None:
        """How many layers went to a device with a memory of its own; None without one."""
        return self.engine.fitted

    def notes(self) -> list[str]:
        """What a user should know of where the model went, a line each."""
        skipped, asked = self.executor.skipped.items(), self.engine.asked
        lines = [
            f"{name} is not used: {why}" for name, why in skipped if registry.find(name).wanted()
        ]
        lines += getattr(self.decoder.weights.source, "notes", list)()  # of quantised ones
        if self.fit:
            return [*lines, str(self.fit)]
        if asked != AUTO:
            why = f"{self.device} works in the host's memory"
            lines.append(f"gpu_layers = {asked} has no effect: {why}")
        return lines
