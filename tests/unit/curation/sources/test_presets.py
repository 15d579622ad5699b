"""Presets on small datasets of the same schema, and the other file formats."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from components.contracts import is_held_out
from components.curation.quarantine import Quarantine
from components.curation.sources.mixture import (
    describe_source,
    evaluation_texts,
    load_conversations,
)
from components.curation.sources.presets import PRESETS
from components.errors import CurationError
from components.settings import CurationSettings, SourceSettings

NUM_ROWS = 30


def question(number: int) -> str:
    return f"What comes after the number {number}, and why is that so?"


def share_gpt(number: int) -> dict[str, Any]:
    turns = [
        {"from": "human", "value": question(number)},
        {"from": "gpt", "value": "The next one."},
    ]
    return {"conversations": turns, "instruction": "another column", "uuid": str(number)}


def openai(number: int) -> dict[str, Any]:
    turns = [
        {"role": "user", "content": question(number)},
        {"role": "assistant", "content": "The next one."},
    ]
    return {"prompt": "another column", "messages": turns, "prompt_id": str(number)}


ROWS: dict[str, Any] = {
    "magpie": share_gpt,
    "ultrachat": openai,
    "open_perfect_blend": share_gpt,
    "gsm8k": lambda n: {"question": question(n), "answer": "#### 1"},
    "gsm8k_test": lambda n: {"question": question(n), "answer": "#### 1"},
    "math500": lambda n: {
        "problem": question(n),
        "solution": "x",
        "answer": "1",
        "subject": "Algebra",
        "level": 1,
    },
    "mbpp": lambda n: {
        "task_id": n,
        "text": question(n),
        "code": "pass",
        "test_list": ["assert True"],
    },
    "mbpp_test": lambda n: {
        "task_id": n,
        "text": question(n),
        "code": "pass",
        "test_list": ["assert True"],
    },
    "humaneval": lambda n: {
        "task_id": f"HumanEval/{n}",
        "prompt": question(n),
        "canonical_solution": "pass",
    },
    "mt_bench": lambda n: {
        "prompt": [question(n), "Say it again."],
        "prompt_id": n,
        "category": "math",
    },
}


def publish(folder: Path, preset: str, rows: Sequence[dict[str, Any]]) -> SourceSettings:
    """A dataset repository with the preset's subset and split, as the Hub describes them in its
    card.
    """
    place = PRESETS[preset]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "README.md").write_text(
        f"---\nconfigs:\n- config_name: {place.subset or 'default'}\n  data_files:\n"
        f"  - split: {place.split}\n    path: rows.jsonl\n---\n"
    )
    return SourceSettings(name=preset, kind="preset", repo_id=str(folder))


def settings(*sources: SourceSettings) -> CurationSettings:
    return CurationSettings(sources=sources, num_conversations=8)


def test_every_preset_has_a_row_here() -> None:
    assert set(ROWS) == set(PRESETS)


@pytest.mark.parametrize(
    "preset", [name for name, place in PRESETS.items() if not place.is_evaluation]
)
@pytest.mark.parametrize("streaming", [True, False])
def test_training_presets_read_their_column(preset: str, streaming: bool, tmp_path: Path) -> None:
    source = publish(tmp_path, preset, [ROWS[preset](number) for number in range(NUM_ROWS)])
    quarantine = Quarantine()
    found = load_conversations(
        settings(source.model_copy(update={"streaming": streaming})), quarantine=quarantine
    )
    expected = {question(number) for number in range(NUM_ROWS) if not is_held_out(question(number))}
    assert {conversation.user_turns for conversation in found} == {(text,) for text in expected}
    assert quarantine.total == 0


@pytest.mark.parametrize("preset", [name for name, place in PRESETS.items() if place.is_evaluation])
def test_evaluation_presets_are_kept_out_of_training(preset: str, tmp_path: Path) -> None:
    source = publish(tmp_path, preset, [ROWS[preset](number) for number in range(3)])
    assert set(evaluation_texts([source])) >= {question(number) for number in range(3)}
    with pytest.raises(CurationError, match="is an evaluation set, not training data"):
        list(load_conversations(settings(source)))


def test_every_turn_of_an_evaluation_set_counts(tmp_path: Path) -> None:
    source = publish(tmp_path, "mt_bench", [ROWS["mt_bench"](1)])
    assert list(evaluation_texts([source])) == [question(1), "Say it again."]
    turns = [{"role": "user", "content": text} for text in ("First?", "Second?")]
    (tmp_path / "chat.jsonl").write_text(json.dumps({"messages": turns}) + "\n")
    chats = SourceSettings(name="chats", kind="file", path=str(tmp_path / "chat.jsonl"))
    assert list(evaluation_texts([chats])) == ["First?", "Second?"]


def test_an_evaluation_set_that_cannot_be_read_whole_is_an_error(tmp_path: Path) -> None:
    source = publish(
        tmp_path, "math500", [ROWS["math500"](1), {**ROWS["math500"](2), "problem": " "}]
    )
    with pytest.raises(
        CurationError, match=r"evaluation set 'math500' has a row that cannot be read.*empty turn"
    ):
        list(evaluation_texts([source]))


def test_a_preset_without_its_column_is_an_error(tmp_path: Path) -> None:
    source = publish(tmp_path, "ultrachat", [{"prompt": question(1)}])
    with pytest.raises(CurationError, match=r"has no column 'messages'.*prompt"):
        list(load_conversations(settings(source)))


def test_an_unknown_preset_names_the_known_ones() -> None:
    with pytest.raises(CurationError, match=r"no such preset.*alpaca.*open_perfect_blend"):
        list(load_conversations(settings(SourceSettings(name="alpaca", kind="preset"))))


def test_the_manifest_names_place_revision_and_licence() -> None:
    source = SourceSettings(name="chat", kind="preset", preset="ultrachat", revision="8049631")
    assert describe_source(source) == {
        "name": "chat", "revision": "HuggingFaceH4/ultrachat_200k@8049631", "licence": "MIT",
    }  # fmt: skip


def test_arrays_lines_and_folders_of_files(tmp_path: Path) -> None:
    texts = [question(number) for number in range(NUM_ROWS)]
    (tmp_path / "share.json").write_text(json.dumps([share_gpt(number) for number in range(10)]))
    alpaca = [{"instruction": text, "input": "", "output": "x"} for text in texts[10:20]]
    (tmp_path / "alpaca.json").write_text("\n" + json.dumps(alpaca))
    (tmp_path / "prompts.txt").write_bytes("\n\n".join(texts[20:]).encode() + b"\n\xff broken\n")
    quarantine = Quarantine()
    source = SourceSettings(name="mixed", kind="file", path=str(tmp_path), column="conversations")
    found = {c.user_turns[0] for c in load_conversations(settings(source), quarantine=quarantine)}
    assert found == {text for text in texts if not is_held_out(text)}
    assert quarantine.by_source() == {"mixed": {"not UTF-8 text": 1}}


def test_a_folder_without_data_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(CurationError, match="has no data"):
        list(
            load_conversations(
                settings(SourceSettings(name="none", kind="file", path=str(tmp_path)))
            )
        )
