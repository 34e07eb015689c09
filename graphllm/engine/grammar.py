"""Structured output: grammars that restrict the tokens of an answer, by llguidance.

A grammar is a JSON schema, a regular expression or a Lark grammar. It is compiled once for a
vocabulary; each answer then has a `GrammarState`, which knows the ids that may follow as a bitmap.
Only answers with a grammar import this module, and with it the extra ``structured``.
"""

from __future__ import annotations

import json
import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any
from weakref import WeakKeyDictionary, WeakMethod

import numpy as np

from ..arguments import invalid_argument, quote
from ..errors import RequestError
from ..tokenizer import Tokenizer
from .sequence import ActiveSequence

try:
    import llguidance
    from llguidance.gbnf_to_lark import gbnf_to_lark
    from llguidance.numpy import fill_next_token_bitmask, fill_next_token_bitmask_par
except ImportError:
    raise RequestError(
        "json_schema, regex and grammar need the package llguidance: "
        "pip install 'graphllm[structured]'"
    ) from None

MAX_CHARS = 1 << 17  # of a grammar
MAX_GBNF_CHARS = 1 << 14  # of one that llguidance converts in Python
_MAX_COMPILED = 32  # grammars that a vocabulary keeps
_MAX_THREADS = 8  # that compute masks
_ERROR_CHARS = 300
# One space, or a line break with an indentation: small models may go on with spaces forever.
_JSON_OPTIONS: Any = {"whitespace_pattern": r" |\n[ \t]{0,20}"}
# llguidance's own limits bound the time of a compilation and of a step; a state has up to 2 KB.
_MAX_LEXER_STATES = 20_000
# Bounds the first mask of a hostile expression, such as (a{1000}){1000}, to 0.15 s; all other
# requests wait for it. With llguidance's own limit of a million it takes 1.7 s.
_INITIAL_FUEL = 200_000

Grammar = tuple[str, str]  # field of `Sampling`, and its text


def json_schema_text(name: str, value: Any) -> str:
    """Return a JSON schema, given as an object or as its JSON text, as text. RequestError."""
    what = "a JSON schema: a mapping, or its JSON text"
    try:
        found = json.loads(value) if isinstance(value, str) else value
        if not isinstance(found, Mapping):
            raise TypeError
        return json.dumps(dict(found), allow_nan=False)
    except (TypeError, ValueError, RecursionError):
        raise invalid_argument(name, value, what) from None


def lark_from_gbnf(name: str, value: str) -> str:
    """Return a grammar in llama.cpp's GBNF as one in llguidance's variant of Lark.

    RequestError: argument ``name`` is malformed or too long.
    """
    if len(value) > MAX_GBNF_CHARS:
        raise invalid_argument(name, value, f"a grammar of at most {MAX_GBNF_CHARS} characters")
    try:
        return gbnf_to_lark(value)
    except RecursionError:
        raise RequestError(f"{name} is too deeply nested", name) from None
    except Exception as error:  # llguidance's parser raises several kinds
        reason = " ".join(str(error).split())[:_ERROR_CHARS]
        raise RequestError(f"{name} is no valid GBNF grammar: {reason}", name) from None


class GrammarState:
    """The grammar of one answer, and the tokens that it has consumed.

    Attributes:
        matcher: llguidance's state.
        words: 32-bit words of a bitmap of the vocabulary.
        error: why the grammar cannot go on; None if it can.
    """

    error: RequestError | None = None

    def __init__(self, matcher: llguidance.LLMatcher, words: int) -> None:
        self.matcher, self.words = matcher, words
        self._consumed = 0

    def follow(self, sequence: ActiveSequence) -> bool:
        """Consume the tokens of an answer that are new.

        Returns:
            Whether nothing can follow: the answer is complete, or `error` is set.
        """
        tokens = sequence.tokens[sequence.prompt_tokens + self._consumed :]
        if tokens:
            self._consumed += len(tokens)
            self.matcher.consume_tokens(tokens)
            self.check()
        return self.matcher.is_stopped()

    def check(self) -> None:
        """Set `error` if the grammar has failed."""
        if self.matcher.is_error():
            self.error = RequestError(f"the grammar cannot go on: {_reason(self.matcher)}")


