"""vLLM plug-in that serves DSpark drafters on CPU: `register` is the entry point in group
`vllm.general_plugins`.

vLLM drafts DSpark in model runner V2 only, which needs Triton. On CPU the V1 runner serves; it
drafts DFlash, whose backbone DSpark shares, but would leave the Markov head out without a word. The
plug-in closes that gap in five places:

1. the reader of `config.json` for "dspark" checkpoints also checks what the CPU path cannot draft,
   and switches the confidence head off (nothing reads it here, so vLLM skips its weights);
2. `DFlashProposer` becomes `DSparkProposer` (`dspark_proposer.py`), which samples left to right
   with the Markov head;
3. a DSpark drafter that reaches DFlash's own sampling after all raises instead of drafting without
   its Markov head;
4. three faults in vLLM's rejection sampling on CPU are repaired (`cpu_sampling.py`): with two of
   them, no speculative method keeps the target's distribution at a temperature above 0; the third
   ends the engine at a request with top-k;
5. a request's `seed`, which ends the engine where a prompt is computed in several steps, is rewound
   as on a GPU (`cpu_seeds.py`).

Serve with `{"method": "dflash", "model": DIR, "num_speculative_tokens": K}` where K = block_size -
1. With `"draft_sample_method": "probabilistic"` the drafts are samples and their probabilities
   reach the rejection sampler.
`DSPARK_CPU_TRACE=FILE` appends one JSON line per request and step: request, position, anchor,
drafts.

Every vLLM process loads the plug-in, some more than once. Where the platform is not CPU it does
nothing. Where vLLM's internals have drifted from what it needs, the engine still serves without a
drafter (the last rung of a rollback), and a DSpark checkpoint is refused with one message that
names the drift.
"""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Callable
from typing import Any

from components.errors import CheckpointError, EngineError

BUILT_FOR = "0.32"
"""vLLM minor version whose internals were read and tested."""

ARCHITECTURE = "Qwen3DSparkModel"
"""vLLM's name for a Qwen3-shaped DSpark drafter, the shape that speculators writes."""

_RUNNER_MODULE = "vllm.v1.worker.gpu_model_runner"
_MODEL_METHODS = ("compute_draft_logits", "markov_embed", "markov_bias", "map_draft_to_target")
_MARK = "__dspark_cpu__"

ConfigReader = Callable[..., None]


def register() -> None:
    """Install the plug-in into this process if vLLM runs on CPU here. Idempotent."""
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return
    from vllm.transformers_utils.configs.speculators.algos import SUPPORTED_SPECULATORS_TYPES

    native = SUPPORTED_SPECULATORS_TYPES.get("dspark")
    if getattr(native, _MARK, False):
        return
    try:
        drift = _find_drift(native)
        if drift is None:
            _install_proposer()
            _repair_sampling()
            _repair_seeds()
    except (ImportError, AttributeError) as error:
        drift = str(error)
    reader = _refusing_reader(drift) if drift else _checking_reader(native)
    setattr(reader, _MARK, True)
    SUPPORTED_SPECULATORS_TYPES["dspark"] = reader


def _find_drift(native: ConfigReader | None) -> str | None:
    """What in this vLLM differs from what the plug-in needs, in words; None when all is as
    expected.
    """
    from vllm import ModelRegistry
    from vllm.model_executor.models.qwen3_dflash import DFlashQwen3ForCausalLM
    from vllm.model_executor.models.qwen3_dspark import Qwen3DSparkForCausalLM
    from vllm.v1.sample import rejection_sampler
    from vllm.v1.sample.ops.topk_topp_sampler import TopKTopPSampler
    from vllm.v1.spec_decode.dflash import DFlashProposer
    from vllm.v1.worker.gpu_input_batch import CachedRequestState

    from components.serving.vllm_plugin import cpu_sampling, cpu_seeds

    if native is None:
        return "no reader for speculators' 'dspark' configs"
    if ARCHITECTURE not in ModelRegistry.get_supported_archs():
        return f"no model architecture {ARCHITECTURE}"
    missing = [
        name for name in _MODEL_METHODS if not callable(getattr(Qwen3DSparkForCausalLM, name, None))
    ]
    if missing:
        return f"Qwen3DSparkForCausalLM lacks {', '.join(missing)}"
    if not issubclass(Qwen3DSparkForCausalLM, DFlashQwen3ForCausalLM):
        return "Qwen3DSparkForCausalLM is no DFlashQwen3ForCausalLM, which the V1 proposer requires"
    for owner, name, wanted in (
        (DFlashProposer, "_sample_draft_tokens", ("self", "hidden_states", "sampling_metadata")),
        (DFlashProposer, "_sample_from_logits", ("self", "logits", "sampling_metadata")),
        (DFlashProposer, "take_last_draft_probs", ("self",)),
        (rejection_sampler, "expand_batch_to_tokens", cpu_sampling.EXPAND_PARAMETERS),
        (rejection_sampler, "rejection_sample", cpu_sampling.REJECTION_PARAMETERS),
        (rejection_sampler, "apply_top_k_top_p", ("logits", "k", "p")),
        (TopKTopPSampler, "forward_cpu", cpu_seeds.FORWARD_PARAMETERS),
        (CachedRequestState, "__post_init__", ("self",)),
    ):
        function = getattr(owner, name, None)
        found = tuple(inspect.signature(function).parameters) if function else ()
        if found[: len(wanted)] != wanted:
            return f"{owner.__name__}.{name} takes {found}, not {wanted}"
    return None


