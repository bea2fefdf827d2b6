"""Make the tokenizer reference of SmolLM2.

    python scripts/smollm2_tokens.py SmolLM2-135M-Instruct.Q4_1.gguf fixtures

Needs what smollm2_folder.py needs; with `llama-cpp-python` installed the ids are also compared with llama.cpp's.
Writes OUT/smollm2/tokens.json: a list of {text, ids, decoded}; `decoded` is there only where it is not the text
(the vocabulary lacks some bytes, and those are dropped). Special tokens in the text are recognised.
"""

import json
import sys
from pathlib import Path

from gguf import GGUFReader

from smollm2_folder import tokenizer

WORDS = [
    "", " ", "a", " a", "a ", "Hello", " Hello", "Hello world", "Hello, world!", "hello  world", "HELLO WORLD", "HeLLo",
    "don't", "DON'T", "we'll they've I'm he'd it's you're", "’s ’t don’t", "'s", "' s", "''s", "rock'n'roll",
    "antidisestablishmentarianism", "supercalifragilisticexpialidocious", "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa",
    "e.g. i.e. etc.", "Dr. Smith's 3rd visit", "end.Start", "semi;colon:colon", "...", "…", "?!?!", "--", "—", "a—b", "-_-",
    "snake_case_name", "camelCaseName", "PascalCase", "kebab-case", "SCREAMING_SNAKE", "path/to/file.txt", "C:\\dir\\f",
    "http://example.org/?q=a&b=c#frag", "user@example.org", "@handle #tag", "$100.00", "50%", "a*b+c=d", "x<y>z", "{[()]}",
    "\"quoted\"", "`code`", "~tilde^caret|pipe\\back", "C++ C# F#", "1st 2nd 3rd", "v1.2.3-rc4",
]
DIGITS = [
    "0", "1", "12", "123", "1234", "1234567890", "3.14159", "-7", "+7", "1,000,000", "1e-5", "0x1F", "12:34:56", "2024-02-29",
    " 1", " 12", "a1b2", "1a2b", "1 2", "1  2", "½ ¼", "²³", "١٢٣", "१२३", "１２３", "Ⅳ", "①②", "7️⃣", "1\n2", "007 bonds",
]
SPACES = [
    "  ", "   ", "    ", " " * 8, " " * 17, "\n", "\n\n", "\n\n\n", "\r\n", "\r", "\t", "\t\t", " \n", "\n ", " \n \n ", "a\nb", "a\n\nb",
    "a \n b", "a\t b", "a  b   c    d", "trailing   ", "   leading", "  if x:\n      y\n", "\tif (x) {\n\t\treturn;\n\t}\n",
    "a\u00a0b", "\u00a0\u00a0", "a\u2003b", "a\u3000b", "\u200b", "a\u200bb", "\u2028", "a\u0085b", "\u000b\u000c", "\ufeff", "\ufeffBOM",
    " \t \t", "x\n\n\n\ny", "end \n", "a\u202fb", " \u00a0 x",
]
CODE = [
    "def f(x):\n    return x ** 2\n", "fn main() { println!(\"{}\", 1 + 2); }", "for (int i = 0; i < 10; ++i) {}", "SELECT * FROM t WHERE a = 'b';",
    "<div class=\"x\">&nbsp;</div>", "{\"key\": [1, 2.5, null, true]}", "#!/bin/sh\necho \"$HOME\" | grep -E '^/'", "\\begin{equation} E = mc^2 \\end{equation}",
    "import numpy as np", "x = [i for i in range(10) if i % 2 == 0]", "/* comment */ // more", "a && b || !c", "lambda: (yield)", "0b1010 >>> 2", "s/\\s+/ /g",
    "        deep\n            deeper\n", "| a | b |\n|---|---|\n| 1 | 2 |", "- [ ] task\n- [x] done", "# Title\n\n## Section\n\ntext", "```rust\nlet x = 1;\n```",
]
SCRIPTS = [
    "Où est l'été ?", "Größe, Straße, Übung", "¿Qué? ¡Ñandú!", "Ångström Øre Æsir", "Zażółć gęślą jaźń", "Příliš žluťoučký kůň", "İstanbul ıssız",
    "Привет, мир!", "Україна їжа", "Ελληνικά γράμματα", "עברית", "שָׁלוֹם", "العربية", "مرحبا بالعالم ١", "فارسی‌زبان", "हिन्दी भाषा", "தமிழ்",
    "ไทยไม่มีเว้นวรรค", "ລາວ", "မြန်မာ", "ខ្មែរ", "বাংলা", "ქართული", "Հայերեն", "አማርኛ", "你好，世界。", "日本語のテスト", "カタカナ ｶﾀｶﾅ", "한국어 문장", "繁體中文",
    "Tiếng Việt", "e\u0301 vs é", "ﬁ ligature", "ﷺ", "𝓯𝓪𝓷𝓬𝔂", "𐍈𐌰", "ꜳ", "ſ", "ß ẞ", "mixed русский and English 中文",
]
SYMBOLS = [
    "🙂", "🙂🙂", " 🙂", "👍🏽", "👩‍👩‍👧‍👦", "🏳️‍🌈", "🇫🇷🇩🇪", "❤️", "☃", "emoji🙂inside", "→ ← ↑ ↓", "≤ ≥ ≠ ∑ ∫ √", "€ £ ¥ ₹ ₿", "™ © ®", "• ◦ ▪",
    "“quotes” ‘single’ «guillemets»", "a\u0300\u0301\u0302", "\u202eright to left", "░▒▓█", "♠♥♦♣", "\U0010ffff", "\ue000", "\ufffd",
]
CONTROL = [
    "\x00", "a\x00b", "\x01\x02\x03", "\x07", "\x1b[31mred\x1b[0m", "\x7f", "\x80\x9f", "\x1f", "\x0e\x0f\x10\x11\x12\x13\x14\x15\x16\x17\x18\x19\x1a",
    "\x04\x05\x06\x08", "\x1c\x1d\x1e",
]
SPECIAL = [
    "<|im_start|>", "<|im_end|>", "<|endoftext|>", "<|im_start|>user\nHi<|im_end|>\n", "<|im_start|> <|im_end|>", "a<|im_end|>b", "a <|im_end|> b",
    "<|im_start|><|im_start|>", "<|im_start", "<|im_start|", "< |im_start|>", "<|IM_START|>", "<|im_end|>1", "1<|im_end|>", "<repo_name>x/y<file_sep>z",
    "<reponame><filename><gh_stars>", "<issue_start><issue_comment><issue_closed>", "<jupyter_start><jupyter_text><jupyter_code><jupyter_output><jupyter_script><empty_output>",
    "<|endoftext|>\n\n<|endoftext|>", "<s></s>", "<pad>", "<unk>", "<|im_start|>assistant\n<think>\n\n</think>\n", "x<|im_end|>\n<|im_start|>y",
]
TEXTS = WORDS + DIGITS + SPACES + CODE + SCRIPTS + SYMBOLS + CONTROL + SPECIAL


