"""Chat templates: which one a model has, and messages as its text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import TemplateError, TemplateSyntaxError

from ..errors import ModelFileError, RequestError
from ..tokenizer.files import read_json, read_text
from .builtin import TEMPLATES
from .sandbox import BoundedEnvironment

Message = Mapping[str, Any]
_PLAIN = (str, int, float, type(None))
_LARGEST = 4_000_000  # bytes of a template's file


class ChatTemplate:
    """A Jinja2 template that makes one text of the messages of a chat.

    ``name`` says where it is from, for errors; ``tokens`` are the texts of special tokens that it
    may use (``bos_token``, ``eos_token``). ModelFileError when it is no valid template.
    """

    def __init__(self, source: str, name: str, tokens: Mapping[str, str] | None = None) -> None:
        self.source, self.name, self.tokens = source, name, dict(tokens or {})
        self._environment = BoundedEnvironment()
        try:
            self._template = self._environment.from_string(source)
        except TemplateSyntaxError as error:
            raise ModelFileError(f"{name}: line {error.lineno}: {_line(error)}") from None
        except (TemplateError, RecursionError, SyntaxError, ValueError) as error:
            raise ModelFileError(f"{name}: {_line(error)}") from None

    def render(self, messages: Sequence[Message], **variables: Any) -> str:
        """The chat as text, up to where the answer begins.

        messages: mappings with a ``role`` (``user``, ``assistant``, ``system``) and a ``content``.
        ``variables`` are passed on; ``add_generation_prompt=False`` leaves the answer's header out.
        RequestError when a message is malformed or the template refuses the messages.
        """
        given = {
            "messages": [_checked(i, message) for i, message in enumerate(messages)],
            "add_generation_prompt": True,
            "tools": None,
            "documents": None,
            **self.tokens,
            **{name: _plain(value, name) for name, value in variables.items()},
        }
        if not given["messages"]:
            raise RequestError("a chat needs at least one message")
        try:
            return self._environment.render_text(self._template, given)
        except RecursionError:
            raise RequestError(f"{self.name}: it calls itself too often") from None
        except MemoryError:
            raise RequestError(f"{self.name}: it needs too much memory") from None
        except Exception as error:  # whatever a template's expressions may raise
            raise RequestError(f"{self.name}: {_line(error)}") from None


def _line(error: BaseException) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    return text if isinstance(error, (TemplateError, SyntaxError)) else f"{_kind(error)}: {text}"


def _kind(error: BaseException) -> str:
    return type(error).__name__


def _checked(index: int, message: Message) -> Any:
    """The message as plain data. RequestError names it by its index."""
    if not isinstance(message, Mapping):
        raise RequestError(f"message {index} is {_kind_of(message)}, not a mapping")
    if not isinstance(message.get("role"), str):
        raise RequestError(f"message {index} has no role")
    if not isinstance(message.get("content"), (str, list, tuple)) and "tool_calls" not in message:
        raise RequestError(f"message {index} has no content")
    return _plain(message, f"message {index}")


def _kind_of(value: Any) -> str:
    return f"a {type(value).__name__}"


def _plain(value: Any, where: str) -> Any:
    """A copy made of nothing but dicts, lists, texts and numbers: templates get no objects."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item, where) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item, where) for item in value]
    if isinstance(value, _PLAIN):
        return value
    raise RequestError(f"{where} holds {_kind_of(value)}, which a template cannot read")


def directory_template(folder: Path) -> str | None:
    """The chat template of a Hugging Face directory, None where it has none.

    That of chat_template.jinja, else of tokenizer_config.json (of several the one called default),
    else of additional_chat_templates (default.jinja, or the only one). ModelFileError.
    """
    own = folder / "chat_template.jinja"
    if own.exists():
        return read_text(own, _LARGEST)
    settings = folder / "tokenizer_config.json"
    listed = read_json(settings).get("chat_template")
    if isinstance(listed, list):
        rows = [row for row in listed if isinstance(row, dict) and row.get("name") == "default"]
        listed = rows[0].get("template") if rows else None
    if not isinstance(listed, (str, type(None))):
        raise ModelFileError(f"{settings}: the chat template is {_kind_of(listed)}, not a text")
    if listed:
        return listed
    more = sorted(folder.glob("additional_chat_templates/*.jinja"))
    chosen = [path for path in more if path.stem == "default"] or more
    return read_text(chosen[0], _LARGEST) if len(chosen) == 1 else None


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
            f"{model}: the model has no chat template; give one with --chat-template, a file or "
            f"one of {names}"
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
