"""Alignment of buffers and of the values in them."""

ALIGN = 64  # bytes: one cache line, one AVX-512 register


def aligned(nbytes: int) -> int:
    """``nbytes`` rounded up to a multiple of `ALIGN`."""
    return -(-nbytes // ALIGN) * ALIGN
