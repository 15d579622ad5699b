"""Training: the step against speculators', algorithms at equal tokens, what is served, calibration,
resume, memory.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from scipy import stats

from components.contracts import TrainServedGap
from components.evaluation.acceptance import measure_acceptance
from components.evaluation.prompts import load_prompts
from components.evaluation.report import acceptance_length
from components.evaluation.served_answers import collect_answers
from components.settings import EvaluationSettings, load_recipe
from components.targets.resolve import resolve_target
from components.training.checks.gap_job import GapJob, run_gap
from components.training.job import TrainingResult
from tests.benchmarks.loop_figures import at_least, at_most
from tests.benchmarks.processes import last_json
from tests.benchmarks.run import Figure
from tests.benchmarks.training_world import World, make_world, tell

NUM_ROUNDS = 3
SEEDS = (0, 1, 2)
NUM_CONVERSATIONS = 2400
TRAINER_S = 600.0
EQUAL_TOKENS_STEPS = 500
"""Of 384 tokens and 96 blocks each, for every algorithm and seed."""
SLICES = {"mt_bench": 40, "humaneval": 20, "gsm_symbolic": 20, "conversations": 40}
ALGORITHMS: dict[str, dict[str, Any]] = {
    "dspark": {},
    "dflash": {
        "algorithm": "dflash",
        "markov_rank": 0,
        "confidence_head": False,
        "markov_start": "random",
    },
    "eagle3": {
        "algorithm": "eagle3",
        "num_layers": 1,
        "start_layers": (28,),
        "markov_rank": 0,
        "confidence_head": False,
        "markov_start": "random",
    },
}


def run() -> list[Figure]:
    """All figures of training; the last ones need conversations, engines and half an hour."""
    with tempfile.TemporaryDirectory(prefix="bench") as name:
        folder = Path(name)
        figures = [*steps(folder), resume(folder), memory(folder)]
        for figure in figures:
            tell(str(figure))
        world = make_world(folder, num_conversations=NUM_CONVERSATIONS)
        return [*figures, *algorithms(world), *served(world)]


def steps(folder: Path) -> list[Figure]:
    """Seconds, loss and memory of a step, ours and speculators' in turn, on the same pack, weights
    and blocks.
    """
    recipe = load_recipe("demo")
    target = resolve_target(recipe.target, cache_dir=folder / "targets", engine=recipe.engine)

    def job(side: str, mixed_precision: str) -> dict[str, Any]:
        training = {
            "mixed_precision": mixed_precision,
            "tokens_per_step": 768,
            "anchors_per_step": 192,
        }
        plain = recipe.drafter.model_copy(
            update={"start": "plain", "start_layers": (), "markov_start": "random"}
        )
        path = folder / f"step-{side}-{mixed_precision}.json"
        values = {
            "side": side, "target": target.path, "drafter": plain.model_dump(mode="json"),
            "training": recipe.training.model_copy(update=training).model_dump(mode="json"),
            "aux_layer_ids": recipe.stream.aux_layer_ids, "hidden_size": 576, "num_threads": 2,
        }  # fmt: skip
        path.write_text(json.dumps(values))
        found: dict[str, Any] = last_json(
            [sys.executable, "-m", "tests.benchmarks.training_step", str(path)]
        )
        return found

    exact = [job(side, "no")["loss"] for side in ("ours", "theirs")]
    ours, theirs = [], []
    for _ in range(NUM_ROUNDS):
        ours.append(job("ours", "bf16"))
        theirs.append(job("theirs", "bf16"))
    seconds = [
        statistics.median(s for one in side for s in one["seconds"]) for side in (ours, theirs)
    ]
    memory_mib = [statistics.median(one["memory_mib"] for one in side) for side in (ours, theirs)]
    return [
        at_most("step_time_over_speculators", seconds[0] / seconds[1], 0.6, "x"),
        at_most("step_loss_difference", abs(exact[0] - exact[1]), 1e-4, "nats"),
        at_most("step_memory_over_speculators", memory_mib[0] / max(memory_mib[1], 1e-9), 1.0, "x"),
        Figure(name="step", value=1000 * seconds[0], unit="ms", goal="-", ok=True),
        Figure(name="step_memory", value=memory_mib[0], unit="MiB", goal="-", ok=True),
    ]


def resume(folder: Path) -> Figure:
    """Largest difference of a loss between an undisturbed run and one that was stopped and
    resumed.
    """
    found = last_json(
        [sys.executable, "-m", "tests.benchmarks.training_loop", "resume", str(folder / "resume")]
    )
    return at_most("resumed_loss_difference", found["difference"], 1e-6, "nats")


def memory(folder: Path) -> Figure:
    """Resident memory of the loop after 8,000 sequences against that after 1,000."""
    found = last_json(
        [sys.executable, "-m", "tests.benchmarks.training_loop", "memory", str(folder / "memory")]
    )
    return at_most(
        "memory_growth_1k_to_8k_sequences",
        found["after_8k"] / found["after_1k"] - 1,
        0.05,
        "of_its_size",
    )


def algorithms(world: World) -> list[Figure]:
    """Expected acceptance length of each algorithm after equal tokens, three seeds, on held-out
    conversations.
    """
    lengths: dict[str, list[float]] = {}
    for name, drafter in ALGORITHMS.items():
        for seed in SEEDS:
            training = {
                "seed": seed,
                "num_steps": EQUAL_TOKENS_STEPS,
                "num_epochs": 1,
                "max_trainer_s": None,
                "validation_anchors": 3000,
                "validate_every_steps": EQUAL_TOKENS_STEPS,
            }
            result = world.train(f"{name}-{seed}", drafter=drafter, training=training)
            lengths.setdefault(name, []).append(result.validation[-1].expected_acceptance_length)
    for name, values in lengths.items():
        tell(
            f"{name:<8} expected acceptance length {np.mean(values):.3f} "
            f"({', '.join(f'{v:.3f}' for v in values)})"
        )
    return [
        _gain("dspark_over_dflash", lengths["dspark"], lengths["dflash"], 0.18),
        _gain("dspark_over_eagle3", lengths["dspark"], lengths["eagle3"], 0.30),
    ]


def _gain(name: str, ours: list[float], theirs: list[float], goal: float) -> Figure:
    """Mean relative gain over paired seeds, with its t interval on stderr."""
    gains = np.array(ours) / np.array(theirs) - 1
    half = stats.t.ppf(0.975, len(gains) - 1) * gains.std(ddof=1) / np.sqrt(len(gains))
    tell(
        f"{name}: {gains.mean():+.3f}, 95 % interval {gains.mean() - half:+.3f} to "
        f"{gains.mean() + half:+.3f}"
    )
    return at_least(name, float(gains.mean()), goal, "relative")


def served(world: World) -> list[Figure]:
    """The demo's preset after its trainer time: served, calibrated, and held against what was
    trained.
    """
    training = {"num_epochs": 100, "max_trainer_s": TRAINER_S, "validation_anchors": 3000}
    result = world.train("preset", drafter={}, training=training)
    settings = world.recipe.evaluation.model_copy(update={"slices": SLICES})
    prompts = load_prompts(settings)
    with world.served(result.checkpoint) as endpoint:
        measured = measure_acceptance(endpoint, prompts, settings=settings)
        greedy = collect_answers(endpoint, prompts[::3], settings=settings)
    with world.served(result.checkpoint, draft_sample_method="probabilistic") as endpoint:
        sampled = collect_answers(endpoint, prompts, settings=settings, temperature=1.0)
    gap = _gap(world, result, greedy, settings, temperature=0.0)
    warm = _gap(world, result, sampled, settings, temperature=1.0)
    return [
        at_least(
            "served_acceptance_length_600_s", acceptance_length(measured.prompts), 2.0, "tokens"
        ),
        *_calibration(result),
        at_most("train_served_gap", gap.gap, 0.03, "relative"),
        at_most(
            "temperature_1_served_over_expected",
            abs(warm.served / warm.teacher_forced - 1),
            0.03,
            "relative",
        ),
        Figure(name="temperature_1_served", value=warm.served, unit="tokens", goal="-", ok=True),
    ]


def _calibration(result: TrainingResult) -> list[Figure]:
    assert result.calibration is not None
    after = result.calibration.after
    return [at_most("ece_after_calibration", after.ece, 0.02, "probability")]


def _gap(
    world: World,
    result: TrainingResult,
    answers: Any,
    settings: EvaluationSettings,
    *,
    temperature: float,
) -> TrainServedGap:
    job = GapJob(
        target=world.target,
        checkpoint=result.checkpoint,
        answers=answers,
        max_tokens=settings.max_tokens,
        temperature=temperature,
        output_dir=str(world.folder / f"gap-{temperature:g}"),
    )
    gap = run_gap(job, on_line=lambda line: tell(line.what), timeout_s=1800)
    tell(
        f"temperature {temperature:g}: teacher-forced {gap.teacher_forced:.3f}, reference "
        f"{gap.reference:.3f},"
        f" served {gap.served:.3f} over {gap.num_prompts} prompts; most different at position "
        f"{gap.diverging_position}"
    )
    return gap
