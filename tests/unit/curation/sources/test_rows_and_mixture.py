"""Readers of rows and sources: every schema, every way to be bad, and never a held-out
conversation.
"""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from components.contracts import is_held_out
from components.curation.quarantine import BadRowError, Quarantine
from components.curation.sources.mixture import Mixture, load_conversations
from components.curation.sources.packages import MAX_TRAINING_SEED, package_rows
from components.curation.sources.rows import read_context, read_row
from components.curation.text import batches
from components.errors import CurationError
from components.settings import CurationSettings


def settings(*sources: dict[str, object], **values: object) -> CurationSettings:
    return CurationSettings.model_validate({"sources": sources, "num_conversations": 8, **values})


def read(row: object, *, max_turns: int = 8) -> list[tuple[str, str]]:
    conversation = read_row(row, column="messages", source="test", max_turns=max_turns)
    return [(message.role, message.content) for message in conversation.messages]


@pytest.mark.parametrize(
    "row",
    [
        {
            "messages": [
                {"role": "user", "content": "Hello"},
                {"role": "assistant", "content": "Hi"},
            ]
        },
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "Hello"}]}]},
        {"conversations": [{"from": "human", "value": "Hello"}, {"from": "gpt", "value": "Hi"}]},
        {"prompt": "Hello"},
        {"instruction": "Hello", "input": "", "output": "Hi"},
        {"question": "Hello", "answer": "Hi"},
        {"turns": ["Hello", "Hi"]},
        {"input": [{"role": "system", "content": "Hello"}], "ideal": "Hi"},
        "Hello",
    ],
)
def test_every_schema_reads_as_the_same_prompt(row: object) -> None:
    assert read(row) == [("user", "Hello")]


def test_alpaca_input_joins_the_instruction() -> None:
    assert read({"instruction": "Translate.", "input": "Bonjour"}) == [
        ("user", "Translate.\n\nBonjour")
    ]


def test_system_messages_join_answers_go_and_turns_are_capped() -> None:
    turns = [
        ("system", "A"),
        ("system", "B"),
        ("user", "1"),
        ("user", "2"),
        ("assistant", "x"),
        ("user", "3"),
    ]
    row = {"messages": [{"role": role, "content": text} for role, text in turns]}
    assert read(row) == [("system", "A\nB"), ("user", "1\n2"), ("user", "3")]
    assert read(row, max_turns=1) == [("system", "A\nB"), ("user", "1\n2")]


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        (b"\xff\xfe{", "not UTF-8 JSON"),
        ({"other": 1}, "no column"),
        ({"messages": []}, "no user turn"),
        ({"messages": 3}, "neither a list nor a text"),
        ({"messages": [{"role": "user", "content": "  "}]}, "empty turn"),
        ({"messages": [{"role": "wizard", "content": "Hi"}]}, "unknown role"),
        ({"messages": [{"role": "user", "content": None}]}, "without text"),
        ({"messages": [{"role": "user", "content": "lone \ud800 surrogate"}]}, "broken text"),
        (
            {
                "messages": [
                    {"role": "assistant", "content": "Hi"},
                    {"role": "user", "content": "Yo"},
                ]
            },
            "assistant first",
        ),
        (
            {"messages": [{"role": "user", "content": "Hi"}, {"role": "system", "content": "Be"}]},
            "system message after",
        ),
        (BadRowError("said by the adapter"), "said by the adapter"),
    ],
)
def test_bad_rows_say_why(row: object, reason: str) -> None:
    with pytest.raises(BadRowError, match=reason):
        read(row)


CALL = {
    "id": "c1",
    "type": "function",
    "function": {"name": "weather", "arguments": '{"city": "Bern"}'},
}
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]
OPENAI_CALL = {
    "messages": [
        {"role": "user", "content": "Is it raining in Bern?"},
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "c1", "content": "sunny"},
        {"role": "assistant", "content": "No, it is sunny."},
        {"role": "user", "content": "And tomorrow?"},
        {"role": "assistant", "content": "", "tool_calls": [CALL]},
    ],
    "tools": TOOLS,
}
SHAREGPT_CALL = {
    "conversations": [
        {"from": "human", "value": "Is it raining in Bern?"},
        {"from": "function_call", "value": '{"name": "weather", "arguments": {"city": "Bern"}}'},
        {"from": "observation", "value": "sunny"},
        {"from": "gpt", "value": "No, it is sunny."},
    ],
    "tools": json.dumps([TOOLS[0]["function"]]),
}


