"""The content identity of a target: four digests that say what changed when something changed.

Equal content gives equal digests whatever the sharding, the file names, the library that saved it
or where it lies.
"""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

from components.contracts import (
    TargetFingerprint,
    TargetRef,
    digest_file,
    digest_json,
    write_atomic,
)
from components.errors import TargetError
from components.settings import EngineSettings
from components.targets.folder import (
    check_target_folder,
    hash_tensors,
    read_chat_template,
    read_config,
    weight_files,
)

# Keys of config.json that say nothing about the function the weights compute: who saved it, how to
# generate, training.
_VOLATILE_KEYS = {
    "_name_or_path",
    "transformers_version",
    "torch_dtype",
    "dtype",
    "use_cache",
    "initializer_range",
    "pretraining_tp",
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
    "quantization_config",
    "compression_config",
    "auto_map",
    "_attn_implementation",
    "attn_implementation",
    "attention_dropout",
    "output_attentions",
    "output_hidden_states",
}
_ROTARY_KEYS = ("rope_theta", "rope_scaling", "rope_parameters")
_SPECIAL_TOKENS = ("bos_token", "eos_token", "pad_token", "unk_token", "additional_special_tokens")
_TOKENIZER_PARTS = (
    "model",
    "added_tokens",
    "normalizer",
    "pre_tokenizer",
    "post_processor",
    "decoder",
)
# Engine options that may stand in `extra_args` and change what the target computes or accepts.
_NUMERIC_OPTIONS = {
    "--quantization",
    "-q",
    "--hf-overrides",
    "--rope-scaling",
    "--rope-theta",
    "--dtype",
    "--kv-cache-dtype",
    "--max-model-len",
    "--load-format",
    "--attention-backend",
    "--tokenizer",
    "--chat-template",
}


def fingerprint_target(
    path: Path, *, engine: EngineSettings, cache_dir: Path | None = None
) -> TargetFingerprint:
    """Fingerprint the target folder `path` as `engine` would serve it.

    With `cache_dir`, tensor digests are kept there per file and reused while the file's identity
    (device, inode, size, modification and change time, all of the kernel's own) is the same.

    Raises:
        TargetError: the folder is incomplete or a file cannot be read.
    """
    path = Path(path)
    check_target_folder(path)
    config = read_config(path)
    return TargetFingerprint(
        weights=digest_json(
            {"tensors": _tensor_digests(path, cache_dir), "config": _architecture(config)}
        ),
        quantization=digest_json(_quantization_config(path) or "none"),
        tokenizer=_tokenizer_digest(path, config),
        serving=digest_json(_serving(engine)),
    )


def describe_quantization(path: Path) -> str:
    """Readable quantization of a target folder: 'none', 'compressed-tensors int-quantized W8A8',
    'awq W4', ...

    Raises:
        TargetError: config.json cannot be read.
    """
    config = _quantization_config(Path(path))
    if not config:
        return "none"

    method = str(config.get("quant_method") or config.get("quant_algo") or "unknown")
    words = [method]
    if config.get("format"):
        words.append(str(config["format"]))

    groups = sorted((config.get("config_groups") or {}).items())
    words += sorted({width for _, group in groups if (width := _group_width(group))})
    bits = config.get("bits") or config.get("w_bit")
    if bits and not groups:
        words.append(f"W{bits}")

    return " ".join(words)


def make_target_ref(
    name: str, *, path: Path, source: str, engine: EngineSettings, cache_dir: Path | None = None
) -> TargetRef:
    """The record of the target folder `path` under the short name `name`.

    Raises:
        TargetError: as `fingerprint_target`.
    """
    path = Path(path).resolve()
    return TargetRef(
        name=name,
        path=str(path),
        source=source,
        fingerprint=fingerprint_target(path, engine=engine, cache_dir=cache_dir),
        quantization=describe_quantization(path),
    )


def _tensor_digests(path: Path, cache_dir: Path | None) -> list[list[Any]]:
    """[name, dtype, shape, sha256] of every tensor, sorted by name."""
    tensors = [tensor for file in weight_files(path) for tensor in _file_digests(file, cache_dir)]
    tensors.sort()
    twice = [a[0] for a, b in itertools.pairwise(tensors) if a[0] == b[0]]
    if twice:
        raise TargetError(
            f"{path} holds a tensor twice", got=twice[0], fix="Remove the stale weight file."
        )
    return tensors


