"""Trains a tiny drafter in several processes, as torchrun starts them, on FOLDER.

FOLDER holds `target` and `packs.pt`. Each rank takes every other pack, by each way to share the
work; rank 0 leaves the loss curves in `curves.json` and the last state of each run under its name.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

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

DRAFTER = DrafterSettings(num_layers=2, block_size=4, markov_rank=8, draft_vocab_size=256)
NUM_STEPS, STOPPED_AT = 6, 3
# All blocks of a pack: nothing is drawn, so one process can make the very same steps.
SETTINGS = TrainingSettings(
    num_steps=NUM_STEPS,
    learning_rate=3e-3,
    anchors_per_step=1000,
    mixed_precision="no",
    log_every_steps=1,
    validate_every_steps=4,
    checkpoint_every_steps=100,
)


def make_loop(
    folder: Path,
    name: str,
    packs: list[Pack],
    should_stop: Callable[[], bool] = lambda: False,
    **changes: Any,
) -> Trainer:
    """A loop whose learning rate depends on the step alone."""
    target = folder / "target"
    head_VH = read_lm_head(target)
    vocabulary = build_draft_vocabulary(
        torch.ones(len(head_VH), dtype=torch.long), size=256, min_coverage=0.1
    )
    drafter = build_drafter(
        DRAFTER, target_path=target, aux_layer_ids=(1, 3), draft_vocab=vocabulary, seed=0
    )
    accelerator = Accelerator(mixed_precision="no", cpu=True)
    is_main = accelerator.is_main_process
    return Trainer(
        drafter,
        SETTINGS.model_copy(update=changes),
        accelerator=accelerator,
        num_samples=10**9,
        validation=AcceptanceCheck(
            packs[:1],
            max_anchors=64,
            lm_head_VH=head_VH.float(),
            drafter=drafter,
            num_draft_tokens=3,
        )
        if is_main
        else None,
        states=StateFolder(folder / name, keep=9),
        ticker=ProgressTicker(),
        metrics=MetricsLog(tracking_uri=None, run_id=None),
        should_stop=should_stop,
    )


def read_packs(folder: Path) -> list[Pack]:
    """What the test left for its ranks."""
    return [Pack(**fields) for fields in torch.load(folder / "packs.pt", weights_only=True)]


def stopped_and_resumed(folder: Path, packs: list[Pack]) -> Trainer:
    """A sharded run that is stopped, and goes on in a drafter of other weights."""
    asked = iter(range(100))
    stopped = make_loop(
        folder, "cut", packs, should_stop=lambda: next(asked) >= STOPPED_AT, parallel="fsdp2"
    )
    with suppress(TrainingStoppedError):
        stopped.run(iter(packs))
    resumed = make_loop(folder, "cut", packs, parallel="fsdp2")
    state = StateFolder(folder / "cut", keep=9).load_newest()
    assert state is not None and state["progress"]["step"] == STOPPED_AT
    resumed.restore(state)
    resumed.run(iter(packs[STOPPED_AT:]))
    return resumed


def main(folder: Path) -> None:
    """All runs, one after another in the same processes."""
    rank = Accelerator(cpu=True).process_index
    packs = read_packs(folder)[rank::2]
    loops = {}
    for name, changes in {
        "ddp": {"parallel": "ddp"},
        "fsdp2": {"parallel": "fsdp2"},
        "muon": {"parallel": "fsdp2", "optimizer": "muon"},
        "accumulated": {"parallel": "fsdp2", "packs_per_step": 2, "num_steps": NUM_STEPS // 2},
    }.items():
        loops[name] = make_loop(folder, name, packs, **changes)
        loops[name].run(iter(packs))
    loops["cut"] = stopped_and_resumed(folder, packs)
    if rank == 0:
        curves = {
            name: [[point.loss, point.grad_norm] for point in loop.progress.curve]
            for name, loop in loops.items()
        }
        (folder / "curves.json").write_text(json.dumps(curves))
        held = sum(
            value.to_local().numel()
            for value in loops["fsdp2"]._trainee.objective.parameters()
            if value.requires_grad
        )
        whole = sum(
            value.numel() for value in loops["fsdp2"]._drafter.parameters() if value.requires_grad
        )
        (folder / "share.json").write_text(json.dumps(held / whole))


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]))
