"""Starts a drafter from its target's own layers, which learns several times faster than a random
start.

What is copied: the projections and norms of one target layer per draft layer, and the final norm.
`fc` becomes zero but for an identity on one aux layer's slot, so the drafter's context is that
layer's own residual stream; its norm is the input norm of the first copied layer. The per-head q
and k norms, which a Llama target lacks, stay at one.

EAGLE-3's first layer reads two halves, the embedding of the token at hand and the state before it,
where a layer of the target reads one stream that holds both. So half of its projections stands in
each half, both behind that layer's norm: they read the mean of the two (docs/lab-notes/training.md
has what other splits learn).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from components.drafter.protocol import Drafter
from components.errors import ConfigError, TargetError

LAYER_WEIGHTS = (
    "input_layernorm.weight",
    "post_attention_layernorm.weight",
    "self_attn.q_proj.weight",
    "self_attn.k_proj.weight",
    "self_attn.v_proj.weight",
    "self_attn.o_proj.weight",
    "mlp.gate_proj.weight",
    "mlp.up_proj.weight",
    "mlp.down_proj.weight",
)
OPTIONAL_LAYER_WEIGHTS = ("self_attn.q_norm.weight", "self_attn.k_norm.weight")
TWO_HALVES = ("self_attn.q_proj.weight", "self_attn.k_proj.weight", "self_attn.v_proj.weight")


def start_from_target(
    model: Drafter, *, target_path: Path, start_layers: tuple[int, ...], aux_slot: int
) -> None:
    """Overwrite the drafter's layers, `fc`, its norms and the final norm with the target's, in
    place.

    Args:
        model: a drafter of `build_drafter`.
        target_path: folder with the target's safetensors.
        start_layers: target layer (from 0) copied into each draft layer.
        aux_slot: aux layer whose states `fc` passes on unchanged; negative counts from the end.

    Raises:
        ConfigError: the target's layers do not have the drafter's shape.
        TargetError: a weight is missing from the target's files.
    """
    weights = read_tensors(target_path)
    for draft_layer, target_layer in zip(model.layers, start_layers, strict=True):
        _copy_layer(draft_layer, weights, f"layers.{target_layer}.")
    _copy(model.norm.weight, weights, "norm.weight")
    # EAGLE-3 keeps the norm of the fused states in its first layer.
    context_norm = getattr(model, "hidden_norm", None) or model.layers[0].hidden_norm
    _copy(context_norm.weight, weights, f"layers.{start_layers[0]}.input_layernorm.weight")
    hidden_size = model.fc.weight.shape[0]
    slot = range(model.fc.weight.shape[1] // hidden_size)[aux_slot]
    with torch.no_grad():
        model.fc.weight.zero_()
        model.fc.weight[:, slot * hidden_size : (slot + 1) * hidden_size] = torch.eye(hidden_size)


def read_tensors(target_path: Path) -> TensorFiles:
    """The target's safetensors, opened lazily."""
    return TensorFiles(target_path)


class TensorFiles:
    """Tensors of a safetensors folder by the end of their name, so prefixes like `model.` do not
    matter.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = Path(folder)
        index = self._folder / "model.safetensors.index.json"
        if index.is_file():
            self._files: dict[str, str] = json.loads(index.read_text())["weight_map"]
        else:
            self._files = {}
            for file in sorted(self._folder.glob("*.safetensors")):
                with safe_open(file, framework="pt") as opened:
                    self._files |= dict.fromkeys(opened.keys(), file.name)

    def find(self, name: str) -> str | None:
        """Full name of the tensor that is `name` or ends in `.name`; the shortest where several
        do.
        """
        matches = [known for known in self._files if known == name or known.endswith(f".{name}")]
        return min(matches, key=len) if matches else None

    def read(self, name: str) -> torch.Tensor:
        """The tensor called `name`, as stored.

        Raises:
            TargetError: there is none.
        """
        full_name = self.find(name)
        if full_name is None:
            raise TargetError("the target has no such weight", got=f"{name} in {self._folder}")
        with safe_open(self._folder / self._files[full_name], framework="pt") as opened:
            tensor: torch.Tensor = opened.get_tensor(full_name)
        return tensor


def read_lm_head(target_path: Path) -> torch.Tensor:
    """The target's output head [V, H], which is its embedding where the two are tied."""
    weights = TensorFiles(target_path)
    return weights.read(
        "lm_head.weight" if weights.find("lm_head.weight") else "embed_tokens.weight"
    )


def _copy_layer(draft_layer: Any, weights: TensorFiles, prefix: str) -> None:
    parameters = dict(draft_layer.named_parameters())
    for name in LAYER_WEIGHTS:
        parameter = parameters[name].detach()
        if name in TWO_HALVES and hasattr(draft_layer, "hidden_norm"):
            for half in parameter.chunk(2, dim=1):
                _copy(half, weights, prefix + name)
            parameter.mul_(0.5)
        else:
            _copy(parameter, weights, prefix + name)

    for name in OPTIONAL_LAYER_WEIGHTS:
        if not weights.find(prefix + name):
            continue
        if name not in parameters:
            raise ConfigError(
                "drafter.start 'target_layers' needs draft layers of the target's kind",
                got=f"the target has {name}, the drafter's layers have none",
                fix="Use drafter.start: plain.",
            )
        _copy(parameters[name], weights, prefix + name)


def _copy(parameter: torch.Tensor, weights: TensorFiles, name: str) -> None:
    source = weights.read(name)
    if source.shape != parameter.shape:
        raise ConfigError(
            "drafter.start 'target_layers' needs draft layers of the target's shape",
            got=f"{name} {tuple(source.shape)}",
            expected=tuple(parameter.shape),
            fix="Use drafter.start: plain.",
        )
    with torch.no_grad():
        parameter.copy_(source)