def _file_digests(file: Path, cache_dir: Path | None) -> list[list[Any]]:
    status = file.stat()
    identity = [
        status.st_dev,
        status.st_ino,
        status.st_size,
        status.st_mtime_ns,
        status.st_ctime_ns,
    ]

    cached = (
        Path(cache_dir) / "fingerprints" / f"{digest_json(identity)}.json" if cache_dir else None
    )
    if cached and cached.is_file():
        tensors: list[list[Any]] = json.loads(cached.read_text())
        return tensors

    tensors = [
        [entry.name, entry.dtype, list(entry.shape), digest] for entry, digest in hash_tensors(file)
    ]
    if cached:
        write_atomic(cached, json.dumps(tensors))

    return tensors


def _architecture(config: dict[str, Any]) -> dict[str, Any]:
    """config.json without volatile keys and nulls, its rotary keys in one spelling (transformers 4
    and 5 differ).
    """
    kept = {
        key: value
        for key, value in config.items()
        if key not in _VOLATILE_KEYS and key not in _ROTARY_KEYS and value is not None
    }
    rotary = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    rotary.setdefault("rope_type", rotary.pop("type", "default"))
    theta = config.get("rope_theta") or rotary.get("rope_theta")
    if theta is not None:
        rotary["rope_theta"] = float(theta)
    return {**kept, "rotary": rotary}


def _quantization_config(path: Path) -> dict[str, Any]:
    config = read_config(path)
    found = config.get("quantization_config") or config.get("compression_config") or {}
    separate = path / "hf_quant_config.json"  # ModelOpt writes its own file
    if not found and separate.is_file():
        found = json.loads(separate.read_text()).get("quantization", {})
    return {
        key: value
        for key, value in found.items()
        if key not in ("version", "producer") and value is not None
    }


def _group_width(group: dict[str, Any]) -> str:
    weights, activations = group.get("weights"), group.get("input_activations")
    if not weights:
        return ""
    return f"W{weights.get('num_bits')}A{activations.get('num_bits') if activations else 16}"


def _tokenizer_digest(path: Path, config: dict[str, Any]) -> str:
    settings = path / "tokenizer_config.json"
    special = json.loads(settings.read_text()) if settings.is_file() else {}
    return digest_json(
        {
            "model": _tokenizer_model(path),
            "special": {
                name: _token_text(special[name]) for name in _SPECIAL_TOKENS if special.get(name)
            },
            "stop": config.get("eos_token_id"),
            "chat_template": read_chat_template(path),
        }
    )


def _tokenizer_model(path: Path) -> Any:
    fast = path / "tokenizer.json"
    # Sentencepiece and tiktoken models are opaque: their bytes are their identity.
    if not fast.is_file():
        files = [
            path / name
            for name in ("tokenizer.model", "tiktoken.model", "vocab.json", "merges.txt")
        ]
        return {file.name: digest_file(file) for file in files if file.is_file()}

    try:
        parsed = json.loads(fast.read_text())
    except ValueError as error:
        raise TargetError(f"{fast} cannot be read", got=error) from None

    model = dict(parsed.get("model") or {})
    # Older tokenizers write a merge as "a b", newer ones as ["a", "b"].
    model["merges"] = [
        merge if isinstance(merge, str) else " ".join(merge) for merge in model.get("merges") or []
    ]
    return {**{part: parsed.get(part) for part in _TOKENIZER_PARTS}, "model": model}


def _token_text(token: Any) -> Any:
    if isinstance(token, list):
        return [_token_text(item) for item in token]
    return token.get("content") if isinstance(token, dict) else token


def _serving(engine: EngineSettings) -> dict[str, Any]:
    """What the engine settings do to the target's numbers and limits; batching and memory do not
    belong here.
    """
    options: list[str] = []
    keep = False
    for argument in engine.extra_args:
        if argument.startswith("-"):
            keep = argument.partition("=")[0] in _NUMERIC_OPTIONS
        if keep:
            options.append(argument)

    serving = {
        "dtype": engine.dtype,
        "kv_cache_dtype": engine.kv_cache_dtype,
        "max_model_len": engine.max_model_len,
    }

    return {**serving, "options": options} if options else serving
