"""Train the tiny tokenizer of the runnable fixture.

    python scripts/tiny_tokenizer.py fixtures/llama-gqa

Needs `tokenizers`. Writes tokenizer.json and tokenizer_config.json: a byte-level BPE with the same stages as
SmolLM2's tokenizer (digits apart, then the GPT-2 pattern), three ChatML special tokens, all 256 bytes and just
enough merges to make 384 entries. Training is deterministic, so a second run writes the same bytes.
"""

import json
import sys
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

VOCAB = 384
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]

CHATML = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are a tiny test model.<|im_end|>\n' }}{% endif %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

CORPUS = """
The user asks a question and the assistant answers it. What is the answer? The answer is in the text.
There is no other thing that the reader and the writer of this line would want to see here, is there?
They said that they were there, and then there was nothing more to say about it. I do not think so.
It was a bright cold morning, and the children were standing together near the old stone bridge over the river.
Someone asked whether the last train would stop here, but nobody could remember what the station master had told them.
Please write a short story about a lighthouse keeper who finds a letter. Please list three reasons to learn to cook.
Large language models predict the next token; a token is a piece of a word, and each piece has a number of its own.
You are a helpful assistant. You are a tiny test model. user system assistant user system assistant
fn main() { let x = 1; println!("{x}"); } def f(self): return self.x + 1    if x in y:        print(x)
Le chat est sur la table et les enfants sont dans le jardin. C'est la vie. Où est la gare ? Là-bas.
Der Hund und die Katze sind in dem Haus. Warum nicht? über die Straße. Привет, мир. 你好，世界。 日本語
In 2024 there were 12 or 13 of them; in 1999 only 7. We'll see, they're here, it's fine, I'd say we've won.
""".strip().splitlines()


def train() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB,
        min_frequency=2,
        show_progress=False,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        special_tokens=[AddedToken(t, special=True, normalized=False) for t in SPECIAL],
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    assert tokenizer.get_vocab_size() == VOCAB, tokenizer.get_vocab_size()
    return tokenizer


def config() -> dict:
    return {
        "tokenizer_class": "GPT2Tokenizer",
        "bos_token": "<|im_start|>",
        "eos_token": "<|im_end|>",
        "pad_token": "<|im_end|>",
        "unk_token": "<|endoftext|>",
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 512,
        "added_tokens_decoder": {
            str(i): {
                "content": t,
                "lstrip": False,
                "normalized": False,
                "rstrip": False,
                "single_word": False,
                "special": True,
            }
            for i, t in enumerate(SPECIAL)
        },
        "chat_template": CHATML,
    }


def main() -> None:
    out = Path(sys.argv[1])
    out.mkdir(parents=True, exist_ok=True)
    train().save(str(out / "tokenizer.json"))
    text = json.dumps(config(), indent=2, ensure_ascii=False)
    (out / "tokenizer_config.json").write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
