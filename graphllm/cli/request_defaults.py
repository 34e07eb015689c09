"""Options of the verb ``serve`` with the sampling settings that requests leave out."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Annotated, Any

from .declarations import Option


@dataclass
class RequestDefaults:
    """Settings of requests that do not set them; None leaves the default of each endpoint.

    The fields are those of `Sampling`.
    """

    max_tokens: Annotated[
        int | None,
        Option(
            "-n",
            "--max-tokens",
            "--n-predict",
            help="Number of tokens to generate for requests that set none.",
            show_default=False,
        ),
    ] = None
    seed: Annotated[
        int | None,
        Option("-s", "--seed", help="Seed of requests without one.", show_default=False),
    ] = None
    temperature: Annotated[
        float | None,
        Option(
            "--temp",
            "--temperature",
            help="Temperature of requests without one.",
            show_default=False,
        ),
    ] = None
    top_k: Annotated[
        int | None,
        Option("--top-k", help="Top-k of requests without one.", show_default=False),
    ] = None
    top_p: Annotated[
        float | None,
        Option("--top-p", help="Top-p of requests without one.", show_default=False),
    ] = None
    min_p: Annotated[
        float | None,
        Option("--min-p", help="Min-p of requests without one.", show_default=False),
    ] = None

    def settings(self) -> dict[str, Any]:
        """Return the settings that are given. RequestError: one is out of range."""
        from ..engine.request import Sampling

        own = {each.name: getattr(self, each.name) for each in fields(self)}
        given = {name: value for name, value in own.items() if value is not None}
        Sampling(**given).normalize()
        return given
