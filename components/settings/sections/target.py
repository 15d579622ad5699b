"""Where the weights of the target come from."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from components.settings.base import Settings


class TargetSettings(Settings):
    """Where the target's weights come from."""

    name: str = Field(
        pattern=r"^[a-z0-9][a-z0-9.-]*$", description="short name; the model is '<name>-drafter'"
    )
    source: Literal["package", "huggingface", "local"]
    package: str | None = Field(
        default=None, description="distribution that ships a GGUF file (source: package)"
    )
    package_version: str | None = None
    package_file: str | None = Field(
        default=None, description="path of the GGUF file inside the distribution"
    )
    sha256: str | None = Field(default=None, description="of the GGUF file, 64 hex digits")
    repo_id: str | None = Field(default=None, description="Hugging Face id (source: huggingface)")
    revision: str | None = Field(
        default=None, description="commit or tag; a moving branch is allowed but warned of"
    )
    path: str | None = Field(
        default=None, description="local folder with safetensors (source: local)"
    )

    @model_validator(mode="after")
    def _complete(self) -> Self:
        needs = {
            "package": ("package", "package_version", "package_file", "sha256"),
            "huggingface": ("repo_id",),
            "local": ("path",),
        }[self.source]
        missing = [name for name in needs if getattr(self, name) is None]
        if missing:
            raise ValueError(f"source '{self.source}' needs {', '.join(missing)}")
        return self
