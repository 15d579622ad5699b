"""Rows on disk between the steps of curation: memory holds an offset per row, never the rows.

A spool is written once, by appending, and then read like a tuple, by this process or another one:
it pickles as the path of its file and its offsets. It is no archive: what is kept for good is the
dataset.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any, Generic, TypeVar, overload

from components.curation.conversation import Answer, AnsweredConversation, Conversation, Message

T = TypeVar("T")
Encode = Callable[[T], Any]
Decode = Callable[[Any], T]


class Spool(Sequence[T], Generic[T]):
    """JSON lines in one file. Build it with `conversation_spool` or `answered_spool`."""

    def __init__(self, path: Path, encode: Encode[T], decode: Decode[T]) -> None:
        self._path = Path(path)
        self._encode = encode
        self._decode = decode
        self._offsets = array("q")
        self._end = 0
        self._writer: IO[bytes] | None = None
        self._reader: IO[bytes] | None = None
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._path.write_bytes(b"")

    def append(self, item: T) -> int:
        """Keep an item; returns its position."""
        if self._writer is None:
            self._writer = self._path.open("ab")
        line = json.dumps(self._encode(item), separators=(",", ":")).encode() + b"\n"
        self._writer.write(line)
        self._offsets.append(self._end)
        self._end += len(line)
        return len(self._offsets) - 1

    def flush(self) -> None:
        """Hand everything to the kernel, where readers find it."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def selected(self, positions: Sequence[int]) -> Spool[T]:
        """The items at these positions, in this order: another view of the same file."""
        self.flush()
        view: Spool[T] = object.__new__(Spool)
        view.__dict__.update(
            self.__dict__, _offsets=array("q", (self._offsets[position] for position in positions))
        )
        view._reader = None
        return view

    def __len__(self) -> int:
        return len(self._offsets)

    @overload
    def __getitem__(self, index: int) -> T: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[T, ...]: ...
    def __getitem__(self, index: int | slice) -> T | tuple[T, ...]:
        if isinstance(index, slice):
            return tuple(self._at(offset) for offset in self._offsets[index])
        return self._at(self._offsets[index])

    def __iter__(self) -> Iterator[T]:
        return (self._at(offset) for offset in self._offsets)

    def _at(self, offset: int) -> T:
        self.flush()
        if self._reader is None:
            self._reader = self._path.open("rb")
        if self._reader.tell() != offset:  # rows read in the order they were written need no seek
            self._reader.seek(offset)
        return self._decode(json.loads(self._reader.readline()))

    def __getstate__(self) -> dict[str, Any]:
        self.flush()
        return {**self.__dict__, "_reader": None}


def conversation_spool(path: Path) -> Spool[Conversation]:
    """A spool of conversations in `path`, which is overwritten."""
    return Spool(path, _from_conversation, _to_conversation)


def answered_spool(path: Path) -> Spool[AnsweredConversation]:
    """A spool of answered conversations in `path`, which is overwritten."""
    return Spool(path, _from_answered, _to_answered)


def to_answer(record: dict[str, Any]) -> Answer:
    """An answer from its JSON form, `dataclasses.asdict`.

    Raises:
        KeyError, TypeError: the record is not an answer.
    """
    ids = {name: tuple(record[name]) for name in ("token_ids", "prompt_token_ids")}
    return Answer(**{**record, **ids})


def _from_conversation(item: Conversation) -> dict[str, Any]:
    turns = [[message.role, message.content, message.extra] for message in item.messages]
    return {"id": item.id, "source": item.source, "messages": turns, "tools": item.tools}


def _to_conversation(record: dict[str, Any]) -> Conversation:
    messages = tuple(Message(*turn) for turn in record["messages"])
    return Conversation(record["id"], record["source"], messages, record["tools"])


def _from_answered(item: AnsweredConversation) -> dict[str, Any]:
    answers = [asdict(answer) for answer in item.answers]
    return {
        "conversation": _from_conversation(item.conversation),
        "answers": answers,
        "variant": dict(item.variant),
    }


def _to_answered(record: dict[str, Any]) -> AnsweredConversation:
    answers = tuple(to_answer(answer) for answer in record["answers"])
    return AnsweredConversation(
        _to_conversation(record["conversation"]), answers, record["variant"]
    )
