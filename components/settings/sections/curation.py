"""Sources of conversations, and how a dataset is made of them."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from components.settings.base import Settings


class SourceSettings(Settings):
    """One source of conversations."""

    name: str
    kind: Literal["package", "huggingface", "file", "preset", "target"] = Field(
        default="package",
        description="target: prompts that the target itself writes (curation/self_prompts.py)",
    )
    preset: str | None = Field(
        default=None, description="a dataset of curation/presets.py (kind: preset); None: name"
    )
    repo_id: str | None = Field(
        default=None, description="Hugging Face dataset id (kind: huggingface)"
    )
    subset: str | None = Field(
        default=None, description="configuration of a Hugging Face dataset that has several"
    )
    revision: str | None = Field(
        default=None, description="commit, tag or branch of a Hugging Face dataset"
    )
    split: str | None = Field(default=None, description="None: the preset's, else train")
    streaming: bool = Field(
        default=True, description="read a Hugging Face dataset as it comes, without downloading all"
    )
    path: str | None = Field(
        default=None,
        description="JSONL, JSON, Parquet, Arrow or text file, or a folder of them (kind: file)",
    )
    column: str | None = Field(
        default=None,
        description="with OpenAI messages, ShareGPT turns or a prompt; None: the preset's, else "
        "messages",
    )
    weight: float = Field(default=1.0, gt=0, description="share of the mixture, relative")
    parts: tuple[str, ...] = Field(
        default=(), description="evals families, reasoning_gym generators; empty: defaults"
    )
    max_rows: int | None = Field(default=None, ge=1)


class CurationSettings(Settings):
    """Conversations in, validated on-policy dataset out."""

    sources: tuple[SourceSettings, ...] = Field(min_length=1)
    num_conversations: int = Field(ge=8, description="conversations wanted after filters and dedup")
    validation_share: float = Field(default=0.05, gt=0, lt=0.5)
    min_prompt_chars: int = Field(default=8, ge=1)
    max_prompt_tokens: int = Field(default=384, ge=8)
    min_ascii_share: float = Field(
        default=0.0, ge=0, le=1, description="of a prompt's letters; for targets of one script"
    )
    languages: tuple[str, ...] = Field(
        default=(), description="ISO 639-1 codes kept, as en; none: any language"
    )
    keep_personal_data: bool = Field(
        default=False, description="prompts with e-mail addresses, phone or card numbers"
    )
    keep_terse_prompts: bool = Field(
        default=True, description="keep prompts that ask for a word, a letter or yes/no"
    )
    max_answer_tokens: int = Field(default=192, ge=8, description="per regenerated answer")
    max_turns: int = Field(default=1, ge=1, description="user turns kept per conversation")
    decontaminate_against: tuple[SourceSettings, ...] = Field(
        default=(), description="further evaluation sets; the recipe's own slices always count"
    )
    near_duplicate_threshold: float = Field(
        default=0.8, gt=0, lt=1, description="Jaccard of word shingles"
    )
    temperatures: tuple[float, ...] = Field(
        default=(0.0, 0.7), description="sampling mix of regeneration"
    )
    keep_truncated_answers: bool = Field(
        default=True, description="answers cut at max_answer_tokens, up to the cut"
    )
    keep_refusals: bool = Field(
        default=True, description="answers that open by declining to answer"
    )
    template_variants: tuple[dict[str, Any], ...] = Field(
        default=({},),
        min_length=1,
        description="variables of the chat template, as {enable_thinking: false}; mixed",
    )
    requests_in_flight: int = Field(default=32, ge=1)
    task_runner: Literal["threads", "dask"] = Field(
        default="threads",
        description="where filters and rendering run: the flow's process, or Prefect's Dask runner",
    )
    dask_address: str | None = Field(
        default=None,
        description="of a Dask scheduler whose workers see the state folder; none: a cluster on "
        "this machine",
    )
    min_mask_share: float = Field(
        default=0.05, ge=0, lt=1, description="least share of supervised tokens in a row"
    )
    seed: int = 0
