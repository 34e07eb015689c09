"""How a model is served (`ServedModel`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..api.recording import Recording
from .fields import check_known

MAX_BODY = 10_000_000  # bytes of a request body


@dataclass(frozen=True)
class ServedModel:
    """What the endpoints of a model know of it besides the model itself.

    Attributes:
        names: its names in the API; answers have the first one.
        max_body: bytes of a request body at most.
        defaults: fields of `Sampling` for requests that do not set them.
        profile: record the steps of all requests, for the metrics.
        recording: gets all generating requests and their answers; None records nothing.
    """

    names: Sequence[str]
    max_body: int = MAX_BODY
    defaults: Mapping[str, Any] = field(default_factory=dict)
    profile: bool = False
    recording: Recording | None = None

    @property
    def name(self) -> str:
        """Name of the model in answers."""
        return self.names[0]

    def check_model(self, values: Mapping[str, Any]) -> None:
        """Check the model of a request, which may be missing. ApiError: it is another one."""
        check_known(values.get("model", self.name), self.names)
