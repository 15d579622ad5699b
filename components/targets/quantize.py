"""INT8 W8A8 of a Llama-like target: per-channel symmetric weights, per-token dynamic activations.

Format: compressed-tensors `int-quantized`, which vLLM loads on CPU and CUDA. For a linear weight W
[O, I]: scale_o = max_i |W_oi| / 127, stored int8 round(W_oi / scale_o), so W is restored within
scale_o / 2. Activations are quantized by the engine at run time, so no calibration data is needed.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from components.contracts import Progress, write_atomic
from components.errors import TargetError
from components.targets.folder import check_target_folder, read_config, weight_files
from components.targets.staging import copy_side_files, require_absent, staged_folder

_MAX_INT8 = 127
# Its error goes straight into the logits, and it is often tied to the embeddings.
_IGNORED = ("lm_head",)
_EXPERT_KEYS = ("num_experts", "num_local_experts", "n_routed_experts")


def quantize_int8_w8a8(
    source: Path, destination: Path, *, progress: Progress | None = None
) -> Path:
    """Write the target `source` to `destination` with every Linear but lm_head in INT8; one shard
    in memory at a time.

    Tokenizer, template and generation config are taken over unchanged; sharding stays as it is.

    Raises:
        TargetError: `source` is incomplete, quantized already or a mixture of experts, or
            `destination` exists.
    """
    source, destination = Path(source), Path(destination)
    require_absent(destination)
    check_target_folder(source)
    config = read_config(source)
    _check_supported(config)
    linears = _linear_modules(source)

    with staged_folder(destination) as folder:
        copy_side_files(source, folder)
        weight_map: dict[str, str] = {}
        num_bytes = num_quantized = 0
        files = weight_files(source)
        for index, file in enumerate(files):
            tensors = _quantize_shard(file, linears)
            num_quantized += sum(name.endswith(".weight_scale") for name in tensors)
            num_bytes += sum(tensor.nbytes for tensor in tensors.values())
            weight_map.update(dict.fromkeys(tensors, file.name))
            save_file(tensors, folder / file.name, metadata={"format": "pt"})
            if progress:
                progress("shards", index + 1, len(files))
        if num_quantized != len(linears):
            raise TargetError(
                "the weights do not hold every linear layer of the config",
                got=num_quantized,
                expected=len(linears),
            )
        if len(files) > 1:
            index_json = {"metadata": {"total_size": num_bytes}, "weight_map": weight_map}
            write_atomic(
                folder / "model.safetensors.index.json",
                json.dumps(index_json, indent=2, sort_keys=True),
            )
        quantized = {**config, "quantization_config": _quantization_config()}
        write_atomic(folder / "config.json", json.dumps(quantized, indent=2, sort_keys=True) + "\n")

    return destination


def quantize_weight(weight_OI: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Per-channel symmetric INT8 of a linear weight [O, I]: (int8 [O, I], float32 scale [O, 1]).

    A row of zeros gets scale 1, so nothing divides by zero.
    """
    weight_OI = weight_OI.float()
    scale_O1 = weight_OI.abs().amax(dim=1, keepdim=True) / _MAX_INT8
    scale_O1 = torch.where(scale_O1 > 0, scale_O1, torch.ones_like(scale_O1))
    quantized_OI = (weight_OI / scale_O1).round().clamp(-_MAX_INT8, _MAX_INT8).to(torch.int8)
    return quantized_OI, scale_O1


def _check_supported(config: dict[str, Any]) -> None:
    if config.get("quantization_config") or config.get("compression_config"):
        raise TargetError("the target is quantized already", got=config.get("quantization_config"))
    experts = [key for key in _EXPERT_KEYS if config.get(key)]
    if experts:
        raise TargetError(
            "a mixture of experts is not quantized here",
            got=f"{experts[0]}={config[experts[0]]}",
            fix="Use llm-compressor for it, and name the result as target.source: local.",
        )


def _linear_modules(source: Path) -> set[str]:
    """Names of the model's linear layers but lm_head, from the architecture itself (built without
    memory).
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(source))
    return {
        name
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear) and name.rpartition(".")[2] not in _IGNORED
    }


def _quantize_shard(file: Path, linears: set[str]) -> dict[str, torch.Tensor]:
    tensors: dict[str, torch.Tensor] = {}
    with safe_open(file, framework="pt") as shard:
        for name in shard.keys():  # noqa: SIM118 - not a dict: it has no iterator
            tensor = shard.get_tensor(name)
            if name.removesuffix(".weight") not in linears or not name.endswith(".weight"):
                tensors[name] = tensor
                continue
            quantized_OI, scale_O1 = quantize_weight(tensor)
            tensors[name] = quantized_OI
            tensors[f"{name}_scale"] = scale_O1
    return tensors


def _quantization_config() -> dict[str, Any]:
    scheme = {"num_bits": 8, "type": "int", "symmetric": True}
    return {
        "quant_method": "compressed-tensors",
        "format": "int-quantized",
        "quantization_status": "compressed",
        "ignore": list(_IGNORED),
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": {**scheme, "strategy": "channel", "dynamic": False},
                "input_activations": {**scheme, "strategy": "token", "dynamic": True},
            }
        },
    }
