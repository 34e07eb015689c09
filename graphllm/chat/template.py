"""Chat templates: find a model's template and render messages with it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..errors import GraphllmError, ModelFileError, RequestError
from ..tokenizer import Tokenizer
from ..tokenizer.untrusted_files import read_json, read_text
from .builtin_templates import TEMPLATES
from .messages import Message, normalize_messages, to_plain_data
from .rendered_chat import RenderedChat
from .renderer_process import PROCESS, LimitExceeded

_MAX_CHARS = 1 << 18
_MAX_FILE_BYTES = 4 * _MAX_CHARS


class ChatTemplate:
    """Jinja2 template that renders chat messages as a prompt.

    It is compiled and rendered in a separate process, with at most 1 s of CPU time and 64 MB of
    memory.

    Args:
        source: Jinja2 source.
        name: origin of the template, for error messages.
        tokens: texts of the special tokens that it may use (``bos_token``, ``eos_token``).

    Raises:
        ModelFileError: the template is invalid.
    """

    def __init__(self, source: str, name: str, tokens: Mapping[str, str] | None = None) -> None:
        self.source, self.name, self.tokens = source, name, dict(tokens or {})
        if len(source) > _MAX_CHARS:
            raise ModelFileError(
                f"{name}: the template has {len(source)} characters, more than {_MAX_CHARS}"
            )
        self._request(ModelFileError, {})

    def render(self, messages: Sequence[Message], **variables: Any) -> str:
        """Return the text of the prompt; see `render_prompt`."""
        return self.render_prompt(messages, **variables).text

    def render_prompt(self, messages: Sequence[Message], **variables: Any) -> RenderedChat:
        """Render messages as a prompt for the next answer.

        Args:
            messages: see `normalize_messages`.
            **variables: variables of the template; ``add_generation_prompt=False`` omits the header
                of the answer.

        Raises:
            RequestError: a message is malformed, or the template rejects the messages.
        """
        values = {
            "messages": normalize_messages(messages),
            "tokens": self.tokens,
            "variables": {name: to_plain_data(value, name) for name, value in variables.items()},
        }
        header, text = self._request(RequestError, values)
        return RenderedChat(text, tuple([(start, end) for start, end in header["content"]]))

    def _request(
        self, kind: type[GraphllmError], values: Mapping[str, Any]
    ) -> tuple[dict[str, Any], str]:
        try:
            header, text = PROCESS.request({"source": self.source, **values})
        except LimitExceeded as error:
            raise kind(f"{self.name}: {error}") from None
        if "error" in header:
            raise kind(f"{self.name}: {header['error']}")
        return header, text


def template_tokens(tokenizer: Tokenizer) -> dict[str, str]:
    """Return the texts of the special tokens that templates use, empty if a model has none."""
    ids = {"bos_token": tokenizer.bos_id, "eos_token": tokenizer.eos_id}
    return {
        name: "" if token is None else tokenizer.piece(token).decode("utf-8", "replace")
        for name, token in ids.items()
    }


def directory_template(folder: Path) -> str | None:
    """Return the chat template of a Hugging Face directory, or None.

    In order of preference: chat_template.jinja; tokenizer_config.json (the template named
    ``default`` of several); additional_chat_templates (default.jinja, or the only file).
    ModelFileError: a file cannot be read or is invalid.
    """
    own = folder / "chat_template.jinja"
    if own.exists():
        return read_text(own, _MAX_FILE_BYTES)
    settings = folder / "tokenizer_config.json"
    listed = read_json(settings).get("chat_template")
    if isinstance(listed, list):
        rows = [row for row in listed if isinstance(row, dict) and row.get("name") == "default"]
        listed = rows[0].get("template") if rows else None
    if not isinstance(listed, (str, type(None))):
        kind = type(listed).__name__
        raise ModelFileError(f"{settings}: the chat template is a {kind}, not a string")
    if listed:
        return listed
    more = sorted(folder.glob("additional_chat_templates/*.jinja"))
    chosen = [path for path in more if path.stem == "default"] or more
    return read_text(chosen[0], _MAX_FILE_BYTES) if len(chosen) == 1 else None


def find_template(
    choice: str | Path | None, own: Any, model: str, tokens: Mapping[str, str]
) -> ChatTemplate:
    """Return the chat template to use.

    Args:
        choice: name of a built-in template, or a file; None for the model's own.
        own: source of the model's own template, if any.
        model: path of the model, for error messages.
        tokens: texts of special tokens; see `ChatTemplate`.

    Raises:
        ModelFileError: the file cannot be read, or the template is invalid.
        RequestError: ``choice`` is None and the model has no template.
    """
    if choice is None:
        if isinstance(own, str) and own:
            return ChatTemplate(own, f"{model}: chat template", tokens)
        names = ", ".join(TEMPLATES)
        raise RequestError(
            f"{model}: the model has no chat template; give one as chat_template: a file or one of "
            f"{names}",
            "chat_template",
        )
    if str(choice) in TEMPLATES:
        return ChatTemplate(TEMPLATES[str(choice)], f"chat template {choice}", tokens)
    try:
        source = Path(choice).read_text("utf-8")
    except OSError as error:
        names = ", ".join(TEMPLATES)
        raise ModelFileError(
            f"chat template {choice}: {error.strerror}; it is not a built-in name ({names}) either"
        ) from None
    except UnicodeDecodeError as error:
        raise ModelFileError(f"{choice}: byte {error.start} is not valid UTF-8") from None
    return ChatTemplate(source, str(Path(choice)), tokens)
