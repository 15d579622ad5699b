"""Filters on prompts: each a pure function from a conversation to the reason it is refused, or
None.

Refused conversations are counted by reason (`Quarantine`), so the funnel can say what went and why.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable

from components.curation.conversation import Conversation
from components.curation.sieve.language import UNKNOWN, language_of
from components.curation.sieve.privacy import personal_data
from components.curation.text import words
from components.settings import CurationSettings

MAX_REPEATED_SHARE = 0.5
"""Largest share of a prompt's word 4-grams that may be repeats of an earlier one."""

MIN_NGRAMS_JUDGED = 20
"""Prompts with fewer 4-grams are not judged: a short one repeats itself by accident."""

_TERSE = re.compile(
    r"""
    \b(answer|respond|reply|output|print|return|write|provide|give|say|produce)\b [^.\n]{0,60}
        \b(only|just|exactly|single|one[- ]word|nothing\ else)\b
    | \b(only|just|simply)\ (answer|respond|reply|output|print|return|write|provide|give|say)\b
    | \b(only|just|simply)\ the\ (answer|letter|number|word)\b
    | \b(yes|true|y)['"]?(\ or\ |/)['"]?(no|false|n)\b
    | \b(no|without|don't|do\ not|not)\b [^.\n]{0,30}
        \b(explanations?|explain|commentary|(other|additional)\ text|extra)\b
    | \bas\ (short|concise|concisely|brief|briefly)\ as\ possible\b
    | \b(one|single)\ (word|letter|character|number|digit)\b
    """,
    re.IGNORECASE | re.VERBOSE,
)
"""Ways in which prompts of benchmarks ask for an answer of a word or a letter."""

_REFUSAL = re.compile(
    r"""
    ^\W* (?:i['\u2019]m\ sorry | sorry | i\ apologi[sz]e | unfortunately
        | as\ an\ ai\b [^.\n]{0,60})
        [^.\n]{0,40}
        \b(?:can(?:['\u2019]t|not|\ not) | unable | won['\u2019]t | not\ able
            | do(?:n['\u2019]t|\ not)\ have)\b
    | ^\W* i\ (?:can(?:['\u2019]t|not)|am\ (?:not\ able|unable)\ to|won['\u2019]t)
        \ (?:help|assist|answer|provide|fulfil|comply|do\ that)
    """,
    re.IGNORECASE | re.VERBOSE,
)
"""How chat models open an answer that declines to answer."""

PromptFilter = Callable[[Conversation], str | None]


def too_short(conversation: Conversation, *, min_chars: int) -> str | None:
    """Refuse a conversation whose first user turn has fewer than `min_chars` characters."""
    return "too short" if len(conversation.user_turns[0]) < min_chars else None


def too_long(conversation: Conversation, *, max_chars: int) -> str | None:
    """Refuse what cannot fit, before paying for tokenising it."""
    return "too long" if len(conversation.text) > max_chars else None


def repeats_itself(conversation: Conversation) -> str | None:
    """Refuse prompts that say the same over and over: share of repeated word 4-grams above
    `MAX_REPEATED_SHARE`.
    """
    tokens = words(conversation.text)
    grams = Counter(zip(tokens, tokens[1:], tokens[2:], tokens[3:], strict=False))
    total = grams.total()
    if total < MIN_NGRAMS_JUDGED:
        return None
    return "repeats itself" if 1 - len(grams) / total > MAX_REPEATED_SHARE else None


def other_script(conversation: Conversation, *, min_ascii_share: float) -> str | None:
    """Refuse prompts whose letters are ASCII for less than `min_ascii_share`; digits and signs do
    not count.
    """
    letters = [char for char in conversation.text if char.isalpha()]
    if not letters:
        return "no letters"
    return (
        "other script"
        if sum(char.isascii() for char in letters) / len(letters) < min_ascii_share
        else None
    )


def other_language(conversation: Conversation, *, languages: tuple[str, ...]) -> str | None:
    """Refuse prompts in a language that is not asked for; those too short to tell stay."""
    return "other language" if language_of(conversation.text) not in (*languages, UNKNOWN) else None


def has_personal_data(conversation: Conversation) -> str | None:
    """Refuse prompts with e-mail addresses, phone, card, account or social security numbers."""
    kind = personal_data(conversation.text)
    return None if kind is None else f"personal data: {kind}"


def asks_for_terse_answer(conversation: Conversation) -> str | None:
    """Refuse prompts that ask for a word or a letter: they cost a prefill and leave a token or two
    to learn from.
    """
    return "asks for a terse answer" if _TERSE.search(conversation.text) else None


def is_refusal(answer: str) -> bool:
    """Whether an answer opens by declining: drafters learn those few phrases quickly and little
    else from them.
    """
    return _REFUSAL.search(answer) is not None


def prompt_filters(settings: CurationSettings) -> tuple[PromptFilter, ...]:
    """The filters a recipe asks for, cheapest first."""
    # No tokenizer averages that many characters a token on text.
    max_chars = 16 * settings.max_prompt_tokens
    filters: list[PromptFilter] = [
        lambda conversation: too_short(conversation, min_chars=settings.min_prompt_chars),
        lambda conversation: too_long(conversation, max_chars=max_chars),
    ]

    if settings.min_ascii_share > 0:
        filters.append(
            lambda conversation: other_script(
                conversation, min_ascii_share=settings.min_ascii_share
            )
        )

    if not settings.keep_terse_prompts:
        filters.append(asks_for_terse_answer)
    filters.append(repeats_itself)
    if not settings.keep_personal_data:
        filters.append(has_personal_data)

    if settings.languages:
        filters.append(
            lambda conversation: other_language(conversation, languages=settings.languages)
        )
    return tuple(filters)


def refusal(conversation: Conversation, filters: tuple[PromptFilter, ...]) -> str | None:
    """The first reason any filter gives, or None."""
    return next((reason for check in filters if (reason := check(conversation)) is not None), None)
