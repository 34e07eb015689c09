"""Profile report as one self-contained HTML file."""

from .page import render_page

__all__ = ["render_page"]
