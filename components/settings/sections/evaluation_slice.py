"""Slices of one's own: where their prompts come from; and the slice of one long shared prefix."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from components.settings.base import Settings
from components.settings.sections.curation import SourceSettings


class SliceSettings(Settings):
    """A slice whose prompts come from a file, a folder or the Hugging Face Hub."""

    kind: Literal["file", "huggingface", "preset"] = Field(
        description="Where the rows are: a file or folder, a Hub dataset, or one that"
        " curation/presets.py knows by name."
    )
    num_prompts: int = Field(
        ge=1,
        description="Prompts measured: the first by content hash, so that a smaller number is a"
        " subset of a larger one.",
    )
    path: str | None = Field(
        default=None,
        description="JSONL, JSON, Parquet, Arrow or text file, or a folder of them (kind: file).",
    )
    repo_id: str | None = Field(
        default=None, description="Id of a Hugging Face dataset (kind: huggingface)."
    )
    preset: str | None = Field(
        default=None, description="Name of the preset (kind: preset). None: the slice's name."
    )
    subset: str | None = Field(
        default=None, description="Configuration of a Hub dataset that has several."
    )
    revision: str | None = Field(
        default=None,
        description="Commit, tag or branch of a Hub dataset. Only a commit always measures the "
        "same prompts.",
    )
    split: str | None = Field(default=None, description="None: the preset's, else train.")
    column: str | None = Field(
        default=None,
        description="Column with OpenAI messages, ShareGPT turns or a prompt. None: the preset's,"
        " else messages, else what curation/rows.py knows.",
    )
    max_rows: int | None = Field(
        default=None, ge=1, description="Rows read from the start of the source. None: all."
    )
    keep_out: Literal["all", "chosen"] = Field(
        default="all",
        description="What of the source is kept out of training: all rows that are read, so that"
        " more prompts can be measured later, or only the chosen ones, for a source that training"
        " draws from, too.",
    )

    @model_validator(mode="after")
    def _placed(self) -> Self:
        needed = {"file": "path", "huggingface": "repo_id"}.get(self.kind)
        if needed is not None and getattr(self, needed) is None:
            raise ValueError(f"a slice of kind '{self.kind}' needs a {needed}")
        return self

    def source(self, name: str) -> SourceSettings:
        """The slice's source in the form that the readers of curation take.

        Args:
            name: of the slice.
        """
        place = self.model_dump(exclude={"num_prompts", "keep_out"})
        return SourceSettings.model_validate({"name": name, **place})


class WarmPrefixSettings(Settings):
    """Questions on one long shared prefix, each asked cold and warm."""

    num_questions: int = Field(
        default=8, ge=2, le=24, description="Questions, each asked once cold and once warm."
    )
    prefix_tokens: int = Field(
        default=600,
        ge=64,
        le=60_000,
        description="Length of the shared prefix, about, at four characters a token. The record"
        " says how many tokens the engine counted.",
    )