def test_a_context_keeps_earlier_answers_and_ends_before_the_last() -> None:
    messages, tools = read_context(OPENAI_CALL, column="messages")
    # The call at the end goes, as an answer would.
    assert [message.role for message in messages] == [
        "user",
        "assistant",
        "tool",
        "assistant",
        "user",
    ]
    assert messages[3].content == "No, it is sunny." and json.loads(tools) == TOOLS
    messages, _ = read_context(SHAREGPT_CALL, column="messages")
    assert [message.role for message in messages] == ["user", "assistant", "tool"]


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"messages": [{"role": "assistant", "content": "Hi"}]}, "no user turn"),
        (
            {
                "messages": [
                    {"role": "assistant", "content": "Hi"},
                    {"role": "user", "content": "Yo"},
                ]
            },
            "assistant first",
        ),
        (
            {"messages": [*OPENAI_CALL["messages"][:2], {"role": "user", "content": "Well?"}]},
            "call without a result",
        ),
    ],
)
def test_contexts_that_cannot_be_say_why(row: object, reason: str) -> None:
    with pytest.raises(BadRowError, match=reason):
        read_context(row, column="messages")


def test_tool_calls_and_results_stay_before_the_answer_they_lead_to() -> None:
    conversation = read_row(OPENAI_CALL, column="messages", source="test", max_turns=8)
    # The call at the end is left out: nothing answers it, and what to do there is the target's to
    # say.
    assert [[message.role for message in turn] for turn in conversation.turns] == [
        ["user", "assistant", "tool"],
        ["user"],
    ]
    call, result = conversation.turns[0][1:]
    assert call.as_dict()["tool_calls"][0]["function"] == {
        "name": "weather",
        "arguments": {"city": "Bern"},
    }
    assert call.as_request()["tool_calls"] == [CALL]
    assert result.as_dict() == {"role": "tool", "content": "sunny", "tool_call_id": "c1"}
    assert conversation.template_tools == {"tools": TOOLS}
    assert len(read_row(OPENAI_CALL, column="messages", source="test", max_turns=1).turns) == 1


def test_sharegpt_calls_read_as_openai_ones() -> None:
    conversation = read_row(SHAREGPT_CALL, column="messages", source="test", max_turns=8)
    assert [message.role for message in conversation.messages] == ["user", "assistant", "tool"]
    function = conversation.messages[1].as_dict()["tool_calls"][0]["function"]
    assert function == {"name": "weather", "arguments": {"city": "Bern"}}
    assert conversation.template_tools == {"tools": TOOLS}


def test_tools_and_calls_are_part_of_a_conversations_name() -> None:
    def name(**changes: object) -> str:
        return read_row(
            {**OPENAI_CALL, **changes}, column="messages", source="test", max_turns=8
        ).id

    other = [*OPENAI_CALL["messages"][:2], {"role": "tool", "content": "rain"}]
    assert len({name(), name(tools=None), name(messages=other)}) == 3


@pytest.mark.parametrize(
    ("turns", "reason"),
    [
        ([{"role": "tool", "content": "sunny"}], "tool first"),
        (
            [{"role": "user", "content": "Hi"}, {"role": "tool", "content": "sunny"}],
            "result without a call",
        ),
        (
            [
                {"role": "user", "content": "Hi"},
                {"role": "assistant", "tool_calls": [CALL]},
                {"role": "user", "content": "Well?"},
            ],
            "call without a result",
        ),
        (
            [
                {"role": "user", "content": "Hi"},
                {"role": "assistant", "tool_calls": [{"function": 3}]},
            ],
            "without a name",
        ),
        (
            [{"role": "user", "content": "Hi"}, {"from": "function_call", "value": "weather("}],
            "not JSON",
        ),
    ],
)
def test_broken_tool_calls_say_why(turns: list[dict[str, object]], reason: str) -> None:
    with pytest.raises(BadRowError, match=reason):
        read({"messages": turns})


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(),
        lambda c: st.lists(c) | st.dictionaries(st.text(), c),
    )
)
def test_any_json_is_read_or_quarantined(value: object) -> None:
    opening = {"role": "user", "content": "Hi"}
    for row in (
        value,
        {"messages": value},
        {"prompt": value},
        {"conversations": [value]},
        {"prompt": "Hi", "tools": value},
        {
            "messages": [
                opening,
                {"role": "assistant", "tool_calls": value},
                {"role": "tool", "content": "x"},
            ]
        },
    ):
        try:
            conversation = read_row(row, column="messages", source="test", max_turns=3)
        except BadRowError as reason:
            assert str(reason)
        else:
            assert 1 <= len(conversation.user_turns) <= 3
            assert all(turn.strip() for turn in conversation.user_turns)


