"""Starts the Markov head from the target's own bigrams, so that training begins with a drafter that
already proposes.

The Markov head adds w1[prev] @ w2[next] to the logits of a draft position. The best such matrix of
rank r for a drafter that knows nothing else is, up to a constant per row, the truncated SVD
(Eckart-Young) of log p(next | prev), and the target itself says what p(next | prev) is: one forward
pass for every token of the draft vocabulary, right after the opening of an answer.
"""

from __future__ import annotations

import copy
import logging
import time
from pathlib import Path
from typing import Any

import torch

from components.drafter.protocol import Drafter
from components.errors import ConfigError
from components.settings import native_dtype

log = logging.getLogger(__name__)

BATCH_SIZE = 256
MAX_DRAFT_VOCAB = 65_536
"""The matrix has this many rows and columns at most: 8 GiB in half precision."""

MIN_LOG_PROBABILITY = -12.0
"""Less likely tokens count as this likely: below it the SVD would spend its rank on telling never
from hardly ever.
"""

SVD_ITERATIONS = 3


def start_markov_head(
    model: Drafter, *, target_path: Path, draft_token_ids: torch.Tensor, device: torch.device
) -> float:
    """Overwrite the Markov head of a DSpark drafter with the target's bigrams, in place.

    Args:
        model: a DSpark drafter with a Markov head of rank r: w1 [V, r] over the target's
            vocabulary, w2 [D, r].
        target_path: folder with the target.
        draft_token_ids: target ids of the draft vocabulary, [D].
        device: where the target runs.

    Returns:
        Share of the bigram matrix's variance that rank r keeps, 0 to 1.

    Raises:
        ConfigError: the drafter has no Markov head, or its draft vocabulary is too large for the
            matrix.
    """
    head = getattr(model, "markov_head", None)
    if head is None:
        raise ConfigError(
            "drafter.markov_start 'bigrams' needs a Markov head",
            expected="drafter.markov_rank above 0",
        )
    if len(draft_token_ids) > MAX_DRAFT_VOCAB:
        raise ConfigError(
            "the draft vocabulary is too large to start the Markov head from bigrams",
            got=len(draft_token_ids),
            expected=f"at most {MAX_DRAFT_VOCAB}",
            fix="Set drafter.draft_vocab_size, or drafter.markov_start: random.",
        )

    started = time.monotonic()
    centred_DD = _centred(
        bigram_log_probs(target_path, draft_token_ids=draft_token_ids, device=device)
    )
    rank = int(head.markov_w2.weight.shape[1])
    left_DR, singular_R, right_DR = torch.svd_lowrank(
        centred_DD.float(), q=rank, niter=SVD_ITERATIONS
    )

    with torch.no_grad():
        head.markov_w1.weight.zero_()
        head.markov_w1.weight[draft_token_ids] = (left_DR * singular_R.sqrt()).to(
            head.markov_w1.weight
        )
        head.markov_w2.weight.copy_(right_DR * singular_R.sqrt())

    kept = float(singular_R.square().sum() / centred_DD.float().square().sum())
    log.info(
        "Markov head started from bigrams: rank %d keeps %.0f %% (%.0f s)",
        rank,
        100 * kept,
        time.monotonic() - started,
    )

    return kept


def bigram_log_probs(
    target_path: Path, *, draft_token_ids: torch.Tensor, device: torch.device
) -> torch.Tensor:
    """log p(next | prev) [D, D] by the target, rows prev and columns next, both over the draft
    vocabulary.

    The context is the opening of an answer in the target's own chat template, then `prev`; the
    distribution is renormalised over the draft vocabulary.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    opening = _answer_opening(AutoTokenizer.from_pretrained(target_path))
    dtype = torch.bfloat16 if device.type == "cuda" else getattr(torch, native_dtype("cpu"))
    target = AutoModelForCausalLM.from_pretrained(target_path, dtype=dtype).to(device).eval()
    head_DH = target.get_output_embeddings().weight[draft_token_ids.to(device)]
    rows = []
    with torch.inference_mode():
        # The opening is the same for every row: its keys and values are computed once.
        opened = target.get_decoder()(
            input_ids=torch.tensor([opening], device=device), use_cache=True
        ).past_key_values
        for prev_B in draft_token_ids.to(device).split(BATCH_SIZE):
            cache = copy.deepcopy(opened)
            cache.batch_repeat_interleave(len(prev_B))
            last_BH = target.get_decoder()(
                input_ids=prev_B[:, None], past_key_values=cache
            ).last_hidden_state[:, -1]
            rows.append((last_BH @ head_DH.T).float().log_softmax(-1).half().cpu())
    return torch.cat(rows)


def _answer_opening(tokenizer: Any) -> list[int]:
    """Token ids with which the chat template opens an answer: what a generation prompt adds."""
    messages = [{"role": "user", "content": "Hello"}]
    closed = tokenizer.apply_chat_template(messages, tokenize=False)
    opened = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    added = opened.removeprefix(closed) if opened.startswith(closed) else opened
    ids: list[int] = tokenizer(added, add_special_tokens=False)["input_ids"]
    return ids


def _centred(log_probs_DD: torch.Tensor) -> torch.Tensor:
    """Each row without its mean, which no softmax can see."""
    clamped_DD = log_probs_DD.clamp_min(MIN_LOG_PROBABILITY)
    return clamped_DD - clamped_DD.float().mean(1, keepdim=True).to(clamped_DD)
