"""The training loop: steps, losses, optimizer, checkpoints, validation."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from components.settings.base import Settings


class TrainingSettings(Settings):
    """The training loop: how long, on how much at once, by which loss, and what is kept of it.

    A run ends with its data, its steps or its time, whichever limit comes first, and the learning
    rate falls to zero by then; or before that, where acceptance no longer grows and the recipe says
    so. The weights of the longest validated acceptance become the checkpoint.
    """

    preset: str | None = Field(
        default=None,
        description="Name of a file in `configs/presets` that holds the values of `drafter` and"
        " `training` which the recipe leaves out. Null takes the defaults of this table.",
    )
    num_steps: int | None = Field(
        default=None,
        ge=1,
        description="Most optimizer steps; null sets no limit, so epochs or time end the run.",
    )
    num_epochs: int = Field(
        default=1,
        ge=1,
        description="Passes over the training split, each in an order of its own; a further one is"
        " worth it where data are short.",
    )
    max_trainer_s: float | None = Field(
        default=None,
        gt=0,
        description="Most seconds of training; it then ends after a step, with its best weights."
        " Null sets no limit of the recipe's own; a run with a pace sets one.",
    )
    tokens_per_step: int = Field(
        default=768,
        ge=32,
        description="Tokens of one pack: samples share it up to this, and a longer sample is a"
        " pack of its own. Raise it until the device is busy; more also means fewer steps.",
    )
    anchors_per_step: int = Field(
        default=96,
        ge=1,
        description="Draft blocks that are trained in each pack, at places drawn anew each time;"
        " a pack with fewer places trains all of them.",
    )
    blocks_in_prompts: bool = Field(
        default=False,
        description="Draw blocks from prompts too, not from answers alone: more to learn from the"
        " same states, of text that the target did not write.",
    )
    updates_per_pack: int = Field(
        default=1,
        ge=1,
        description="Optimizer steps on each streamed pack, each at places drawn anew; raise it"
        " where the trainer waits for states. Not both this and `packs_per_step` may be above 1.",
    )
    packs_per_step: int = Field(
        default=1,
        ge=1,
        description="Packs whose mean gradient makes one optimizer step (gradient accumulation);"
        " raise it for larger steps than the memory holds.",
    )
    gradient_checkpointing: bool = Field(
        default=False,
        description="Compute each draft layer again going backward: less memory, more time."
        " Training of eagle3 refuses it.",
    )
    optimizer: Literal["adamw", "muon"] = Field(
        default="adamw",
        description="Optimizer of the weights: `adamw` for all of them, or `muon` for the matrices"
        " of the backbone with AdamW for the rest. Muon learns more of a single pass and costs more"
        " per step.",
    )
    learning_rate: float = Field(
        default=6e-4,
        gt=0,
        description="Highest learning rate, reached after the warm-up; it then falls to zero along"
        " a cosine. Lower it where training diverges.",
    )
    heads_lr_scale: float = Field(
        default=1.0,
        gt=0,
        description="Learning rate of the Markov and confidence heads, as a factor on"
        " `learning_rate`.",
    )
    warmup_share: float = Field(
        default=0.04,
        ge=0,
        lt=1,
        description="Share of the run in which the learning rate rises linearly; 0 begins at the"
        " highest.",
    )
    weight_decay: float = Field(
        default=0.0,
        ge=0,
        description="Weight decay of the optimizers, per step and times the learning rate.",
    )
    max_grad_norm: float = Field(
        default=1.0,
        gt=0,
        description="Norm that the gradients of a step are clipped to.",
    )
    loss: dict[str, float] = Field(
        default={"kl": 1.0},
        description="Weights of the losses that are added up: `ce`, cross-entropy with the"
        " target's most probable token; `kl`, divergence from the target's distribution; `tv`,"
        " total variation, half of L1. A recipe's losses replace the preset's as a whole.",
    )
    loss_decay: Literal["fixed", "dpace"] = Field(
        default="fixed",
        description="How positions of a block are weighed: `fixed` by exp(-(k - 1) / `loss_gamma`)"
        " at position k, `dpace` by the expected length that hangs on each (D-PACE).",
    )
    loss_gamma: float = Field(
        default=4.0,
        gt=0,
        description="Decay of the fixed weights exp(-(k - 1) / gamma); larger counts late"
        " positions more. The confidence head's loss is weighed by it in either case.",
    )
    dpace_alpha: float = Field(
        default=0.5,
        gt=0,
        le=1,
        description="Smoothing of the likelihoods that D-PACE multiplies; at 1 they do not matter"
        " at all. Read with loss_decay `dpace` only.",
    )
    confidence_weight: float = Field(
        default=1.0,
        ge=0,
        description="Weight of the confidence head's cross-entropy beside the other losses; at 0"
        " the head learns nothing.",
    )
    mixed_precision: Literal["no", "bf16", "native"] = Field(
        default="bf16",
        description="Format of the trainer's matrix products; `native` is bf16 where this machine"
        " multiplies matrices in it (a GPU, AVX-512, Arm with bf16), else no."
        ' In YAML it has to be written `"no"`: without quotes that word is false.',
    )
    num_processes: int = Field(
        default=1,
        ge=1,
        description="Trainer processes that share the samples and average their gradients; one per"
        " GPU.",
    )
    parallel: Literal["ddp", "fsdp2"] = Field(
        default="ddp",
        description="Whether each of several processes holds all weights and optimizer states"
        " (`ddp`) or a share of them (`fsdp2`), for drafters that do not fit one GPU.",
    )
    checkpoint_every_steps: int = Field(
        default=100,
        ge=1,
        description="Optimizer steps between two states on disk, from which an interrupted run can"
        " resume; the end of a run writes one, too.",
    )
    keep_checkpoints: int = Field(
        default=2,
        ge=1,
        description="How many of the newest states on disk are kept.",
    )
    validate_every_steps: int = Field(
        default=100,
        ge=1,
        description="Optimizer steps between two validations; one more comes before the first step"
        " and one at the end.",
    )
    early_stop_validations: int | None = Field(
        default=None,
        ge=1,
        description="Training ends once this many validations in a row bring no longer acceptance;"
        " null never ends it for that.",
    )
    validation_anchors: int = Field(
        default=1024,
        ge=16,
        description="Places of the validation split at which each validation drafts, or a pack's"
        " worth more; their states stay in memory for the whole run.",
    )
    calibration_anchors: int = Field(
        default=16384,
        ge=0,
        description="Supervised tokens of the validation split that the confidence head is"
        " calibrated on, streamed once after training; at 0, or without that head, nothing is"
        " calibrated.",
    )
    log_every_steps: int = Field(
        default=10,
        ge=1,
        description="Optimizer steps that each point of the training curve, in the result and in"
        " MLflow, is the mean of.",
    )
    seed: int = Field(
        default=0,
        description="Seed of the random weights, of the order of the samples and of the places"
        " that are drawn.",
    )

    @model_validator(mode="after")
    def _one_way_to_count_steps(self) -> Self:
        if self.updates_per_pack > 1 and self.packs_per_step > 1:
            raise ValueError("updates_per_pack and packs_per_step cannot both be above 1")
        return self