def fill_masks(states: Sequence[GrammarState | None], masks: np.ndarray) -> None:
    """Write bitmaps i32 [rows, words] of the ids that may follow: all for a row without a grammar.

    Ids without a token are excluded. Python's lock is released meanwhile.
    """
    live = [(row, state) for row, state in enumerate(states) if state is not None]
    words = live[0][1].words  # all states have the vocabulary of one model
    found = masks if words == masks.shape[1] else np.zeros((len(states), words), np.int32)
    threads = min(_MAX_THREADS, len(os.sched_getaffinity(0)) // 2)
    if threads > 1 and len(live) > 1:
        jobs = [(state.matcher, row) for row, state in live]
        fill_next_token_bitmask_par(_executor(threads), jobs, found)
    else:  # a thread of its own would only share a core with a waiting one of the backend
        for row, state in live:
            fill_next_token_bitmask(state.matcher, found, row)
    for row, own in enumerate(states):
        if own is not None:
            own.check()
        if own is None or own.error is not None:
            masks[row] = -1
        elif found is not masks:
            masks[row] = 0
            masks[row, :words] = found[row, : masks.shape[1]]


@cache
def _executor(threads: int) -> llguidance.LLExecutor:
    return llguidance.LLExecutor(num_threads=threads)


class _Vocabulary:
    """The tokens of a tokenizer as llguidance needs them, and the grammars compiled for them."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        if not tokenizer.eog_ids:
            raise RequestError("structured output needs a tokenizer with an EOS token")
        self._tokenizer = llguidance.LLTokenizer(
            llguidance.TokenizerWrapper(_Tokens(tokenizer)), eos_token=sorted(tokenizer.eog_ids)
        )
        self._compiled: OrderedDict[Grammar, str] = OrderedDict()
        self._lock, self._compiling = threading.Lock(), threading.Lock()
        self.words = -(-self._tokenizer.vocab_size // 32)

    def start(self, grammar: Grammar) -> llguidance.LLMatcher:
        """Return the state of a grammar before its first token. RequestError: it is invalid."""
        found = self._known(grammar)
        if found is None:
            with self._compiling:  # one at a time: it may take a second and hundreds of MB
                found = self._known(grammar)  # compiled while this thread waited
                if found is None:
                    found = self._compile(grammar)
                    with self._lock:
                        self._compiled[grammar] = found
                        if len(self._compiled) > _MAX_COMPILED:
                            self._compiled.popitem(last=False)
        return self._matcher(found)

    def _known(self, grammar: Grammar) -> str | None:
        """Return a grammar that was compiled, and is now the one used last; None if it was not."""
        with self._lock:
            if grammar in self._compiled:
                self._compiled.move_to_end(grammar)
            return self._compiled.get(grammar)

    def _matcher(self, compiled: str) -> llguidance.LLMatcher:
        """A state of its own. Copies of one would share a lexer, and so its limit of states."""
        limits = llguidance.LLParserLimits(
            max_lexer_states=_MAX_LEXER_STATES, initial_lexer_fuel=_INITIAL_FUEL,
            verbose_errors=False,
        )  # fmt: skip
        return llguidance.LLMatcher(self._tokenizer, compiled, log_level=0, limits=limits)

    def _compile(self, grammar: Grammar) -> str:
        """Return llguidance's form of a grammar that something matches."""
        name, text = grammar
        if len(text) > MAX_CHARS:
            raise RequestError(f"{name} has {len(text)} characters, more than {MAX_CHARS}", name)
        try:
            compiled = _PARSERS[name](text)
        except ValueError as error:
            raise RequestError(f"{name}: {_line(error)}", name) from None
        matcher = self._matcher(compiled)
        if not matcher.is_error():
            matcher.compute_bitmask()  # of the first token: nothing may match the grammar
        if matcher.is_error():
            raise RequestError(f"{name} = {quote(text)}: {_reason(matcher)}", name)
        return compiled


_PARSERS: dict[str, Callable[[str], str]] = {
    "json_schema": lambda text: llguidance.LLMatcher.grammar_from_json_schema(
        text, overrides=_JSON_OPTIONS
    ),
    "regex": llguidance.LLMatcher.grammar_from_regex,
    "grammar": llguidance.LLMatcher.grammar_from_lark,
}
_VOCABULARIES: WeakKeyDictionary[Tokenizer, _Vocabulary] = WeakKeyDictionary()
_LOCK = threading.Lock()


class _Tokens:
    """The interface of tokenizers that llguidance reads. It does not keep the tokenizer alive."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        ids = range(tokenizer.vocab_size)
        self.tokens = [tokenizer.piece(token) for token in ids]
        shown = (tokenizer.decode([token], continuation=True) for token in ids)
        self.special_token_ids = [token for token, text in zip(ids, shown) if not text]
        self.eos_token_id = min(tokenizer.eog_ids)
        self.bos_token_id = tokenizer.bos_id
        self._encode = WeakMethod(tokenizer.encode)
        self._before = tokenizer.encode("\n")

    def __call__(self, text: str) -> list[int]:
        """Return the tokens of a text that follows other text.

        Some vocabularies put a space before a text, but not after a line break.
        """
        encode = self._encode()
        ids = encode("\n" + text) if encode is not None else []
        own = self._before
        return ids[len(own) :] if ids[: len(own)] == own else []


def prepare(tokenizer: Tokenizer) -> _Vocabulary:
    """Return the vocabulary of a tokenizer. The first call for it takes up to some seconds."""
    with _LOCK:
        if tokenizer not in _VOCABULARIES:
            _VOCABULARIES[tokenizer] = _Vocabulary(tokenizer)
        return _VOCABULARIES[tokenizer]


def start_grammar(settings: Mapping[str, Any], tokenizer: Tokenizer | None) -> GrammarState:
    """Return the state of the grammar of a request before the first token of an answer.

    Args:
        settings: fields of `Sampling`, one of which is a grammar.
        tokenizer: tokenizer of the model, if it has one.

    Raises:
        RequestError: the grammar is malformed or too complex, nothing matches it, it cannot be
            combined with another setting, or there is no tokenizer.
    """
    given = {name: settings[name] for name in (*_PARSERS, "forced_ids")}
    name, *others = (name for name, value in given.items() if value)
    if others:
        raise RequestError(f"{name} cannot be combined with {others[0]}", name)
    if tokenizer is None:
        raise RequestError(f"{name} needs a tokenizer", name)
    vocabulary = prepare(tokenizer)
    return GrammarState(vocabulary.start((name, given[name])), vocabulary.words)


def _reason(matcher: llguidance.LLMatcher) -> str:
    """Return why a matcher is in an error state, on one line."""
    text = matcher.get_error().partition("<state>")[0].partition("<non-verbose")[0]
    if text.startswith("panic"):  # a limit that llguidance asserts
        return "it is too complex"
    return "no text matches it" if text.startswith("NoExtension") else _line(text)


def _line(text: object) -> str:
    return " ".join(str(text).split())[:_ERROR_CHARS]
