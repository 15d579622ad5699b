"""Filters, duplicates, decontamination and split on cases with known answers."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from components.curation.conversation import Conversation, Message
from components.curation.dataset.split import check_both_splits, split_of
from components.curation.funnel import Funnel
from components.curation.sieve.decontaminate import HeldOut
from components.curation.sieve.dedup import NearDuplicateIndex, cross_similarity, jaccard, shingles
from components.curation.sieve.filters import (
    asks_for_terse_answer,
    is_refusal,
    other_script,
    prompt_filters,
    refusal,
    repeats_itself,
)
from components.curation.sieve.language import language_of
from components.curation.sieve.privacy import personal_data
from components.errors import CurationError
from components.settings import CurationSettings


def ask(text: str, *, system: str | None = None) -> Conversation:
    opening = (Message("system", system),) if system else ()
    return Conversation.of((*opening, Message("user", text)), source="test")


def sentence(rng: random.Random, num_words: int) -> list[str]:
    return [f"w{rng.randrange(10_000)}" for _ in range(num_words)]


@pytest.mark.parametrize(
    "text",
    [
        "Is the sky green? Answer yes or no.",
        "Answer with exactly one letter: Y or N.",
        "Respond only with the code.",
        "Give the result without any explanation.",
        "Make your answer as short as possible.",
        "Reply with a single word.",
    ],
)
def test_terse_prompts_are_found(text: str) -> None:
    assert asks_for_terse_answer(ask(text)) == "asks for a terse answer"
    assert asks_for_terse_answer(ask("Go on.", system=text)) is not None


@pytest.mark.parametrize(
    "text",
    [
        "Explain how a bill becomes law.",
        "Write a poem about rain. Think step by step.",
        "What should I only eat?",
    ],
)
def test_open_prompts_are_not_terse(text: str) -> None:
    assert asks_for_terse_answer(ask(text)) is None


@pytest.mark.parametrize(
    "answer",
    [
        "I'm sorry, but I can't help with that.",
        "I\u2019m sorry, I cannot provide medical advice.",
        "As an AI language model, I do not have feelings.",
        "Unfortunately, I am unable to open links.",
        "I cannot assist with this request.",
    ],
)
def test_refusals_are_found(answer: str) -> None:
    assert is_refusal(answer)


@pytest.mark.parametrize(
    "answer",
    [
        "Sorry to hear that! Have you tried turning it off and on again?",
        "I can help you with that.",
        "The shop said: I'm sorry, but I can't help with that.",
        "Unfortunately it rained. We stayed at home.",
    ],
)
def test_regrets_and_quotations_are_no_refusals(answer: str) -> None:
    assert not is_refusal(answer)


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("Write to jane.doe@gmail.com please.", "e-mail address"),
        ("Call 415-555-2671 or (212) 456-7890.", "phone number"),
        ("Ring me at +49 30 901820 tonight.", "phone number"),
        ("My card is 4111 1111 1111 1111.", "card number"),
        ("Pay to DE89 3704 0044 0532 0130 00.", "account number"),
        ("Her number is 536-90-4399.", "social security number"),
        ("Mail me at someone@example.com.", None),
        ("What is 1234567890123 times 3?", None),
        ("On 2023-10-12 the price was 1,000,000.", None),
        ("The card 4111 1111 1111 1112 fails its check.", None),
        ("Pay to DE89 3704 0044 0532 0130 01.", None),
        ("Sort 5 12 7 33 2 8 19 and 4 6 1 0 9.", None),
        ("Pi is 3.14159265358979, the host 192.168.100.200.", None),
    ],
)
def test_personal_data_is_found_and_numbers_are_not(text: str, kind: str | None) -> None:
    assert personal_data(text) == kind


def test_languages_are_told_apart_where_there_is_enough_text() -> None:
    assert language_of("Write me a poem about the sea and its waves.") == "en"
    assert language_of("Schreibe mir ein Gedicht über das Meer und seine Wellen.") == "de"
    assert language_of("OK merci") == "unknown"
    values = {"sources": [{"name": "chitchat"}], "num_conversations": 8, "languages": ["en"]}
    filters = prompt_filters(CurationSettings.model_validate(values))
    assert (
        refusal(ask("Écris-moi un long poème sur la mer et ses vagues."), filters)
        == "other language"
    )
    assert refusal(ask("Write me a long poem about the sea and its waves."), filters) is None
    assert refusal(ask("OK merci, 12 + 30 = ?"), filters) is None


def test_repetition_needs_length_and_repeats() -> None:
    assert repeats_itself(ask("buy now cheap pills " * 30)) == "repeats itself"
    assert repeats_itself(ask("no no no no no no")) is None
    assert repeats_itself(ask(" ".join(sentence(random.Random(0), 200)))) is None


def test_script_counts_letters_only() -> None:
    assert other_script(ask("1 + 2 = 3?"), min_ascii_share=0.9) == "no letters"
    assert other_script(ask("naïve question, 12345"), min_ascii_share=0.9) is None
    assert other_script(ask("Что это такое?"), min_ascii_share=0.9) == "other script"


def test_the_recipe_chooses_the_filters() -> None:
    values = {
        "sources": [{"name": "chitchat"}],
        "num_conversations": 8,
        "min_prompt_chars": 5,
        "max_prompt_tokens": 10,
    }
    lenient = prompt_filters(CurationSettings.model_validate(values))
    strict = prompt_filters(
        CurationSettings.model_validate({**values, "keep_terse_prompts": False})
    )
    assert refusal(ask("Hey"), lenient) == "too short"
    assert refusal(ask("x" * 161), lenient) == "too long"
    assert refusal(ask("True or false: 1 is 2?"), lenient) is None
    assert refusal(ask("True or false: 1 is 2?"), strict) == "asks for a terse answer"


def test_jaccard_of_word_trigrams() -> None:
    # a b c d | b c d e: 2 and 2 trigrams, 1 shared, 3 in all
    assert jaccard(shingles("a b c d"), shingles("b, c. D e")) == pytest.approx(1 / 3)
    assert jaccard(shingles("Hello there!"), shingles("hello   there")) == 1.0
    assert jaccard(shingles("!?"), shingles("...")) == 0.0


def test_planted_near_duplicates_are_found_and_nothing_else() -> None:
    rng = random.Random(0)
    originals = [sentence(rng, 60) for _ in range(300)]
    index = NearDuplicateIndex(threshold=0.8)
    assert all(
        index.add_if_new(str(n), " ".join(words)) is None for n, words in enumerate(originals)
    )
    near = [[*words[:58], "other", "ending"] for words in originals]  # Jaccard 56 / 60 = 0.93
    far = [[*words[:40], *sentence(rng, 20)] for words in originals]  # Jaccard 38 / 78 = 0.49
    assert [index.add_if_new(f"near {n}", " ".join(words)) for n, words in enumerate(near)] == [
        str(n) for n in range(300)
    ]
    assert all(index.add_if_new(f"far {n}", " ".join(words)) is None for n, words in enumerate(far))


def test_similarity_across_the_split_is_the_largest_one() -> None:
    rng = random.Random(1)
    shared = " ".join(sentence(rng, 50))
    clean = ask(" ".join(sentence(rng, 50)))
    leaked = ask(f"{shared} indeed")
    found = cross_similarity([clean, leaked], [ask(shared)], threshold=0.8)
    assert found[clean.id] == 0.0
    assert found[leaked.id] == pytest.approx(48 / 49)


def test_thirteen_shared_words_contaminate_and_twelve_do_not() -> None:
    held = [f"h{n}" for n in range(30)]
    index = HeldOut([" ".join(held), "What is AI?"])
    assert index.contaminates(ask("so " + " ".join(held[5:18]) + " then"))
    assert not index.contaminates(ask("so " + " ".join(held[5:17]) + " then"))
    assert index.contaminates(ask("Hello there.", system=" ".join(held).upper()))
    assert index.shared_words(ask("so " + " ".join(held[5:19]) + " then")) == " ".join(held[5:18])
    assert index.shared_words(ask("what is  ai")) == "what is ai"
    assert index.shared_words(ask("what is a model")) is None
    assert index.contaminates(ask("what is  ai"))
    assert not index.contaminates(ask("what is ai good for"))


@given(
    st.lists(st.text(alphabet="0123456789abcdef", min_size=64, max_size=64), unique=True),
    st.randoms(),
)
def test_split_does_not_depend_on_order_or_growth(ids: list[str], rng: random.Random) -> None:
    before = {name: split_of(name, validation_share=0.2) for name in ids}
    shuffled = [*ids, "f" * 64]
    rng.shuffle(shuffled)
    after = {name: split_of(name, validation_share=0.2) for name in shuffled}
    assert all(after[name] == split for name, split in before.items())


def test_split_shares_and_monotone_growth_of_the_validation_side() -> None:
    ids = [ask(f"question {n}").id for n in range(4000)]
    small = {name for name in ids if split_of(name, validation_share=0.05) == "validation"}
    large = {name for name in ids if split_of(name, validation_share=0.1) == "validation"}
    assert len(small) == pytest.approx(200, abs=50)
    assert small < large


def test_an_empty_side_is_an_error() -> None:
    with pytest.raises(CurationError, match="validation split"):
        check_both_splits({"train"}, num_conversations=2)


def test_the_funnel_keeps_its_order() -> None:
    funnel = Funnel({"rendered": 1, "read": 5})
    funnel.passed("filtered", 3)
    funnel.passed("filtered")
    assert list(funnel.as_dict().items()) == [("read", 5), ("filtered", 4), ("rendered", 1)]
