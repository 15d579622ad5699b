"""A target, and what makes two of them the same for a drafter."""

from __future__ import annotations

from pydantic import Field

from components.contracts.record import Record


class TargetFingerprint(Record):
    """What makes two targets the same for a drafter; each part is a sha256 (hex)."""

    weights: str = Field(
        description="over every tensor's name, dtype, shape and bytes, and the architecture config"
    )
    quantization: str = Field(description="over the quantization config, or of the word 'none'")
    tokenizer: str = Field(description="over vocabulary, merges, special tokens and chat template")
    serving: str = Field(
        description="over engine settings that change numerics or limits (dtype, KV dtype, length)"
    )


class TargetRef(Record):
    """A target on disk, with its content identity."""

    name: str = Field(description="short name; the registered model is '<name>-drafter'")
    path: str = Field(description="folder with config.json, safetensors and tokenizer")
    source: str = Field(description="where it came from: package, Hub id with revision, or folder")
    fingerprint: TargetFingerprint
    quantization: str = Field(
        description="readable: 'none', 'compressed-tensors int-quantized W8A8', ..."
    )
