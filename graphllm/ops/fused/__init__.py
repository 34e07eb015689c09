"""Fused ops, one module per family, in the order in which fusion tries them."""

from . import linear_norm, norm, quantised_linear, experts, linear, attention  # noqa: F401, I001
