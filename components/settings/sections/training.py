"""The training loop: steps, losses, optimizer, checkpoints, validation."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from components.settings.base import Settings


class TrainingSettings(Settings):
    """The training loop."""

    preset: str | None = Field(
        default=None,
        description="configs/presets/<preset>.yaml holds the values of drafter and training "
        "that the recipe leaves out",
    )
    num_steps: int | None = Field(default=None, ge=1, description="None: epochs decide")
    num_epochs: int = Field(default=1, ge=1)
    max_trainer_s: float | None = Field(
        default=None, gt=0, description="stop cleanly after this wall time"
    )
    tokens_per_step: int = Field(
        default=768,
        ge=32,
        description="samples share a step up to this; a longer sample is a step of its own",
    )
    anchors_per_step: int = Field(default=96, ge=1)
    blocks_in_prompts: bool = Field(
        default=False,
        description="draw blocks from prompts too, not from answers alone: more to learn from "
        "the same states",
    )
    updates_per_pack: int = Field(
        default=1,
        ge=1,
        description="optimizer steps on each streamed pack, each with anchors drawn anew",
    )
    packs_per_step: int = Field(
        default=1,
        ge=1,
        description="gradient accumulation: packs whose mean gradient makes one optimizer step",
    )
    gradient_checkpointing: bool = Field(
        default=False,
        description="compute each draft layer again going backward: less memory, more time",
    )
    optimizer: Literal["adamw", "muon"] = Field(
        default="adamw", description="muon: for the backbone's matrices, AdamW for all else"
    )
    learning_rate: float = Field(default=6e-4, gt=0)
    heads_lr_scale: float = Field(
        default=1.0, gt=0, description="learning rate of the heads, relative"
    )
    warmup_share: float = Field(default=0.04, ge=0, lt=1)
    weight_decay: float = Field(default=0.0, ge=0)
    max_grad_norm: float = Field(default=1.0, gt=0)
    loss: dict[str, float] = Field(
        default={"kl": 1.0}, description="weights of ce, kl, tv (tv is half-L1)"
    )
    loss_decay: Literal["fixed", "dpace"] = Field(
        default="fixed",
        description="weights of positions: exp(-(k-1)/gamma), or what hangs on each (D-PACE)",
    )
    loss_gamma: float = Field(
        default=4.0, gt=0, description="decay of position weights exp(-(k-1)/gamma)"
    )
    dpace_alpha: float = Field(
        default=0.5, gt=0, le=1, description="smoothing of D-PACE's likelihoods; 1: none matter"
    )
    confidence_weight: float = Field(default=1.0, ge=0)
    mixed_precision: Literal["no", "bf16", "native"] = Field(
        default="bf16",
        description="Format of the trainer's matrix products; native is bf16 where this machine "
        "multiplies matrices"
        " in it (a GPU, AVX-512), else no.",
    )
    num_processes: int = Field(default=1, ge=1, description="one per GPU")
    parallel: Literal["ddp", "fsdp2"] = Field(
        default="ddp",
        description="several processes hold all weights and optimizer states each, or a share "
        "of them each",
    )
    checkpoint_every_steps: int = Field(default=100, ge=1)
    keep_checkpoints: int = Field(default=2, ge=1)
    validate_every_steps: int = Field(default=100, ge=1)
    early_stop_validations: int | None = Field(
        default=None,
        ge=1,
        description="stop after this many validations without a longer acceptance; None: never",
    )
    validation_anchors: int = Field(
        default=1024, ge=16, description="supervised tokens whose states stay in memory"
    )
    calibration_anchors: int = Field(
        default=16384,
        ge=0,
        description="supervised tokens of the validation split that the confidence head is "
        "calibrated on, streamed"
        " once after training; 0: not calibrated",
    )
    log_every_steps: int = Field(default=10, ge=1)
    seed: int = 0

    @model_validator(mode="after")
    def _one_way_to_count_steps(self) -> Self:
        if self.updates_per_pack > 1 and self.packs_per_step > 1:
            raise ValueError("updates_per_pack and packs_per_step cannot both be above 1")
        return self
