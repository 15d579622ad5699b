"""The drafter of a training job: its vocabulary, its weights to start from, and the one it is
compared with.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file

from components.drafter.build import build_drafter, load_trainable, read_target_config
from components.drafter.checkpoint import load_checkpoint_ref
from components.drafter.protocol import Drafter
from components.drafter.vocabulary import DraftVocabulary, build_draft_vocabulary, from_mappings
from components.errors import CheckpointError
from components.settings import DrafterSettings
from components.training.data import Rows, count_tokens
from components.training.job import TrainingJob


@dataclass(frozen=True)
class JobDrafter:
    """`model` is the drafter to train; `coverage` is the vocabulary's share of supervised tokens by
    split, empty where the drafter has the target's whole vocabulary.
    """

    job: TrainingJob
    model: Drafter
    vocabulary: DraftVocabulary | None
    coverage: dict[str, float]

    @classmethod
    def build(cls, job: TrainingJob, *, train_rows: Rows, validation_rows: Rows) -> JobDrafter:
        """From the recipe's start, or from the parent's weights.

        Raises:
            ConfigError: the settings do not fit the target, the parent or the data.
            CheckpointError: the parent cannot be read.
        """
        parent = load_checkpoint_ref(Path(job.parent.path)) if job.parent else None
        weights = load_file(Path(parent.path) / "model.safetensors") if parent else {}
        vocabulary, coverage = _vocabulary(job, train_rows, validation_rows, weights)
        # A parent's weights replace whatever the start copies.
        model = _built(job, plain(job.drafter) if parent else job.drafter, vocabulary)
        if parent is not None:
            load_trainable(model, weights, source=f"the parent checkpoint {parent.path}")
        return cls(job, model, vocabulary, coverage)

    def untrained(self) -> Drafter:
        """What training is compared with: the parent as it was, or this drafter with nothing
        learned or copied.

        A start from the target's own layers and bigrams is part of what the recipe does for
        acceptance, so it belongs to the trained side; the validation at step 0 says what it is
        worth alone.
        """
        settings = self.job.drafter
        if self.job.parent is not None or settings == plain(settings):
            return self.model
        return _built(self.job, plain(settings), self.vocabulary)


def plain(settings: DrafterSettings) -> DrafterSettings:
    """The same drafter with nothing copied from its target."""
    return settings.model_copy(
        update={"start": "plain", "start_layers": (), "markov_start": "random"}
    )


def _built(
    job: TrainingJob, settings: DrafterSettings, vocabulary: DraftVocabulary | None
) -> Drafter:
    return build_drafter(
        settings,
        target_path=Path(job.target.path),
        aux_layer_ids=job.stream.aux_layer_ids,
        draft_vocab=vocabulary,
        seed=job.training.seed,
    )


def _vocabulary(
    job: TrainingJob, train_rows: Rows, validation_rows: Rows, parent: dict[str, torch.Tensor]
) -> tuple[DraftVocabulary | None, dict[str, float]]:
    """The parent's vocabulary where there is one, because its weights are indexed by it; else by
    frequency.
    """
    size = job.drafter.draft_vocab_size
    vocab_size = int(read_target_config(Path(job.target.path)).vocab_size)
    if size is None or size >= vocab_size:
        return None, {}

    counts = {
        split: [
            torch.from_numpy(counts_V) for counts_V in count_tokens(rows, vocab_size=vocab_size)
        ]
        for split, rows in (("train", train_rows), ("validation", validation_rows))
    }

    if job.parent is None:
        vocabulary = build_draft_vocabulary(
            counts["train"][0],
            size=size,
            min_coverage=job.drafter.min_vocab_coverage,
            context_counts_V=counts["train"][1],
        )
    elif "d2t" in parent and "t2d" in parent:
        vocabulary = from_mappings(parent["d2t"], parent["t2d"])
    else:
        raise CheckpointError("the parent checkpoint has no draft vocabulary", got=job.parent.path)

    return vocabulary, {
        split: vocabulary.measure_coverage(supervised_V)
        for split, (supervised_V, _) in counts.items()
    }
