"""The short model card (README.md) inside a drafter checkpoint."""

from __future__ import annotations

import json
from typing import Any

from components.contracts import Calibration, CheckpointRef, TargetRef

ALGORITHM_NAMES = {"dspark": "DSpark", "dflash": "DFlash", "eagle3": "EAGLE-3"}


def model_card(
    ref: CheckpointRef,
    *,
    target: TargetRef,
    provenance: dict[str, Any],
    calibration: Calibration | None = None,
) -> str:
    """Markdown: what the drafter is for, how it was trained, how to serve it, and what it must not
    be used for.
    """
    length = ref.expected_acceptance_length
    measured = (
        f"{length:.3f} (teacher-forced on held-out conversations)"
        if length is not None
        else "not measured"
    )
    rows = {
        "Target": f"{target.name} ({target.source}), quantization {target.quantization}",
        "Target weights": f"`{target.fingerprint.weights}`",
        "Draft tokens per target step": ref.num_draft_tokens,
        "Acceptance length": measured,
        "Trained": f"{ref.step} steps, {ref.num_trained_tokens} tokens",
        "Dataset": f"`{ref.dataset_digest}`" if ref.dataset_digest else "none",
        "Parent": f"`{ref.parent_digest}`" if ref.parent_digest else "none",
        **(_calibration_rows(calibration, target) if calibration is not None else {}),
        "Code": f"`{provenance['code_revision']}`",
        "Written": provenance["created_at"],
    }
    table = "\n".join(f"| {name} | {value} |" for name, value in rows.items())
    serving = json.dumps({"model": "<this folder>", "num_speculative_tokens": ref.num_draft_tokens})
    return f"""# {ALGORITHM_NAMES[ref.algorithm]} drafter for {target.name}

A draft model for speculative decoding. It proposes tokens that the target verifies, so it changes
speed, never answers.

| | |
|---|---|
{table}

Serve it with vLLM:
`--speculative-config '{serving}'`.

It is bound to the target in `target_fingerprint.json`. On any other weights, quantization or
tokenizer it is useless at best; measure it there before serving it. Settings, versions and the
command that wrote it are in `provenance.json`.
"""


def _calibration_rows(calibration: Calibration, target: TargetRef) -> dict[str, str]:
    before, after = calibration.before, calibration.after
    fitted_on = (
        f"{calibration.num_blocks:,} blocks of {calibration.num_conversations} held-out "
        "conversations"
    )
    if calibration.target_weights not in (None, target.fingerprint.weights):
        fitted_on += f", of the target with weights `{calibration.target_weights}`, not of this one"

    pairs = zip(calibration.temperatures, calibration.biases, calibration.is_fitted, strict=True)
    scaling = ", ".join(f"{t:.2f} {b:+.2f}" if fitted else "not fitted" for t, b, fitted in pairs)
    areas = (
        "not defined"
        if after.auc is None or before.auc is None
        else f"{before.auc:.3f} to {after.auc:.3f}"
    )

    return {
        "Confidence head": f"calibrated (`calibration.json`) on {fitted_on}",
        "Temperature and bias by position": scaling,
        "Survival: ECE, before to after": f"{before.ece:.4f} to {after.ece:.4f} (noise alone: "
        f"{after.ece_floor:.4f})",
        "Survival: Brier score, AUC": f"{before.brier:.4f} to {after.brier:.4f}, {areas}",
    }
