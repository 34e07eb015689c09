"""One plan of a model over a whole sequence, for observers such as `diff` and `trace`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from ..graph.tensor import Tensor


@dataclass(frozen=True)
class Program:
    """A part of a model that runs as one plan: encoding, the forward pass, or a head.

    Attributes:
        outputs: outputs by name.
        bounds: bounds of the Vars to compile the plan for.
        feeds: inputs.
        env: values of the Vars.
    """

    outputs: Mapping[str, Tensor]
    bounds: Mapping[str, tuple[int, int]]
    feeds: Mapping[str, np.ndarray]
    env: Mapping[str, int]