def _install_proposer() -> None:
    """Put `DSparkProposer` where the V1 runner looks for `DFlashProposer`, and guard the road
    around it.
    """
    from vllm.model_executor.models.qwen3_dspark import Qwen3DSparkForCausalLM

    from components.serving.vllm_plugin.dspark_proposer import DSparkProposer

    # The runner's module takes the name at its import. Importing it here would cost every API
    # server half a second, so the source is rebound, and the runner too in the processes where it
    # is already loaded.
    dflash: Any = importlib.import_module("vllm.v1.spec_decode.dflash")
    dflash.DFlashProposer = DSparkProposer
    runner: Any = sys.modules.get(_RUNNER_MODULE)
    if runner is not None:
        if not hasattr(runner, "DFlashProposer"):
            raise AttributeError(f"{_RUNNER_MODULE} has no DFlashProposer")
        runner.DFlashProposer = DSparkProposer
    Qwen3DSparkForCausalLM.compute_logits = _refuse_plain_sampling


def _repair_sampling() -> None:
    """Put the functions of `cpu_sampling.py` where vLLM's rejection sampler looks them up."""
    from components.serving.vllm_plugin import cpu_sampling

    sampler: Any = importlib.import_module("vllm.v1.sample.rejection_sampler")
    sampler.expand_batch_to_tokens = cpu_sampling.expand_batch_to_tokens
    sampler.rejection_sample = cpu_sampling.without_padding(sampler.rejection_sample)
    sampler.apply_top_k_top_p = cpu_sampling.skipping_no_rows(sampler.apply_top_k_top_p)


def _repair_seeds() -> None:
    """Put the wrappers of `cpu_seeds.py` around what makes requests and what samples for them."""
    from components.serving.vllm_plugin import cpu_seeds

    sampling: Any = importlib.import_module("vllm.v1.sample.ops.topk_topp_sampler")
    batch: Any = importlib.import_module("vllm.v1.worker.gpu_input_batch")
    sampler = sampling.TopKTopPSampler
    sampler.forward_cpu = cpu_seeds.remembering(sampler.forward_cpu)
    request = batch.CachedRequestState
    request.__post_init__ = cpu_seeds.with_rewindable_generator(request.__post_init__)


def _refuse_plain_sampling(_model: object, _hidden_states: object) -> None:
    raise EngineError(
        "a DSpark drafter is being sampled as plain DFlash, without its Markov head",
        expected=f"vLLM {BUILT_FOR} with model runner V1 on CPU",
        fix="Unset VLLM_USE_V2_MODEL_RUNNER, or serve with method 'dspark' where runner V2 works.",
    )


def _checking_reader(native: ConfigReader | None) -> ConfigReader:
    def read_dspark(config_dict: dict[str, Any], pre_trained_config: dict[str, Any]) -> None:
        """vLLM's own reader, then: refuse what the CPU path cannot draft, and drop the confidence
        head.
        """
        check_servable(config_dict)
        assert native is not None
        native(config_dict=config_dict, pre_trained_config=pre_trained_config)
        pre_trained_config["enable_confidence_head"] = False

    return read_dspark


def _refusing_reader(drift: str) -> ConfigReader:
    def refuse_dspark(config_dict: dict[str, Any], pre_trained_config: dict[str, Any]) -> None:  # noqa: ARG001
        import vllm

        raise EngineError(
            f"the CPU DSpark plug-in does not fit this vLLM: {drift}",
            got=f"vLLM {vllm.__version__}",
            expected=f"vLLM {BUILT_FOR}",
            fix="Install that version, or serve without a drafter.",
        )

    return refuse_dspark


def check_servable(config: dict[str, Any]) -> None:
    """Check that the V1 runner's DFlash layout can draft for a speculators "dspark" config (a
    parsed config.json).

    Raises:
        CheckpointError: the block is sampled from the anchor, the Markov head is not the vanilla
            one, or a layer uses sliding-window attention (trained over the block, but served per
            position by vLLM).
    """
    # An absent key means True to speculators, which trained the drafter, and False to vLLM: the
    # trainer is believed.
    if config.get("sample_from_anchor", True):
        raise CheckpointError(
            "this DSpark drafter samples from the anchor, which the CPU path cannot draft",
            got="sample_from_anchor=true",
            expected="sample_from_anchor=false (the anchor, then K = block_size - 1 masks)",
            fix="Train it with sample_from_anchor=false.",
        )

    head = config.get("markov_head_type", "vanilla")
    if head != "vanilla":
        raise CheckpointError(
            "vLLM serves only the vanilla Markov head", got=f"markov_head_type={head}"
        )

    layer_types = (config.get("transformer_layer_config") or {}).get("layer_types") or []
    if "sliding_attention" in layer_types:
        raise CheckpointError(
            "sliding-window draft layers are trained and served with different windows",
            got=f"layer_types={layer_types}",
            expected="full_attention in every layer",
        )
