"""Make the 2,000 strings that tokenizers are compared on.

    python scripts/token_strings.py fixtures

Needs nothing but Python. Writes OUT/tokens/strings.json, a list of 2,000 different strings, one a line: words of 20
scripts joined as running text, mixtures of scripts, emoji, combining marks, control characters, numbers, source code,
white space and the spellings of special tokens. A seeded generator of its own (not Python's, whose sequence may
change) makes them, so a second run writes the same bytes.
"""

import json
import sys
from pathlib import Path

SCRIPTS = {
    "latin": "the quick brown fox don't we'll café naïve Größe Straße señor façade Łódź žluťoučký İstanbul ĲSSELMEER Ångström straße rock'n'roll HTTP camelCase snake_case",
    "cyrillic": "привет мир съешь ещё этих мягких французских булок Україна їжак ґанок Москва ЭТО щука объезд Ѐ ѝ",
    "greek": "Ελληνικά γράμματα ἄνθρωπος ᾧ ΣΊΣΥΦΟΣ ς καὶ ὁ λόγος μῆνιν ἄειδε",
    "hebrew": "שלום עולם שָׁלוֹם בְּרֵאשִׁית ירושלים ״ציטוט״ צה״ל",
    "arabic": "السلام عليكم مرحبا بالعالم العَرَبِيَّة ١٢٣ كتاب ﷺ ﻻ فارسی‌زبان می‌خواهم",
    "devanagari": "नमस्ते दुनिया हिन्दी भाषा क्षत्रिय ज्ञान १२३ श्री संस्कृतम्",
    "bengali": "বাংলা ভাষা আমার সোনার ক্ষমা ১২৩ বিশ্ব",
    "tamil": "தமிழ் மொழி வணக்கம் உலகம் க்ஷ ஸ்ரீ",
    "telugu": "తెలుగు భాష నమస్కారం ప్రపంచం క్షమించు",
    "thai": "สวัสดีชาวโลก ภาษาไทย ไม่มีเว้นวรรค น้ำ กรุงเทพฯ ๑๒๓",
    "lao": "ສະບາຍດີ ພາສາລາວ ນ້ຳ",
    "burmese": "မြန်မာဘာသာ မင်္ဂလာပါ ကမ္ဘာ",
    "khmer": "ភាសាខ្មែរ សួស្តី ពិភពលោក",
    "georgian": "ქართული ენა გამარჯობა მსოფლიო ᲥᲐᲠᲗᲣᲚᲘ",
    "armenian": "Հայերեն լեզու Բարեւ աշխարհ և",
    "ethiopic": "አማርኛ ሰላም ልዑል ፩፪፫",
    "han": "你好世界 中文 繁體漢字 龍 的 我们 在图书馆 学习 𠮷野家 〇一二三",
    "kana": "こんにちは 世界 ひらがな カタカナ ｶﾀｶﾅ パーティー が が 東京タワー",
    "hangul": "안녕하세요 세계 한국어 문장 한 ㅋㅋㅋ ㅎㅎ",
    "cherokee": "ᏣᎳᎩ ᎦᏬᏂᎯᏍᏗ ᎣᏏᏲ ꭰꭱ",
}
EMOJI = "🙂 🎉 👍🏽 👩‍👩‍👧‍👦 🏳️‍🌈 🇫🇷 🇩🇪🇯🇵 ❤️ ☃ 7️⃣ 🫠 🧑🏿‍🚀 ♠♥ ✅ ⚠️ 🏴󠁧󠁢󠁳󠁣󠁴󠁿".split()
MARKS = ["\u0300", "\u0301", "\u0308", "\u0323", "\u0327", "\u20dd", "\u05b8", "\u064e", "\u093c", "\u3099", "\ufe0f", "\u200d"]
CONTROLS = [chr(c) for c in [*range(1, 32), *range(127, 160)]] + ["\x00", "\u200b", "\u200e", "\u202e", "\u2060", "\ufeff", "\ufffd", "\ue000", "\U0010ffff"]
SPACES = [" ", "  ", "   ", "    ", " " * 7, " " * 16, "\n", "\n\n", "\r\n", "\t", "\t\t", " \n", "\n ", "\u00a0", "\u2003", "\u3000", "\u2028", "\u0085", "\u000b", "\u202f", "\n\n\n", "\n  \n"]
NUMBERS = "0 1 12 123 1234 1234567890 3.14159 -7 1,000,000 1e-5 0x1F 12:34:56 2024-02-29 ½ ² Ⅳ ① １２３ v1.2.3 $9.99 50% 007 1st 192.168.0.1".split()
SYMBOLS = "… — – -- ... ?! «» “” ‘’ ’s ’T 'S 'LL → ≤ ∑ € ₹ ™ • ░▓ \\ / | ~ ^ ` @ # & * _ __ == != => -> :: ;; {{ }} [] () <> ﬁ 𝓯𝓪𝓷𝓬𝔂 𐍈 ▁ ▁▁ Ġ Ċ Ã© ſ ß ẞ".split()
CODE = [
    "def f(x):\n    return x ** 2\n", "fn main() { println!(\"{}\", 1 + 2); }", "for (int i = 0; i < 10; ++i) {\n\tsum += a[i];\n}", "SELECT * FROM t WHERE a = 'b';",
    "<div class=\"x\">&nbsp;</div>", "{\"key\": [1, 2.5, null, true]}", "#!/bin/sh\necho \"$HOME\" | grep -E '^/'", "\\begin{equation} E = mc^2 \\end{equation}",
    "x = [i for i in range(10) if i % 2 == 0]", "/* comment */ // more", "a && b || !c", "0b1010 >>> 2", "s/\\s+/ /g", "        deep\n            deeper\n",
    "| a | b |\n|---|---|\n| 1 | 2 |", "- [ ] task\n- [x] done", "# Title\n\n## Section\n\ntext", "```rust\nlet x = 1;\n```", "http://example.org/?q=a&b=c#frag", "user@example.org",
    "C:\\dir\\file.txt", "import numpy as np\n\n\nclass A(B):\n    pass", "if x:\r\n    y = 1\r\n", "const f = async () => { await g(); };", "λx. x + 1", "@@ -1,3 +1,4 @@\n-old\n+new",
]
SPECIAL = [
    "<|im_start|>", "<|im_end|>", "<|endoftext|>", "<s>", "</s>", "<unk>", "<pad>", "<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>", "<|begin_of_text|>",
    "<|eot_id|>", "<|start_header_id|>", "<|end_header_id|>", "<think>", "</think>", "<tool_call>", "<|user|>", "<|end|>", "[INST]", "[/INST]", "<table>", "<h1>", "<0x0A>",
    "<|im_start", "<|im_end|", "< |im_start|>", "<|IM_START|>", "<<s>>", "<fim_prefix>", "<mask>", "[multimodal]", "<unused1>", "<|reserved_special_token_1|>",
]
TOTAL = 2000


