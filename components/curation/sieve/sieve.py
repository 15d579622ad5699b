"""Which conversations are kept: what each says by itself (`PromptJudge`), then what it shares with
others (`Sieve`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from components.curation.answers.regenerate import variant_of
from components.curation.conversation import Conversation
from components.curation.dataset.render import Chat, Renderer, renderer_of
from components.curation.funnel import Funnel
from components.curation.quarantine import Quarantine
from components.curation.sieve.decontaminate import HeldOut
from components.curation.sieve.dedup import NearDuplicateIndex, SeenIds
from components.curation.sieve.filters import prompt_filters, refusal
from components.curation.text import batches
from components.settings import CurationSettings

BATCH = 64
"""Conversations tokenised at once."""


@lru_cache(maxsize=4)
def renderer_here(folder: str, name: str) -> Renderer:
    """The target's renderer, loaded once per process: work that is sent to other processes names it
    by its folder.
    """
    return renderer_of(Path(folder), name=name)


@dataclass(frozen=True)
class PromptJudge:
    """The filters that look at one conversation alone, as work that can be done in any process."""

    settings: CurationSettings
    target_path: str
    target_name: str

    def __call__(self, conversations: Sequence[Conversation]) -> list[str | None]:
        """Why each conversation is refused; None where nothing speaks against it."""
        renderer = renderer_here(self.target_path, self.target_name)
        return [
            reason
            for batch in batches(conversations, BATCH)
            for reason in judge(batch, renderer, self.settings)
        ]


def judge(
    batch: Sequence[Conversation], renderer: Renderer, settings: CurationSettings
) -> list[str | None]:
    """As `PromptJudge`, for conversations whose tokens are counted in one go."""
    filters = prompt_filters(settings)
    reasons = [refusal(conversation, filters) for conversation in batch]
    left = [
        conversation for conversation, reason in zip(batch, reasons, strict=True) if reason is None
    ]
    counts = iter(renderer.num_prompt_tokens([_prompt(chat, settings) for chat in left]))
    return [_length(next(counts), settings) if reason is None else reason for reason in reasons]


def _prompt(conversation: Conversation, settings: CurationSettings) -> Chat:
    """The whole conversation up to its last answer. The earlier answers do not exist yet; each
    stands as a sign, because templates want roles that alternate, and the engine's own limit ends
    what grows too long.
    """
    turns = conversation.turns
    messages = (*conversation.answered_with(["-"] * (len(turns) - 1)), *turns[-1])
    return messages, {
        **variant_of(conversation.id, settings.template_variants),
        **conversation.template_tools,
    }


def _length(num_tokens: int | None, settings: CurationSettings) -> str | None:
    if num_tokens is None:
        return "refused by the chat template"  # one without system messages, say
    return "too many tokens" if num_tokens > settings.max_prompt_tokens else None


class Sieve:
    """What is left of judged conversations after duplicates and evaluation prompts; counts what
    each step lets by.
    """

    def __init__(self, settings: CurationSettings, held_out: HeldOut, refused: Quarantine) -> None:
        self._held_out = held_out
        self._refused = refused
        self._ids = SeenIds()
        self._near = NearDuplicateIndex(threshold=settings.near_duplicate_threshold)
        self.funnel = Funnel(
            dict.fromkeys(("filtered", "unique", "not_near_duplicate", "decontaminated"), 0)
        )

    def sift(
        self, conversations: Sequence[Conversation], reasons: Sequence[str | None], *, at_most: int
    ) -> list[bool]:
        """Whether each conversation is kept, up to and including the one that is number `at_most`.

        Args:
            conversations: in the order drawn.
            reasons: of the `PromptJudge`, one for each.
            at_most: conversations wanted; the rest gets no verdict.
        """
        verdicts: list[bool] = []
        num_kept = 0
        for conversation, filtered in zip(conversations, reasons, strict=True):
            if num_kept == at_most:
                break
            reason, detail = (filtered, "") if filtered else self._compare(conversation)
            if reason is not None:
                self._refused.add(conversation.source, reason, where=conversation.id, detail=detail)
            verdicts.append(reason is None)
            num_kept += reason is None
        return verdicts

    def _compare(self, conversation: Conversation) -> tuple[str | None, str]:
        """What a conversation shares with others: the reason to refuse it, and with whom or in
        which words.
        """
        self.funnel.passed("filtered")
        if not self._ids.add(conversation.id):
            return "duplicate", ""
        self.funnel.passed("unique")
        if (near := self._near.add_if_new(conversation.id, conversation.text)) is not None:
            return "near duplicate", f"of {near}"
        self.funnel.passed("not_near_duplicate")
        if (shared := self._held_out.shared_words(conversation)) is not None:
            return "repeats an evaluation prompt", shared
        self.funnel.passed("decontaminated")
        return None, ""
