"""The training loop on a tiny drafter:
`python -m tests.benchmarks.training_loop resume|memory FOLDER`.

Prints one JSON line: the largest difference of a resumed run's losses, or resident memory after
1,000 and 8,000 sequences.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
from accelerate import Accelerator

from components.drafter.build import build_drafter
from components.drafter.start import read_lm_head
from components.drafter.vocabulary import build_draft_vocabulary
from components.settings import DrafterSettings, TrainingSettings
from components.training.checks.acceptance import AcceptanceCheck
from components.training.packing import Pack
from components.training.state import StateFolder
from components.training.telemetry import MetricsLog, ProgressTicker
from components.training.trainer import Trainer, TrainingStoppedError
from tests.support.tiny_target import make_tiny_target

AUX = (1, 3)
DRAFTER = DrafterSettings(num_layers=1, block_size=4, markov_rank=8, draft_vocab_size=256)
SETTINGS = TrainingSettings(
    learning_rate=3e-3,
    tokens_per_step=96,
    anchors_per_step=16,
    mixed_precision="no",
    log_every_steps=1,
    validate_every_steps=10**9,
    checkpoint_every_steps=10**9,
)
SEQUENCES_PER_PACK, SEQUENCE_TOKENS = 4, 40
STOPPED_AT, NUM_PACKS = 37, 120


def main(what: str, folder: Path) -> dict[str, Any]:
    """Either figure."""
    folder.mkdir(parents=True)
    torch.set_num_threads(1)
    target = make_tiny_target(folder / "target")
    return {"resume": resume, "memory": memory}[what](folder, target)


def resume(folder: Path, target: Path) -> dict[str, float]:
    """Losses of every step after the stop, against those of a run that was not stopped."""
    packs = list(_packs(NUM_PACKS))
    whole = _loop(folder / "whole", target, NUM_PACKS)
    whole.run(iter(packs))
    asked = iter(range(10**6))
    stopped = _loop(
        folder / "cut", target, NUM_PACKS, should_stop=lambda: next(asked) >= STOPPED_AT
    )
    with suppress(TrainingStoppedError):
        stopped.run(iter(packs))
    resumed = _loop(folder / "cut", target, NUM_PACKS, seed=1)
    state = StateFolder(folder / "cut", keep=2).load_newest()
    assert state is not None
    resumed.restore(state)
    resumed.run(iter(packs[STOPPED_AT:]))
    losses = [np.array([point.loss for point in loop.progress.curve]) for loop in (whole, resumed)]
    assert len(losses[0]) == len(losses[1]) == NUM_PACKS
    return {"difference": float(np.abs(losses[0] - losses[1]).max())}


def killable(folder: Path) -> None:
    """Train in `folder` from its newest state on, a line of output per pack; the losses of all
    steps go to curve.json once the run is at its end.
    """
    torch.set_num_threads(1)
    loop = _loop(folder / "run", folder / "target", NUM_PACKS, checkpoint_every_steps=5)
    state = StateFolder(folder / "run", keep=2).load_newest()
    if state is not None:
        loop.restore(state)

    def told() -> Iterator[Pack]:
        for number, pack in enumerate(_packs(NUM_PACKS)):
            if number * SEQUENCES_PER_PACK >= loop.progress.num_consumed:
                print(f"pack {number}", flush=True)
                yield pack

    loop.run(told())
    (folder / "curve.json").write_text(json.dumps([point.loss for point in loop.progress.curve]))


def memory(folder: Path, target: Path) -> dict[str, int]:
    """Resident memory once 1,000 and once 8,000 sequences were trained on; logs are as rare as a
    recipe's.
    """
    sizes: dict[int, int] = {}
    process = psutil.Process()

    def watched() -> Iterator[Pack]:
        for number, pack in enumerate(_packs(8_400 // SEQUENCES_PER_PACK)):
            sizes[number * SEQUENCES_PER_PACK] = process.memory_info().rss
            yield pack

    _loop(folder / "run", target, 8_400 // SEQUENCES_PER_PACK, log_every_steps=10).run(watched())
    return {"after_1k": sizes[1_000], "after_8k": sizes[8_000]}


def _packs(num: int) -> Iterator[Pack]:
    generator = torch.Generator().manual_seed(0)
    total = SEQUENCES_PER_PACK * SEQUENCE_TOKENS
    for number in range(num):
        yield Pack(
            token_ids_T=torch.randint(0, 512, (total,), generator=generator),
            supervised_T=torch.arange(total) % SEQUENCE_TOKENS >= 8,
            positions_T=torch.arange(total) % SEQUENCE_TOKENS,
            states_TLH=torch.randn(total, len(AUX) + 1, 64, generator=generator).to(torch.bfloat16),
            bounds=tuple(
                (n * SEQUENCE_TOKENS, (n + 1) * SEQUENCE_TOKENS) for n in range(SEQUENCES_PER_PACK)
            ),
            indices=tuple(range(number * SEQUENCES_PER_PACK, (number + 1) * SEQUENCES_PER_PACK)),
            sample_ids=tuple(f"s{number}-{n}" for n in range(SEQUENCES_PER_PACK)),
        )


def _loop(
    folder: Path,
    target: Path,
    num_packs: int,
    *,
    seed: int = 0,
    should_stop: Callable[[], bool] = lambda: False,
    **changes: Any,
) -> Trainer:
    lm_head_VH = read_lm_head(target)
    counts_V = torch.ones(len(lm_head_VH), dtype=torch.long)
    drafter = build_drafter(
        DRAFTER, target_path=target, aux_layer_ids=AUX, seed=seed,
        draft_vocab=build_draft_vocabulary(counts_V, size=256, min_coverage=0.1),
    )  # fmt: skip
    validation = AcceptanceCheck(
        list(_packs(1)),
        max_anchors=64,
        lm_head_VH=lm_head_VH.float(),
        drafter=drafter,
        num_draft_tokens=3,
    )
    return Trainer(
        drafter,
        SETTINGS.model_copy(update=changes),
        accelerator=Accelerator(mixed_precision="no", cpu=True),
        num_samples=num_packs * SEQUENCES_PER_PACK,
        validation=validation,
        states=StateFolder(folder, keep=2),
        ticker=ProgressTicker(),
        metrics=MetricsLog(tracking_uri=None, run_id=None),
        should_stop=should_stop,
    )


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1], Path(sys.argv[2]))))
