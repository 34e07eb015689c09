"""A profile of prefill and decode: times, bytes and FLOPs of every step, held against ceilings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any

from . import machine_load
from .phase import Phase, Roofline
from .record import GROUP_KEYS
from .report import footer, phase_table, request_table
from .request_costs import RequestCost, total_costs
from .schema import SCHEMA, VERSION


@dataclass(frozen=True)
class Profile:
    """A profile of prefill and decode.

    Attributes:
        phases: those that ran.
        rooflines: ceilings by backend, for the backends that were measured.
        about: sections ``made``, ``machine``, ``model`` and ``settings`` of the report
            (docs/profile-format.md).
        start: seconds of loading, weight preparation, kernel compilation and the first run.
        other_load: share of the processors' time that other processes used during the passes; None
            if unknown or if no step ran on the host.
    """

    phases: tuple[Phase, ...]
    rooflines: Mapping[str, Roofline]
    about: Mapping[str, Any]
    start: Mapping[str, float]
    other_load: float | None = None

    @property
    def load_note(self) -> str:
        """One line on what disturbed the passes; empty if nothing did."""
        ran = {p.name: (sum(each.plain for each in p.passes), p.interference) for p in self.phases}
        return machine_load.load_note(self.other_load, ran)

    @cached_property
    def requests(self) -> list[RequestCost]:
        """Cost of each request over all phases and passes; see `request_costs` for the rules."""
        return total_costs(phase.requests for phase in self.phases)

    def __getitem__(self, name: str) -> Phase:
        """Return the phase ``prefill`` or ``decode``; KeyError if it did not run."""
        for phase in self.phases:
            if phase.name == name:
                return phase
        raise KeyError(name)

    def table(self, by: str = "op", top: int = 0, colour: bool = False) -> str:
        """Return both phases as text tables, and of ramps and the cost of several requests, if any.

        Args:
            by: group rows by op, scope, layer, backend or format.
            top: number of rows to show, the longest first; 0 shows all.
            colour: use ANSI colours.

        Raises:
            ValueError: ``by`` is not one of these.
        """
        if by not in GROUP_KEYS:
            raise ValueError(f"by = {by!r} must be one of {', '.join(GROUP_KEYS)}")
        tables = [phase_table(phase, by, top, colour) for phase in self.phases]
        if any(phase.ramps for phase in self.phases):
            from .ramp_report import ramp_table

            tables += [ramp_table(phase, by, top, colour) for phase in self.phases]
        if len(self.requests) > 1:
            tables.append(request_table(self.requests, self.phases, colour))
        last = footer(self.phases, self.rooflines, self.load_note, self.start)
        return "\n\n".join([*tables, last])

    def as_dict(self) -> dict[str, Any]:
        """Return the JSON form, described in docs/profile-format.md."""
        return {
            "schema": SCHEMA,
            "version": VERSION,
            **self.about,
            "start": dict(self.start),
            "busy": {"others": self.other_load, "note": self.load_note},
            "ceilings": {name: _plain(roofline) for name, roofline in self.rooflines.items()},
            "requests": [cost.as_dict() for cost in self.requests],
            "phases": [phase.as_dict() for phase in self.phases],
        }


def _plain(roofline: Roofline) -> dict[str, Any]:
    return {f.name: getattr(roofline, f.name) for f in fields(roofline)}
