"""Sources of conversations, and how a dataset is made of them."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from components.settings.base import Settings


class SourceSettings(Settings):
    """One source of conversations, or one evaluation set to keep out.

    Only prompts are kept: the target answers them itself. Evaluation sets may be of kind `file`,
    `huggingface` or `preset`.
    """

    name: str = Field(
        description="Name of the source in counts, quarantine and manifest. For kind `package` it"
        " says which one: chitchat, evals, reasoning_gym or python_stdlib."
    )
    kind: Literal["package", "huggingface", "file", "preset", "target"] = Field(
        default="package",
        description="Where the rows are: in an installed package, on the Hugging Face Hub, in a"
        " file or folder, in a dataset known by a short name (`preset`), or prompts that the"
        " target writes itself (`target`).",
    )
    preset: str | None = Field(
        default=None,
        description="Which known dataset, for kind `preset`: magpie, ultrachat,"
        " open_perfect_blend, gsm8k or mbpp, or one of the evaluation sets gsm8k_test, math500,"
        " mbpp_test, humaneval and mt_bench. Null takes the source's name.",
    )
    repo_id: str | None = Field(
        default=None,
        description="Id of the dataset on the Hugging Face Hub; kind `huggingface` needs one, and"
        " with kind `preset` it takes the place of the preset's own.",
    )
    subset: str | None = Field(
        default=None,
        description="Configuration of a Hub dataset that has several; null takes the preset's,"
        " else the dataset's default.",
    )
    revision: str | None = Field(
        default=None,
        description="Commit, tag or branch of a Hub dataset; null takes its main branch. Only a"
        " commit always gives the same rows.",
    )
    split: str | None = Field(
        default=None,
        description="Split of a Hub dataset; null takes the preset's, else train.",
    )
    streaming: bool = Field(
        default=True,
        description="Read a Hub dataset as it comes, shuffled through a buffer of 1,000 rows;"
        " false downloads all of it first and shuffles the whole.",
    )
    path: str | None = Field(
        default=None,
        description="File of JSONL, JSON, Parquet, Arrow or text (one prompt a line), or a folder"
        " of such files; kind `file` needs one. Kind `target` has its own, set by the run.",
    )
    column: str | None = Field(
        default=None,
        description="Column with OpenAI messages, ShareGPT turns or a prompt; the known column"
        " names are tried after it, but a Hub dataset must have the one that is named. Null takes"
        " the preset's, else messages.",
    )
    weight: float = Field(
        default=1.0,
        gt=0,
        description="Share of the conversations that come from this source, relative to the other"
        " sources' weights; conversations that filters refused hardly count.",
    )
    parts: tuple[str, ...] = Field(
        default=(),
        description="Families of the package evals, or generators of reasoning_gym, to draw from;"
        " an empty list takes the usual ones.",
    )
    max_rows: int | None = Field(
        default=None,
        ge=1,
        description="Most rows that are drawn from the source; null is no limit. Evaluation sets"
        " are always read whole.",
    )


class CurationSettings(Settings):
    """Conversations in, a validated dataset out whose answers the target itself wrote.

    Rows are read, filtered, freed of duplicates and of evaluation prompts; the target answers what
    is left; its chat template renders the rows, and expectations are checked before any is kept.
    """

    sources: tuple[SourceSettings, ...] = Field(
        min_length=1,
        description="Sources of the prompts, mixed by their weights; a source that runs dry leaves"
        " its place to the others.",
    )
    num_conversations: int = Field(
        ge=8,
        description="Conversations wanted after filters and duplicate search, for training and"
        " validation together; fewer where the sources run dry.",
    )
    validation_share: float = Field(
        default=0.05,
        gt=0,
        lt=0.5,
        description="Share of the conversations that go to the validation split, told by the hash"
        " of each; they are never trained on.",
    )
    min_prompt_chars: int = Field(
        default=8,
        ge=1,
        description="Characters that the first user turn of a conversation must have.",
    )
    max_prompt_tokens: int = Field(
        default=384,
        ge=8,
        description="Most tokens of a conversation before its last answer, in the target's chat"
        " template; with `max_answer_tokens` it must fit `engine.max_model_len`.",
    )
    min_ascii_share: float = Field(
        default=0.0,
        ge=0,
        le=1,
        description="Share of a prompt's letters that must be ASCII; raise it for targets that"
        " know one script only. At 0 nothing is checked.",
    )
    languages: tuple[str, ...] = Field(
        default=(),
        description="Languages to keep as ISO 639-1 codes, such as en; prompts too short to tell"
        " stay. An empty list keeps every language.",
    )
    keep_personal_data: bool = Field(
        default=False,
        description="Whether prompts with e-mail addresses, phone, card, account or social"
        " security numbers stay.",
    )
    keep_terse_prompts: bool = Field(
        default=True,
        description="Whether prompts that ask for a word, a letter or yes or no stay; their"
        " answers leave little to learn from.",
    )
    max_answer_tokens: int = Field(
        default=192,
        ge=8,
        description="Longest answer that the target writes for one user turn, in tokens.",
    )
    max_turns: int = Field(
        default=1,
        ge=1,
        description="User turns that are kept of each conversation, from the first; the target"
        " answers all of them, each on its own earlier answers.",
    )
    decontaminate_against: tuple[SourceSettings, ...] = Field(
        default=(),
        description="Further evaluation sets: a conversation with a run of 13 words of one, or a"
        " turn that is the whole of a shorter text in one, is left out. The recipe's own slices"
        " always count.",
    )
    near_duplicate_threshold: float = Field(
        default=0.8,
        gt=0,
        lt=1,
        description="Similarity from which the later of two conversations is left out: the share"
        " of word triples that they have in common (Jaccard).",
    )
    temperatures: tuple[float, ...] = Field(
        default=(0.0, 0.7),
        description="Temperatures that answers are sampled at; each conversation gets one by its"
        " hash, so a value that stands twice is used twice as often.",
    )
    keep_truncated_answers: bool = Field(
        default=True,
        description="Whether an answer that was cut at `max_answer_tokens` is kept up to the cut;"
        " false drops it.",
    )
    keep_refusals: bool = Field(
        default=True,
        description="Whether answers that open by declining to answer are kept; a drafter learns"
        " their few phrases quickly and little else from them.",
    )
    template_variants: tuple[dict[str, Any], ...] = Field(
        default=({},),
        min_length=1,
        description="Variables of the chat template, one mapping per variant, such as"
        " `{enable_thinking: false}`. Each conversation and each evaluation prompt gets one of"
        " them.",
    )
    requests_in_flight: int = Field(
        default=32,
        ge=1,
        description="Answers, or prompts of the target's own, that are asked for at once; a little"
        " above `engine.max_num_seqs` keeps the engine's batch full.",
    )
    task_runner: Literal["threads", "dask"] = Field(
        default="threads",
        description="Where filters and rendering run: in the flow's own process (`threads`), or as"
        " Prefect tasks on a Dask cluster (`dask`), for datasets that one process is too slow for.",
    )
    dask_address: str | None = Field(
        default=None,
        description="Address of a Dask scheduler whose workers see the state folder. Null starts a"
        " cluster on this machine, one process per core; read for task_runner `dask` only.",
    )
    min_mask_share: float = Field(
        default=0.05,
        ge=0,
        lt=1,
        description="Share of a row's tokens that should be supervised; where more than one row in"
        " twenty has less, the dataset is written with a warning.",
    )
    seed: int = Field(
        default=0,
        description="Seed of the order in which rows are drawn; the same sources and seed give the"
        " same conversations.",
    )
