"""GGUF (Llama family, byte-level BPE) -> a Hugging Face folder: bf16 safetensors, tokenizer, chat
template.

Shapes: GGUF lists dimensions fastest first, so a matrix `[in, out]` there is `[out, in]` here.
llama.cpp stores q and k with each head's rotary halves interleaved; `_unpermute` undoes it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

from components.contracts import Progress, write_atomic
from components.errors import TargetError

_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_OUTER_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
# The split patterns llama.cpp names in `tokenizer.ggml.pre`. None: the GPT-2 pattern of the
# byte-level step itself.
_SPLIT_PATTERNS = {
    "gpt-2": None,
    "smollm": None,
    "llama-bpe": (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
        r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    ),
}
_CONTROL, _USER_DEFINED = 3, 4  # llama.cpp token types that never come out of a merge


def convert_gguf(gguf_path: Path, destination: Path, *, progress: Progress | None = None) -> Path:
    """Write the GGUF model `gguf_path` as a Hugging Face folder that vLLM and transformers load.

    Quantized tensors are dequantized to float32 and rounded to bfloat16. `destination` must not
    hold other files; it is filled in place, so hand in a temporary folder and rename it.

    Raises:
        TargetError: not a GGUF file, an architecture or tokenizer that is not known here, or no
            chat template.
    """
    destination = Path(destination)
    try:
        reader = gguf.GGUFReader(str(gguf_path))
    except (ValueError, OSError) as error:
        raise TargetError(f"{Path(gguf_path).name} cannot be read as GGUF", got=error) from None

    metadata = dict(reader.fields)
    tied = all(tensor.name != "output.weight" for tensor in reader.tensors)
    config = _config(metadata, tied=tied)
    tokenizer = _tokenizer(metadata)
    template = _value(metadata, "tokenizer.chat_template", missing_ok=True)

    if not template:
        raise TargetError(
            f"{Path(gguf_path).name} has no chat template", fix="Use a chat (instruct) model."
        )

    destination.mkdir(parents=True, exist_ok=True)
    save_file(
        _tensors(reader, config, progress),
        destination / "model.safetensors",
        metadata={"format": "pt"},
    )
    _write_json(destination / "config.json", config)
    _write_json(destination / "generation_config.json", _generation_config(config))
    tokenizer.save(str(destination / "tokenizer.json"))

    write_atomic(destination / "chat_template.jinja", template)
    _write_json(destination / "tokenizer_config.json", _tokenizer_config(metadata, config))
    return destination


def _value(metadata: dict[str, Any], key: str, *, missing_ok: bool = False) -> Any:
    if key not in metadata:
        if missing_ok:
            return None
        raise TargetError("the GGUF file lacks a metadata key", got=f"no {key}")
    return metadata[key].contents()


def _config(metadata: dict[str, Any], *, tied: bool) -> dict[str, Any]:
    """The Hugging Face config of a Llama in GGUF. What the format can say and this conversion
    cannot do is refused.
    """
    architecture = _value(metadata, "general.architecture")
    if architecture != "llama":
        raise TargetError(
            "this GGUF architecture cannot be converted",
            got=architecture,
            expected="llama",
            fix="Name the model's safetensors instead (target.source: huggingface or local).",
        )
    if "llama.expert_count" in metadata or "llama.rope.scaling.type" in metadata:
        raise TargetError(
            "this Llama variant cannot be converted",
            got="experts or rotary scaling in the GGUF file",
        )

    num_heads = _value(metadata, "llama.attention.head_count")
    hidden_size = _value(metadata, "llama.embedding_length")
    return {
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": False,
        "bos_token_id": _value(metadata, "tokenizer.ggml.bos_token_id"),
        "dtype": "bfloat16",
        "eos_token_id": _value(metadata, "tokenizer.ggml.eos_token_id"),
        "head_dim": _value(metadata, "llama.rope.dimension_count", missing_ok=True)
        or hidden_size // num_heads,
        "hidden_act": "silu",
        "hidden_size": hidden_size,
        "intermediate_size": _value(metadata, "llama.feed_forward_length"),
        "max_position_embeddings": _value(metadata, "llama.context_length"),
        "mlp_bias": False,
        "model_type": "llama",
        "num_attention_heads": num_heads,
        "num_hidden_layers": _value(metadata, "llama.block_count"),
        "num_key_value_heads": _value(metadata, "llama.attention.head_count_kv", missing_ok=True)
        or num_heads,
        "pad_token_id": _value(metadata, "tokenizer.ggml.padding_token_id", missing_ok=True),
        "rms_norm_eps": _short_float(_value(metadata, "llama.attention.layer_norm_rms_epsilon")),
        "rope_parameters": {
            "rope_theta": _short_float(
                _value(metadata, "llama.rope.freq_base", missing_ok=True) or 10000.0
            ),
            "rope_type": "default",
        },
        "tie_word_embeddings": tied,
        "vocab_size": len(_value(metadata, "tokenizer.ggml.tokens")),
    }


def _short_float(value: float) -> float:
    """The shortest decimal that rounds to the same float32: 9.999999747378752e-06 -> 1e-05."""
    return float(str(np.float32(value)))


def _generation_config(config: dict[str, Any]) -> dict[str, Any]:
    keys = ("bos_token_id", "eos_token_id", "pad_token_id")
    return {key: config[key] for key in keys if config[key] is not None}


def _tensors(
    reader: Any, config: dict[str, Any], progress: Progress | None
) -> dict[str, torch.Tensor]:
    tensors: dict[str, torch.Tensor] = {}
    for index, tensor in enumerate(reader.tensors):
        name = _hugging_face_name(tensor.name)
        if name is None:
            continue
        weight = torch.from_numpy(
            np.array(gguf.dequantize(tensor.data, tensor.tensor_type), dtype=np.float32)
        )
        weight = weight.reshape([int(size) for size in reversed(tensor.shape)])
        if name.endswith("q_proj.weight"):
            weight = _unpermute(weight, config["num_attention_heads"])
        elif name.endswith("k_proj.weight"):
            weight = _unpermute(weight, config["num_key_value_heads"])
        tensors[name] = weight.to(torch.bfloat16).contiguous()
        if progress and index % 50 == 0:
            progress("convert GGUF tensors", index, len(reader.tensors))

    expected = 2 + 9 * config["num_hidden_layers"] + (not config["tie_word_embeddings"])
    if len(tensors) != expected:
        raise TargetError(
            "the GGUF file does not hold every tensor", got=len(tensors), expected=expected
        )

    return tensors


def _hugging_face_name(name: str) -> str | None:
    if name in _OUTER_NAMES:
        return _OUTER_NAMES[name]
    # Derived from the config by every consumer of the converted folder.
    if name == "rope_freqs.weight":
        return None
    block, _, rest = name.removeprefix("blk.").partition(".")
    part = rest.removesuffix(".weight")
    if not name.startswith("blk.") or part not in _LAYER_NAMES or not rest.endswith(".weight"):
        raise TargetError("the GGUF file holds a tensor that is not known here", got=name)
    return f"model.layers.{block}.{_LAYER_NAMES[part]}.weight"


def _unpermute(weight_OI: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Undo llama.cpp's rotary interleaving: rows (head, pair, half) -> (head, half, pair)."""
    rows, columns = weight_OI.shape
    by_pair = weight_OI.reshape(num_heads, rows // num_heads // 2, 2, columns)
    return by_pair.swapaxes(1, 2).reshape(rows, columns)


def _tokenizer(metadata: dict[str, Any]) -> Tokenizer:
    """The byte-level BPE that the file describes. Another kind is refused: it would read text as
    other tokens.
    """
    kind = _value(metadata, "tokenizer.ggml.model")
    pre = _value(metadata, "tokenizer.ggml.pre", missing_ok=True)
    if kind != "gpt2" or (pre or "gpt-2") not in _SPLIT_PATTERNS:
        raise TargetError(
            "this GGUF tokenizer cannot be converted",
            got=f"{kind}/{pre}",
            expected=f"gpt2 with one of {', '.join(_SPLIT_PATTERNS)}",
        )

    tokens: list[str] = _value(metadata, "tokenizer.ggml.tokens")
    types: list[int] = _value(metadata, "tokenizer.ggml.token_type")
    merges = [tuple(merge.split(" ")) for merge in _value(metadata, "tokenizer.ggml.merges")]
    tokenizer = Tokenizer(
        models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges)
    )
    tokenizer.pre_tokenizer = _pre_tokenizer(pre or "gpt-2")

    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_tokens(
        [
            AddedToken(token, special=kind == _CONTROL, normalized=False)
            for token, kind in zip(tokens, types, strict=True)
            if kind in (_CONTROL, _USER_DEFINED)
        ]
    )

    return tokenizer


