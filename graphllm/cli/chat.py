"""``chat``: talk with a model."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..errors import GraphllmError, RequestError
from .error_flags import with_flag
from .options import ChatSamplingOptions, LoadOptions, Model, System, Template, verb
from .output import note, write_text

if TYPE_CHECKING:
    from ..chat import Conversation
    from ..engine.request import Completion

HELP = '''\
/reset       forget what was said
/save FILE   write the messages to a file, as JSON
/help        show this
/exit        end; so does Ctrl-D
A line that ends in \\ goes on; a line of """ begins and ends a block of lines; a pasted text of
several lines is one message, where Python has GNU readline.
Ctrl-C stops the answer only.'''
QUOTES = '"""'


@verb
def chat(
    model: Model,
    drawing: ChatSamplingOptions,
    loading: LoadOptions,
    chat_template: Template = None,
    system: System = None,
    parse_special: Annotated[
        bool,
        typer.Option(
            "--parse-special",
            help="Read special tokens written out in messages as control tokens: pasted text can "
            "then open a turn of the model.",
        ),
    ] = False,
) -> None:
    """Talk with a model: each line is a message; /help shows what else can be typed.

    Without a terminal on standard input its lines are the messages, and the answers are all that is
    printed. An answer ends at -n tokens.

    graphllm chat model.gguf --system "Answer in one sentence."

    graphllm chat demo --chat-template gemma
    """
    from ..chat import PROCESS

    sampling = drawing.sampling()
    PROCESS.start()  # while the model loads
    llm = loading.load(model, chat_template=chat_template)
    settings = {name: getattr(sampling, name) for name in vars(sampling)}
    if drawing.seed is None:
        del settings["seed"]
    conversation = llm.conversation(system, parse_special=parse_special, **settings)
    talk = ChatLoop(conversation, sys.stdin.isatty())
    for line in llm.misses():
        note(f"note: {line}")
    talk.run()


class ChatLoop:
    """Reads messages and commands, and prints answers. ``terminal``: whether anybody types."""

    def __init__(self, conversation: Conversation, terminal: bool) -> None:
        self._conversation, self._terminal = conversation, terminal
        self._commands: dict[str, Callable[[str], bool]] = {
            "/reset": self._reset,
            "/save": self._save,
            "/help": self._help,
            "/exit": lambda rest: False,
        }

    def run(self) -> None:
        """Until /exit or the end of the input."""
        if self._terminal:
            _edit_lines()
            note("/help shows the commands; Ctrl-D ends")
        goes_on = True
        while goes_on:
            try:
                text = self.read()
            except KeyboardInterrupt:  # at the prompt: drop what was typed
                note("")
                if not self._terminal:
                    raise
                continue
            if text is None:
                return
            try:
                goes_on = self.turn(text)
            except GraphllmError as error:
                if not self._terminal:
                    raise
                note(f"error: {with_flag(error)}")

    def read(self) -> str | None:
        """A message: a line, lines that go on with a backslash, or a block; None at the end."""
        line = self._line("> ")
        if line is None:
            return None
        if line.strip() == QUOTES:
            block = []
            while (more := self._line(". ")) is not None and more.strip() != QUOTES:
                block.append(more)
            return "\n".join(block)
        lines = [line]
        while lines[-1].endswith("\\"):
            lines[-1] = lines[-1][:-1]
            more = self._line(". ")
            if more is None:
                break
            lines.append(more)
        return "\n".join(lines)

    def _line(self, prompt: str) -> str | None:
        if self._terminal:
            try:
                return input(prompt)
            except EOFError:
                note("")
                return None
            except UnicodeDecodeError:
                raise RequestError("what was typed is not valid UTF-8") from None
        data = sys.stdin.buffer.readline()
        try:
            return data.decode("utf-8").rstrip("\r\n") if data else None
        except UnicodeDecodeError:
            raise RequestError("standard input is not valid UTF-8") from None

    def turn(self, text: str) -> bool:
        """Answer a message or do what a command says; whether to go on."""
        word, _, rest = text.strip().partition(" ")
        if word in self._commands:
            return self._commands[word](rest.strip())
        if word.startswith("/") and "\n" not in text and "/" not in word[1:]:
            raise RequestError(f"unknown command {word}; known: {', '.join(self._commands)}")
        if word:
            self._answer(text)
        return True

    def _answer(self, text: str) -> None:
        from ..engine.request import Completion

        done = Completion()
        try:
            with closing(self._conversation.ask(text, done)) as pieces:
                for piece in pieces:
                    write_text(piece)
        except KeyboardInterrupt:
            if not self._terminal:
                raise
            write_text("\n")
            note("[stopped]")
            return
        write_text("\n")
        if self._terminal:
            _tell(done)

    # -- commands
    def _reset(self, rest: str) -> bool:
        self._conversation.reset()
        return True

    def _help(self, rest: str) -> bool:
        for line in HELP.splitlines():
            note(line)
        return True

    def _save(self, name: str) -> bool:
        if not name:
            raise RequestError("/save needs a file's name")
        text = json.dumps(self._conversation.messages, ensure_ascii=False, indent=1)
        try:
            Path(name).expanduser().write_text(text + "\n", "utf-8")
        except OSError as error:
            raise RequestError(f"{name}: {error.strerror}") from None
        return True


def _edit_lines() -> None:
    """Arrow keys, history and bracketed paste at the prompt, where Python has them.

    GNU readline asks the terminal to bracket pasted text while it reads a line, and puts the
    terminal back after each. Python switches that off unless it is asked for.
    """
    with suppress(ImportError):
        import readline

        if "GNU readline" in (readline.__doc__ or ""):
            readline.parse_and_bind("set enable-bracketed-paste on")


def _tell(done: Completion) -> None:
    t = done.timings
    cut = {"length": ", cut at -n tokens"}.get(done.finish_reason, "")
    cut = f", {'; '.join(done.notes)}: /reset" if done.notes else cut
    note(
        f"[{t.prefill_tokens} new + {len(done.ids)} tokens, "
        f"{t.as_dict()['decode_tok_s']:.1f} tok/s{cut}]"
    )