def test_ids_name_content_not_source() -> None:
    one = read_row("Hello", column="prompt", source="a", max_turns=1)
    two = read_row({"question": " Hello "}, column="prompt", source="b", max_turns=1)
    other = read_row("Hello!", column="prompt", source="a", max_turns=1)
    assert one.id == two.id != other.id


def write_jsonl(path: Path, prompts: list[str]) -> dict[str, object]:
    path.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts))
    return {"name": path.stem, "kind": "file", "path": str(path), "column": "prompt"}


def test_files_quarantine_bad_lines_and_hold_out_evaluations_share(tmp_path: Path) -> None:
    prompts = [f"Tell me about the number {number}." for number in range(400)]
    source = write_jsonl(tmp_path / "prompts.jsonl", prompts)
    with (tmp_path / "prompts.jsonl").open("ab") as file:
        file.write(b'{"prompt": "cut\n\xff\xff\n{"nothing": 1}\n')
    quarantine = Quarantine()
    loaded = [c.user_turns[0] for c in load_conversations(settings(source), quarantine=quarantine)]
    assert sorted(loaded) == sorted(prompt for prompt in prompts if not is_held_out(prompt))
    assert 0 < len(prompts) - len(loaded) < 60
    assert quarantine.by_source()["prompts"] == {
        "no column with messages or a prompt": 1,
        "not UTF-8 JSON": 2,
    }
    assert {example["where"] for example in quarantine.examples} == {
        f"prompts.jsonl:{n}" for n in (401, 402, 403)
    }


def test_parquet_arrow_and_jsonl_give_the_same_conversations(tmp_path: Path) -> None:
    rows = [{"messages": [{"role": "user", "content": f"Question number {n}?"}]} for n in range(30)]
    table = pa.Table.from_pylist(rows)
    pq.write_table(table, tmp_path / "a.parquet")
    with pa.ipc.new_file(tmp_path / "a.arrow", table.schema) as writer:
        writer.write_table(table)
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, rows)))
    ids = [
        {
            c.id
            for c in load_conversations(
                settings({"name": "a", "kind": "file", "path": str(tmp_path / name)})
            )
        }
        for name in ("a.parquet", "a.arrow", "a.jsonl")
    ]
    assert ids[0] and ids[0] == ids[1] == ids[2]


def test_a_missing_file_and_an_unknown_source_are_errors(tmp_path: Path) -> None:
    with pytest.raises(CurationError, match="missing"):
        list(
            load_conversations(
                settings({"name": "a", "kind": "file", "path": str(tmp_path / "no.jsonl")})
            )
        )
    with pytest.raises(CurationError, match="no package source"):
        list(load_conversations(settings({"name": "nothing"})))
    with pytest.raises(CurationError, match="no such families"):
        list(itertools.islice(package_rows("evals", seed=0, parts=["theory_of_mind"]), 1))


def test_accepted_conversations_follow_the_weights(tmp_path: Path) -> None:
    many = write_jsonl(tmp_path / "many.jsonl", [f"many {n}" for n in range(2000)])
    few = write_jsonl(tmp_path / "few.jsonl", [f"few {n}" for n in range(2000)])
    mixture = Mixture(
        settings({**many, "weight": 0.75}, {**few, "weight": 0.25}), quarantine=Quarantine()
    )
    accepted = 0
    for draw, conversation in enumerate(mixture):
        if conversation.source == "few" or draw % 2:  # the larger source loses half of its rows
            accepted += 1
        else:
            mixture.refuse(conversation.source)
        if accepted == 400:
            break
    assert mixture.num_accepted["few"] == pytest.approx(100, abs=8)


