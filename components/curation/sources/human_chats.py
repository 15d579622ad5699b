"""Human conversations with their human replies, rendered for a target: text to fine-tune it on.

Curation throws human replies away, since a drafter must learn the target's own; a fine-tune of the
target wants them.
"""

from __future__ import annotations

from itertools import islice

from components.contracts import TargetRef, is_held_out
from components.curation.conversation import Message
from components.curation.dataset.render import load_renderer
from components.curation.sources.packages import package_rows
from components.errors import CurationError

MAX_TURNS = 6


def human_chats(target: TargetRef, *, num_chats: int, seed: int = 0) -> list[str]:
    """Texts of up to `num_chats` two-person chats of at most six turns, through the target's own
    chat template.

    Raises:
        CurationError: the package is missing, or the target has no chat template.
    """
    renderer = load_renderer(target)
    rows = (
        row
        for _, row in package_rows("chitchat", seed=seed)
        if isinstance(row, list) and len(row) >= 2
    )
    # Evaluation's share is nobody's training data.
    chats = (row for row in rows if not is_held_out(row[0]))

    texts = [
        renderer.text(_messages(turns[: min(MAX_TURNS, len(turns) // 2 * 2)]))
        for turns in islice(chats, num_chats)
    ]
    if not texts:
        raise CurationError("no human chats to fine-tune on")

    return texts


def _messages(turns: list[str]) -> list[Message]:
    return [
        Message("user" if index % 2 == 0 else "assistant", turn) for index, turn in enumerate(turns)
    ]
