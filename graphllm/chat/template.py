"""Chat templates: which one a model has, and messages as its text."""

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

_LARGEST = 1 << 18  # characters of a template
_MAX_FILE_BYTES = 4 * _LARGEST


class ChatTemplate:
    """A Jinja2 template that makes one text of the messages of a chat.

    ``name`` says where it is from, for errors; ``tokens`` are the texts of special tokens that it
    may use (``bos_token``, ``eos_token``). It is compiled and rendered in a process of its own,
    with at most 1 s of CPU time and 64 MB of memory. ModelFileError when it is no valid template.
    """

    def __init__(self, source: str, name: str, tokens: Mapping[str, str] | None = None) -> None:
        self.source, self.name, self.tokens = source, name, dict(tokens or {})
        if len(source) > _LARGEST:
            raise ModelFileError(
                f"{name}: {len(source)} characters, where a template has at most {_LARGEST}"
            )
        self._request(ModelFileError, {})

    def render(self, messages: Sequence[Message], **variables: Any) -> str:
        """The text of `render_prompt`."""
        return self.render_prompt(messages, **variables).text

    def render_prompt(self, messages: Sequence[Message], **variables: Any) -> RenderedChat:
        """The chat as text, up to where the answer begins.

        ``messages``: see `normalize_messages`. ``variables`` are passed on;
        ``add_generation_prompt=False`` leaves the answer's header out. RequestError when a message
        is malformed or the template refuses the messages.
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
    """The texts of special tokens that templates use; empty where a model has none."""
    ids = {"bos_token": tokenizer.bos_id, "eos_token": tokenizer.eos_id}
    return {
        name: "" if token is None else tokenizer.piece(token).decode("utf-8", "replace")
        for name, token in ids.items()
    }


def directory_template(folder: Path) -> str | None:
    """The chat template of a Hugging Face directory, None where it has none.

    That of chat_template.jinja, else of tokenizer_config.json (of several the one called default),
    else of additional_chat_templates (default.jinja, or the only one). ModelFileError.
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
        raise ModelFileError(f"{settings}: the chat template is a {kind}, not a text")
    if listed:
        return listed
    more = sorted(folder.glob("additional_chat_templates/*.jinja"))
    chosen = [path for path in more if path.stem == "default"] or more
    return read_text(chosen[0], _MAX_FILE_BYTES) if len(chosen) == 1 else None


def find_template(
    choice: str | Path | None, own: Any, model: str, tokens: Mapping[str, str]
) -> ChatTemplate:
    """The template that ``choice`` names (a built-in's name, or a file), else the model's ``own``.

    ModelFileError when the file is not there or no template, RequestError when there is none.
    """
    if choice is None:
        if isinstance(own, str) and own:
            return ChatTemplate(own, f"{model}: chat template", tokens)
        names = ", ".join(TEMPLATES)
        raise RequestError(
            f"{model}: the model has no chat template; give one as chat_template, a file or one of "
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
            f"chat template {choice}: {error.strerror}, and no built-in one ({names}) has the name"
        ) from None
    except UnicodeDecodeError as error:
        raise ModelFileError(f"{choice}: byte {error.start} is not valid UTF-8") from None
    return ChatTemplate(source, str(choice), tokens)