def test_verdicts_that_come_in_batches_keep_the_weights(tmp_path: Path) -> None:
    many = write_jsonl(tmp_path / "many.jsonl", [f"many {n}" for n in range(4000)])
    few = write_jsonl(tmp_path / "few.jsonl", [f"few {n}" for n in range(4000)])
    mixture = Mixture(
        settings({**many, "weight": 0.75}, {**few, "weight": 0.25}), quarantine=Quarantine()
    )
    for _, batch in zip(range(20), batches(mixture, 64), strict=False):
        for conversation in batch[::2]:  # half of every batch, whatever its source
            mixture.refuse(conversation.source)
    accepted = mixture.num_accepted
    assert sum(accepted.values()) == 640
    assert accepted["few"] == pytest.approx(160, abs=20)


def test_a_source_that_gives_nothing_does_not_hold_the_others_up(tmp_path: Path) -> None:
    good = write_jsonl(tmp_path / "good.jsonl", [f"good {n}" for n in range(300)])
    endless = {"name": "reasoning_gym", "weight": 100.0}
    mixture = Mixture(settings(good, endless), quarantine=Quarantine())
    sources = []
    for conversation in itertools.islice(mixture, 3000):
        sources.append(conversation.source)
        if conversation.source != "good":
            mixture.refuse(conversation.source)
    assert "good" in sources


@pytest.mark.parametrize("name", ["chitchat", "evals", "reasoning_gym", "python_stdlib"])
def test_package_sources_are_seeded_and_leave_evaluation_out(name: str) -> None:
    def draw(seed: int) -> list[str]:
        return [
            c.id
            for c in itertools.islice(load_conversations(settings({"name": name}, seed=seed)), 40)
        ]

    assert draw(1) == draw(1) != draw(2)
    openings = [
        c.user_turns[0] for c in itertools.islice(load_conversations(settings({"name": name})), 200)
    ]
    assert len(openings) == 200
    assert not any(map(is_held_out, openings))


def test_generated_problems_use_training_seeds() -> None:
    where = [place for place, _ in itertools.islice(package_rows("reasoning_gym", seed=3), 100)]
    seeds = [int(place.rsplit(" ", 1)[1]) for place in where]
    assert max(seeds) < MAX_TRAINING_SEED
    assert {place.split()[0] for place in where} >= {"gsm_symbolic", "leg_counting"}


def test_git_lfs_pointers_are_quarantined(tmp_path: Path) -> None:
    from components.curation.sources.packages import _evals_family

    family = tmp_path / "family"
    family.mkdir()
    (family / "samples.jsonl").write_text(
        "version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 1\n"
    )
    rows = list(_evals_family(family, 0))
    assert [type(row) for _, row in rows] == [BadRowError]


def test_hugging_face_datasets_are_streamed_from_wherever_they_lie(tmp_path: Path) -> None:
    answer = {"from": "gpt", "value": "A."}
    rows = [
        {"conversations": [{"from": "human", "value": f"Question {n}?"}, answer]} for n in range(40)
    ]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    source = {
        "name": "hub",
        "kind": "huggingface",
        "repo_id": str(tmp_path),
        "column": "conversations",
    }
    found = sorted(c.user_turns[0] for c in load_conversations(settings(source)))
    assert found == sorted(f"Question {n}?" for n in range(40) if not is_held_out(f"Question {n}?"))


def test_a_dataset_that_cannot_be_loaded_is_named(tmp_path: Path) -> None:
    source = {"name": "hub", "kind": "huggingface", "repo_id": str(tmp_path / "nothing")}
    with pytest.raises(CurationError, match="cannot load the dataset of source 'hub'"):
        list(load_conversations(settings(source)))


def test_stdlib_prompts_are_heads_of_documented_functions() -> None:
    prompts = list(
        itertools.islice((prompt for _, prompt in package_rows("python_stdlib", seed=0)), 400)
    )
    assert len(prompts) == 400 and len(set(prompts)) > 390
    for prompt in prompts:
        head = (
            str(prompt).split("\n\n", 1)[-1]
            if not str(prompt).startswith(("def ", "@"))
            else str(prompt)
        )
        assert "def " in head
        assert len(head) <= 700
