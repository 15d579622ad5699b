"""Builds drafters from speculators' models, with the target's embedding, head rows and final norm
frozen and shared.

DSpark and DFlash use the "1+K fill-in" layout (`sample_from_anchor=False`): slot 0 of a block holds
the anchor, the token the target just committed, and slots 1..K = block_size - 1 are filled in. It
is the layout vLLM serves everywhere. EAGLE-3 drafts the same K tokens after the anchor, in K steps
of its layers.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from speculators import SpeculatorModel, SpeculatorModelConfig
from speculators.models.dflash import DFlashDraftModel
from speculators.models.dspark import DSparkDraftModel
from speculators.models.eagle3 import Eagle3DraftModel
from speculators.train.cli import create_transformer_layer_config
from transformers import AutoConfig, AutoTokenizer

from components.drafter.bigrams import start_markov_head
from components.drafter.protocol import Drafter
from components.drafter.start import start_from_target
from components.drafter.vocabulary import DraftVocabulary
from components.errors import CheckpointError, ConfigError, TargetError
from components.settings import DrafterSettings


def build_drafter(
    settings: DrafterSettings,
    *,
    target_path: Path,
    aux_layer_ids: tuple[int, ...],
    draft_vocab: DraftVocabulary | None,
    seed: int,
) -> Drafter:
    """A drafter for the target at `target_path`, in fp32, ready to train.

    Args:
        settings: shape and start of the drafter.
        target_path: folder with config.json, safetensors and tokenizer.
        aux_layer_ids: target layers whose states feed the drafter (id N is the residual stream
            after layer N).
        draft_vocab: the tokens it may propose; None for the target's own vocabulary.
        seed: of the random part of the weights.

    Returns:
        speculators' DSparkDraftModel, DFlashDraftModel or Eagle3DraftModel.

    Raises:
        ConfigError: the settings do not fit the target (a layer, a slot or a token it does not
            have).
        TargetError: the target's config cannot be read.
    """
    config = read_target_config(target_path)
    _check_against_target(settings, config, aux_layer_ids)
    layer_config = create_transformer_layer_config(
        str(target_path),
        num_layers=settings.num_layers,
        draft_arch="llama" if settings.algorithm == "eagle3" else "qwen3",
        hidden_act=None,
        sliding_window=None,
        full_attention_indices=list(range(settings.num_layers)),
    )

    arguments: dict[str, Any] = {
        "verifier_name_or_path": str(target_path),
        "target_layer_ids": list(aux_layer_ids),
        "draft_vocab_size": draft_vocab.size if draft_vocab else int(config.vocab_size),
        "draft_attn_impl": "sdpa",
        "t2d": draft_vocab.t2d_V if draft_vocab else None,
        "d2t": draft_vocab.d2t_D if draft_vocab else None,
    }

    with torch.random.fork_rng():
        torch.manual_seed(seed)
        built = _build(settings, layer_config, target_path, arguments)

    model: Drafter = built.float()
    if settings.start == "target_layers":
        start_from_target(
            model,
            target_path=target_path,
            start_layers=settings.start_layers,
            aux_slot=settings.start_aux_slot,
        )
        with torch.no_grad():
            model.norm.weight.mul_(settings.start_norm_scale)

    if settings.markov_start == "bigrams":
        start_markov_head(
            model,
            target_path=target_path,
            draft_token_ids=draft_vocab.token_ids_D
            if draft_vocab
            else torch.arange(int(config.vocab_size)),
            device=torch.device("cuda" if torch.cuda.is_available() else "cpu"),
        )

    return model


def load_drafter(checkpoint_path: Path, *, target_path: Path) -> Drafter:
    """The drafter of a checkpoint in fp32, with the frozen parts of the target at `target_path`,
    wherever the checkpoint says that its target was.

    Raises:
        CheckpointError: it cannot be read.
    """
    try:
        config = SpeculatorModelConfig.from_pretrained(str(checkpoint_path))
        config.speculators_config.verifier.name_or_path = str(target_path)
        model = SpeculatorModel.from_pretrained(str(checkpoint_path), config=config)
        loaded: Drafter = model.float().eval()
    except (OSError, ValueError, SafetensorError) as error:
        raise CheckpointError(
            "the drafter checkpoint cannot be read", got=f"{checkpoint_path}: {error}"
        ) from None
    return loaded


def _build(
    settings: DrafterSettings, layer_config: Any, target_path: Path, arguments: dict[str, Any]
) -> Any:
    """One call for each algorithm: speculators' three classes take different arguments for the same
    settings.
    """
    if settings.algorithm == "eagle3":
        # Its checkpoints carry the embedding: speculators does not fill it in on loading, as for
        # DFlash and DSpark.
        return Eagle3DraftModel.from_training_args(
            layer_config, norm_before_residual=False, ttt_steps=settings.block_size - 1, **arguments
        )

    arguments |= {
        "block_size": settings.block_size,
        "mask_token_id": settings.mask_token_id
        if settings.mask_token_id is not None
        else choose_mask_token_id(target_path),
        "sample_from_anchor": False,
    }

    if settings.algorithm == "dflash":
        return DFlashDraftModel.from_training_args(layer_config, **arguments)
    return DSparkDraftModel.from_training_args(
        layer_config,
        markov_rank=settings.markov_rank,
        markov_head_type=settings.markov_head,
        enable_confidence_head=settings.confidence_head,
        confidence_head_with_markov=settings.confidence_head and settings.markov_rank > 0,
        **arguments,
    )


def read_target_config(target_path: Path) -> Any:
    """The target's text config (transformers).

    Raises:
        TargetError: there is none at `target_path`.
    """
    try:
        config = AutoConfig.from_pretrained(str(target_path))
    except (OSError, ValueError) as error:
        raise TargetError(
            "the target's config.json cannot be read", got=f"{target_path}: {error}"
        ) from None
    return getattr(config, "text_config", config)


def choose_mask_token_id(target_path: Path) -> int:
    """A real token for the slots to fill in: the tokenizer's mask token, or else a special token
    chats do not use.

    Raises:
        ConfigError: the tokenizer has no such token; the recipe must then name one.
    """
    tokenizer = AutoTokenizer.from_pretrained(str(target_path))
    if tokenizer.mask_token_id is not None:
        return int(tokenizer.mask_token_id)

    template = tokenizer.chat_template or ""
    in_use = {tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id}
    vocab_size = int(read_target_config(target_path).vocab_size)
    free = [
        token_id
        for token_id, token in tokenizer.added_tokens_decoder.items()
        if token.special
        and token_id not in in_use
        and token.content not in str(template)
        and token_id < vocab_size
    ]

    if not free:
        raise ConfigError(
            "the target's tokenizer has no unused special token for the slots to fill in",
            got=target_path,
            fix="Set drafter.mask_token_id to a token that conversations do not contain.",
        )

    return int(max(free))


def _check_against_target(
    settings: DrafterSettings, config: Any, aux_layer_ids: tuple[int, ...]
) -> None:
    """All that only the target's config can refuse, before any weights are made."""
    num_layers = int(config.num_hidden_layers)
    bad_aux = [layer for layer in aux_layer_ids if not 1 <= layer <= num_layers]
    if bad_aux or not aux_layer_ids or len(set(aux_layer_ids)) != len(aux_layer_ids):
        raise ConfigError(
            "stream.aux_layer_ids do not fit the target",
            got=aux_layer_ids,
            expected=f"1..{num_layers}",
        )

    bad_start = [layer for layer in settings.start_layers if not 0 <= layer < num_layers]
    if settings.start == "target_layers" and bad_start:
        raise ConfigError(
            "drafter.start_layers do not exist", got=bad_start, expected=f"0..{num_layers - 1}"
        )
    if not -len(aux_layer_ids) <= settings.start_aux_slot < len(aux_layer_ids):
        raise ConfigError(
            "drafter.start_aux_slot has no aux layer",
            got=settings.start_aux_slot,
            expected=f"< {len(aux_layer_ids)}",
        )
    if settings.mask_token_id is not None and not 0 <= settings.mask_token_id < int(
        config.vocab_size
    ):
        raise ConfigError(
            "drafter.mask_token_id is no token of the target", got=settings.mask_token_id
        )


def num_draft_tokens(model: Drafter) -> int:
    """K, the tokens a drafter of `build_drafter` proposes per step."""
    return int(model.config.speculators_config.proposal_methods[0].speculative_tokens)


def trainable_state(model: Drafter) -> dict[str, torch.Tensor]:
    """Name -> tensor (detached, shared) of the weights that training changes."""
    return {name: value.detach() for name, value in model.named_parameters() if value.requires_grad}


def load_trainable(model: Drafter, state: dict[str, torch.Tensor], *, source: str) -> None:
    """Copy trainable weights into `model`; the target's frozen parts stay as they are.

    Raises:
        ConfigError: a weight is missing or of another shape, so the two drafters do not have the
            same settings.
    """
    parameters = {name: value for name, value in model.named_parameters() if value.requires_grad}
    wrong = [
        name
        for name, value in parameters.items()
        if name not in state or state[name].shape != value.shape
    ]

    if wrong:
        raise ConfigError(
            "the weights to start from do not fit the drafter's settings",
            got=f"{len(wrong)} of {len(parameters)} tensors of {source} differ, first {wrong[0]}",
            fix="Use the drafter settings that the other drafter was trained with.",
        )

    with torch.no_grad():
        for name, value in parameters.items():
            value.copy_(state[name])
