"""The mask under the chat templates of well-known models: what each does to turns, answers and
history.

The templates are written here from what the models' own ones print, not copied.
"""

from __future__ import annotations

import copy
import json
import shutil
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from components.curation.conversation import Answer, AnsweredConversation, Conversation, Message
from components.curation.dataset.render import Renderer, prove_masks, renderer_of, rewrites_history
from components.curation.sieve.sieve import judge
from components.curation.sources.rows import read_row
from components.curation.sources.self_prompts import open_turn
from components.errors import CurationError
from components.settings import CurationSettings
from tests.support.masked_spans import supervised

LLAMA3 = """{{- bos_token }}
{%- if messages[0]['role'] == 'system' %}{% set system = messages[0]['content'] %}{% set messages = messages[1:] %}
{%- else %}{% set system = '' %}{% endif %}
{{- '<|start_header_id|>system<|end_header_id|>\n\nCutting Knowledge Date: December 2023\nToday Date: ' }}
{{- strftime_now('%d %b %Y') + '\n\n' + system + '<|eot_id|>' }}
{%- for message in messages %}
{{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' + message['content'] | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{%- endif %}"""

QWEN3 = """{%- set ns = namespace(last=0) %}
{%- for message in messages %}{% if message['role'] == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}
{%- for message in messages %}
{%- set content = message['content'] %}
{%- if message['role'] == 'assistant' and '</think>' in content and loop.index0 < ns.last %}
{%- set content = content.split('</think>')[-1].lstrip('\n') %}{% endif %}
{{- '<|im_start|>' + message['role'] + '\n' + content + '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}
{%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\n\n</think>\n\n' }}{%- endif %}
{%- endif %}"""

GEMMA = """{{- bos_token }}
{%- if messages[0]['role'] == 'system' %}{{- raise_exception('System role not supported') }}{%- endif %}
{%- for message in messages %}
{%- set role = 'model' if message['role'] == 'assistant' else message['role'] %}
{{- '<start_of_turn>' + role + '\n' + message['content'] | trim + '<end_of_turn>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<start_of_turn>model\n' }}{%- endif %}"""

MISTRAL = """{%- if messages[0]['role'] == 'system' %}
{%- set system = messages[0]['content'] %}{% set messages = messages[1:] %}{% else %}{% set system = '' %}{% endif %}
{{- bos_token }}
{%- for message in messages %}
{%- if message['role'] == 'user' %}
{%- if loop.last and system %}{{- '[INST] ' + system + '\n\n' + message['content'] + '[/INST]' }}
{%- else %}{{- '[INST] ' + message['content'] + '[/INST]' }}{%- endif %}
{%- else %}{{- ' ' + message['content'] | trim + eos_token }}{%- endif %}
{%- endfor %}"""

CHATML = """{%- for message in messages %}
{{- '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"""


TOOL_CALLING = """{%- if tools %}{{- '<|im_start|>system\\n# Tools\\n' }}
{%- for tool in tools %}{{- tool | tojson + '\\n' }}{%- endfor %}{{- '<|im_end|>\\n' }}{%- endif %}
{%- for message in messages %}
{{- '<|im_start|>' + message['role'] + '\\n' + message['content'] }}
{%- for call in message['tool_calls'] or [] %}
{{- '<tool_call>' + call['function']['name'] + ' ' + call['function']['arguments']['city'] + '</tool_call>' }}
{%- endfor %}{{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""


@dataclass(frozen=True)
class Family:
    """A model family's template and tokens."""

    template: str
    specials: tuple[str, ...]
    eos: str
    closing: str
    """What the model says when it has finished."""


FAMILIES = {
    "chatml": Family(CHATML, ("<|im_start|>", "<|im_end|>"), "<|im_end|>", "<|im_end|>"),
    "llama3": Family(
        LLAMA3,
        ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
        "<|eot_id|>",
        "<|eot_id|>",
    ),
    "qwen3": Family(
        QWEN3, ("<|im_start|>", "<|im_end|>", "<|endoftext|>"), "<|im_end|>", "<|im_end|>"
    ),
    # Gemma's eos token is <eos>; its models end a turn with <end_of_turn>.
    "gemma": Family(
        GEMMA, ("<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"), "<eos>", "<end_of_turn>"
    ),
    "mistral": Family(MISTRAL, ("<s>", "</s>", "[INST]", "[/INST]"), "</s>", "</s>"),
    "tool-calling": Family(
        TOOL_CALLING, ("<|im_start|>", "<|im_end|>"), "<|im_end|>", "<|im_end|>"
    ),
}


