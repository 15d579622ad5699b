"""Whether a release's evidence still bears it: its report is decided again before it serves."""

from __future__ import annotations

from components.contracts import CheckpointRef, Release
from components.errors import ConfigError, EvaluationError, RegistryError
from components.evaluation.rules.asked import Asked
from components.evaluation.rules.decide import check_decision
from components.registry.client import Registry
from components.registry.releases import acceptance_report_of, check_releasable, gate_decision_of
from components.settings import load_recipe
from components.settings.signing import signing_key
from components.stages.gate.paced import as_paced
from components.stages.gate.same_weights import champion_to_beat
from components.stages.prompts import prompts_of


def check_evidence(
    registry: Registry, release: Release, *, recipe: str, champion: CheckpointRef | None
) -> None:
    """Decide again from the release's report, under the recipe and overlay it was gated by, as they
    are now.

    Args:
        registry: that holds decision and report.
        release: with its checkpoint on this machine.
        recipe: name or path.
        champion: the drafter in service, which the report must compare the release with; None:
            there is none.

    Raises:
        RegistryError: the evidence does not bear the release, or is not signed where a key is
            configured.
    """
    decision, report = gate_decision_of(registry, release), acceptance_report_of(registry, release)
    try:
        loaded = as_paced(load_recipe(recipe, size=decision.size), report)
        asked = Asked(
            loaded,
            decision.size,
            prompts_of(loaded),
            champion_to_beat(release.checkpoint, champion),
        )
        check_decision(decision, report, asked=asked, signing_key=signing_key())
    except (ConfigError, EvaluationError) as error:
        raise RegistryError(
            f"{release.model_name} version {release.version} may not serve: its evidence does "
            "not bear it",
            got=str(error),
            fix="Gate the drafter again: prefect deployment run 'gate-drafter/<recipe>'.",
        ) from None

    check_releasable(
        checkpoint=release.checkpoint, target=release.target, gate=decision, report=report
    )
