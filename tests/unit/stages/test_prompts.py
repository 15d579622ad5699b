"""A recipe's own slices: read whole, named by content, nested, kept out of training; variants and
languages.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from components.curation.conversation import Conversation, Message
from components.curation.sieve.decontaminate import HeldOut
from components.errors import EvaluationError
from components.evaluation.prompts import Prompt, prompt_digest
from components.evaluation.prompts import load_prompts as load_builtin
from components.settings import EvaluationSettings
from components.stages.prompts import held_out_texts, load_prompts, rows_set_aside

THINKING = ({"enable_thinking": True}, {"enable_thinking": False})
CALL = {
    "id": "c1",
    "type": "function",
    "function": {"name": "weather", "arguments": '{"city": "Bern"}'},
}
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]


def said(*turns: tuple[str, str]) -> dict[str, Any]:
    return {"messages": [{"role": role, "content": text} for role, text in turns]}


def write(path: Path, rows: Sequence[Mapping[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def settings(path: Path, num_prompts: int, **values: Any) -> EvaluationSettings:
    own = {"kind": "file", "path": str(path), "num_prompts": num_prompts, **values}
    return EvaluationSettings.model_validate({"slices": {"ours": own}})


def one(path: Path, row: Mapping[str, Any]) -> Prompt:
    (prompt,) = load_prompts(settings(write(path, [row]), 1))
    return prompt


@pytest.fixture
def questions(tmp_path: Path) -> Path:
    """40 rows of one question each."""
    return write(
        tmp_path / "questions.jsonl", [{"prompt": f"What is {n} and {n + 7}?"} for n in range(40)]
    )


def test_built_in_slices_are_what_they_were() -> None:
    plain = EvaluationSettings(slices={"mt_bench": 6, "conversations": 6})
    ours, theirs = load_prompts(plain), load_builtin(plain)
    assert [(p.prompt_id, p.messages, p.variant) for p in ours] == [
        (p.prompt_id, p.messages, {}) for p in theirs
    ]
    assert prompt_digest(ours) == prompt_digest(theirs)


def test_every_schema_and_format_gives_the_same_prompt(tmp_path: Path) -> None:
    openai = said(("user", "Tell me about bees."), ("assistant", "Bees fly."))
    sharegpt = {"conversations": [{"from": "human", "value": "Tell me about bees."}]}
    found = {
        one(tmp_path / "a.jsonl", row).prompt_id
        for row in (openai, sharegpt, {"prompt": "Tell me about bees."})
    }
    pq.write_table(pa.Table.from_pylist([openai]), tmp_path / "a.parquet")
    (tmp_path / "a.txt").write_text("Tell me about bees.\n")
    for name in ("a.parquet", "a.txt"):
        found |= {prompt.prompt_id for prompt in load_prompts(settings(tmp_path / name, 1))}
    # sha256("ours\nTell me about bees."): as a built-in slice would name it
    assert found == {"ours/10eabd5483fa"}


def test_system_and_earlier_answers_stay_and_the_last_answer_goes(tmp_path: Path) -> None:
    turns = [
        ("system", "Be brief."),
        ("user", "Bees?"),
        ("assistant", "They fly."),
        ("user", "And wasps?"),
    ]
    prompt = one(tmp_path / "a.jsonl", said(*turns, ("assistant", "")))
    assert [(m["role"], m["content"]) for m in prompt.messages] == turns
    assert (
        prompt.text
        == "system: Be brief.\n\nuser: Bees?\n\nassistant: They fly.\n\nuser: And wasps?"
    )
    assert prompt == one(tmp_path / "a.jsonl", said(*turns))


def test_tools_calls_and_results_are_context(tmp_path: Path) -> None:
    row = {
        "messages": [
            {"role": "user", "content": "Is it raining in Bern?"},
            {"role": "assistant", "content": None, "tool_calls": [CALL]},
            {"role": "tool", "tool_call_id": "c1", "content": "sunny"},
            {"role": "assistant", "content": "No."},
        ],
        "tools": TOOLS,
    }
    prompt = one(tmp_path / "a.jsonl", row)
    assert [m["role"] for m in prompt.messages] == ["user", "assistant", "tool"]
    # Arguments as text, as an endpoint takes them.
    assert prompt.messages[1]["tool_calls"] == [CALL]
    assert prompt.request_options == {"tools": TOOLS, "tool_choice": "none"}
    assert '"name": "weather"' in prompt.text
    bare = one(tmp_path / "b.jsonl", {"messages": row["messages"]})
    assert bare.prompt_id != prompt.prompt_id and prompt_digest([bare]) != prompt_digest([prompt])


def test_a_smaller_number_is_a_subset_whatever_the_order_of_rows(
    questions: Path, tmp_path: Path
) -> None:
    small, large = (load_prompts(settings(questions, n)) for n in (8, 30))
    assert len(small) == 8 and {p.prompt_id for p in small} < {p.prompt_id for p in large}
    lines = questions.read_text().splitlines(keepends=True)
    (tmp_path / "turned.jsonl").write_text("".join(reversed(lines)))
    assert load_prompts(settings(tmp_path / "turned.jsonl", 8)) == small
    assert len(load_prompts(settings(questions, 8, max_rows=8))) == 8


def test_a_changed_file_is_read_again(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    before = one(path, {"prompt": "Tell me about bees."})
    assert one(path, {"prompt": "Tell me about the wasps."}) != before


def test_what_cannot_be_read_is_counted_and_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rows = [
        {"prompt": "Tell me about bees."},
        {"prompt": "Tell me about bees."},
        {"messages": 3},
        {"other": 1},
    ]
    path = write(tmp_path / "a.jsonl", rows)
    reasons = {
        "repeats another row": 1,
        "turns are neither a list nor a text but int": 1,
        "no column with messages or a prompt": 1,
    }
    assert rows_set_aside(settings(path, 1)) == {"ours": reasons}
    assert "3 of 4 rows set aside" in caplog.text
    with pytest.raises(
        EvaluationError, match=r"got 1 usable prompts in 4 rows; set aside: no column.*expected 2"
    ):
        load_prompts(settings(path, 2))


def test_a_missing_file_and_a_taken_name_are_errors(tmp_path: Path) -> None:
    with pytest.raises(EvaluationError, match=r"evaluation\.slices\.ours cannot be read.*missing"):
        load_prompts(settings(tmp_path / "none.jsonl", 1))
    own = {"kind": "file", "path": str(tmp_path), "num_prompts": 1}
    with pytest.raises(EvaluationError, match="built-in slice"):
        load_prompts(EvaluationSettings.model_validate({"slices": {"mt_bench": own}}))
    with pytest.raises(EvaluationError, match="only built-in slices are read here; got ours"):
        load_builtin(settings(tmp_path, 1))


def test_a_hub_set_is_read_in_order(tmp_path: Path) -> None:
    (tmp_path / "set").mkdir()
    rows = [{"question": f"What is {n} and {n + 7}?", "answer": "x"} for n in range(6)]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "set" / "test.parquet")
    hub = {
        "kind": "huggingface",
        "repo_id": str(tmp_path / "set"),
        "split": "test",
        "column": "question",
    }
    prompts = load_prompts(
        EvaluationSettings.model_validate({"slices": {"hub": {**hub, "num_prompts": 4}}})
    )
    assert len(prompts) == 4 and all(p.text.startswith("What is") for p in prompts)
    wrong = {**hub, "column": "prompt", "num_prompts": 4}
    with pytest.raises(EvaluationError, match="no column 'prompt'"):
        load_prompts(EvaluationSettings.model_validate({"slices": {"hub": wrong}}))


def test_every_prompt_has_one_variant_and_each_has_as_many(questions: Path) -> None:
    chosen = settings(questions, 16)
    plain = load_prompts(chosen)
    mixed = load_prompts(chosen, template_variants=THINKING)
    assert Counter(p.variant["enable_thinking"] for p in mixed) == {True: 8, False: 8}
    assert {p.messages[0]["content"] for p in mixed} == {p.messages[0]["content"] for p in plain}
    assert not {p.prompt_id for p in mixed} & {p.prompt_id for p in plain}
    assert prompt_digest(mixed) != prompt_digest(plain)
    fewer = load_prompts(settings(questions, 7), template_variants=THINKING)
    assert {p.prompt_id for p in fewer} < {p.prompt_id for p in mixed}
    assert mixed[0].text.startswith('{"enable_thinking": ')


def test_a_single_variant_is_sent_and_changes_no_id(questions: Path) -> None:
    chosen = settings(questions, 5)
    single = load_prompts(chosen, template_variants=THINKING[1:])
    assert [p.prompt_id for p in single] == [p.prompt_id for p in load_prompts(chosen)]
    assert all(
        p.request_options == {"chat_template_kwargs": {"enable_thinking": False}} for p in single
    )
    assert prompt_digest(single) == prompt_digest(load_prompts(chosen))


def test_variants_do_not_follow_the_stride_of_a_subsample(questions: Path) -> None:
    """Every second prompt of a slice, in the order in which variants are given out, holds both."""
    mixed = load_prompts(settings(questions, 40), template_variants=THINKING)
    by_text = {p.messages[0]["content"]: p.variant["enable_thinking"] for p in mixed}
    plain = load_prompts(settings(questions, 40))
    assert {by_text[p.messages[0]["content"]] for p in plain[::2]} == {True, False}


def test_languages_are_told_from_the_users_text(tmp_path: Path) -> None:
    french = ("user", "Écris une lettre à un ami qui habite à Lyon, s'il te plaît.")
    assert (
        one(
            tmp_path / "a.jsonl", said(("system", "You answer in English, always."), french)
        ).language
        == "fr"
    )
    assert one(tmp_path / "b.jsonl", {"prompt": "Hi?"}).language is None


def held_out(chosen: EvaluationSettings, text: str) -> bool:
    conversation = Conversation.of((Message("user", text),), source="training")
    return HeldOut(held_out_texts(chosen)).contaminates(conversation)


def test_all_rows_of_a_slice_stay_out_of_training(questions: Path) -> None:
    chosen = settings(questions, 3)
    assert all(held_out(chosen, f"What is {n} and {n + 7}?") for n in range(40))
    assert not held_out(chosen, "What is 3 and 4?")


def test_only_the_chosen_ones_where_training_draws_from_the_same_source(questions: Path) -> None:
    chosen = settings(questions, 3, keep_out="chosen")
    measured = {prompt.text for prompt in load_prompts(chosen)}
    kept_out = {text for n in range(40) if held_out(chosen, text := f"What is {n} and {n + 7}?")}
    assert kept_out == measured and len(measured) == 3


def test_a_common_system_message_keeps_nothing_out(tmp_path: Path) -> None:
    system = (
        "You are a helpful assistant that answers every question in a friendly way and "
        "never lies to anyone."
    )
    path = write(
        tmp_path / "a.jsonl", [said(("system", system), ("user", "Tell me all about the bees."))]
    )
    assert held_out_texts(settings(path, 1)) == ["Tell me all about the bees."]
