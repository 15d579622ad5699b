"""What a rendered row supervises, as text."""

from __future__ import annotations

from components.curation.conversation import AnsweredConversation
from components.curation.dataset.render import Renderer


def supervised(renderer: Renderer, item: AnsweredConversation) -> list[str]:
    """Texts of the masked spans, special tokens included."""
    row = renderer.render(item)
    spans: list[list[int]] = [[]]
    for token_id, on in zip(row.token_ids, row.loss_mask, strict=True):
        if on:
            spans[-1].append(token_id)
        elif spans[-1]:
            spans.append([])
    return [renderer.tokenizer.decode(span) for span in spans if span]
