"""How long a training step takes on this machine:
`python -m components.training.checks.step_probe job.json`.

A few steps of the real objective, drafter and optimizer on a pack of the recipe's size whose states
are random, in a process of its own, as training is. Written to `<output_dir>/step_probe.json`.
"""

from __future__ import annotations

import statistics
import sys
import time
from pathlib import Path

import torch
from accelerate import Accelerator

from components.drafter.build import build_drafter, num_draft_tokens, read_target_config
from components.drafter.protocol import Drafter
from components.drafter.vocabulary import build_draft_vocabulary
from components.errors import ConfigError, run_main
from components.training.checks.step_job import RESULT_FILE, StepJob, StepTimes
from components.training.drafter import plain
from components.training.objectives.build import build_objective
from components.training.optimizing.optimizers import build_optimizers
from components.training.packing import Pack, choose_blocks

NUM_DOCUMENTS = 3
NUM_WARM_UPS = 1


def measure_steps(job: StepJob) -> StepTimes:
    """Time the steps.

    Raises:
        ConfigError: the drafter's settings do not fit the target.
    """
    torch.manual_seed(job.training.seed)
    accelerator = Accelerator(mixed_precision=job.training.mixed_precision)
    drafter = _drafter(job).to(accelerator.device)
    objective, optimizers = (
        build_objective(drafter, job.training),
        build_optimizers(drafter, job.training),
    )

    config = read_target_config(Path(job.target_path))
    pack = _pack(job, hidden_size=int(config.hidden_size)).to(accelerator.device)
    parameters = [value for value in drafter.parameters() if value.requires_grad]
    seconds = []

    for _ in range(NUM_WARM_UPS + job.num_steps):
        started = time.perf_counter()
        blocks = choose_blocks(
            pack,
            num_draft_tokens=num_draft_tokens(drafter),
            num_anchors=job.training.anchors_per_step,
            in_prompts=job.training.blocks_in_prompts,
        )
        assert blocks is not None  # the pack's second half is supervised
        with accelerator.autocast():
            loss = objective(pack, blocks).loss
        accelerator.backward(loss)
        torch.nn.utils.clip_grad_norm_(parameters, job.training.max_grad_norm)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        float(loss.detach())  # waits for a GPU
        seconds.append(time.perf_counter() - started)

    timed = seconds[NUM_WARM_UPS:]
    return StepTimes(median_s=statistics.median(timed), seconds=tuple(timed), loop_s=sum(seconds))


def _drafter(job: StepJob) -> Drafter:
    """The recipe's drafter with nothing copied: as large, and built in a second."""
    config = read_target_config(Path(job.target_path))
    size = job.drafter.draft_vocab_size
    vocab_size = int(config.vocab_size)
    counts_V = torch.ones(vocab_size, dtype=torch.long)
    is_pruned = size is not None and size < vocab_size
    vocabulary = (
        build_draft_vocabulary(counts_V, size=size, min_coverage=1e-6)
        if is_pruned and size
        else None
    )

    return build_drafter(
        plain(job.drafter),
        target_path=Path(job.target_path),
        aux_layer_ids=job.aux_layer_ids,
        draft_vocab=vocabulary,
        seed=job.training.seed,
    )


def _pack(job: StepJob, *, hidden_size: int) -> Pack:
    """Documents of equal length, the later half of each supervised."""
    length = max(2, job.training.tokens_per_step // NUM_DOCUMENTS)
    total = length * NUM_DOCUMENTS
    states_TLH = torch.randn(total, len(job.aux_layer_ids) + 1, hidden_size)
    return Pack(
        token_ids_T=torch.randint(0, 256, (total,)),
        supervised_T=torch.arange(total) % length >= length // 2,
        positions_T=torch.arange(total) % length,
        states_TLH=states_TLH.to(torch.bfloat16),
        bounds=tuple((index * length, (index + 1) * length) for index in range(NUM_DOCUMENTS)),
        indices=tuple(range(NUM_DOCUMENTS)),
        sample_ids=tuple(f"probe{index}" for index in range(NUM_DOCUMENTS)),
    )


def main(arguments: list[str] | None = None) -> int:
    """Command line; see the module's docstring."""
    given = sys.argv[1:] if arguments is None else arguments
    if len(given) != 1:
        raise ConfigError(
            "usage: python -m components.training.checks.step_probe JOB.json", got=given
        )
    job = StepJob.read(Path(given[0]))
    measure_steps(job).write(Path(job.output_dir) / RESULT_FILE)
    return 0


if __name__ == "__main__":
    run_main(main)
