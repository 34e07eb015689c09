"""Edge cases for tokenizers: texts for tests and for `graphllm validate`."""

EDGE_CASES = (
    "",  # empty: only the special tokens around a text
    " ",  # a space without a word
    "  ",  # two spaces: some vocabularies have tokens for runs
    "   leading and trailing   ",  # spaces at both ends
    "a  b   c    d          e",  # runs within a line
    "\t",  # a tab alone
    "\tdef f(x):\n\t\treturn x\n",  # leading tabs
    "\n",  # a newline alone
    "\n\n\n",  # a run of newlines
    "one\ntwo\n\nthree\n",  # lines
    "dos\r\nlines\r\n\r\n",  # carriage returns
    " \n \t \r\n",  # mixed white space
    "no-break\u00a0space, thin\u2009space, ideographic\u3000space",  # white space beyond ASCII
    "The capital of France is Paris.",  # plain words
    "don't, I'LL, we've; it's 'quoted' n't",  # contractions, in either case
    "hello world. How are you ? I am fine , thanks !",  # spaces that a clean-up removes
    "camelCase snake_case kebab-case SCREAMING",  # words without spaces between
    "x = [1, 2, 3]; y := {'a': (b->c)}  # comment //",  # code and punctuation
    "https://example.org/a?b=c&d=%20#e user@example.org",  # addresses
    "0 1 12 123 1234 12345 123456789012345678901234567890",  # numbers of all lengths
    "3.14159, 1,000,000.50 and -2e-10",  # numbers with punctuation
    "  12  345   6",  # spaces before digits
    "١٢٣ ४५६ ⅷ ½ ²",  # non-ASCII digits and numbers
    "naïve café Zürich Ærøskøbing",  # letters of Latin-1
    "cafe\u0301 n\u0303 a\u0308\u0323",  # combining marks, which NFC composes
    "\u212b \ufb01 \uff21\uff22\uff23 \u2460 ㎏",  # NFKC: angstrom, ligature, full width
    "Ελληνικά, русский язык, עִבְרִית",  # other alphabets, one with points
    "مرحبا بالعالم، كيف حالك؟",  # right to left, with Arabic punctuation
    "हिन्दी में लिखा है",  # vowel signs and conjuncts
    "你好，世界！今天天气很好。",  # no spaces between words
    "日本語のテキスト、カタカナとひらがな。",  # three scripts in a sentence
    "한국어 텍스트 \u1112\u1161\u11ab",  # syllables, and one decomposed
    "ภาษาไทยไม่มีช่องว่าง",  # marks above and below
    "😀",  # four bytes of UTF-8
    "😀😃 x 😄",  # several in a row
    "👩‍👩‍👧‍👦 👍🏽 🏳️‍🌈 🇫🇷",  # ZWJ sequences, skin tones, variation selectors and flags
    "𝔘𝔫𝔦𝔠𝔬𝔡𝔢 𐍈 🜁",  # letters above U+FFFF that vocabularies lack
    "\x00",  # the NUL byte
    "a\x00b\x01c\x7f",  # control characters within words
    "\ufeffwith a mark",  # a byte order mark
    "zero\u200bwidth\u200djoiner\u00adsoft",  # invisible characters
    "\ufffd\uffff\U0010ffff",  # the replacement character and noncharacters
    "lone \ud800 and \udcff surrogates",  # lone surrogates count as U+FFFD
    "▁a ▁▁b ▁",  # SentencePiece's space symbol as text
    "Ġhello Ċ Ã©",  # GPT-2's byte characters as text
    "<0x0A><0xFF> <0x41>",  # names of byte tokens
    "<s>hello</s> <unk> <pad><|endoftext|>",  # text of special tokens
    "<s> <s><s>  </s>x",  # special tokens in a row and between spaces
    "<|im_start|>user\nhi<|im_end|>\n<|eot_id|>[INST] x [/INST]",  # chat tokens
    "< s > <|im_start |> <|",  # near misses of special tokens
    "<n><|tab|><|blank_2|> [gMASK]<sop>",  # ChatGLM's special tokens
    "a" * 300,  # a long word
    "supercalifragilisticexpialidocious" * 12,  # a longer one
    "ab" * 200 + " " + "1" * 100 + " " + "." * 100,  # long runs of each kind
    " " * 100,  # a long run of spaces
    "tab\tthen  spaces" + " " * 81 + "end",  # more spaces than any token has
    "MixedСмешанный混合مختلط123",  # scripts without a space between
)
