"""Targets and drafters small enough that every sequence can be enumerated, and what proves decoding
lossless on them.

Shapes: B draws, M new tokens, C sequences (W ** M), N sequences still decoding, K draft tokens, W
target vocabulary.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy.stats import chi2
from speculators.models.dflash import DFlashDraftModel
from speculators.models.dspark import DSparkDraftModel
from speculators.models.eagle3 import Eagle3DraftModel
from speculators.train.cli import create_transformer_layer_config
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from components.drafter.confidence.calibration import fit_calibration
from components.drafter.confidence.scheduler import PrefixScheduler
from components.drafter.reference import verify as reference_verify
from components.drafter.reference.decoder import ReferenceDecoder
from components.drafter.reference.verify import Verification
from components.drafter.vocabulary import from_token_ids

VOCAB_SIZE = 8
PROMPTS = ((3,), (1, 6, 2))
"""Of two lengths, so that every batch is a ragged one."""
DRAFTERS = ("dspark-vanilla", "dspark-gated", "dspark-rnn", "dflash", "eagle3")
MODELS: dict[str, Any] = {
    "dspark": DSparkDraftModel,
    "dflash": DFlashDraftModel,
    "eagle3": Eagle3DraftModel,
}
BLOCK_SIZE = 4
MIN_EXPECTED = 5.0
"""Cells expected less often are pooled (the usual rule for a chi-squared test)."""


def write_enumerable_target(path: Path, *, seed: int = 3) -> Path:
    """A random Llama with a vocabulary of eight tokens."""
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        bos_token_id=0,
        eos_token_id=None,
        initializer_range=0.3,
        tie_word_embeddings=False,
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        LlamaForCausalLM(config).save_pretrained(path)
    return path


def write_random_drafter(
    path: Path,
    kind: str,
    *,
    target: Path,
    aux_layer_ids: Sequence[int] = (1, 2),
    draft_token_ids: Sequence[int] | None = (0, 1, 2, 4, 5, 6, 7),
    num_layers: int = 2,
    block_size: int = BLOCK_SIZE,
    markov_rank: int = 4,
    mask_token_id: int = 3,
    weight_std: float = 0.3,
    layer_kind: str | None = None,
    num_candidates: int | None = None,
    seed: int = 0,
    **config: Any,
) -> Path:
    """A drafter of `DRAFTERS` whose weights are all drawn anew, so that no part of it is nearly
    silent.

    `draft_token_ids` None gives it the target's whole vocabulary. `config` goes to speculators'
    `from_training_args`; `num_candidates` is vLLM's own option, which speculators' config does not
    know.
    """
    layer_config = create_transformer_layer_config(
        str(target),
        num_layers=num_layers,
        draft_arch=layer_kind or ("llama" if kind == "eagle3" else "qwen3"),
        hidden_act=None,
        sliding_window=None,
        full_attention_indices=list(range(num_layers)),
    )
    arguments: dict[str, Any] = {
        "verifier_name_or_path": str(target),
        "target_layer_ids": list(aux_layer_ids),
        "draft_attn_impl": "sdpa",
        "draft_vocab_size": int(layer_config.vocab_size),
    } | config
    if draft_token_ids is not None:
        kept = torch.tensor(list(draft_token_ids))
        vocabulary = from_token_ids(kept, target_vocab_size=int(layer_config.vocab_size))
        arguments |= {
            "draft_vocab_size": vocabulary.size,
            "t2d": vocabulary.t2d_V,
            "d2t": vocabulary.d2t_D,
        }
    if kind == "eagle3":
        arguments = {"norm_before_residual": False, "ttt_steps": block_size - 1} | arguments
    else:
        arguments |= {
            "block_size": block_size,
            "mask_token_id": mask_token_id,
            "sample_from_anchor": False,
        }
    if kind.startswith("dspark"):
        arguments |= {"markov_rank": markov_rank, "markov_head_type": kind.removeprefix("dspark-")}
    model = MODELS[kind.partition("-")[0]].from_training_args(layer_config, **arguments).float()
    _draw_weights(model, std=weight_std, seed=seed)
    model.save_pretrained(path)
    if num_candidates is not None:
        written = json.loads((path / "config.json").read_text()) | {
            "dspark_draft_topk": num_candidates
        }
        (path / "config.json").write_text(json.dumps(written))
    return path


@torch.no_grad()
def _draw_weights(model: Any, *, std: float, seed: int) -> None:
    """All but the target's own; the two small heads wider, so that they have a say beside the
    backbone.
    """
    generator = torch.Generator().manual_seed(seed)
    for name, weight in model.named_parameters():
        if name.startswith(("embed_tokens", "lm_head", "verifier_")):
            continue
        if "norm" in name:
            weight.copy_(1 + std * torch.rand(weight.shape, generator=generator))
        else:
            scale = 4.0 if name.startswith(("markov_head", "confidence_head")) else 1.0
            weight.copy_(scale * std * torch.randn(weight.shape, generator=generator))


def calibrated_scheduler(
    threshold: float, *, num_positions: int = BLOCK_SIZE - 1
) -> PrefixScheduler:
    """The scheduler as it is served, with a calibration that moves every score: temperature 2, bias
    0.5 and rising.
    """
    draws = np.random.default_rng(0)
    logits_NK = draws.normal(0.0, 2.0, (2000, num_positions))
    survival_NK = 1 / (1 + np.exp(-(logits_NK / 2 + 0.5 * np.arange(1, num_positions + 1))))
    accepted_NK = draws.random(logits_NK.shape) < survival_NK
    return PrefixScheduler(
        threshold, fit_calibration(logits_NK, accepted_NK, np.arange(2000) // 20)
    )


class PeekingScheduler:
    """Wrong on purpose: whether draft 1 is verified hangs on the confidence of draft 2, which draft
    1 enters.
    """

    def num_scheduled(self, confidence_logits_NK: np.ndarray) -> np.ndarray:
        """All drafts or none, [N]."""
        wanted_N = confidence_logits_NK[:, 1] > np.median(confidence_logits_NK[:, 1])
        return np.where(wanted_N, confidence_logits_NK.shape[1], 0)


def verify_too_kindly(
    draft_ids_BK: torch.Tensor,
    draft_probs_BKW: torch.Tensor,
    target_probs_BRW: torch.Tensor,
    *,
    generator: torch.Generator | None,
    num_scheduled_B: torch.Tensor | None = None,
) -> Verification:
    """Wrong on purpose: keeps a draft while 0.9 u q < p."""
    kinder_BKW = draft_probs_BKW.clone()
    kinder_BKW.scatter_(
        2, draft_ids_BK[..., None], 0.9 * draft_probs_BKW.gather(2, draft_ids_BK[..., None])
    )
    return reference_verify.verify_sampled(
        draft_ids_BK,
        kinder_BKW,
        target_probs_BRW,
        generator=generator,
        num_scheduled_B=num_scheduled_B,
    )


def verify_without_residual(
    draft_ids_BK: torch.Tensor,
    draft_probs_BKW: torch.Tensor,
    target_probs_BRW: torch.Tensor,
    *,
    generator: torch.Generator | None,
    num_scheduled_B: torch.Tensor | None = None,
) -> Verification:
    """Wrong on purpose: after a refusal the token comes from p, not from the residual."""
    right = reference_verify.verify_sampled(
        draft_ids_BK,
        draft_probs_BKW,
        target_probs_BRW,
        generator=generator,
        num_scheduled_B=num_scheduled_B,
    )
    rows_B = torch.arange(draft_ids_BK.shape[0], device=draft_ids_BK.device)
    source_BW = target_probs_BRW[rows_B, right.num_accepted_B]
    return Verification(right.num_accepted_B, reference_verify.draw(source_BW, generator))


@torch.inference_mode()
def exact_probabilities(
    target: Path, prompts: Sequence[Sequence[int]], *, num_tokens: int, temperature: float
) -> list[np.ndarray]:
    """Per prompt, the target's probability [C] of each sequence of `num_tokens`, in the order of
    `sequence_codes`.
    """
    model = AutoModelForCausalLM.from_pretrained(str(target), dtype=torch.float64).eval()
    sequences_CM = torch.tensor(list(product(range(VOCAB_SIZE), repeat=num_tokens)))
    exact = []
    for prompt in prompts:
        ids = torch.cat(
            [torch.tensor([list(prompt)]).expand(len(sequences_CM), -1), sequences_CM], dim=1
        )
        logits = model(ids).logits[:, len(prompt) - 1 : -1] / temperature
        chosen = logits.log_softmax(-1).gather(2, sequences_CM[..., None])
        exact.append(chosen.sum((1, 2)).exp().numpy())
    return exact


def sequence_codes(tokens_BM: torch.Tensor) -> np.ndarray:
    """Index of each sequence among all of its length, [B]."""
    weights_M = VOCAB_SIZE ** torch.arange(tokens_BM.shape[1] - 1, -1, -1)
    return np.asarray((tokens_BM.cpu() * weights_M).sum(1).numpy())


def count_draws(
    decoder: ReferenceDecoder,
    *,
    num_draws: int,
    batch_size: int,
    num_tokens: int,
    seed: int,
    **call: Any,
) -> list[np.ndarray]:
    """Per prompt of `PROMPTS`, how often each sequence [C] was decoded; `num_draws` in total,
    prompts alternating.
    """
    generator = torch.Generator(decoder.device).manual_seed(seed)
    counts = [np.zeros(VOCAB_SIZE**num_tokens, dtype=np.int64) for _ in PROMPTS]
    prompts = [PROMPTS[row % len(PROMPTS)] for row in range(batch_size)]
    for _ in range(num_draws // batch_size):
        tokens_BM = decoder.sample(prompts, max_new_tokens=num_tokens, generator=generator, **call)
        codes_B = sequence_codes(tokens_BM)
        for index, count in enumerate(counts):
            count += np.bincount(codes_B[index :: len(PROMPTS)], minlength=len(count))
    return counts


def chi_squared_p_value(counts: Sequence[np.ndarray], exact: Sequence[np.ndarray]) -> float:
    """p-value of independent multinomials, one per prompt: statistics and degrees of freedom add
    up.
    """
    statistic, freedom = 0.0, 0
    for observed_C, probability_C in zip(counts, exact, strict=True):
        expected_C = probability_C / probability_C.sum() * observed_C.sum()
        often_C = expected_C >= MIN_EXPECTED
        observed = np.append(observed_C[often_C], observed_C[~often_C].sum())
        expected = np.append(expected_C[often_C], expected_C[~often_C].sum())
        kept = expected > 0
        statistic += float(((observed - expected)[kept] ** 2 / expected[kept]).sum())
        freedom += int(kept.sum()) - 1
    return float(chi2.sf(statistic, freedom))
