"""The HTML report of a profile."""

from __future__ import annotations

import json
from collections.abc import Mapping
from html import escape
from typing import Any

from ...html.page import inline_page
from ...terminal import escape_control
from .reduce import reduce_report

SCRIPTS = (
    "base.js", "groups.js", "summary.js", "labels.js", "roofline.js", "heat.js", "table.js",
    "zoomable_canvas.js", "timeline.js", "arena.js", "placement.js", "requests.js", "main.js",
)  # fmt: skip


def render_page(report: Mapping[str, Any]) -> str:
    """Return the page of a report (docs/profile-format.md), to be written as UTF-8."""
    parts = {
        "title": escape(escape_control(f"{report['model']['type']}: profile")),
        "data": _json_for_script(reduce_report(report)),
    }
    return inline_page(__package__, SCRIPTS, "img-src data:", parts).text


def _json_for_script(data: Mapping[str, Any]) -> str:
    """Return JSON that is safe in a script element: no text in it can end the element."""
    text = json.dumps(data, allow_nan=False, ensure_ascii=False, separators=(",", ":"))
    for sign in "<>&\u2028\u2029":
        text = text.replace(sign, f"\\u{ord(sign):04x}")
    return text
