"""Slices of one's own: where their prompts come from; and the slice of one long shared prefix."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from components.settings.base import Settings
from components.settings.sections.curation import SourceSettings


class SliceSettings(Settings):
    """A slice whose prompts come from a file, a folder, the Hugging Face Hub or a known dataset.

    Each row is asked whole, up to its last answer; rows that are no prompt are counted by reason.
    """

    kind: Literal["file", "huggingface", "preset"] = Field(
        description="Where the rows are: a file or folder, a Hub dataset, or one that"
        " `components/curation/sources/presets.py` knows by name."
    )
    num_prompts: int = Field(
        ge=1,
        description="Prompts measured: the first by content hash, so that a smaller number is a"
        " subset of a larger one. Fewer usable rows are an error.",
    )
    path: str | None = Field(
        default=None,
        description="File of JSONL, JSON, Parquet, Arrow or text (one prompt a line), or a folder"
        " of such files; kind `file` needs one.",
    )
    repo_id: str | None = Field(
        default=None,
        description="Id of a dataset on the Hugging Face Hub; kind `huggingface` needs one.",
    )
    preset: str | None = Field(
        default=None,
        description="Name of the known dataset, for kind `preset`; null takes the slice's name.",
    )
    subset: str | None = Field(
        default=None,
        description="Configuration of a Hub dataset that has several; null takes the preset's,"
        " else the dataset's default.",
    )
    revision: str | None = Field(
        default=None,
        description="Commit, tag or branch of a Hub dataset; null takes its main branch. Only a"
        " commit always measures the same prompts.",
    )
    split: str | None = Field(
        default=None,
        description="Split of a Hub dataset; null takes the preset's, else train.",
    )
    column: str | None = Field(
        default=None,
        description="Column with OpenAI messages, ShareGPT turns or a prompt; the known column"
        " names are tried after it, but a Hub dataset must have the one that is named. Null takes"
        " the preset's, else messages.",
    )
    max_rows: int | None = Field(
        default=None,
        ge=1,
        description="Rows read from the start of the source; null reads all of them.",
    )
    keep_out: Literal["all", "chosen"] = Field(
        default="all",
        description="What of the source is kept out of training: `all` rows that are read, so that"
        " more prompts can be measured later, or only the `chosen` ones, for a source that"
        " training draws from, too.",
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
        default=8,
        ge=2,
        le=24,
        description="Questions on the prefix, each asked once cold and once warm.",
    )
    prefix_tokens: int = Field(
        default=600,
        ge=64,
        le=60_000,
        description="Length of the shared prefix in tokens, about, at four characters a token; the"
        " record says how many the engine counted. With `max_tokens` it must leave room for a"
        " question in `engine.max_model_len`.",
    )
