"""Write the architectures' fixtures as GGUF files with llama.cpp's own converter.

    python scripts/arch_gguf.py LLAMA_CPP fixtures

LLAMA_CPP is a checkout of llama.cpp (its `conversion` and `gguf-py` folders); needs what golden.py needs besides. Writes
OUT/gguf/NAME.gguf in bf16 for each of NAMES, so that the file holds the folder's weights as they are and the folder's
golden.safetensors is its golden too. GGUF does not carry Mistral's window, Gemma's layer types and query scale, and
SmolLM 3's layers without rope, so only fixtures are here that keep to the values llama.cpp assumes. The fixtures have no tokenizer: a byte-pair vocabulary of the right size stands in.
"""

import logging
import sys
from pathlib import Path

LLAMA_CPP, FIXTURES = Path(sys.argv[1]), Path(sys.argv[2])
sys.path[:0] = [str(LLAMA_CPP), str(LLAMA_CPP / "gguf-py")]

import gguf  # noqa: E402
import torch  # noqa: E402
from conversion import ModelBase, ModelType, get_model_architecture, get_model_class  # noqa: E402

NAMES = ["qwen2-yarn", "qwen3", "gemma3-vision", "phi3-longrope", "smollm3", "olmo2", "granite"]


def set_vocab(self) -> None:
    tokens = ["a", "b", "ab"] + [chr(0x100 + i) for i in range(3, self.hparams["vocab_size"])]
    self.gguf_writer.add_tokenizer_model("gpt2")
    self.gguf_writer.add_tokenizer_pre("smollm")
    self.gguf_writer.add_token_list(tokens)
    self.gguf_writer.add_token_types([gguf.TokenType.NORMAL] * len(tokens))
    self.gguf_writer.add_token_merges(["a b"])


def main() -> None:
    logging.disable()
    for name in NAMES:
        folder, path = FIXTURES / name, FIXTURES / "gguf" / f"{name}.gguf"
        hparams = ModelBase.load_hparams(folder, is_mistral_format=False)
        converter = get_model_class(get_model_architecture(hparams, ModelType.TEXT))
        converter.set_vocab = set_vocab
        # It cuts the embedding to the tokens of a tokenizer.json, which is not there.
        if name == "gemma3-vision":
            converter.modify_tensors = lambda self, w, tensor, bid: super(converter, self).modify_tensors(
                w + self.norm_shift(tensor), tensor, bid
            )
        with torch.inference_mode():
            converter(folder, gguf.LlamaFileType.MOSTLY_BF16, path, model_name=f"Tandem tiny {name}").write()
        print(f"{path.name}: {path.stat().st_size / 1000:.0f} kB")


if __name__ == "__main__":
    main()
