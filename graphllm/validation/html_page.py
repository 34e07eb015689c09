"""Validation report as one HTML file, in the style of the profile report, without scripts."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterable
from html import escape
from importlib.resources import files

from ..terminal import escape_control
from .report import FAILED, PASSED, Check, Report, Run, shown

_OWN = """
#main > header { padding-top: 26px; }
.passed { color: var(--accent); }
.failed { color: var(--c2); font-weight: 600; }
.skipped { color: var(--ink-2); }
.checks :is(td, th) { text-align: left; vertical-align: top; }
.checks td { white-space: normal; overflow-wrap: anywhere; }
.checks table { width: auto; }
.checks table :is(td, th) { padding: 3px 24px 3px 0; white-space: nowrap; }
details { padding: 2px 0 8px; }
summary { cursor: pointer; color: var(--ink-2); font-size: 12px; }
@media (prefers-color-scheme: dark) { .failed { color: var(--c6); } }
"""


def render_page(report: Report) -> str:
    """Return the page, to be written as UTF-8."""
    style = files("graphllm.profiler.html").joinpath("style.css").read_text("utf-8") + _OWN
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    policy = f"default-src 'none'; img-src data:; style-src 'sha256-{digest}'"
    title = _text(f"{report.model}: validation")
    return "\n".join([
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">',
        f'<meta http-equiv="Content-Security-Policy" content="{escape(policy)}">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        '<meta name="color-scheme" content="light dark">',
        '<link rel="icon" href="data:,">',
        f"<title>{title}</title>\n<style>{style}</style>\n</head>\n<body>\n<main id='main'>",
        f"<header><h1>{title}</h1><p class='facts'>{_verdict(report)}</p></header>",
        *(_section(run) for run in report.runs),
        "</main>\n</body>\n</html>\n",
    ])  # fmt: skip


def _verdict(report: Report) -> str:
    if report.first is not None:
        run, check = report.first
        return f"<span class='failed'>failed</span>: {_text(run.title)}: {_text(check.name)}"
    several = f", {len(report.runs)} models" if len(report.runs) > 1 else ""
    return f"<span class='passed'>passed</span>{several}"


def _section(run: Run) -> str:
    against = f"{_text(run.oracle)}, float32" if run.oracle else "no oracle"
    rows = "\n".join(map(_row, run.checks))
    return (
        f"<section><div class='title'><h2>{_text(run.title)}</h2></div>"
        f"<p class='about'>on {_text(run.device)}, against {against}: {_text(run.verdict)}</p>"
        f"<div class='wide'><table class='listing checks'>{rows}</table></div></section>"
    )


def _row(check: Check) -> str:
    mark = {PASSED: "passed", FAILED: "failed"}.get(check.status, "skipped")
    return (
        f"<tr><th class='words'>{_text(check.name)}</th>"
        f"<td class='{check.status}'>{mark}</td><td>{_text(check.summary)}{_more(check)}</td></tr>"
    )


def _more(check: Check) -> str:
    """Details and figures of a check, open if it failed."""
    if not check.lines and not check.rows:
        return ""
    lines = "".join(f"<li>{_text(line)}</li>" for line in check.lines)
    table = ""
    if check.rows:
        head = _cells("th", check.rows[0])
        body = "".join(f"<tr>{_cells('td', map(shown, row.values()))}</tr>" for row in check.rows)
        table = (
            f"<table class='listing'><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
        )
    is_open = " open" if check.status == FAILED else ""
    return (
        f"<details{is_open}><summary>details</summary><ul class='list'>{lines}</ul>{table}"
        "</details>"
    )


def _cells(kind: str, values: Iterable[str]) -> str:
    return "".join(f"<{kind}>{_text(value)}</{kind}>" for value in values)


def _text(text: str) -> str:
    return escape(escape_control(text, limit=None))