def compare_llama_cpp(gguf: Path, records: list[dict]) -> None:
    try:
        import llama_cpp
    except ImportError:
        print("llama-cpp-python is not installed: not compared")
        return
    llama = llama_cpp.Llama(str(gguf), vocab_only=True, verbose=False)
    other = [r for r in records if r["text"] and llama.tokenize(r["text"].encode(), add_bos=False, special=True) != r["ids"]]
    print(f"llama.cpp: {len(records) - len(other)} of {len(records)} equal")
    for r in other:
        print(f"  {r['text']!r}: {r['ids']} against {llama.tokenize(r['text'].encode(), add_bos=False, special=True)}")


def main() -> None:
    gguf, fixtures = Path(sys.argv[1]), Path(sys.argv[2])
    encode = tokenizer(GGUFReader(gguf))
    assert len(set(TEXTS)) == len(TEXTS)
    records = []
    for text in TEXTS:
        ids = encode.encode(text).ids
        decoded = encode.decode(ids, skip_special_tokens=False)
        records.append({"text": text, "ids": ids} | ({} if decoded == text else {"decoded": decoded}))
    lines = ",\n".join(json.dumps(r, ensure_ascii=True) for r in records)
    out = fixtures / "smollm2" / "tokens.json"
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(f"[\n{lines}\n]\n", encoding="utf-8")
    print(f"{len(records)} texts; not reversible: {[r['text'] for r in records if 'decoded' in r]}")
    compare_llama_cpp(gguf, records)


if __name__ == "__main__":
    main()