def _pre_tokenizer(pre: str) -> Any:
    if pre == "smollm":  # digits one by one, then GPT-2's pattern
        return pre_tokenizers.Sequence(
            [
                pre_tokenizers.Digits(individual_digits=True),
                pre_tokenizers.ByteLevel(add_prefix_space=False),
            ]
        )

    pattern = _SPLIT_PATTERNS[pre]
    if pattern is None:
        return pre_tokenizers.ByteLevel(add_prefix_space=False)

    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


def _tokenizer_config(metadata: dict[str, Any], config: dict[str, Any]) -> dict[str, Any]:
    tokens = _value(metadata, "tokenizer.ggml.tokens")
    ids = {
        "bos_token": config["bos_token_id"],
        "eos_token": config["eos_token_id"],
        "pad_token": config["pad_token_id"],
        "unk_token": _value(metadata, "tokenizer.ggml.unknown_token_id", missing_ok=True),
    }

    special = {name: tokens[token_id] for name, token_id in ids.items() if token_id is not None}
    return {
        **special,
        "add_bos_token": bool(_value(metadata, "tokenizer.ggml.add_bos_token", missing_ok=True)),
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": config["max_position_embeddings"],
        "tokenizer_class": "PreTrainedTokenizerFast",
    }


def _write_json(path: Path, value: dict[str, Any]) -> None:
    write_atomic(path, json.dumps(value, indent=2, sort_keys=True) + "\n")
