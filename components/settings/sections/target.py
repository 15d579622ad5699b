"""Where the weights of the target come from."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from components.settings.base import Settings


class TargetSettings(Settings):
    """The model that the drafter is bound to, and where its weights come from.

    A `package` target needs `package`, `package_version`, `package_file` and `sha256`; a
    `huggingface` one needs `repo_id`; a `local` one needs `path`.
    """

    name: str = Field(
        pattern=r"^[a-z0-9][a-z0-9.-]*$",
        description="Short name of the target: clients send it as `model`, releases are registered"
        " as `<name>-drafter`, and folders of the state folder bear it.",
    )
    source: Literal["package", "huggingface", "local"] = Field(
        description="Where the weights are: in a GGUF file that an installed Python package ships,"
        " on the Hugging Face Hub, or in a folder of this machine."
    )
    package: str | None = Field(
        default=None,
        description="Name of the installed distribution that ships the GGUF file; read for source"
        " `package` only.",
    )
    package_version: str | None = Field(
        default=None,
        description="Version that the distribution must have; another one is an error that says"
        " what to install.",
    )
    package_file: str | None = Field(
        default=None,
        description="Path of the GGUF file inside the distribution; it is converted to safetensors"
        " once and kept in the state folder.",
    )
    sha256: str | None = Field(
        default=None,
        description="SHA-256 of the GGUF file as 64 hex digits; a file with another one is"
        " refused.",
    )
    repo_id: str | None = Field(
        default=None,
        description="Id of the model on the Hugging Face Hub, as `Qwen/Qwen3-8B`; read for source"
        " `huggingface` only.",
    )
    revision: str | None = Field(
        default=None,
        description="Commit, tag or branch of the Hub model; null takes its main branch. Anything"
        " but a commit is warned of, because it may move; the watch then follows it.",
    )
    path: str | None = Field(
        default=None,
        description="Folder with config.json, safetensors and tokenizer; read for source `local`"
        " only, and used where it is.",
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
