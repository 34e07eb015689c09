"""Alignment of buffers and of intermediates in arenas."""

ALIGN = 64  # bytes: one cache line, one AVX-512 register


def aligned(nbytes: int) -> int:
    """Round ``nbytes`` up to a multiple of `ALIGN`."""
    return -(-nbytes // ALIGN) * ALIGN
