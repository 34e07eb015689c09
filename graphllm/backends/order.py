"""Order of preference of backends: an op runs on the first backend that has a kernel for it."""

ORDER = ("cuda", "cpu", "reference")
