"""The gate's page stands alone, shows the figures of report and decision, and escapes what models
and users wrote.
"""

from __future__ import annotations

import re
from datetime import UTC, datetime
from html.parser import HTMLParser
from pathlib import Path

import pytest

from components.contracts import (
    AcceptanceReport,
    ArmReport,
    DraftLengthReport,
    GateDecision,
    PromptMeasurement,
    RuleResult,
    SpeedPoint,
    TargetFingerprint,
    TargetRef,
    Verdict,
)
from components.reporting.gate.acceptance_plots import plot_acceptance
from components.reporting.gate.draft_lengths import length_table
from components.reporting.gate.page import gate_page, lost_prompts, write_gate_page

START = datetime(2026, 1, 1, tzinfo=UTC)
FINGERPRINT = TargetFingerprint(weights="w", quantization="q", tokenizer="t", serving="s")


def prompt(number: int, accepted: int) -> PromptMeasurement:
    return PromptMeasurement(
        prompt_id=f"code/{number}",
        slice="code",
        num_prompt_tokens=9,
        num_output_tokens=21 + accepted,
        num_steps=20,
        num_draft_tokens=40,
        num_accepted_tokens=accepted,
        accepted_by_position=(accepted, 0),
        latency_s=1,
        output_digest="d",
    )


def arm(
    name: str, accepted: tuple[int, ...], *, rates: dict[int, float], drafts: bool = True
) -> ArmReport:
    length = 1 + sum(accepted) / (20 * len(accepted))
    speed = tuple(
        SpeedPoint(
            requests_in_flight=level, num_requests=8, output_tokens_per_s=rate,
            ttft_p50_ms=61, ttft_p99_ms=92, itl_p50_ms=7, itl_p99_ms=9,
        )
        for level, rate in rates.items()
    )  # fmt: skip
    return ArmReport(
        arm=name,
        checkpoint_digest=name * 8 if drafts else None,
        acceptance_length=length,
        acceptance_interval=(length - 0.1, length + 0.1) if drafts else None,
        acceptance_by_slice={"code": length},
        interval_by_slice={"code": (length - 0.2, length + 0.2)} if drafts else {},
        acceptance_by_position=(0.5, 0.25) if drafts else (),
        draft_coverage=1.0,
        prompts=tuple(prompt(number, count) for number, count in enumerate(accepted)),
        speed=speed,
        engine_counters={},
        acceptance_histogram=(10, 5, 5) if drafts else (),
    )


@pytest.fixture
def report() -> AcceptanceReport:
    arms = [
        arm("candidate", (4, 16, 9), rates={1: 61, 4: 120, 8: 165}),
        arm("champion", (12, 14, 9), rates={1: 60, 4: 118, 8: 160}),
        arm("no_draft", (0, 0, 0), rates={1: 43, 4: 130, 8: 237}, drafts=False),
    ]
    return AcceptanceReport(
        target=TargetRef(
            name="tiny", path="p", source="test", fingerprint=FINGERPRINT, quantization="none"
        ),
        temperature=0,
        max_tokens=64,
        prompt_digest="p",
        arms={one.arm: one for one in arms},
        num_equal_outputs=3,
        num_compared_outputs=3,
        excluded={"code/9": "too <long>"},
        engine_version="1",
        created_at=START,
    )


@pytest.fixture
def decision() -> GateDecision:
    rules = (
        RuleResult(
            rule="non-inferior on code",
            verdict=Verdict.INCONCLUSIVE,
            value=-0.04,
            threshold=-0.05,
            detail="wide",
            interval=(-0.12, 0.05),
            bootstrap_interval=(-0.1, 0.04),
            confidence=0.98,
            num_prompts=3,
            num_further_prompts=40,
        ),
        RuleResult(
            rule="superior overall",
            verdict=Verdict.INCONCLUSIVE,
            value=-0.04,
            threshold=0,
            detail="not required",
            interval=(-0.1, 0.03),
            confidence=0.95,
            num_prompts=3,
            binding=False,
        ),
    )
    return GateDecision(
        candidate_digest="c",
        champion_digest="h",
        target_fingerprint=FINGERPRINT,
        report_digest="r",
        rules=rules,
        verdict=Verdict.INCONCLUSIVE,
        speculative_schedule=((1, 1, 2), (2, 64, 0)),
        drafter_out_above=1,
        created_at=START,
    ).sealed(b"0123456789abcdef")


