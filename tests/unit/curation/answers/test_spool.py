"""Spools: rows on disk that read like a tuple, here or in another process."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest

from components.curation.answers.spool import answered_spool, conversation_spool
from components.curation.conversation import Answer, AnsweredConversation, Conversation, Message


def chat(number: int) -> Conversation:
    turns = (
        Message("system", "Be\u2028brief."),
        Message("user", f"Frage {number}: wie weit? \U0001f600"),
    )
    return Conversation.of(turns, source=f"source {number % 3}")


def test_rows_come_back_as_they_went_in(tmp_path: Path) -> None:
    spool = conversation_spool(tmp_path / "rows")
    chats = [chat(number) for number in range(50)]
    assert [spool.append(item) for item in chats] == list(range(50))
    assert len(spool) == 50
    assert list(spool) == chats and list(spool) == chats
    assert spool[7] == chats[7] and spool[-1] == chats[-1]
    assert spool[3:6] == tuple(chats[3:6])
    with pytest.raises(IndexError):
        spool[50]


def test_rows_may_be_read_while_more_are_written(tmp_path: Path) -> None:
    spool = conversation_spool(tmp_path / "rows")
    for number in range(5):
        spool.append(chat(number))
        assert spool[number] == chat(number) and spool[0] == chat(0)
    assert list(spool) == [chat(number) for number in range(5)]


def test_a_selection_has_an_order_of_its_own(tmp_path: Path) -> None:
    spool = answered_spool(tmp_path / "rows")
    answer = Answer("Ja.", (5, 6), (1, 2, 3), 2, False, 0.7)
    items = [
        AnsweredConversation(chat(number), (answer,), {"enable_thinking": False})
        for number in range(4)
    ]
    for item in items:
        spool.append(item)
    assert list(spool.selected([3, 1])) == [items[3], items[1]]
    assert len(spool) == 4


def test_a_spool_travels_to_another_process(tmp_path: Path) -> None:
    spool = conversation_spool(tmp_path / "rows")
    spool.append(chat(1))
    copy = pickle.loads(pickle.dumps(spool))
    assert list(copy) == [chat(1)]
    spool.append(chat(2))
    assert list(spool) == [chat(1), chat(2)]


def test_an_older_file_is_overwritten(tmp_path: Path) -> None:
    conversation_spool(tmp_path / "rows").append(chat(1))
    spool = conversation_spool(tmp_path / "rows")
    assert len(spool) == 0 and list(spool) == []
