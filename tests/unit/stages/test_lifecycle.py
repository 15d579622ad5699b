"""What a run says of what serves now: true before a first promotion, after it, and after a fallback
to no draft.
"""

from __future__ import annotations

from components.contracts import ArmEndpoint, CheckpointRef, Release, TargetFingerprint, TargetRef
from components.serving.rollout.production import ProductionEngine
from components.stages.lifecycle import serving_now

URL = "http://here/v1/chat/completions"
FINGERPRINT = TargetFingerprint(weights="w", quantization="q", tokenizer="t", serving="s")
TARGET = TargetRef(
    name="tiny", path="p", source="test", fingerprint=FINGERPRINT, quantization="none"
)


def release(version: int, digest: str) -> Release:
    checkpoint = CheckpointRef.model_construct(digest=digest)
    return Release.model_construct(
        model_name="tiny-drafter",
        version=version,
        checkpoint=checkpoint,
        target=TARGET,
        gate_digest="g",
        run_id="r",
    )


def production(digest: str | None) -> ProductionEngine:
    endpoint = ArmEndpoint(
        arm="baseline", url="u", model="m", checkpoint_digest=digest, num_draft_tokens=4
    )
    return ProductionEngine(endpoint=endpoint, fingerprint=FINGERPRINT, pid=1, start_ticks=1)


def test_before_a_first_promotion_nothing_answers() -> None:
    assert serving_now(None, (None, None), url=URL) == f"nothing serves, {URL} answers HTTP 503"


def test_a_champion_whose_engine_is_gone_does_not_serve() -> None:
    assert "HTTP 503" in serving_now(None, (None, release(3, "old")), url=URL)


def test_the_release_behind_the_engine_is_named() -> None:
    both = (release(4, "new"), release(3, "old"))
    assert (
        serving_now(production("old"), both, url=URL)
        == f"version 3 of tiny-drafter serves at {URL}"
    )
    assert (
        serving_now(production("new"), both, url=URL)
        == f"version 4 of tiny-drafter serves at {URL}"
    )
    assert (
        serving_now(production("another-one-of-old"), both, url=URL)
        == f"the drafter another-one- serves at {URL}"
    )


def test_no_draft_in_production_is_the_target_alone() -> None:
    assert (
        serving_now(production(None), (None, None), url=URL)
        == f"the target serves without a drafter at {URL}"
    )
