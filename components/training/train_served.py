"""Train-served gap: the same prompts teacher-forced, through reference decoding and as served.

    python -m components.training.train_served job.json

Teacher forcing that promises what serving does not reach means that the two do not compute the same drafter: other
layers, positions, masks or states. Each answer is walked as it was decoded: from its first token, which the prefill
gave, each step commits the accepted drafts and one token more, so the answer's other tokens over its steps are its
acceptance length. Steps that pass the answer's end count what was kept of them, the same way for all three.

Shapes: T tokens, L aux layers plus the last state, H hidden, N anchors, K draft positions.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from components.contracts import CheckpointRef, Record, ServedAnswer, TargetRef, TrainServedGap
from components.drafter.build import load_drafter
from components.drafter.reference import ReferenceDecoder
from components.drafter.reference_target import ReferenceTarget
from components.errors import ConfigError, TrainingError, run_main
from components.settings import TrainingSettings
from components.training.job import PARENT_PID_VARIABLE
from components.training.objectives import build_objective
from components.training.packing import Pack, choose_blocks
from components.training.process import run_process
from components.training.telemetry import ProgressTicker
from components.training.validate import walk

MODULE = "components.training.train_served"
RESULT_FILE = "train_served_gap.json"


class GapJob(Record):
    """What to compare."""

    target: TargetRef
    checkpoint: CheckpointRef
    answers: tuple[ServedAnswer, ...]
    max_tokens: int
    dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16"
    device: Literal["cpu", "cuda"] = "cpu"
    num_threads: int | None = None
    output_dir: str


@dataclass
class Walked:
    """Sums over answers walked one way."""

    num_kept: int = 0
    num_steps: int = 0
    accepted_K: list[int] | None = None

    def add(self, *, num_kept: int, num_steps: int, accepted_by_position: Sequence[int]) -> None:
        """One answer: tokens kept after the first, target steps, and steps that accepted drafts 1..k."""
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
        raise TrainingError("no served answer has a step with a draft", got=f"{len(job.answers)} answers")
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
    return compare({"teacher_forced": teacher, "reference": reference, "served": served}, num_prompts=len(answers))


@torch.no_grad()
def _teacher_forced(job: GapJob, answers: list[ServedAnswer], *, on_line: Callable[[str], None]) -> Walked:
    """Blocks of the objective at every token of the served answers, accepted where they say what was answered."""
    drafter = load_drafter(Path(job.checkpoint.path), target_path=Path(job.target.path)).to(job.device)
    settings = TrainingSettings(mixed_precision="bf16" if job.dtype == "bfloat16" else "no")
    objective = build_objective(drafter, settings)
    target = ReferenceTarget(Path(job.target.path), dtype=getattr(torch, job.dtype), device=torch.device(job.device))
    target.capture([*drafter.config.aux_hidden_state_layer_ids, int(target.model.config.num_hidden_layers)])
    walked, num_draft_tokens = Walked(), int(drafter.config.block_size) - 1
    for number, answer in enumerate(answers, 1):
        on_line(f"train-served gap: teacher-forced answer {number} of {len(answers)}")
        pack = _pack(answer, target).to(torch.device(job.device))
        blocks = choose_blocks(pack, num_draft_tokens=num_draft_tokens, num_anchors=None)
        assert blocks is not None  # two tokens were answered
        next_T = torch.cat([pack.token_ids_T[1:], pack.token_ids_T.new_full((1,), -1)])
        with torch.autocast(job.device, dtype=torch.bfloat16, enabled=job.dtype == "bfloat16"):
            scores = objective(pack, blocks, next_T)
        accepted_N = scores.match_NK.int().cumprod(1).sum(1).cpu().numpy()
        (steps,) = walk(blocks, accepted_N + 1)
        accepted = accepted_N[steps]
        walked.add(
            num_kept=len(answer.token_ids) - 1,
            num_steps=len(steps),
            accepted_by_position=[int((accepted >= k).sum()) for k in range(1, num_draft_tokens + 1)],
        )
    return walked


def _pack(answer: ServedAnswer, target: ReferenceTarget) -> Pack:
    token_ids = [*answer.prompt_token_ids, *answer.token_ids]
    num_prompt, num_tokens = len(answer.prompt_token_ids), len(token_ids)
    target.reset(batch_size=1, num_slots=num_tokens)
    _, states_1TLH = target.extend(torch.tensor([token_ids], device=target.device))
    return Pack(
        token_ids_T=torch.tensor(token_ids),
        supervised_T=torch.arange(num_tokens) >= num_prompt,
        positions_T=torch.arange(num_tokens),
        states_TLH=states_1TLH[0].cpu().to(torch.bfloat16),
        bounds=((0, num_tokens),),
        indices=(0,),
        sample_ids=(answer.prompt_id,),
    )


def _reference(job: GapJob, answers: list[ServedAnswer], walked: Walked, *, on_line: Callable[[str], None]) -> None:
    decoder = ReferenceDecoder(
        Path(job.target.path), Path(job.checkpoint.path), dtype=getattr(torch, job.dtype),
        device=torch.device(job.device),
    )  # fmt: skip
    on_line(f"train-served gap: reference decoding of {len(answers)} prompts")
    for group in _groups(answers):
        outputs = decoder.generate_batch([answer.prompt_token_ids for answer in group], max_new_tokens=job.max_tokens)
        for output in outputs:
            accepted = [step.num_accepted for step in output.steps]
            num_positions = decoder.drafter.num_draft_tokens
            walked.add(
                num_kept=len(output.token_ids) - 1,
                num_steps=len(accepted),
                accepted_by_position=[sum(count >= k for count in accepted) for k in range(1, num_positions + 1)],
            )
        on_line(f"train-served gap: reference decoded to a length of {walked.length:.3f}")


def _groups(answers: list[ServedAnswer], size: int = 16) -> Iterator[list[ServedAnswer]]:
    for start in range(0, len(answers), size):
        yield answers[start : start + size]


def run_gap(job: GapJob, *, on_line: Callable[[str], None], timeout_s: float) -> TrainServedGap:
    """As `measure_gap`, in a process of its own, which ends with the caller.

    Raises:
        TrainingError: it failed or took too long; the message ends in its last line.
    """
    folder = Path(job.output_dir)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / RESULT_FILE).unlink(missing_ok=True)
    path = job.write(folder / "train_served_job.json")
    environment = os.environ | {PARENT_PID_VARIABLE: str(os.getpid()), "PYTHONUNBUFFERED": "1"}
    command = [sys.executable, "-m", MODULE, str(path)]
    run_process(command, environment, what="the train-served comparison", on_line=on_line, timeout_s=timeout_s)
    return TrainServedGap.read(folder / RESULT_FILE)


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
