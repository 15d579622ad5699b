"""Greedy outputs of an engine at work, judged by the gate's own rule against what the plain engine
answered. Pure.

A gate keeps the plain engine's answers. Whoever asks the same prompts later, at temperature 0, can
tell by them whether what is served is still the target's own: a rollout does, of the very engine
that is about to serve.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from components.contracts import (
    AcceptanceReport,
    Arm,
    Divergence,
    PlainAnswers,
    SelfComparison,
    Verdict,
)
from components.errors import EvaluationError
from components.evaluation.outputs.greedy_answers import GreedyAnswer, digest_tokens, divergence
from components.evaluation.outputs.losslessness import judge_outputs, margin_of


class OutputWatch:
    """Collects the first answer to each prompt and says when they are not the target's own.

    Args:
        report: of the gate, which compared the plain engine with itself.
        plain: what that engine answered.
        alpha: chance that a lossless engine is ever called lossy: each prompt's answer is a look at
            what was added, and the level is shared out evenly over them.

    Raises:
        EvaluationError: the answers are not those the report was made of.
    """

    def __init__(self, report: AcceptanceReport, plain: PlainAnswers, *, alpha: float) -> None:
        told = {one.prompt_id: one.output_digest for one in report.arms[Arm.NO_DRAFT].prompts}
        strange = [
            n
            for n, one in plain.answers.items()
            if n in told and digest_tokens(one.token_ids) != told[n]
        ]

        if strange or not plain.answers.keys() & told.keys():
            raise EvaluationError(
                "the plain engine's answers are not those of the gate's report",
                got=strange[0] if strange else "no answer to any of its prompts",
                fix="Gate the drafter again.",
            )

        self._plain = {
            name: GreedyAnswer(one.token_ids, one.top) for name, one in plain.answers.items()
        }
        self._itself = report.self_comparisons
        self._dtype = report.dtype
        self._alpha = alpha / len(plain.answers)
        self._divergences: dict[str, Divergence] = {}

        self._lengths: dict[str, int] = {}

    @property
    def num_compared(self) -> int:
        """Prompts that were answered."""
        return len(self._lengths)

    def add(self, prompt_id: str, token_ids: Sequence[int], *, was_cut: bool) -> None:
        """An answer; only the first to each prompt counts, and prompts that the gate did not ask
        are left out.

        Args:
            prompt_id: of the gate's.
            token_ids: as answered, an end token included.
            was_cut: it ended at its length limit: the plain answer is compared up to there.
        """
        plain = self._plain.get(prompt_id)
        if plain is None or prompt_id in self._lengths or not token_ids:
            return

        ours, length = tuple(token_ids), len(token_ids)
        if was_cut or len(ours) > len(plain.token_ids):
            # Either may have had the smaller limit: what both hold is compared.
            length = min(len(ours), len(plain.token_ids))
            ours = ours[:length]
            plain = GreedyAnswer(plain.token_ids[:length], plain.top[:length])

        self._lengths[prompt_id] = length
        parted = divergence(plain, GreedyAnswer(ours))
        if parted is not None:
            self._divergences[prompt_id] = parted

    def fault(self) -> str | None:
        """Why what was answered is not the target's own, in words; None where rounding explains it,
        or nothing was.
        """
        if not self._lengths or not self._itself:
            return None
        itself = [self._of_the_same(one) for one in self._itself]
        judged = judge_outputs(self._divergences, itself, dtype=self._dtype, alpha=self._alpha)
        if judged.verdict is not Verdict.FAIL:
            return None

        largest = max(map(margin_of, self._divergences.values()))
        return (
            f"{len(self._divergences)} of {self.num_compared} outputs part from the target's "
            "own, by up to"
            f" {largest:.2f} nats; rounding reaches {judged.reach_nats:.2f} (p "
            f"{judged.share_p_value:.2g})"
        )

    def _of_the_same(self, one: SelfComparison) -> SelfComparison:
        """The plain engine against itself over the prompts, and as far, as they were answered
        here.
        """
        return one.model_copy(
            update={
                "digests": {
                    name: digest for name, digest in one.digests.items() if name in self._lengths
                },
                "divergences": _within(one.divergences, self._lengths),
            }
        )


def _within(
    divergences: Mapping[str, Divergence], lengths: Mapping[str, int]
) -> dict[str, Divergence]:
    return {name: one for name, one in divergences.items() if one.position < lengths.get(name, 0)}
