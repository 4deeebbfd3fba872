"""Writes the folder model/: a small Llama with a tokenizer whose tokens are the words of the desk.

A token of a word holds the space before it, so decoding is joining, and what is decoded is exactly what was written.
Run it again after a change of words: `python make_model.py`.
"""

from __future__ import annotations

import json
from pathlib import Path

from tasks import NAMES
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

FOLDER = Path(__file__).resolve().parent / "model"
SPECIAL = ("<pad>", "<unk>", "<|system|>", "<|user|>", "<|assistant|>", "<|tool|>", "<|end|>")
TAGS = ("<shell>", "</shell>", "<submit/>")
WORDS = (
    *("\n", "Carry", " out", " the", " orders", " in", " note", " to", "copy", "rename", "write", "append"),
    *("cat", "cp", "mv", "echo", " >", " >>", "[no", " output]", "[exit", " 1]", " 2]", " 127]"),
)
TEMPLATE = """\
{%- for message in messages -%}
<|{{ message.role }}|>{{ message.content }}<|end|>
{%- endfor -%}
{%- if add_generation_prompt -%}<|assistant|>{%- endif -%}
"""


def make_tokenizer() -> Tokenizer:
    """One token per word; what is not known becomes `<unk>`."""
    words = (*SPECIAL, *TAGS, *WORDS, *(f" {name}" for name in NAMES))
    tokenizer = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r" ?[^\s<]+|\n"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIAL])
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in TAGS])
    return tokenizer


def make_config(tokenizer: Tokenizer) -> dict[str, object]:
    """`config.json` in Hugging Face's form.

    Copying words from the note is learnt much sooner from weights of deviation 0.05 than from the usual 0.02, and with
    a `rope_theta` that suits sequences of 50 tokens.
    """
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": tokenizer.get_vocab_size(),
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1000.0,
        "initializer_range": 0.05,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": True,
        "torch_dtype": "float32",
        "bos_token_id": None,
        "eos_token_id": tokenizer.token_to_id("<|end|>"),
        "pad_token_id": tokenizer.token_to_id("<pad>"),
    }


def make_files() -> dict[str, str]:
    """All files of the folder, by name."""
    tokenizer = make_tokenizer()
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|end|>",
        "pad_token": "<pad>",
        "unk_token": "<unk>",
        "clean_up_tokenization_spaces": False,
        "model_max_length": 256,
    }
    return {
        "config.json": json.dumps(make_config(tokenizer), indent=2) + "\n",
        "tokenizer.json": tokenizer.to_str(pretty=True) + "\n",
        "tokenizer_config.json": json.dumps(tokenizer_config, indent=2) + "\n",
        "chat_template.jinja": TEMPLATE,
    }


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for name, text in make_files().items():
        (FOLDER / name).write_text(text, "utf-8")
