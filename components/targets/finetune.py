"""A small, real fine-tune of a target on CPU or GPU: the kind of change a drafter has to follow.

Next-token cross entropy over packed text (rows of `tokens_per_step` tokens), AdamW on the last
layers, bf16 autocast over float32 master weights, linear warm-up over a tenth of the steps and
cosine decay to zero.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from components.contracts import Progress
from components.errors import TargetError, TrainingError
from components.settings import native_dtype
from components.targets.folder import check_target_folder, read_config, weight_files
from components.targets.staging import copy_side_files, require_absent, staged_folder

_WARMUP_SHARE = 0.1
_MAX_GRAD_NORM = 1.0


def finetune_target(
    source: Path,
    destination: Path,
    *,
    num_steps: int,
    learning_rate: float,
    texts: Sequence[str],
    seed: int = 0,
    tokens_per_step: int = 512,
    num_layers: int | None = None,
    progress: Progress | None = None,
) -> list[float]:
    """Fine-tune `source` on `texts` (conversations already rendered with its chat template) into
    folder `destination`.

    Args:
        num_layers: train only the last so many layers and the final norm; None trains everything.

    Returns:
        The loss of each step, nats per token. `destination` keeps the source's tensor names, dtypes
        and sharding, so that nothing but numbers differs.

    Raises:
        TargetError: `source` is incomplete or quantized, `destination` exists, or the texts are too
            short for one row.
        TrainingError: the loss is not finite.
    """
    source, destination = Path(source), Path(destination)
    require_absent(destination)
    check_target_folder(source)
    if read_config(source).get("quantization_config"):
        raise TargetError(
            "a quantized target cannot be fine-tuned", got=source, fix="Fine-tune the original."
        )
    from transformers import AutoModelForCausalLM

    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).to(device).train()
    rows = _rows(source, texts, tokens_per_step=tokens_per_step, seed=seed)
    losses = _train(
        model,
        rows,
        parameters=_trainable(model, num_layers),
        num_steps=num_steps,
        learning_rate=learning_rate,
        progress=progress,
    )
    with staged_folder(destination) as folder:
        copy_side_files(source, folder)
        _save_like(source, folder, model.state_dict())
    return losses


def _rows(
    source: Path, texts: Sequence[str], *, tokens_per_step: int, seed: int
) -> Iterator[torch.Tensor]:
    """Endless rows [1, tokens_per_step] of token ids, packed from the texts in a new order each
    pass.
    """
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(source)
    encoded = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]
    num_tokens = sum(map(len, encoded))
    if num_tokens < tokens_per_step:
        raise TargetError(
            "too little text to fine-tune on", got=f"{num_tokens} tokens", expected=tokens_per_step
        )
    return _pack(encoded, tokens_per_step=tokens_per_step, seed=seed)


def _pack(encoded: list[list[int]], *, tokens_per_step: int, seed: int) -> Iterator[torch.Tensor]:
    shuffler = random.Random(seed)
    pending: list[int] = []
    while True:
        shuffler.shuffle(encoded)
        for ids in encoded:
            pending.extend(ids)
            while len(pending) >= tokens_per_step:
                yield torch.tensor([pending[:tokens_per_step]])
                pending = pending[tokens_per_step:]


def _trainable(model: Any, num_layers: int | None) -> list[torch.nn.Parameter]:
    if num_layers is None:
        return list(model.parameters())
    layers = model.model.layers
    if not 1 <= num_layers <= len(layers):
        raise TargetError(
            "cannot train so many layers", got=num_layers, expected=f"1 to {len(layers)}"
        )

    model.requires_grad_(False)
    chosen = [*layers[-num_layers:], model.model.norm]
    parameters = [parameter for module in chosen for parameter in module.parameters()]
    for parameter in parameters:
        parameter.requires_grad_(True)

    return parameters


def _train(
    model: Any,
    rows: Iterator[torch.Tensor],
    *,
    parameters: list[torch.nn.Parameter],
    num_steps: int,
    learning_rate: float,
    progress: Progress | None,
) -> list[float]:
    """A short, plain loop: what is wanted is a target that has changed, at a finite loss."""
    optimizer = torch.optim.AdamW(
        parameters, lr=learning_rate, betas=(0.9, 0.95), weight_decay=0.0, fused=True
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: _rate(step, num_steps))
    losses: list[float] = []
    is_bf16 = model.device.type != "cpu" or native_dtype("cpu") == "bfloat16"

    for step in range(num_steps):
        ids_BT = next(rows).to(model.device)
        with torch.autocast(model.device.type, dtype=torch.bfloat16, enabled=is_bf16):
            loss = model(input_ids=ids_BT, labels=ids_BT, use_cache=False).loss
        if not math.isfinite(loss.item()):
            raise TrainingError(
                "the fine-tune diverged",
                got=f"loss {loss.item()} at step {step}",
                fix="Lower its rate.",
            )
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, _MAX_GRAD_NORM)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.item())
        if progress:
            progress("steps", step + 1, num_steps)

    return losses


def _rate(step: int, num_steps: int) -> float:
    """Share of the peak rate at `step` (from 0): linear warm-up, then half a cosine down to
    zero.
    """
    num_warmup = max(1, round(num_steps * _WARMUP_SHARE))
    if step < num_warmup:
        return (step + 1) / num_warmup
    return 0.5 * (1 + math.cos(math.pi * (step - num_warmup) / max(1, num_steps - num_warmup)))


def _save_like(source: Path, folder: Path, state: dict[str, torch.Tensor]) -> None:
    """Write `state` under the source's own tensor names, dtypes and files."""
    for file in weight_files(source):
        tensors: dict[str, torch.Tensor] = {}
        with safe_open(file, framework="pt") as shard:
            for name in shard.keys():  # noqa: SIM118 - not a dict: it has no iterator
                if name not in state:
                    raise TargetError("a stored tensor has no counterpart in the model", got=name)
                tensors[name] = state[name].to("cpu", shard.get_tensor(name).dtype).contiguous()
        save_file(tensors, folder / file.name, metadata={"format": "pt"})
    index = source / "model.safetensors.index.json"
    if index.is_file():
        (folder / index.name).write_bytes(index.read_bytes())