class Links(HTMLParser):
    """Every address an HTML page would load something from."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []
        self.tags: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.found += [
            value or "" for name, value in attrs if name in {"src", "href", "xlink:href", "data"}
        ]


def test_the_page_loads_nothing(
    report: AcceptanceReport, decision: GateDecision, tmp_path: Path
) -> None:
    page = write_gate_page(report, decision, tmp_path / "gate.html").read_text()
    links = Links()
    links.feed(page)
    assert all(link.startswith("#") for link in links.found)
    assert not {"script", "link", "img", "iframe"} & set(links.tags)
    assert not re.findall(r"url\((?!#)|@import", page)
    assert links.tags.count("svg") == 5


def test_ids_of_plots_are_unique(report: AcceptanceReport, decision: GateDecision) -> None:
    page = gate_page(report, decision)
    ids = re.findall(r'\bid="([^"]+)"', page)
    assert len(ids) == len(set(ids))
    assert set(re.findall(r'(?:href="|url\()#([^")]+)', page)) <= set(ids)


def test_figures_and_words_of_the_decision_are_on_the_page(
    report: AcceptanceReport, decision: GateDecision
) -> None:
    page = gate_page(report, decision, prompts={"code/0": "print <b>this</b>"})
    assert "undecided: non-inferior on code" in page and "superior overall" in page
    assert "1.48" in page and "1.58" in page  # candidate's and champion's length
    assert "1.42x" in page and "Take the drafter out above 1 requests in flight." in page
    assert "Break-even with no draft at about 3.2" in page
    assert (
        "print &lt;b&gt;this&lt;/b&gt;" in page
        and "<b>this" not in page
        and "too &lt;long&gt;" in page
    )
    assert decision.content_digest in page and str(decision.signature) in page


def test_prompts_lost_most_come_first(report: AcceptanceReport) -> None:
    against, lost = lost_prompts(report)
    assert against == "champion"
    assert [one.prompt_id for one in lost] == ["code/0"]
    assert (lost[0].ours, lost[0].theirs, lost[0].loss) == pytest.approx((1.2, 1.6, 8.0))
    alone = report.model_copy(update={"arms": {"candidate": report.arms["candidate"]}})
    against, lost = lost_prompts(alone)
    assert against == "its slice" and [one.prompt_id for one in lost] == ["code/0", "code/2"]


def test_fewer_draft_tokens_stand_beside_all_of_them(
    report: AcceptanceReport, decision: GateDecision
) -> None:
    assert "Fewer draft tokens" not in gate_page(report, decision)
    shorter = DraftLengthReport(
        num_draft_tokens=1, arm=arm("draft_1", (3, 6), rates={1: 53.75, 4: 117}),
        no_draft_speed=report.arms["no_draft"].speed,
    )  # fmt: skip
    both = report.model_copy(update={"draft_lengths": (shorter,)})
    columns, rows = length_table(both)
    assert columns[1] == "acceptance length (2 prompts)"  # of three, in every row
    assert (
        rows[0][0] == str(len(report.arms["candidate"].acceptance_by_position))
        and rows[1][0] == "1"
    )
    assert rows[0][2:4] == ("1.42x", "0.92x") and rows[1][2:] == ("1.25x", "0.90x", "-")
    prompts = report.arms["candidate"].prompts[:2]
    steps, accepted = (
        sum(getattr(p, name) for p in prompts) for name in ("num_steps", "num_accepted_tokens")
    )
    assert float(rows[0][1]) == pytest.approx(1 + accepted / steps, abs=5e-4)
    page = gate_page(both, decision)
    assert "<h2>Fewer draft tokens</h2>" in page and rows[1][1] in page


def test_without_champion_and_speed_the_page_has_no_holes(
    report: AcceptanceReport, decision: GateDecision, tmp_path: Path
) -> None:
    candidate = report.arms["candidate"].model_copy(update={"speed": ()})
    alone = report.model_copy(update={"arms": {"candidate": candidate}})
    plain = decision.model_copy(
        update={"rules": (), "verdict": Verdict.PASS, "drafter_out_above": None}
    )
    page = gate_page(alone, plain)
    assert (
        "every rule holds" in page
        and "<h2>Speed</h2>" not in page
        and "<h2>Candidate against" not in page
    )
    assert set(plot_acceptance(alone, tmp_path, decision=plain)) == {
        "acceptance_by_slice", "acceptance_by_position", "accepted_per_step"
    }  # fmt: skip
