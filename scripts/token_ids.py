"""Token ids of `tokenizers`, for the judged tests.

    python scripts/token_ids.py tokenizer.json [strings.json]

Prints a line of JSON for each string: {"ids": [...], "decoded": "..."}, without the tokens that a post-processor puts
around a text, special tokens recognised and kept. Needs `tokenizers`.
"""

import json
import sys
from pathlib import Path

from tokenizers import Tokenizer

STRINGS = Path(__file__).parent.parent / "fixtures/tokens/strings.json"


def strings(path: Path = STRINGS) -> list[str]:
    return json.loads(path.read_text(encoding="utf-8"))


def main() -> None:
    tokenizer = Tokenizer.from_file(sys.argv[1])
    for text in strings(Path(sys.argv[2]) if len(sys.argv) > 2 else STRINGS):
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        print(json.dumps({"ids": ids, "decoded": tokenizer.decode(ids, skip_special_tokens=False)}))


if __name__ == "__main__":
    main()
