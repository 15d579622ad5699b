"""Train-served gap: the same prompts teacher-forced, through reference decoding and as served.

    python -m components.training.checks.train_served job.json

Teacher forcing that promises what serving does not reach means that the two do not compute the same
drafter: other layers, positions, masks or states. Each answer is walked as it was decoded: from its
first token, which the prefill gave, each step commits the accepted drafts and one token more, so
the answer's other tokens over its steps are its acceptance length. Steps that pass the answer's end
count what was kept of them, the same way for all three.

At temperature 0 a draft is accepted where it is the answer's own token. At temperature 1 the
teacher-forced walk is an expectation: with o_k = sum min(p_k, q_k) at slot k of block n, the block
is followed by the one at n + 1 + j with probability o_1 .. o_j (1 - o_{j+1}), which gives each
block's probability of being drafted and their expected number.

Shapes: T tokens, L aux layers plus the last state, H hidden, N anchors, K draft positions.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from components.contracts import ServedAnswer, TrainServedGap
from components.drafter.build import load_drafter, num_draft_tokens
from components.drafter.reference.decoder import ReferenceDecoder
from components.drafter.reference.target import ReferenceTarget
from components.errors import ConfigError, TrainingError, run_main
from components.settings import TrainingSettings
from components.training.checks.acceptance import target_words, walk
from components.training.checks.gap_job import MODULE, RESULT_FILE, GapJob
from components.training.objectives.build import build_objective
from components.training.packing import Blocks, Pack, choose_blocks
from components.training.telemetry import ProgressTicker


@dataclass
class Walked:
    """Sums over answers walked one way."""

    num_kept: int = 0
    num_steps: float = 0.0
    accepted_K: list[float] | None = None

    def add(
        self, *, num_kept: int, num_steps: float, accepted_by_position: Sequence[float]
    ) -> None:
        """One answer: tokens kept after the first, target steps, and steps that accepted drafts
        1..k.
        """
        self.num_kept += num_kept
        self.num_steps += num_steps
        known = self.accepted_K or [0] * len(accepted_by_position)
        self.accepted_K = [old + new for old, new in zip(known, accepted_by_position, strict=True)]

    @property
    def length(self) -> float:
        """Tokens kept per step."""
        return self.num_kept / self.num_steps

    @property
    def shares(self) -> tuple[float, ...]:
        """Share of steps that accepted drafts 1..k."""
        return tuple(count / self.num_steps for count in self.accepted_K or ())


def compare(ways: dict[str, Walked], *, num_prompts: int) -> TrainServedGap:
    """The record of three walks, with the position at which they differ most.

    Args:
        ways: 'teacher_forced', 'reference' and 'served'.
        num_prompts: answers behind each.
    """
    shares = {name: way.shares for name, way in ways.items()}
    spreads = [max(column) - min(column) for column in zip(*shares.values(), strict=True)]
    worst = max(range(len(spreads)), key=spreads.__getitem__) if any(spreads) else None
    return TrainServedGap(
        **{name: way.length for name, way in ways.items()},
        diverging_position=None if worst is None else worst + 1,
        num_prompts=num_prompts,
        acceptance_by_position=shares,
    )


def measure_gap(job: GapJob, *, on_line: Callable[[str], None] = print) -> TrainServedGap:
    """Walk every answer three ways.

    Raises:
        TrainingError: no answer has a step to walk.
        TargetError, CheckpointError: target or drafter cannot be loaded.
    """
    answers = [answer for answer in job.answers if answer.num_steps and len(answer.token_ids) > 1]
    if not answers:
        raise TrainingError(
            "no served answer has a step with a draft", got=f"{len(job.answers)} answers"
        )
    if job.num_threads is not None:
        torch.set_num_threads(job.num_threads)

    served, reference = Walked(), Walked()
    for answer in answers:
        served.add(
            num_kept=len(answer.token_ids) - 1,
            num_steps=answer.num_steps,
            accepted_by_position=answer.accepted_by_position,
        )

    teacher = _teacher_forced(job, answers, on_line=on_line)
    _reference(job, answers, reference, on_line=on_line)
    return compare(
        {"teacher_forced": teacher, "reference": reference, "served": served},
        num_prompts=len(answers),
    )


@torch.no_grad()
def _teacher_forced(
    job: GapJob, answers: list[ServedAnswer], *, on_line: Callable[[str], None]
) -> Walked:
    """The objective's blocks at every token of the served answers."""
    device = torch.device(job.device)
    dtype = getattr(torch, job.dtype)
    drafter = load_drafter(Path(job.checkpoint.path), target_path=Path(job.target.path)).to(device)
    objective = build_objective(
        drafter, TrainingSettings(mixed_precision="bf16" if dtype == torch.bfloat16 else "no")
    )
    target = ReferenceTarget(Path(job.target.path), dtype=dtype, device=device)

    layer_ids = [
        *drafter.config.aux_hidden_state_layer_ids,
        int(target.model.config.num_hidden_layers),
    ]
    captured = list(dict.fromkeys(layer_ids))  # an aux layer may be the last one
    target.capture(captured)
    columns = [captured.index(layer_id) for layer_id in layer_ids]

    lm_head_VH = target.model.get_output_embeddings().weight.detach()
    walked = Walked()
    num_drafts = num_draft_tokens(drafter)
    for number, answer in enumerate(answers, 1):
        on_line(f"teacher-forced answer {number} of {len(answers)}")
        pack = _pack(answer, target, columns).to(device)
        blocks = choose_blocks(pack, num_draft_tokens=num_drafts, num_anchors=None)
        assert blocks is not None  # two tokens were answered
        next_T = torch.cat([pack.token_ids_T[1:], pack.token_ids_T.new_full((1,), -1)])
        _, mass_T = target_words(pack, lm_head_VH, drafter)
        with torch.autocast(job.device, dtype=torch.bfloat16, enabled=dtype == torch.bfloat16):
            scores = objective(pack, blocks, next_T, mass_T)
        steps = (
            _greedy_steps(scores.match_NK, blocks)
            if job.temperature == 0
            else expected_steps(scores.overlap_NK)
        )
        walked.add(
            num_kept=len(answer.token_ids) - 1, num_steps=steps[0], accepted_by_position=steps[1]
        )

    return walked


