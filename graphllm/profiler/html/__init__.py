"""A profile as one self-contained HTML file."""

from .page import page

__all__ = ["page"]
