"""Training steps on one pack, ours or speculators' own:
`python -m tests.benchmarks.training_step JOB.json`.

Prints one JSON line: seconds of each step, the loss of the first one, and how much resident memory
the steps took at most above what the drafter and its optimizer hold.
"""

from __future__ import annotations

import json
import resource
import sys
import time
from pathlib import Path
from typing import Any

import torch

from components.drafter.build import build_drafter
from components.drafter.vocabulary import build_draft_vocabulary
from components.settings import DrafterSettings, TrainingSettings
from components.training.objectives.block import BlockObjective
from components.training.optimizing.optimizers import build_optimizers
from components.training.packing import Blocks, Pack, choose_blocks

NUM_DOCUMENTS = 3
NUM_STEPS = 8


def main(job_path: str) -> dict[str, Any]:
    """Run the steps the job asks for."""
    job = json.loads(Path(job_path).read_text())
    torch.set_num_threads(job["num_threads"])
    torch.manual_seed(0)
    drafter_settings = DrafterSettings.model_validate(job["drafter"])
    settings = TrainingSettings.model_validate(job["training"])
    drafter = _drafter(job, drafter_settings)
    pack = _pack(job, settings.tokens_per_step)
    blocks = _whole_blocks(pack, drafter_settings.block_size - 1, settings.anchors_per_step)
    (optimizer,) = build_optimizers(drafter, settings)
    for group in optimizer.param_groups:
        group["lr"] = 1e-5
    step = (
        _ours(drafter, settings, pack, blocks)
        if job["side"] == "ours"
        else _theirs(drafter, settings, pack, blocks)
    )
    parameters = [value for value in drafter.parameters() if value.requires_grad]
    # The optimizer's own memory is there before the first step, as in any later one.
    for value in parameters:
        value.grad = torch.zeros_like(value)
    optimizer.step()
    optimizer.zero_grad()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    losses = []
    times = []
    for _ in range(NUM_STEPS):
        started = time.perf_counter()
        loss = step()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        times.append(time.perf_counter() - started)
        losses.append(float(loss))
    growth_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    return {
        "seconds": times[1:],
        "loss": losses[0],
        "memory_mib": growth_kib / 1024,
        "num_anchors": len(blocks.anchors_N),
    }


def _drafter(job: dict[str, Any], settings: DrafterSettings) -> Any:
    target_path = Path(job["target"])
    config = json.loads((target_path / "config.json").read_text())
    counts_V = torch.ones(int(config["vocab_size"]), dtype=torch.long)
    vocabulary = build_draft_vocabulary(
        counts_V, size=int(settings.draft_vocab_size or 0), min_coverage=0.0001
    )
    return build_drafter(
        settings,
        target_path=target_path,
        aux_layer_ids=tuple(job["aux_layer_ids"]),
        draft_vocab=vocabulary,
        seed=0,
    )


def _pack(job: dict[str, Any], num_tokens: int) -> Pack:
    """Documents of equal length, all of a later half supervised; states as large as the target's
    are.
    """
    length = num_tokens // NUM_DOCUMENTS
    total = length * NUM_DOCUMENTS
    states = torch.randn(total, len(job["aux_layer_ids"]) + 1, job["hidden_size"]) * 2
    return Pack(
        token_ids_T=torch.randint(0, 8000, (total,)),
        supervised_T=(torch.arange(total) % length) >= length // 4,
        positions_T=torch.arange(total) % length,
        states_TLH=states.to(torch.bfloat16),
        bounds=tuple((index * length, (index + 1) * length) for index in range(NUM_DOCUMENTS)),
        indices=tuple(range(NUM_DOCUMENTS)),
        sample_ids=tuple(f"s{index}" for index in range(NUM_DOCUMENTS)),
    )


def _whole_blocks(pack: Pack, num_draft_tokens: int, num_anchors: int) -> Blocks:
    """Blocks whose slots are all supervised: there both sides mask alike."""
    blocks = choose_blocks(pack, num_draft_tokens=num_draft_tokens, num_anchors=None)
    assert blocks is not None
    whole = torch.nonzero(blocks.valid_NK.all(1)).flatten()
    chosen = whole[torch.randperm(len(whole))[:num_anchors].sort().values]
    anchors_N = blocks.anchors_N[chosen]
    places = torch.searchsorted(
        anchors_N, torch.tensor([edge for bound in pack.bounds for edge in bound])
    )
    spans = [
        (*bound, int(places[2 * i]), int(places[2 * i + 1])) for i, bound in enumerate(pack.bounds)
    ]
    return Blocks(anchors_N, blocks.valid_NK[chosen], [span for span in spans if span[2] < span[3]])


def _ours(drafter: Any, settings: TrainingSettings, pack: Pack, blocks: Blocks) -> Any:
    objective = BlockObjective(drafter, settings)
    is_bf16 = settings.mixed_precision == "bf16"

    def step() -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=is_bf16):
            return objective(pack, blocks).loss

    return step


def _theirs(drafter: Any, settings: TrainingSettings, pack: Pack, blocks: Blocks) -> Any:
    """speculators' forward and loss, its anchors set to ours."""
    import speculators.models.dflash.core as dflash_core
    from speculators.losses import resolve_loss_config

    chosen = (blocks.anchors_N, torch.ones(len(blocks.anchors_N), dtype=torch.bool))
    dflash_core.select_anchors = lambda *_: chosen
    documents = torch.cat(
        [torch.full((end - start,), i) for i, (start, end) in enumerate(pack.bounds)]
    )
    loss_config = resolve_loss_config("kl_div", "eager")
    tv_loss = resolve_loss_config("tv", "eager")["tv"][0]
    is_bf16 = settings.mixed_precision == "bf16"
    dtype = torch.bfloat16 if is_bf16 else torch.float32

    def step() -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=is_bf16):
            _, loss, _ = drafter(
                pack.states_TLH[:, :-1].flatten(1).to(dtype)[None],
                pack.token_ids_T[None],
                pack.supervised_T[None],
                pack.states_TLH[:, -1].to(dtype)[None],
                documents[None],
                position_ids=pack.positions_T[None],
                loss_config=loss_config,
                gamma=settings.loss_gamma,
                max_anchors=len(blocks.anchors_N),
                tv_loss_fn=tv_loss,
            )
        return loss

    return step


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1])))
