"""Names of artifacts."""

from __future__ import annotations

from flows.flow_run.artifacts import _key


def test_artifact_keys_hold_what_prefect_allows() -> None:
    assert _key("Gate: acceptance_by slice (95 %)") == "gate-acceptance-by-slice-95"
