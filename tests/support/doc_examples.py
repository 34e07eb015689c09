"""Code examples of the documentation."""

from __future__ import annotations

import re
from pathlib import Path

DOCS = Path(__file__).parents[2] / "docs"


def example(heading: str, language: str = "python") -> str:
    """Return the first code block in ``language`` under a heading of the page."""
    page = (DOCS.parent / "CONTRIBUTING.md").read_text("utf-8")
    section = page.split(f"\n## {heading}\n")[1].split("\n## ")[0]
    found = re.search(rf"```{language}\n(.*?)```", section, re.DOTALL)
    assert found, f"{heading}: no {language} example"
    return found.group(1)
