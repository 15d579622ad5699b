"""Evaluation prompts out of the training set.

A conversation is contaminated if any of its turns shares a run of 13 words with a held-out prompt
(the n-gram test of Brown et al. 2020, appendix C). Held-out prompts of fewer than 13 words have no
such run: those match only as a whole, after normalising.
"""

from __future__ import annotations

from collections.abc import Iterable

from components.curation.conversation import Conversation
from components.curation.text import hash64, ngrams, words

NGRAM_WORDS = 13


class HeldOut:
    """Index of held-out prompts: hashed 13-grams of the long ones, whole texts of the short
    ones.
    """

    def __init__(self, prompts: Iterable[str]) -> None:
        self._grams: set[int] = set()
        self._whole: set[str] = set()
        for prompt in prompts:
            tokens = words(prompt)
            if len(tokens) < NGRAM_WORDS:
                self._whole.add(" ".join(tokens))
            else:
                self._grams.update(hash64(gram) for gram in ngrams(tokens, NGRAM_WORDS))
        self._whole.discard("")

    def contaminates(self, conversation: Conversation) -> bool:
        """Whether any turn of the conversation repeats a held-out prompt."""
        return self.shared_words(conversation) is not None

    def shared_words(self, conversation: Conversation) -> str | None:
        """Words that a turn of the conversation has in common with a held-out prompt; None if there
        are none.
        """
        return next(
            (
                shared
                for message in conversation.messages
                if (shared := self._shared(message.content))
            ),
            None,
        )

    def _shared(self, text: str) -> str | None:
        tokens = words(text)
        if (whole := " ".join(tokens)) in self._whole:
            return whole
        if len(tokens) < NGRAM_WORDS:
            return None
        # In the order of the text, so that the same words are named every time.
        runs = (
            " ".join(tokens[start : start + NGRAM_WORDS])
            for start in range(len(tokens) - NGRAM_WORDS + 1)
        )
        return next((run for run in runs if hash64(run) in self._grams), None)
