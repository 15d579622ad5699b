"""A random Llama of a few hundred kilobytes that vLLM serves on CPU, with a real byte-level BPE and
ChatML template.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
HEAD_DIM = 32  # the smallest head size of vLLM's CPU attention
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% "
    "endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
_TEXT = (
    "A drafter proposes tokens and the target checks them in one step.",
    "The acceptance length counts the bonus token, so it is never less than one.",
    "What is the capital of France? The capital of France is Paris, on the river Seine.",
    "def add(a, b):\n    return a + b\n\nfor i in range(10):\n    print(add(i, 1))",
    "If Anna has 12 apples and gives 5 to Ben, then she has 12 - 5 = 7 apples left.",
    "Please write a short story about a small robot who learns to paint the sea.",
    "Once upon a time there was a lighthouse keeper, and every evening the light went out over "
    "the water.",
    "Explain the difference between a stack and a queue, and say when you would use each of "
    "them in a program.",
    "My favourite season is autumn because the leaves change colour, people walk more slowly "
    "and soup tastes better.",
)


def make_tiny_target(
    path: Path, *, seed: int = 0, num_layers: int = 4, hidden_size: int = 64, vocab_size: int = 512
) -> Path:
    """Write the target into folder `path` (bf16 safetensors, config, tokenizer, ChatML template)
    and return it.
    """
    path = Path(path)
    path.mkdir(parents=True, exist_ok=True)
    _write_tokenizer(path, vocab_size)
    num_heads = hidden_size // HEAD_DIM
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=2 * hidden_size,
        num_hidden_layers=num_layers,
        num_attention_heads=num_heads,
        num_key_value_heads=max(1, num_heads // 2),
        head_dim=HEAD_DIM,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=2,
        # Wider than the usual 0.02, so that random logits differ by more than bf16 noise.
        initializer_range=0.2,
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config).to(torch.bfloat16)
    model.save_pretrained(path)
    return path


def _write_tokenizer(path: Path, vocab_size: int) -> None:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_TEXT, trainer)
    tokenizer.save(str(path / "tokenizer.json"))
    (path / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    settings = {
        "bos_token": "<|im_start|>",
        "clean_up_tokenization_spaces": False,
        "eos_token": "<|im_end|>",
        "model_max_length": 2048,
        "pad_token": "<|im_end|>",
        "tokenizer_class": "PreTrainedTokenizerFast",
        "unk_token": "<|endoftext|>",
    }
    (path / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")
