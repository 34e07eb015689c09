"""The order in which backends are asked whether they can run an op: the first that can, does."""

ORDER = ("cuda", "cpu", "reference")
