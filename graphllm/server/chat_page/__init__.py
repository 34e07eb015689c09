"""The chat page of the server: one file, which needs no network but the server.

The page talks to ``/v1/chat/completions``. Conversations stay in the browser. What a model writes
becomes elements through the DOM (`markdown.js`), so no HTML or script of an answer takes effect.
"""

from __future__ import annotations

from functools import cache

from ...html.page import InlinePage, inline_page

SCRIPTS = (
    "markdown.js", "store.js", "client.js", "bill.js", "messages.js", "settings.js", "main.js",
)  # fmt: skip


@cache
def chat_page() -> InlinePage:
    """Return the page. Its policy allows its own style and script, and requests to its server."""
    directives = "connect-src 'self'; img-src data:"
    return inline_page(__package__, SCRIPTS, directives, {})