@pytest.fixture(scope="module")
def renderers(tiny_target: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Renderer]:
    return {
        name: renderer_of(
            write_family(tiny_target, tmp_path_factory.mktemp("families") / name, family), name=name
        )
        for name, family in FAMILIES.items()
    }


def write_family(tiny_target: Path, folder: Path, family: Family) -> Path:
    """The tiny target's tokenizer with the family's special tokens and template."""
    shutil.copytree(tiny_target, folder)
    tokenizer = AutoTokenizer.from_pretrained(str(folder))
    tokenizer.add_special_tokens({"additional_special_tokens": list(family.specials)})
    tokenizer.eos_token = family.eos
    tokenizer.bos_token = family.specials[0]
    tokenizer.chat_template = None
    tokenizer.save_pretrained(str(folder))
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(
        json.dumps({**config, "chat_template": family.template})
    )
    return folder


def answered(
    renderer: Renderer,
    family: Family,
    turns: list[tuple[str, str]],
    *,
    exact: bool,
    variant: dict[str, object] | None = None,
    system: str | None = None,
) -> AnsweredConversation:
    """Answers to `turns` = [(prompt, answer)] as the family's model gives them on an engine."""
    opening = (Message("system", system),) if system else ()
    conversation = Conversation.of(
        (*opening, *(Message("user", prompt) for prompt, _ in turns)), source="test"
    )
    history = list(opening)
    answers = []
    for prompt, text in turns:
        history.append(Message("user", prompt))
        ids = tuple(renderer.encode(text + family.closing))
        prompt_ids = tuple(renderer.prompt_token_ids(history, variant or {}))
        answers.append(
            Answer(text, ids if exact else (), prompt_ids if exact else (), len(ids), False, 0.0)
        )
        history.append(Message("assistant", text))
    return AnsweredConversation(conversation, tuple(answers), variant or {})


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("exact", [True, False])
def test_one_answer_and_its_end_are_supervised(
    renderers: dict[str, Renderer], name: str, exact: bool
) -> None:
    renderer, family = renderers[name], FAMILIES[name]
    item = answered(renderer, family, [("What is two plus two?", "Four, of course.")], exact=exact)
    spans = supervised(renderer, item)
    assert [span.strip() for span in spans] == ["Four, of course." + family.closing]
    assert prove_masks([renderer.render(item)], [item], renderer) == 1


@pytest.mark.parametrize("name", FAMILIES)
def test_a_batch_renders_as_its_rows_do_and_as_the_template_does(
    renderers: dict[str, Renderer], name: str
) -> None:
    renderer, family = renderers[name], FAMILIES[name]
    items = [
        answered(
            renderer,
            family,
            [(f"What is {n} plus {n}?", f"It is {2 * n}, of course.")],
            exact=n % 3 == 0,
        )
        for n in range(12)
    ]
    rows = renderer.render_all(items)
    assert rows == [renderer.render(item) for item in items]
    for item, row in zip(items, rows, strict=True):
        if not row.exact:
            turns = [message.as_dict() for message in item.messages]
            ids = renderer.tokenizer.apply_chat_template(turns, return_dict=True)["input_ids"]
            assert row.token_ids == tuple(ids)


@pytest.mark.parametrize("name", ["chatml", "llama3", "gemma", "mistral"])
@pytest.mark.parametrize("exact", [True, False])
def test_every_answer_of_a_chat_is_supervised(
    renderers: dict[str, Renderer], name: str, exact: bool
) -> None:
    renderer, family = renderers[name], FAMILIES[name]
    turns = [("Say one.", "One."), ("Say two.", "Two."), ("Say three.", "Three.")]
    item = answered(renderer, family, turns, exact=exact)
    spans = [span.strip() for span in supervised(renderer, item)]
    expected = [text + family.closing for _, text in turns]
    # Mistral's template puts a space before an answer. An engine's answer comes without it, so its
    # ids differ in context: such an earlier answer is left out rather than trained on with other
    # tokens.
    assert spans == expected or (name == "mistral" and exact and spans == expected[-1:])


@pytest.mark.parametrize("name", FAMILIES)
def test_a_system_message_is_kept_or_refused_in_words(
    renderers: dict[str, Renderer], name: str
) -> None:
    renderer, family = renderers[name], FAMILIES[name]
    if name == "gemma":
        with pytest.raises(
            CurationError, match=r"chat template of gemma refuses.*System role not supported"
        ):
            answered(renderer, family, [("Hi there.", "Hello.")], exact=True, system="Be kind.")
        return
    item = answered(renderer, family, [("Hi there.", "Hello.")], exact=True, system="Be kind.")
    row = renderer.render(item)
    assert "Be kind." in renderer.decode(row.token_ids)
    assert [span.strip() for span in supervised(renderer, item)] == ["Hello." + family.closing]


