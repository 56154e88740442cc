"""The tokenizers of the two real models, loaded once for the suite, and a corpus made to break tokenizers."""

from functools import cache
from pathlib import Path

from octavo.frontend.text.loader import load_tokenizer
from octavo.frontend.text.tokenizer import Tokenizer


@cache
def real_tokenizer(path: Path) -> Tokenizer:
    return load_tokenizer(path)


NASTY = [
    "Hello, world!",
    " leading and trailing ",
    "The capital of France is Paris.\nIt's what they've said; I'm sure we'll see.",
    "   \t \n\n  mixed \r\n whitespace \u00a0\u2003\u3000 runs\t\t\tend   ",
    "a" * 300,
    " " * 100,
    "\n" * 70,
    "\t" * 40,
    "naïve café œuvre Straße Ångström ﬁ ½ ² Ⅷ",
    "e\u0301 vs \u00e9, x\u0308\u0304, क्षि, ไทย, ភាសាខ្មែរ",
    "日本語のテキスト、中文文本，한국어 텍스트",
    "العربية עברית mixed with English",
    "👍🏽 👨‍👩‍👧‍👦 🏳️‍🌈 🇫🇷 🤗 \U0001f9ff",
    "𝔘𝔫𝔦𝔠𝔬𝔡𝔢 𐍈 \U000e0041 \U0010fffd",
    "\u200b\u200d\ufeff zero width \u2028 line \u2029 para",
    "\x00\x01\x02\x07\x08\x0b\x0c\x1b\x7f\x80\x9f",
    "def f(x: int) -> int:\n    return x**2  # squared\n\n\nclass A:\n\tpass\n",
    '{"key": [1, 2.5, -3e10, null, true], "s": "a\\"b\\\\c"}',
    "<div class='x'>&amp; <!-- c --></div><h1>T</h1><br/>",
    "https://example.com/a?b=c&d=%20#frag user@example.org",
    "12345 3.14159 1,000,000 0x7f 007 ١٢٣ ४५६ 1st 2nd x2y3",
    "it's IT'S they'RE y'all'd've ''quotes'' \"double\"",
    "<|im_start|>user\nhi<|im_end|>\n<|endoftext|><bos><eos><unk><pad><0x41><unused5>",
    "<start_of_turn>model\n<end_of_turn> <|im_start <|im_start|",
    "▁meta▁space ▁▁ Ġbyte Ċ level",
    "!!!???...———…‹›«»„“”‚‘’",
    "\ufffd replacement \ufffd\ufffd",
    "snake_case camelCase SCREAMING_CASE kebab-case a.b.c a/b/c",
    "antidisestablishmentarianism Donaudampfschifffahrtsgesellschaft",
]
