"""Make the token references of the 2,000 strings.

    python scripts/token_references.py fixtures tokenizers NAME=tokenizer.json ...
    python scripts/token_references.py fixtures tokenizers NAME=vocabulary.gguf:PRE ...
    python scripts/token_references.py fixtures llama.cpp NAME=vocabulary.gguf ...

The first two forms need `tokenizers`, the second also `gguf`, the third `llama-cpp-python`. PRE says how the texts are
cut, whatever the file says: the cut of one model may be tried over the vocabulary of another. Writes
OUT/tokens/NAME.json:
    by      whose ids they are
    hashes  of the ids of each string in turn (without begin token), FNV-1a over their little-endian bytes, 8 hex digits
    ids     the ids of every hundredth string in full
"""

import ctypes
import json
import sys
from pathlib import Path

from token_ids import strings


def fnv(ids: list[int]) -> str:
    hash = 0x811C9DC5
    for id in ids:
        for byte in id.to_bytes(4, "little"):
            hash = (hash ^ byte) * 0x01000193 & 0xFFFFFFFF
    return f"{hash:08x}"


ENDINGS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
REST = r"| ?[^\s\p{L}\p{N}]+[\r\n%s]*|\s*[\r\n]+|\s+(?!\S)|\s+"
UPPER, LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
LEAD = r"[^\r\n\p{L}\p{N}]?"
# The patterns of the models' tokenizer.json files, and whether words of the vocabulary are taken whole.
CUTS = {
    "qwen2": (ENDINGS + "|" + LEAD + r"\p{L}+|\p{N}" + REST % "", False),
    "gpt-4o": (
        f"{LEAD}{UPPER}*{LOWER}+{ENDINGS}?|{LEAD}{UPPER}+{LOWER}*{ENDINGS}?|" + r"\p{N}{1,3}" + REST % "/", False,
    ),
    "tekken": (f"{LEAD}{UPPER}*{LOWER}+|{LEAD}{UPPER}+{LOWER}*|" + r"\p{N}" + REST % "/", True),
}


def from_gguf(path: str, pre: str):
    from gguf import GGUFReader
    from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers

    fields = GGUFReader(path).fields
    tokens, merges, types = (fields[f"tokenizer.ggml.{key}"].contents() for key in ("tokens", "merges", "token_type"))
    pattern, whole = CUTS[pre]
    merges = [tuple(m.split(" ")) for m in merges]
    tokenizer = Tokenizer(models.BPE({t: i for i, t in enumerate(tokens)}, merges, ignore_merges=whole))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(pattern), "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ])
    if pre == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    added = [AddedToken(t, special=kind == 3, normalized=False) for t, kind in zip(tokens, types) if kind in (2, 3, 4)]
    tokenizer.add_tokens(added)
    return tokenizer


def by_tokenizers(path: str) -> list[list[int]]:
    from tokenizers import Tokenizer

    file, _, pre = path.partition(":")
    tokenizer = from_gguf(file, pre) if pre else Tokenizer.from_file(file)
    return [tokenizer.encode(text, add_special_tokens=False).ids for text in strings()]


def by_llama_cpp(path: str) -> list[list[int]]:
    import llama_cpp

    settings = llama_cpp.llama_model_default_params()
    settings.vocab_only = True
    model = llama_cpp.llama_model_load_from_file(path.encode(), settings)
    vocab = llama_cpp.llama_model_get_vocab(model)
    out = []
    for text in strings():
        data = text.encode()
        ids = (ctypes.c_int32 * (len(data) + 8))()
        count = llama_cpp.llama_tokenize(vocab, data, len(data), ids, len(ids), False, True)
        assert count >= 0
        out.append(list(ids[:count]))
    return out


def main() -> None:
    out = Path(sys.argv[1]) / "tokens"
    by = sys.argv[2]
    encode = {"tokenizers": by_tokenizers, "llama.cpp": by_llama_cpp}[by]
    for argument in sys.argv[3:]:
        name, _, path = argument.partition("=")
        ids = encode(path)
        rows = ",\n".join(json.dumps(row) for row in ids[::100])
        text = f'{{"by": "{by}", "hashes": "{"".join(map(fnv, ids))}", "ids": [\n{rows}\n]}}\n'
        (out / f"{name}.json").write_text(text, encoding="utf-8")
        print(name, sum(map(len, ids)))


if __name__ == "__main__":
    main()
