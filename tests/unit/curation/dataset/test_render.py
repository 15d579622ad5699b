"""The loss mask: exactly the target's own tokens, whatever the template does."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from components.curation.conversation import Answer, AnsweredConversation, Conversation, Message
from components.curation.dataset.render import Renderer, prove_masks, renderer_of, rewrites_history
from components.errors import CurationError
from tests.support.masked_spans import supervised

END = "<|im_end|>"
MARKED = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message['role'] == 'assistant' %}{% generation %}{{ message['content'] + "
    "'<|im_end|>' }}{% endgeneration %}"
    "{% else %}{{ message['content'] + '<|im_end|>' }}{% endif %}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
FORGETS_THOUGHTS = (
    "{% for message in messages %}{% set content = message['content'] %}{% set past = not "
    "loop.last %}"
    "{% if message['role'] == 'assistant' and past %}{% set content = "
    "content.split('</think>')[-1] %}{% endif %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + content + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


@pytest.fixture(scope="module")
def renderer(tiny_target: Path) -> Renderer:
    return renderer_of(tiny_target, name="tiny")


def with_template(tiny_target: Path, folder: Path, template: str | None) -> Path:
    shutil.copytree(tiny_target, folder)
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config.pop("chat_template", None)
    if template is not None:
        config["chat_template"] = template
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def answered(
    renderer: Renderer,
    prompts: list[str],
    texts: list[str],
    *,
    truncated: bool = False,
    exact: bool = True,
) -> AnsweredConversation:
    """Answers as an engine with this template and tokenizer would return them."""
    conversation = Conversation.of(
        tuple(Message("user", prompt) for prompt in prompts), source="test"
    )
    history: list[Message] = []
    answers = []
    for number, (prompt, text) in enumerate(zip(prompts, texts, strict=True)):
        history.append(Message("user", prompt))
        cut = truncated and number == len(texts) - 1
        ids = renderer.encode(text if cut else text + END)
        prompt_ids = renderer.prompt_token_ids(history)
        answers.append(
            Answer(
                text=text,
                token_ids=tuple(ids) if exact else (),
                prompt_token_ids=tuple(prompt_ids) if exact else (),
                num_tokens=len(ids),
                truncated=cut,
                temperature=0.0,
            )
        )
        history.append(Message("assistant", text))
    return AnsweredConversation(conversation, tuple(answers))


@pytest.mark.parametrize("exact", [True, False])
def test_single_turn_supervises_the_answer_and_its_end(renderer: Renderer, exact: bool) -> None:
    item = answered(
        renderer, ["What is the capital of France?"], ["Paris, on the Seine."], exact=exact
    )
    assert supervised(renderer, item) == ["Paris, on the Seine." + END]
    assert renderer.render(item).exact is exact


@pytest.mark.parametrize("exact", [True, False])
def test_a_truncated_answer_claims_no_end_of_turn(renderer: Renderer, exact: bool) -> None:
    item = answered(renderer, ["Tell me a story."], ["Once upon a"], truncated=True, exact=exact)
    assert supervised(renderer, item) == ["Once upon a"]
    row = renderer.render(item)
    assert row.truncated
    assert row.loss_mask[-1], "nothing follows what the target produced"


@pytest.mark.parametrize("exact", [True, False])
def test_every_answer_of_a_chat_is_supervised_and_no_prompt(
    renderer: Renderer, exact: bool
) -> None:
    item = answered(
        renderer,
        ["Hello there!", "And a queue?"],
        ["A stack.", "First in, first out."],
        exact=exact,
    )
    assert supervised(renderer, item) == ["A stack." + END, "First in, first out." + END]


def test_earlier_answers_with_other_tokens_in_context_are_not_supervised(
    renderer: Renderer,
) -> None:
    item = answered(renderer, ["Hello", "Again"], ["the target checks them", "Yes."])
    first = item.answers[0]
    letters = tuple(token for char in first.text for token in renderer.encode(char)) + tuple(
        renderer.encode(END)
    )
    assert letters != first.token_ids
    odd = Answer(first.text, letters, first.prompt_token_ids, len(letters), False, 0.7)
    item = AnsweredConversation(item.conversation, (odd, item.answers[1]))
    assert supervised(renderer, item) == ["Yes." + END]


def test_an_engine_with_another_template_is_refused(renderer: Renderer) -> None:
    item = answered(renderer, ["Hello"], ["Hi."])
    answer = item.answers[0]
    other = Answer(
        answer.text, answer.token_ids, answer.prompt_token_ids[1:], answer.num_tokens, False, 0.0
    )
    with pytest.raises(CurationError, match=r"rendered conversation .* differently"):
        renderer.render(AnsweredConversation(item.conversation, (other,)))


def test_generation_markers_and_prefix_differences_agree(
    renderer: Renderer, tiny_target: Path, tmp_path: Path
) -> None:
    marked = renderer_of(with_template(tiny_target, tmp_path / "marked", MARKED), name="marked")
    assert marked._marks_answers and not renderer._marks_answers
    item = answered(renderer, ["Hello", "More?"], ["One answer.", "Another one."], exact=False)
    one, two = renderer.render(item), marked.render(item)
    assert (one.token_ids, one.loss_mask) == (two.token_ids, two.loss_mask)


def test_a_template_that_forgets_thoughts_is_found(
    renderer: Renderer, tiny_target: Path, tmp_path: Path
) -> None:
    forgetful = renderer_of(
        with_template(tiny_target, tmp_path / "forgetful", FORGETS_THOUGHTS), name="forgetful"
    )
    assert rewrites_history(renderer) is None
    assert "rewrites history" in str(rewrites_history(forgetful))
    thought = "<think>Hm.</think>Four."
    with pytest.raises(CurationError, match="rewrites history"):
        forgetful.render(answered(forgetful, ["2 + 2?", "3 + 3?"], [thought, "Six."], exact=False))
    # With the engine's ids the last answer is right, and the rewritten one is left out.
    item = answered(forgetful, ["2 + 2?", "3 + 3?"], [thought, "Six."])
    assert supervised(forgetful, item) == ["Six." + END]


def test_no_template_is_an_error(tiny_target: Path, tmp_path: Path) -> None:
    with pytest.raises(CurationError, match="no chat template"):
        renderer_of(with_template(tiny_target, tmp_path / "bare", None), name="bare")


def test_no_tokenizer_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(CurationError, match="no usable tokenizer"):
        renderer_of(tmp_path, name="nothing")


def test_the_proof_finds_a_shifted_mask(renderer: Renderer) -> None:
    import dataclasses

    item = answered(renderer, ["Hello there"], ["A drafter proposes tokens."])
    row = renderer.render(item)
    assert prove_masks([row], [item], renderer) == 1
    shifted = dataclasses.replace(row, loss_mask=(*row.loss_mask[3:], False, False, False))
    empty = dataclasses.replace(row, loss_mask=(False,) * len(row.loss_mask))
    for wrong in (shifted, empty):
        with pytest.raises(CurationError, match="does not cover its answers"):
            prove_masks([wrong], [item], renderer)


WORDS = st.text(
    alphabet=st.characters(codec="utf-8", exclude_categories=("Cs", "Cc")), min_size=1, max_size=40
).filter(lambda text: bool(text.strip()) and "<|" not in text and "\ufffd" not in text)


@settings(max_examples=60, deadline=None)
@given(
    turns=st.lists(st.tuples(WORDS, WORDS), min_size=1, max_size=3),
    truncated=st.booleans(),
    exact=st.booleans(),
)
def test_masked_tokens_read_as_the_answers(
    renderer: Renderer, turns: list[tuple[str, str]], truncated: bool, exact: bool
) -> None:
    prompts = [turn[0] for turn in turns]
    texts = [turn[1].strip() for turn in turns]
    item = answered(renderer, prompts, texts, truncated=truncated, exact=exact)
    row = renderer.render(item)
    assert len(row.token_ids) == len(row.loss_mask)
    assert prove_masks([row], [item], renderer) >= 1
