"""The gate's decision: one verdict, and every rule and number it rests on."""

from __future__ import annotations

import hmac
from datetime import datetime
from enum import StrEnum
from pathlib import Path
from typing import Any, Self

from pydantic import Field

from components.contracts.digests import digest_json
from components.contracts.record import Record
from components.contracts.serving.arms import Schedule
from components.contracts.target import TargetFingerprint
from components.errors import ConfigError


class Verdict(StrEnum):
    """Outcome of a gate or one of its rules."""

    PASS = "pass"
    FAIL = "fail"
    INCONCLUSIVE = "inconclusive"


class RuleResult(Record):
    """One gate rule with the numbers it used."""

    rule: str
    verdict: Verdict
    value: float | None
    threshold: float | None
    detail: str
    interval: tuple[float, float] | None = Field(
        default=None, description="of `value`, that the verdict rests on"
    )
    confidence: float | None = Field(
        default=None, description="two-sided level of the intervals, 0.95 for 95 %"
    )
    bootstrap_interval: tuple[float, float] | None = Field(
        default=None, description="BCa, as a second opinion"
    )
    p_values: dict[str, float] = Field(
        default={}, description="one-sided, by claim; '(Holm)' ones over all slices"
    )
    binding: bool = Field(
        default=True, description="counts for the verdict; others are told for information"
    )
    num_prompts: int | None = None
    num_further_prompts: int | None = Field(
        default=None,
        description="that an inconclusive rule needs to be decided; None: not inconclusive, or "
        "unknown",
    )
    num_further_rounds: int | None = Field(
        default=None,
        description="of speed, that an inconclusive speed-up needs to be decided; None: as for "
        "prompts",
    )


class GateDecision(Record):
    """The gate's written decision: every input by digest, every rule, every number, one verdict.

    `content_digest` is the digest of all the rest but the signature, so a decision file that was
    changed by hand is refused (`read`): it says that a file is whole, not who wrote it. Who wrote
    it is what `signature` says, an HMAC with a key that only the gate and those who check it have.
    """

    candidate_digest: str
    champion_digest: str | None
    target_fingerprint: TargetFingerprint
    report_digest: str
    rules: tuple[RuleResult, ...]
    verdict: Verdict
    speculative_schedule: Schedule = Field(
        default=(),
        description="[from, to, K] by requests in flight; vLLM's "
        "num_speculative_tokens_per_batch_size",
    )
    drafter_out_above: int | None = Field(
        default=None,
        description="requests in flight above which the drafter should not be loaded at all: "
        "with the schedule, plain"
        " decoding was more than 5 % faster there, or nothing was measured; None: no such load, "
        "or no speed measured",
    )
    superior: bool = Field(
        default=False,
        description="passed, and the paired difference to the champion over all slices lies "
        "above 0",
    )
    settings: dict[str, Any] = Field(
        default={}, description="the recipe's gate section it was decided by"
    )
    recipe: str = Field(default="", description="name of the recipe it was decided by")
    size: str | None = Field(default=None, description="overlay of that recipe")
    look: int = Field(
        default=1, ge=1, description="how often the candidate was measured for it, this included"
    )
    created_at: datetime
    content_digest: str = Field(
        default="", description="sha256 (hex) over everything else but the signature"
    )
    signature: str | None = Field(
        default=None,
        description="HMAC-SHA256 (hex) of the content digest; None where no key was configured",
    )

    def sealed(self, key: bytes | None) -> Self:
        """The same decision with its content digest and, given a key, its signature."""
        digest = self._content_digest()
        signature = _hmac(key, digest) if key is not None else None
        return self.model_copy(update={"content_digest": digest, "signature": signature})

    def check_signature(self, key: bytes | None) -> None:
        """Check the signature where a key is configured; without one nobody can say who wrote a
        decision.

        Raises:
            ConfigError: not signed, or signed with another key.
        """
        if key is None:
            return
        if self.signature is None:
            raise ConfigError(
                "the gate's decision is not signed, and a signing key is configured",
                fix="Gate the drafter again where the key is configured.",
            )
        if not hmac.compare_digest(self.signature, _hmac(key, self._content_digest())):
            raise ConfigError(
                "the gate's decision was signed with another key, or changed since",
                fix="Gate the drafter again, or configure the key it was signed with.",
            )

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read a decision written by `write`.

        Raises:
            ConfigError: the file is missing, holds no decision, or was changed after it was
                written.
        """
        decision = super().read(path)
        if decision.content_digest != decision._content_digest():
            raise ConfigError(
                f"{path} was changed after it was written",
                got=decision.content_digest or "no digest",
                expected=decision._content_digest(),
                fix="Decide again from the report: dspark gate --report ...",
            )
        return decision

    def _content_digest(self) -> str:
        return digest_json(self.model_dump(mode="json", exclude={"content_digest", "signature"}))


def _hmac(key: bytes, digest: str) -> str:
    return hmac.new(key, digest.encode(), "sha256").hexdigest()
