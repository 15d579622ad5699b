"""Sections of the gate's page: acceptance by length of the prompt and by language, and the long
shared prefix, cold and warm."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from html import escape

from components.contracts import ArmGroups, GroupAcceptance, WarmPrefixPoint
from components.reporting.html_table import html_table
from components.reporting.style import label

LENGTH_NOTE = (
    "Tokens per target step by tokens of the prompt, chat template included; in brackets the 95 %"
    " interval over the prompts. No interval: one prompt."
)
LANGUAGE_NOTE = (
    "Tokens per target step by the language of the user's text (py3langid); 'not told' holds texts"
    " of a few words, which say too little."
)
PREFIX_NOTE = (
    "questions behind one long prefix, each asked with the prefix never seen (cold) and seen "
    "(warm);"
    " one request at a time, medians. Length: tokens per target step. vLLM takes one block less"
    " from the cache for a drafter that reads hidden states, so such an arm computes more of a warm"
    " prompt than no draft does."
)

Groups = Sequence[tuple[str, tuple[GroupAcceptance, ...]]]


def groups_section(arms: Sequence[ArmGroups]) -> str:
    """Acceptance by length of the prompt and by language, a section each; empty without a drafting
    arm.

    Args:
        arms: in the order of the page's other tables.
    """
    lengths = _group_table("prompt tokens", [(one.arm, one.by_length) for one in arms])
    languages = _group_table("language", [(one.arm, one.by_language) for one in arms])
    return _section("Acceptance length by length of the prompt", lengths, LENGTH_NOTE) + _section(
        "Acceptance length by language", languages, LANGUAGE_NOTE
    )


def warm_prefix_section(points: Sequence[WarmPrefixPoint]) -> str:
    """Time to first token and acceptance on one long shared prefix; empty where not measured.

    Args:
        points: one per arm, in the order of the page's other tables.
    """
    columns = (
        "", "prompt tokens", "from the cache", "TTFT cold, ms", "TTFT warm, ms", "length cold",
        "length warm",
    )  # fmt: skip
    rows = [
        [
            escape(label(point.arm)),
            f"{point.num_prompt_tokens:,.0f}",
            _or_dash(point.cached_warm, lambda tokens: f"{tokens:,.0f}"),
            f"{point.ttft_cold_ms:,.0f}",
            f"{point.ttft_warm_ms:,.0f} <span class='soft'>{point.ttft_ratio:.2f}x</span>",
            _or_dash(point.acceptance_cold, lambda length: f"{length:.2f}"),
            _or_dash(point.acceptance_warm, lambda length: f"{length:.2f}"),
        ]
        for point in points
    ]

    if not rows:
        return ""
    table = html_table(columns, rows, numbers=range(1, len(columns)))
    return _section(
        "One long prefix, cold and warm", table, f"{points[0].num_questions} {PREFIX_NOTE}"
    )


def _section(title: str, table: str, note: str) -> str:
    if not table:
        return ""
    return f"<section><h2>{escape(title)}</h2>{table}<p class='note'>{escape(note)}</p></section>\n"


def _group_table(heading: str, arms: Groups) -> str:
    """Groups by arms; the groups in the order of the arm that has most of them."""
    orders = sorted(
        ([group.group for group in groups] for _, groups in arms), key=len, reverse=True
    )
    names = list(dict.fromkeys(name for order in orders for name in order))
    by_arm = [{group.group: group for group in groups} for _, groups in arms]
    rows = []

    for name in names:
        most = max(groups[name].num_prompts for groups in by_arm if name in groups)
        rows.append(
            [escape(name), str(most), *(_cell(groups.get(name), most) for groups in by_arm)]
        )

    columns = [heading, "prompts", *(label(arm) for arm, _ in arms)]
    return html_table(columns, rows, numbers=range(1, len(columns))) if rows else ""


def _cell(group: GroupAcceptance | None, most: int) -> str:
    """Length and interval; the number of prompts, where another arm answered more."""
    if group is None:
        return "-"
    ends = group.interval
    spread = f" <span class='soft'>[{ends[0]:.2f}, {ends[1]:.2f}]</span>" if ends else ""
    fewer = f" <span class='soft'>of {group.num_prompts}</span>" if group.num_prompts < most else ""
    return f"{group.acceptance_length:.2f}{spread}{fewer}"


def _or_dash(value: float | None, told: Callable[[float], str]) -> str:
    return "-" if value is None else told(value)
