"""Public datasets by a short name: where they lie on the Hugging Face Hub, and which column holds
the prompts.

A recipe's source with `preset: magpie` takes everything from here that it does not set itself.
Evaluation sets are presets, too, so that a recipe can keep them out of training
(`decontaminate_against: [math500, mbpp]`); as a source of training prompts they are refused, unless
their split is a training one.

Columns and splits were read from the cards of the datasets and from
`speculators.data_generation.configs`.
"""

from __future__ import annotations

from dataclasses import dataclass

from components.errors import CurationError


@dataclass(frozen=True, kw_only=True)
class Preset:
    """One public dataset.

    Attributes:
        repo_id: on the Hub.
        split: rows that are used.
        column: with messages, turns or a prompt.
        subset: configuration of the dataset, where it has several.
        licence: as the card states it.
        is_evaluation: whether other people's evaluations use this split.
    """

    repo_id: str
    split: str
    column: str
    licence: str
    subset: str | None = None
    is_evaluation: bool = False


PRESETS = {
    "magpie": Preset(
        repo_id="Magpie-Align/Magpie-Llama-3.1-Pro-300K-Filtered",
        split="train",
        column="conversations",
        licence="llama3.1",
    ),
    "ultrachat": Preset(
        repo_id="HuggingFaceH4/ultrachat_200k", split="train_sft", column="messages", licence="MIT"
    ),
    "open_perfect_blend": Preset(
        repo_id="mlabonne/open-perfectblend",
        split="train",
        column="conversations",
        licence="Apache-2.0",
    ),
    "gsm8k": Preset(
        repo_id="openai/gsm8k", subset="main", split="train", column="question", licence="MIT"
    ),
    "gsm8k_test": Preset(
        repo_id="openai/gsm8k",
        subset="main",
        split="test",
        column="question",
        licence="MIT",
        is_evaluation=True,
    ),
    "math500": Preset(
        repo_id="HuggingFaceH4/MATH-500",
        split="test",
        column="problem",
        licence="MIT",
        is_evaluation=True,
    ),
    "mbpp": Preset(
        repo_id="google-research-datasets/mbpp",
        subset="full",
        split="train",
        column="text",
        licence="CC-BY-4.0",
    ),
    "mbpp_test": Preset(
        repo_id="google-research-datasets/mbpp",
        subset="full",
        split="test",
        column="text",
        licence="CC-BY-4.0",
        is_evaluation=True,
    ),
    "humaneval": Preset(
        repo_id="openai/openai_humaneval",
        split="test",
        column="prompt",
        licence="MIT",
        is_evaluation=True,
    ),
    "mt_bench": Preset(
        repo_id="HuggingFaceH4/mt_bench_prompts",
        split="train",
        column="prompt",
        licence="Apache-2.0",
        is_evaluation=True,
    ),
}


def preset_of(name: str) -> Preset:
    """The preset of that name.

    Raises:
        CurationError: there is none.
    """
    if name not in PRESETS:
        raise CurationError("no such preset", got=name, expected=", ".join(sorted(PRESETS)))
    return PRESETS[name]
