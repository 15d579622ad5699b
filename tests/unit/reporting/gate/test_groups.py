"""Sections on kinds of prompts and on the shared prefix: every figure is there, and nothing where
nothing was.
"""

from __future__ import annotations

from components.contracts import ArmGroups, GroupAcceptance, WarmPrefixPoint
from components.reporting.gate.groups import groups_section, warm_prefix_section


def group(
    name: str, num_prompts: int, length: float, interval: tuple[float, float] | None
) -> GroupAcceptance:
    return GroupAcceptance(
        group=name, num_prompts=num_prompts, acceptance_length=length, interval=interval
    )


def test_arms_stand_side_by_side_with_intervals_and_counts() -> None:
    candidate = ArmGroups(
        arm="candidate",
        by_length=(group("up to 64", 9, 1.62, (1.4, 1.9)), group("65 to 256", 1, 1.3, None)),
        by_language=(group("en", 9, 1.6, (1.4, 1.9)), group("<fr>", 1, 1.3, None)),
    )
    champion = ArmGroups(
        arm="champion",
        by_length=(group("up to 64", 4, 1.5, (1.3, 1.7)),),
        by_language=(group("en", 9, 1.5, (1.3, 1.7)),),
    )
    page = groups_section([champion, candidate])
    # In the order of the arm with all bands.
    assert page.index("up to 64") < page.index("65 to 256")
    assert "<td class='num'>9</td><td class='num'>1.50 " in page
    assert "<td class='num'>1.62 <span class='soft'>[1.40, 1.90]</span></td>" in page
    assert "1.50 <span class='soft'>[1.30, 1.70]</span> <span class='soft'>of 4</span>" in page
    assert "<td class='num'>1</td>" in page and "<td class='num'>1.30</td>" in page
    assert "<td class='num'>-</td>" in page  # the champion has none there
    assert "&lt;fr&gt;" in page and "<fr>" not in page


def test_cold_and_warm_stand_side_by_side() -> None:
    point = WarmPrefixPoint(
        arm="no_draft", num_questions=8, num_prompt_tokens=641, ttft_cold_ms=1200, ttft_warm_ms=90,
        acceptance_cold=None, acceptance_warm=None, cached_cold=0, cached_warm=640,
    )  # fmt: skip
    page = warm_prefix_section([point])
    cells = ["no draft", "641", "640", "1,200", "90 <span class='soft'>0.07x</span>", "-", "-"]
    assert (
        "".join(f"<td class='{'num' if n else ''}'>{cell}</td>" for n, cell in enumerate(cells))
        in page
    )
    assert "8 questions behind" in page


def test_nothing_measured_is_no_section() -> None:
    assert groups_section([]) == "" and warm_prefix_section([]) == ""
