"""Sections of the gate's page: acceptance by length of the prompt and by language, and the long
shared prefix, cold and warm."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from html import escape

from components.contracts import ArmGroups, GroupAcceptance, WarmPrefixPoint
from components.reporting.html_table import html_table
from components.reporting.style import label

LENGTH_NOTE = (
    "Tokens per target step by tokens of the prompt, chat template included; in square brackets"
    " the 95 % interval over the prompts, behind it how many they are. No interval: one prompt, or"
    " prompts that are all alike."
)
LANGUAGE_NOTE = (
    "By the language of the user's text (py3langid); 'not told' holds texts of a few words, which say too little."
)
PREFIX_NOTE = (
    "The same questions behind one long prefix, never seen (cold) and seen (warm); one request at a"
    " time, medians. vLLM takes one block less from the cache for a drafter that reads hidden"
    " states, so an arm with a draft computes more of a warm prompt than no draft does."
)


def groups_section(arms: Sequence[ArmGroups]) -> str:
    """Acceptance by prompt length and by language as one section; empty without a drafting arm.

    Args:
        arms: in the order of the page's other tables.
    """
    lengths = _group_table("prompt tokens", [(one.arm, one.by_length) for one in arms])
    languages = _group_table("language", [(one.arm, one.by_language) for one in arms])
    if not lengths:
        return ""
    return (
        "<section><h2>Acceptance length by kind of prompt</h2>"
        f"{lengths}<p class='note'>{escape(LENGTH_NOTE)}</p>"
        f"{languages}<p class='note'>{escape(LANGUAGE_NOTE)}</p></section>\n"
    )


def warm_prefix_section(points: Sequence[WarmPrefixPoint]) -> str:
    """Time to first token and acceptance on one long shared prefix; empty where not measured.

    Args:
        points: one per arm, in the order of the page's other tables.
    """
    if not points:
        return ""
    columns = (
        "", "questions", "prompt tokens", "from the cache", "TTFT cold, ms", "TTFT warm, ms",
        "warm / cold", "accepted cold", "accepted warm",
    )  # fmt: skip
    rows = [
        [
            escape(label(point.arm)),
            str(point.num_questions),
            f"{point.num_prompt_tokens:,.0f}",
            _or_dash(point.cached_warm, lambda tokens: f"{tokens:,.0f}"),
            f"{point.ttft_cold_ms:,.0f}",
            f"{point.ttft_warm_ms:,.0f}",
            f"{point.ttft_ratio:.2f}",
            _or_dash(point.acceptance_cold, lambda length: f"{length:.2f}"),
            _or_dash(point.acceptance_warm, lambda length: f"{length:.2f}"),
        ]
        for point in points
    ]
    table = html_table(columns, rows, numbers=range(1, len(columns)))
    return (
        f"<section><h2>One long prefix, cold and warm</h2>{table}<p class='note'>{escape(PREFIX_NOTE)}</p></section>\n"
    )


def _group_table(heading: str, arms: Sequence[tuple[str, tuple[GroupAcceptance, ...]]]) -> str:
    """Groups by arms; the groups in the order of the arm that has most of them."""
    orders = sorted(([group.group for group in groups] for _, groups in arms), key=len, reverse=True)
    names = list(dict.fromkeys(name for order in orders for name in order))
    by_arm = [{group.group: group for group in groups} for _, groups in arms]
    rows = [[escape(name), *(_cell(groups.get(name)) for groups in by_arm)] for name in names]
    columns = [heading, *(label(arm) for arm, _ in arms)]
    return html_table(columns, rows, numbers=range(1, len(columns))) if rows else ""


def _cell(group: GroupAcceptance | None) -> str:
    if group is None:
        return "-"
    ends = group.interval
    spread = f" <span class='soft'>[{ends[0]:.2f}, {ends[1]:.2f}]</span>" if ends else ""
    prompts = "prompt" if group.num_prompts == 1 else "prompts"
    count = f" <span class='soft'>{group.num_prompts} {prompts}</span>"
    return f"{group.acceptance_length:.2f}{spread}{count}"


def _or_dash(value: float | None, told: Callable[[float], str]) -> str:
    return "-" if value is None else told(value)