def _greedy_steps(match_NK: torch.Tensor, blocks: Blocks) -> tuple[float, list[float]]:
    """Steps of one answer's walk, and how many of them accept drafts 1..k."""
    accepted_N = match_NK.int().cumprod(1).sum(1).cpu().numpy()
    (steps,) = walk(blocks, accepted_N + 1)
    accepted = accepted_N[steps]
    return float(len(steps)), [
        float((accepted >= k).sum()) for k in range(1, match_NK.shape[1] + 1)
    ]


def expected_steps(overlap_NK: torch.Tensor) -> tuple[float, list[float]]:
    """Expected steps of one answer's walk by rejection sampling, and the expected number that
    accept drafts 1..k.

    Args:
        overlap_NK: probability of acceptance at each slot of the blocks at consecutive tokens, 0
            past the answer's end.
    """
    prefix_NK = overlap_NK.double().cumprod(1).cpu()
    num_blocks, num_positions = prefix_NK.shape
    at_least = torch.cat([torch.ones(num_blocks, 1, dtype=prefix_NK.dtype), prefix_NK], dim=1)
    exactly = at_least - torch.cat(
        [prefix_NK, torch.zeros(num_blocks, 1, dtype=prefix_NK.dtype)], dim=1
    )
    drafted_N = torch.zeros(num_blocks + num_positions + 1, dtype=prefix_NK.dtype)
    drafted_N[0] = 1.0
    for n in range(num_blocks):
        drafted_N[n + 1 : n + 2 + num_positions] += drafted_N[n] * exactly[n]
    drafted_N = drafted_N[:num_blocks]
    return float(drafted_N.sum()), (drafted_N @ prefix_NK).tolist()


def _pack(answer: ServedAnswer, target: ReferenceTarget, columns: list[int]) -> Pack:
    token_ids = [*answer.prompt_token_ids, *answer.token_ids]
    num_prompt = len(answer.prompt_token_ids)
    num_tokens = len(token_ids)
    target.reset(batch_size=1, num_slots=num_tokens)
    _, states_1TLH = target.extend(torch.tensor([token_ids], device=target.device))

    return Pack(
        token_ids_T=torch.tensor(token_ids),
        supervised_T=torch.arange(num_tokens) >= num_prompt,
        positions_T=torch.arange(num_tokens),
        states_TLH=states_1TLH[0][:, columns].cpu().to(torch.bfloat16),
        bounds=((0, num_tokens),),
        indices=(0,),
        sample_ids=(answer.prompt_id,),
    )


def _reference(
    job: GapJob, answers: list[ServedAnswer], walked: Walked, *, on_line: Callable[[str], None]
) -> None:
    decoder = ReferenceDecoder(
        Path(job.target.path), Path(job.checkpoint.path), dtype=getattr(torch, job.dtype),
        device=torch.device(job.device),
    )  # fmt: skip
    on_line(f"reference decoding of {len(answers)} prompts")

    for group in _groups(answers):
        outputs = decoder.generate_batch(
            [answer.prompt_token_ids for answer in group],
            max_new_tokens=job.max_tokens,
            temperature=job.temperature,
            generator=torch.Generator(job.device).manual_seed(0),
        )
        for output in outputs:
            accepted = [step.num_accepted for step in output.steps]
            num_positions = decoder.drafter.num_draft_tokens
            walked.add(
                num_kept=len(output.token_ids) - 1,
                num_steps=len(accepted),
                accepted_by_position=[
                    sum(count >= k for count in accepted) for k in range(1, num_positions + 1)
                ],
            )
        on_line(f"reference decoded to a length of {walked.length:.3f}")


def _groups(answers: list[ServedAnswer], size: int = 16) -> Iterator[list[ServedAnswer]]:
    for start in range(0, len(answers), size):
        yield answers[start : start + size]


def main(arguments: Iterable[str] | None = None) -> int:
    """Command line; see the module's docstring."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    if len(given) != 1:
        raise ConfigError(f"usage: python -m {MODULE} JOB.json", got=given)
    job = GapJob.read(Path(given[0]))
    with ProgressTicker() as ticker:
        gap = measure_gap(job, on_line=ticker.update)
    gap.write(Path(job.output_dir) / RESULT_FILE)
    return 0


if __name__ == "__main__":
    run_main(main)
