"""The verb ``chat``: multi-turn chat in the terminal or with piped messages."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from ..errors import GraphllmError, RequestError
from ..terminal import note
from .declarations import Option, verb
from .error_flags import with_flag
from .options import GenerationLoadOptions, Model, System, Template
from .output import write_text
from .sampling_options import ChatSamplingOptions

if TYPE_CHECKING:
    from ..chat import Conversation
    from ..engine.completion import Completion

HELP = '''\
/reset       forget the conversation
/save FILE   write the messages to a new file, or to one saved by this chat, as JSON
/help        show this help
/exit        end the chat, like Ctrl-D
A line that ends in \\ continues on the next line; a line of """ begins and ends a block of lines.
Pasted text of several lines is one message if Python has GNU readline.
Ctrl-C stops the answer, not the chat.'''
QUOTES = '"""'


@verb
def chat(
    model: Model,
    options: ChatSamplingOptions,
    load_options: GenerationLoadOptions,
    chat_template: Template = None,
    system: System = None,
    parse_special: Annotated[
        bool,
        Option(
            "--parse-special",
            help="Encode special tokens written out in messages as control tokens; pasted text can "
            "then begin a turn of the model.",
        ),
    ] = False,
) -> None:
    """Chat with a model: each line is a message; /help lists the commands.

    If standard input is not a terminal, each of its lines is a message, and only the answers are
    printed.

    graphllm chat model.gguf --system "Answer in one sentence."

    graphllm chat demo --chat-template gemma
    """
    from ..chat import PROCESS

    sampling = options.sampling()
    PROCESS.start()  # while the model loads
    llm = load_options.load(model, chat_template=chat_template)
    settings = {name: getattr(sampling, name) for name in vars(sampling)}
    if options.seed is None:
        del settings["seed"]
    conversation = llm.conversation(system, parse_special=parse_special, **settings)
    loop = ChatLoop(conversation, sys.stdin.isatty())
    for line in llm.misses():
        note(f"note: {line}")
    loop.run()


class ChatLoop:
    """Reads messages and commands and prints answers.

    ``terminal``: whether standard input is a terminal.
    """

    def __init__(self, conversation: Conversation, terminal: bool) -> None:
        self._conversation, self._terminal = conversation, terminal
        self._saved: set[Path] = set()  # files that /save wrote
        self._commands: dict[str, Callable[[str], bool]] = {
            "/reset": self._reset,
            "/save": self._save,
            "/help": self._help,
            "/exit": lambda rest: False,
        }

    def run(self) -> None:
        """Handle messages until /exit or the end of the input."""
        if self._terminal:
            _enable_line_editing()
            note("/help lists the commands; Ctrl-D ends the chat")
        running = True
        while running:
            try:
                text = self.read()
            except KeyboardInterrupt:
                if not self._terminal:
                    raise
                note("")  # at the prompt: discard the line
                continue
            if text is None:
                return
            try:
                running = self.handle(text)
            except GraphllmError as error:
                if not self._terminal:
                    raise
                note(f"error: {with_flag(error)}")

    def read(self) -> str | None:
        """Read a message: a line, lines continued with a backslash, or a block; None at the end."""
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
                raise RequestError("the input is not valid UTF-8") from None
        data = sys.stdin.buffer.readline()
        try:
            return data.decode("utf-8").rstrip("\r\n") if data else None
        except UnicodeDecodeError:
            raise RequestError("standard input is not valid UTF-8") from None

    def handle(self, text: str) -> bool:
        """Answer a message or execute a command; return whether the chat continues."""
        word, _, rest = text.strip().partition(" ")
        if word in self._commands:
            return self._commands[word](rest.strip())
        if word.startswith("/") and "\n" not in text and "/" not in word[1:]:
            raise RequestError(f"unknown command {word}; known: {', '.join(self._commands)}")
        if word:
            self._answer(text)
        return True

    def _answer(self, text: str) -> None:
        from ..engine.completion import Completion

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
            _print_timings(done)

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
            raise RequestError("/save needs a file name")
        from ..atomic_file import AtomicFile

        text = json.dumps(self._conversation.messages, ensure_ascii=False, indent=1)
        try:
            path = Path(name).expanduser()
            saved = path.resolve() in self._saved
            if path.is_file() and not saved:  # it could be the model's, which is mapped
                raise RequestError(
                    f"{name}: exists already, and was not saved by this chat; give another name"
                )
            with AtomicFile(path, replace=saved) as file:
                file.write(f"{text}\n".encode("utf-8", "backslashreplace"))
            self._saved.add(path.resolve())
        except OSError as error:
            raise RequestError(f"{name}: {error.strerror}") from None
        except (RuntimeError, ValueError) as error:  # no such home directory; a zero byte
            raise RequestError(f"{name!r}: {error}") from None
        return True


def _enable_line_editing() -> None:
    """Enable arrow keys, history and bracketed paste at the prompt if Python has readline.

    Python disables the bracketed paste of GNU readline by default. Readline restores the terminal
    after each line.
    """
    with suppress(ImportError):
        import readline

        if "GNU readline" in (readline.__doc__ or ""):
            readline.parse_and_bind("set enable-bracketed-paste on")


def _print_timings(done: Completion) -> None:
    t = done.timings
    cut = {"length": ", cut off at -n tokens"}.get(done.finish_reason, "")
    cut = f", {'; '.join(done.notes)}: /reset" if done.notes else cut
    note(
        f"[{t.prefill_tokens} new + {len(done.ids)} tokens, "
        f"{t.as_dict()['decode_tok_s']:.1f} tok/s{cut}]"
    )