class Random:
    """xorshift64*."""

    def __init__(self, seed: int):
        self.state = seed

    def below(self, n: int) -> int:
        mask = (1 << 64) - 1
        self.state ^= self.state >> 12
        self.state ^= (self.state << 25) & mask
        self.state ^= self.state >> 27
        return ((self.state * 0x2545F4914F6CDD1D & mask) >> 33) % n

    def pick(self, items):
        return items[self.below(len(items))]


def running(random: Random, words: list[str], most: int) -> str:
    """Words with what stands between words."""
    out = "" if random.below(4) else " "
    for _ in range(1 + random.below(most)):
        out += random.pick(words)
        out += random.pick([" ", " ", " ", " ", ", ", ". ", "", "-", "\n", "  ", "。", "? ", "!"])
    return out


def strings() -> list[str]:
    random = Random(0x5EED_0F_70CE75)
    scripts = {name: text.split() for name, text in SCRIPTS.items()}
    assert len(scripts) == 20
    words = [word for group in scripts.values() for word in group]
    everything = [words, EMOJI, CONTROLS, SPACES, NUMBERS, SYMBOLS, SPECIAL]
    out: dict[str, None] = {"": None, " ": None, "a": None, " a": None, "a ": None}

    def add(count: int, make):
        wanted = len(out) + count
        while len(out) < wanted:
            out[make()] = None

    for one in [*words, *EMOJI, *CONTROLS, *SPACES, *NUMBERS, *SYMBOLS, *CODE, *SPECIAL]:
        out[one] = None
    for group in scripts.values():
        add(30, lambda: running(random, group, 6))
    add(120, lambda: running(random, words, 6))
    add(80, lambda: running(random, EMOJI + scripts["latin"], 6))
    # Marks on letters that may or may not take them.
    add(100, lambda: "".join(random.pick(words)[:3] + random.pick(MARKS) * (1 + random.below(2)) for _ in range(1 + random.below(4))))
    add(80, lambda: random.pick(words) + random.pick(CONTROLS) + random.pick(CONTROLS) + random.pick(["", "a", " b"]))
    add(100, lambda: random.pick(["", "a", "."]) + "".join(random.pick(SPACES) for _ in range(1 + random.below(4))) + random.pick(["", "b", "1", "é", "?"]))
    add(80, lambda: "".join(random.pick(NUMBERS) + random.pick(["", " ", "a", ","]) for _ in range(1 + random.below(4))))
    add(60, lambda: random.pick(CODE) + random.pick(SPACES) + random.pick(CODE))
    add(100, lambda: random.pick(["", "a", " ", "\n"]) + random.pick(SPECIAL) + random.pick(["", " ", "x", "\n", " y"]) + random.pick(SPECIAL + [""]))
    add(TOTAL - len(out), lambda: "".join(random.pick(random.pick(everything)) for _ in range(1 + random.below(6))))
    assert len(out) == TOTAL
    return list(out)


def main() -> None:
    out = Path(sys.argv[1]) / "tokens"
    out.mkdir(parents=True, exist_ok=True)
    lines = ",\n".join(json.dumps(text, ensure_ascii=False) for text in strings())
    # These break lines in some editors.
    for c in ["\u0085", "\u2028", "\u2029", "\x7f"]:
        lines = lines.replace(c, f"\\u{ord(c):04x}")
    (out / "strings.json").write_text(f"[\n{lines}\n]\n", encoding="utf-8", newline="\n")


if __name__ == "__main__":
    main()
