"""The HTML report: template, style, scripts and data in one file that needs no network.

The scripts share one scope, in the order of `SCRIPTS`. They create all elements through the DOM and
never parse text as HTML. The content security policy of the page allows only this script, by hash.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Mapping
from html import escape
from importlib.resources import files
from typing import Any

from ...terminal import escape_control
from .reduce import reduce_report

SCRIPTS = (
    "base.js", "groups.js", "summary.js", "labels.js", "roofline.js", "heat.js", "table.js",
    "zoomable_canvas.js", "timeline.js", "arena.js", "placement.js", "requests.js", "main.js",
)  # fmt: skip


def render_page(report: Mapping[str, Any]) -> str:
    """Return the page of a report (docs/profile-format.md), to be written as UTF-8."""
    style = _file("style.css")
    script = "(() => {\n" + "\n".join(map(_file, SCRIPTS)) + "\n})();\n"
    policy = (
        "default-src 'none'; img-src data:; base-uri 'none'; form-action 'none';"
        f" style-src '{_csp_hash(style)}'; script-src '{_csp_hash(script)}'"
    )
    parts = {
        "title": escape(escape_control(f"{report['model']['type']}: profile")),
        "policy": escape(policy),
        "style": style,
        "script": script,
        "data": _json_for_script(reduce_report(report)),
    }
    # One substitution pass, so that inserted text is not searched for placeholders.
    return re.sub(r"\{\{(\w+)\}\}", lambda found: parts[found[1]], _file("template.html"))


def _file(name: str) -> str:
    return files(__package__).joinpath(name).read_text("utf-8")


def _csp_hash(text: str) -> str:
    """Return the hash of an inline element for a content security policy."""
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _json_for_script(data: Mapping[str, Any]) -> str:
    """Return JSON that is safe in a script element: no text in it can end the element."""
    text = json.dumps(data, allow_nan=False, ensure_ascii=False, separators=(",", ":"))
    for sign in "<>&\u2028\u2029":
        text = text.replace(sign, f"\\u{ord(sign):04x}")
    return text