def test_which_templates_rewrite_history_or_depend_on_the_day(
    renderers: dict[str, Renderer],
) -> None:
    rewriting = {name for name, renderer in renderers.items() if rewrites_history(renderer)}
    # Thoughts go; the system message moves to the last turn.
    assert rewriting == {
        "qwen3",
        "mistral",
    }
    assert {name for name, renderer in renderers.items() if renderer.injects_date} == {"llama3"}


def test_thoughts_are_supervised_where_they_were_thought_and_gone_from_history(
    renderers: dict[str, Renderer],
) -> None:
    renderer, family = renderers["qwen3"], FAMILIES["qwen3"]
    thoughtful = "<think>\nAdd them.\n</think>\n\nFour."
    turns = [
        ("Two plus two?", thoughtful),
        ("And three plus three?", "<think>\nAgain.\n</think>\n\nSix."),
    ]
    item = answered(renderer, family, turns, exact=True)
    # The engine saw the first answer without its thoughts, so its tokens are not in the row as they
    # were produced.
    assert supervised(renderer, item) == [turns[1][1] + family.closing]
    assert "Add them." not in renderer.decode(renderer.render(item).token_ids)
    with pytest.raises(CurationError, match="rewrites history"):
        renderer.render(answered(renderer, family, turns, exact=False))


def test_the_variant_of_a_conversation_reaches_the_rendering(
    renderers: dict[str, Renderer],
) -> None:
    renderer, family = renderers["qwen3"], FAMILIES["qwen3"]
    turns = [("Two plus two?", "Four.")]
    quiet = renderer.render(
        answered(renderer, family, turns, exact=True, variant={"enable_thinking": False})
    )
    free = renderer.render(answered(renderer, family, turns, exact=True))
    assert "<think>\n\n</think>\n\nFour." in renderer.decode(quiet.token_ids)
    assert "<think>" not in renderer.decode(free.token_ids)
    assert sum(quiet.loss_mask) == sum(free.loss_mask)


def test_yesterdays_answers_are_taken_up_today(renderers: dict[str, Renderer]) -> None:
    renderer, family = renderers["llama3"], FAMILIES["llama3"]
    item = answered(renderer, family, [("Hi there.", "Hello.")], exact=True)
    (answer,) = item.answers
    dated = renderer.decode(answer.prompt_token_ids)
    assert "Today Date: " in dated
    other = Answer(
        answer.text,
        answer.token_ids,
        (*answer.prompt_token_ids[:20], *answer.prompt_token_ids[21:]),
        answer.num_tokens,
        False,
        0.0,
    )
    row = renderer.render(AnsweredConversation(item.conversation, (other,)))
    assert row.token_ids == (*other.prompt_token_ids, *other.token_ids)


CALL = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Bern"}}}
WEATHER = {
    "messages": [
        {"role": "user", "content": "Is it raining in Bern?"},
        {"role": "assistant", "content": "I shall look.", "tool_calls": [CALL]},
        {"role": "tool", "content": "sunny"},
        {"role": "assistant", "content": "No."},
        {"role": "user", "content": "And in Thun?"},
    ],
    "tools": [{"type": "function", "function": {"name": "weather"}}],
}


@pytest.mark.parametrize("exact", [True, False])
def test_tool_calls_are_context_and_only_the_targets_answers_are_supervised(
    renderers: dict[str, Renderer], exact: bool
) -> None:
    renderer, family = renderers["tool-calling"], FAMILIES["tool-calling"]
    conversation = read_row(WEATHER, column="messages", source="test", max_turns=8)
    texts = ["It is sunny in Bern.", "That I cannot tell."]
    answers = []
    for number, text in enumerate(texts):
        history = (*conversation.answered_with(texts[:number]), *conversation.turns[number])
        prompt_ids = renderer.prompt_token_ids(history, conversation.template_tools)
        ids = tuple(renderer.encode(text + family.closing))
        answers.append(
            Answer(
                text, ids if exact else (), tuple(prompt_ids) if exact else (), len(ids), False, 0.0
            )
        )
    item = AnsweredConversation(conversation, tuple(answers))
    row = renderer.render(item)
    text = renderer.tokenizer.decode(row.token_ids)
    assert '# Tools\n{"type": "function", "function": {"name": "weather"}}' in text
    assert "I shall look.<tool_call>weather Bern</tool_call><|im_end|>" in text
    assert "<|im_start|>tool\nsunny<|im_end|>" in text
    assert supervised(renderer, item) == [answer + family.closing for answer in texts]
    assert prove_masks([row], [item], renderer) == 2


