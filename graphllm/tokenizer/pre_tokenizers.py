"""Pre-tokenizers of BPE vocabularies: patterns that split a text into words before merging.

Source: llama.cpp, `src/llama-vocab.cpp`, for the names of `tokenizer.ggml.pre` and their meaning.
The patterns are those published with the models, in llama.cpp's form and Oniguruma's syntax, which
the tokenizers package uses.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

# llama.cpp's tables of letters, marks, numbers and punctuation are those of Unicode 15.1. An older
# Oniguruma lacks the additions of 15.0 and 15.1, a newer one has those of 16.0. Therefore the first
# are added to every class and the second removed (source: the Unicode Character Database).
_OF_15 = {
    "L": "1123F-11240 11F02 11F04-11F10 11F12-11F33 1342F 13441-13446 1B132 1B155 1DF25-1DF2A "
    "1E030-1E06D 1E4D0-1E4EB 2B739 2EBF0-2EE5D 31350-323AF",
    "M": "CF3 ECE 10EFD-10EFF 11241 11F00-11F01 11F03 11F34-11F3A 11F3E-11F42 13440 13447-13455 "
    "1E08F 1E4EC-1E4EF",
    "N": "11F50-11F59 1D2C0-1D2D3 1E4F0-1E4F9",
    "P": "11B00-11B09 11F43-11F4F",
}
_OF_16 = {
    "L": "1C89-1C8A A7CB-A7CD A7DA-A7DC 105C0-105F3 10D4A-10D65 10D6F-10D85 10EC2-10EC4 "
    "11380-11389 1138B 1138E 11390-113B5 113B7 113D1 113D3 11BC0-11BE0 13460-143FA 16100-1611D "
    "16D40-16D6C 18CFF 1E5D0-1E5ED 1E5F0",
    "M": "897 10D69-10D6D 10EFC 113B8-113C0 113C2 113C5 113C7-113CA 113CC-113D0 113D2 113E1-113E2 "
    "11F5A 1611E-1612F 1E5EE-1E5EF",
    "N": "10D40-10D49 116D0-116E3 11BF0-11BF9 16130-16139 16D70-16D79 1CCF0-1CCF9 1E5F1-1E5FA",
    "P": "1B4E-1B4F 1B7F 10D6E 113D4-113D5 113D7-113D8 11BE1 16D6D-16D6F 1E5FF",
}


def _ranges(text: str) -> str:
    """Return code point ranges such as ``"41-5A B5"`` as the inside of a character class."""
    return re.sub(r"([0-9A-F]+) ?", r"\\x{\1}", text)


CHARACTER_CLASSES = {
    name: rf"[\p{{{name}}}{_ranges(_OF_15[name])}&&[^{_ranges(_OF_16[name])}]]" for name in _OF_15
}


def expand(pattern: str) -> str:
    r"""Replace ``\p{L}`` and the like in a pattern by the classes of Unicode 15.1."""
    return re.sub(r"\\p\{(\w)\}", lambda match: CHARACTER_CLASSES[match[1]], pattern)


_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


def _marked(marks: str, numbers: str) -> str:
    r"""Join the published sequence ``[\p{P}marks]+``, `_GPT2` and patterns for digits.

    After the first pattern no contraction is left, and spaces before its marks end a text for
    `_GPT2`. Digits are split in threes from the first three ASCII digits on.
    """
    marks = r"\p{P}" + marks
    rest = rf"| ?[^\s\p{{L}}\p{{N}}{marks}]+|\s+(?![^\s{marks}])|\s+"
    return rf"[{marks}]+| ?\p{{L}}+|{numbers}" + rest


_CONTRACTIONS = r"'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD]"
_END = r"\s*[\r\n]+|\s+(?!\S)|\s+"  # end of the patterns since GPT-4
_LLAMA3, _QWEN2 = (
    rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{numbers}"
    rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_END}"
    for numbers in (r"\p{N}{1,3}", r"\p{N}")
)
_QWEN35 = (  # as Qwen 2, with marks as part of words
    rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
    rf"| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_END}"
)
# llama.cpp distinguishes upper and lower case only in ASCII, and leaves marks out of words.
_GPT4O, _TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}&&[^a-z]]*[\p{{L}}&&[^A-Z]]+{tail}"
    rf"|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}&&[^a-z]]+[\p{{L}}&&[^A-Z]]*{tail}"
    rf"|{numbers}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_END}"
    for tail, numbers in ((f"(?:{_CONTRACTIONS})?", r"\p{N}{1,3}"), ("", r"\p{N}"))
)
_DEEPSEEK_LETTERS = (  # letters with upper and lower case
    "41-5A 61-7A B5 C0-D6 D8-F6 F8-1BA 1BC-1BF 1C4-293 295-2AF 370-373 376 377 37B-37D 37F 386 "
    "388-38A 38C 38E-3A1 3A3-3F5 3F7-481 48A-52F 531-556 10A0-10C5 13A0-13F5 13F8-13FD 1C90-1CBA "
    "1CBD-1CBF 1D00-1D2B 1D6B-1D77 1D79-1D9A 1E00-1F15 1F18-1F1D 1F20-1F45 1F48-1F4D 1F50-1F57 "
    "1F59 1F5B 1F5D 1F5F-1F7D 1F80-1FB4 1FB6-1FBC 1FBE 1FC2-1FC4 1FC6-1FCC 1FD0-1FD3 1FD6-1FDB "
    "1FE0-1FEC 1FF2-1FF4 1FF6-1FFC 2102 2107 210A-2113 2115 2119-211D 2124 2126 2128 212A-212D "
    "212F-2134 2139 213C-213F 2145-2149 214E 2183 2184 2C00-2C7B 2C7E-2CE4 2CEB-2CEE 2CF2 2CF3 "
    "A640-A66D A680-A69B A722-A76F A771-A787 A78B-A78E AB70-ABBF FB00-FB06 FB13-FB17 FF21-FF3A "
    "FF41-FF5A 10400-1044F 104B0-104D3 104D8-104FB 10C80-10CB2 10CC0-10CF2 118A0-118DF 1E900-1E943"
)
# Published as sequences of five or six patterns. To save passes over the text, patterns whose
# matches cannot overlap are joined: no word contains a newline, and numbers are split off CJK runs.
# llama.cpp replaces every space by an ASCII one before it compares ranges, so U+3000 is in none.
_CJK = rf"{_ranges('800-9FA5 AC00-D7FF')}&&[^\s]"
_SPACE = r"[^\S\r\n]?"
_DEEPSEEK_LLM = (
    rf"[\r\n]|{_SPACE}[{_ranges(_DEEPSEEK_LETTERS)}]+",
    rf"\s?[{_ranges('21-2F 3A-7E FF01-FF0F FF1A-FF5E 2018-201F 3001-3002')}]+",
    r"\s+\z",
    rf"[{_CJK}&&[^\p{{N}}]]+|[{_CJK}&&\p{{N}}]+|[\p{{N}}&&[^{_CJK}]]+",
)
_DEEPSEEK_CODER = (
    rf"[\r\n]|{_SPACE}\p{{L}}+|{_SPACE}\p{{P}}+",
    rf"[{_CJK}&&[^\p{{N}}]]+|\p{{N}}",
)
_THREE = "[0-9]{3}"
_FEW = rf"(?:(?!{_THREE})\p{{N}})+"
_DEFAULT = _marked(r"\$\+<=>\^~\|", rf" (?=\p{{N}})|{_THREE}|{_FEW}")
_FALCON = _marked(r"\$\+<=>\^~\|`", rf" (?={_THREE})|{_THREE}| ?{_FEW}")


@dataclass(frozen=True)
class PreTokenizer:
    """A pre-tokenizer, and properties of the vocabularies that state its name.

    ``patterns`` are applied one after the other, each to the parts that the previous one produced:
    its matches and the text between them.
    """

    patterns: tuple[str, ...] = ()
    add_bos: bool = False  # default for files that do not state it
    ignore_merges: bool = False  # a word that is a token is not split
    raw: bool = False  # UTF-8 with U+2581 for spaces, by lines; False: GPT-2's byte characters


DEFAULT = "default"
_GROUPS: dict[tuple[str, ...], PreTokenizer] = {
    (DEFAULT,): PreTokenizer((_DEFAULT,)),
    ("gpt-2", "mpt", "phi-2", "olmo", "jais", "exaone4", "trillion"): PreTokenizer((_GPT2,)),
    ("llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "lfm2"): PreTokenizer(
        (_LLAMA3,), add_bos=True, ignore_merges=True
    ),
    ("dbrx", "smaug-bpe"): PreTokenizer((_LLAMA3,)),
    ("qwen2", "deepseek-r1-qwen", "stablelm2", "megrez", "hunyuan"): PreTokenizer((_QWEN2,)),
    ("qwen35",): PreTokenizer((_QWEN35,)),
    ("deepseek-llm",): PreTokenizer(_DEEPSEEK_LLM),
    ("deepseek-coder",): PreTokenizer(_DEEPSEEK_CODER),
    (
        "starcoder",
        "refact",
        "command-r",
        "smollm",
        "codeshell",
        "exaone",
        "minerva-7b",
    ): PreTokenizer((r"\p{N}", _GPT2)),
    ("falcon",): PreTokenizer((_FALCON,)),
    ("gpt-4o", "llama4"): PreTokenizer((_GPT4O,)),
    ("tekken",): PreTokenizer((_TEKKEN,), add_bos=True, ignore_merges=True),
    ("gemma4",): PreTokenizer(add_bos=True, raw=True),
}
PRE_TOKENIZERS = {name: pre for names, pre in _GROUPS.items() for name in names}
