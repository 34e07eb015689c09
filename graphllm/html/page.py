"""Assembly of a page: template, style and scripts of a package in one text.

The scripts share one scope, in the given order, after `dom.js`. They create all elements through
the DOM and never parse text as HTML. The content security policy allows only this style and this
script, by hash.
"""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from importlib.resources import files


@dataclass(frozen=True)
class InlinePage:
    """A page, to be sent or written as UTF-8, and its content security policy."""

    text: str
    policy: str


def inline_page(
    package: str, scripts: Sequence[str], directives: str, parts: Mapping[str, str]
) -> InlinePage:
    """Return the page of a package with ``template.html`` and ``style.css``.

    Args:
        package: name of the package.
        scripts: its files, in the order in which they are run.
        directives: of the content security policy, beyond those of style and script. Nothing else
            is allowed.
        parts: HTML for other placeholders of the template than ``style``, ``script`` and
            ``policy``; a placeholder is a name in double braces.
    """
    style = _file(package, "style.css")
    sources = [_file(__package__, "dom.js"), *(_file(package, name) for name in scripts)]
    script = "(() => {\n" + "\n".join(sources) + "\n})();\n"
    policy = (
        f"default-src 'none'; {directives}; base-uri 'none'; form-action 'none';"
        f" style-src '{_csp_hash(style)}'; script-src '{_csp_hash(script)}'"
    )
    found = {"policy": escape(policy), "style": style, "script": script, **parts}
    # One substitution pass, so that inserted text is not searched for placeholders.
    template = _file(package, "template.html")
    return InlinePage(re.sub(r"\{\{(\w+)\}\}", lambda match: found[match[1]], template), policy)


def _file(package: str, name: str) -> str:
    return files(package).joinpath(name).read_text("utf-8")


def _csp_hash(text: str) -> str:
    """Return the hash of an inline element for a content security policy."""
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
