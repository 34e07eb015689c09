"""One-line messages for exceptions."""

from __future__ import annotations

from ..errors import GraphllmError


def error_message(error: Exception) -> str:
    """Return the text after ``error: ``, on one line."""
    if isinstance(error, GraphllmError):
        from .error_flags import with_flag

        return with_flag(error)
    if isinstance(error, OSError) and error.filename is not None and error.strerror:
        return f"{error.filename}: {error.strerror}"
    return _unexpected(error)


def _unexpected(error: Exception) -> str:
    """Return the message for another exception, with the user's line of code that raised it."""
    from ..graph.scopes import relative_origin
    from ..model.spec import user_line

    where = user_line(error)
    text = error.msg if isinstance(error, SyntaxError) else str(error)
    what = ": ".join([type(error).__name__, *filter(None, [" ".join(text.split())])])
    if where is None:
        return f"{what} (GRAPHLLM_DEBUG=1 shows where)"
    return f"{relative_origin(where)}: {what}"


def usage_message(error: Exception) -> str:
    """Return typer's message for wrong usage on one line, with the command that shows the help.

    It is empty if typer has printed the help already, because no verb was given.
    """
    if type(error).__name__ == "NoArgsIsHelpError":
        return ""
    context = getattr(error, "ctx", None)
    path = context.command_path if context is not None else "graphllm"
    text = error.format_message().rstrip(".")  # type: ignore[attr-defined]
    return f"{text} ({path} --help)"


def is_interrupt(error: BaseException) -> bool:
    """Whether Ctrl-C caused the error, directly or through an exception of a library."""
    found: BaseException | None = error
    while found is not None:
        if isinstance(found, KeyboardInterrupt):
            return True
        found = found.__cause__ or found.__context__
    return False