@pytest.mark.parametrize("name", FAMILIES)
@given(
    texts=st.lists(st.text(min_size=1), min_size=2, max_size=6).filter(
        lambda texts: len(texts) % 2 == 0
    )
)
@example(texts=["Four?", "<think>\n2 + 2\n</think>\n\nFour."])
@example(texts=["a", "a", " a", "a "])
@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_a_skeleton_finds_the_answers_where_the_prefixes_do(
    renderers: dict[str, Renderer], name: str, texts: list[str]
) -> None:
    renderer = renderers[name]
    messages = [
        Message("user" if turn % 2 == 0 else "assistant", text) for turn, text in enumerate(texts)
    ]
    try:
        expected = renderer.answer_spans(messages)
    except CurationError:
        return  # this template rewrites such a chat, and says so
    assert renderer.place_answers([(messages, {})]) == [expected]


def test_one_rendering_finds_the_answers_of_plain_chats(renderers: dict[str, Renderer]) -> None:
    chat = [
        Message("user", "One?"),
        Message("assistant", "One."),
        Message("user", "Two?"),
        Message("assistant", "Two."),
    ]
    for name in ("chatml", "llama3", "gemma"):
        renderer = renderers[name]
        renderer.place_answers([(chat, {})])
        rendered = renderer.text(chat)
        skeleton = renderer.skeleton(chat, {})
        assert (
            skeleton is not None
            and skeleton.spans(chat, rendered) == renderer.answer_spans(chat)[1]
        )
        assert skeleton.spans(chat, rendered.replace("One?", "Won?")) is None


def test_prompts_of_several_turns_are_counted_with_roles_that_alternate(
    renderers: dict[str, Renderer],
) -> None:
    """Some templates refuse two user turns in a row, and answers do not exist yet when prompts are
    filtered.
    """
    strict = (
        "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ "
        "raise_exception('roles') }}"
    )
    tokenizer = copy.deepcopy(renderers["chatml"].tokenizer)
    tokenizer.chat_template = strict + "{% endif %}{{ m.content }}{% endfor %}"
    conversation = Conversation.of(
        (Message("user", "One?"), Message("user", "Two?")), source="test"
    )
    renderer = Renderer(tokenizer, name="strict")
    curation = CurationSettings.model_validate(
        {"sources": [{"name": "chitchat"}], "num_conversations": 8}
    )
    assert judge([conversation], renderer, curation.model_copy(update={"min_prompt_chars": 1})) == [
        None
    ]


@pytest.mark.parametrize(
    ("name", "opening", "ending"),
    [
        ("chatml", "<|im_start|>user\n", "<|im_end|>"),
        ("llama3", "<|start_header_id|>user<|end_header_id|>\n\n", "<|eot_id|>"),
        ("qwen3", "<|im_start|>user\n", "<|im_end|>"),
        ("gemma", "<bos><start_of_turn>user\n", "<end_of_turn>"),
        ("mistral", "<s>[INST] ", "[/INST]"),
    ],
)
def test_a_users_turn_is_opened_and_its_end_is_known(
    renderers: dict[str, Renderer], name: str, opening: str, ending: str
) -> None:
    tokenizer = renderers[name].tokenizer
    turn = open_turn(tokenizer, name=name)
    assert tokenizer.decode(list(turn.prompt_ids)).endswith(opening)
    assert turn.stop_token_ids == (tokenizer.convert_tokens_to_ids(ending),) and turn.stop == ()


def test_a_turn_that_ends_in_plain_text_is_ended_by_that_text(
    tiny_target: Path, tmp_path: Path
) -> None:
    family = Family(
        "{% for message in messages %}User: {{ message['content'] }}\nEnd of turn\n{% endfor %}",
        ("<s>",),
        "<s>",
        "",
    )
    renderer = renderer_of(write_family(tiny_target, tmp_path / "plain", family), name="plain")
    turn = open_turn(renderer.tokenizer, name="plain")
    assert turn.stop == ("End of turn",) and turn.stop_token_ids == ()


def test_a_template_without_an_end_of_turn_cannot_write_prompts(
    tiny_target: Path, tmp_path: Path
) -> None:
    family = Family(
        "{% for message in messages %}User: {{ message['content'] }}{% endfor %}",
        ("<s>",),
        "<s>",
        "",
    )
    renderer = renderer_of(write_family(tiny_target, tmp_path / "open", family), name="open")
    with pytest.raises(CurationError, match="does not mark the end of a user's turn"):
        open_turn(renderer.tokenizer, name="open")
