"""One row of any known schema -> a conversation of prompts, or `BadRowError` with the reason.

Known schemas: OpenAI messages (`[{role, content}]`), ShareGPT (`[{from, value}]`), Alpaca (`instruction`, `input`),
a list of strings (turns, user first), and a plain prompt. Only prompts are kept: whatever a row's assistant said was
not said by our target.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from components.curation.conversation import Conversation, Message
from components.curation.quarantine import BadRowError
from components.curation.text import is_broken

ROLES = {
    "system": "system", "developer": "system",
    "user": "user", "human": "user", "prompter": "user",
    "assistant": "assistant", "gpt": "assistant", "model": "assistant", "bot": "assistant",
}  # fmt: skip
TURN_COLUMNS = ("messages", "conversations", "conversation", "input", "turns")
PROMPT_COLUMNS = ("prompt", "instruction", "question", "problem", "query", "text", "content")


def read_row(row: object, *, column: str, source: str, max_turns: int) -> Conversation:
    """Read one row.

    Args:
        row: a mapping with a known column, or the value of such a column itself.
        column: looked at first; the known columns follow.
        source: name the conversation carries.
        max_turns: user turns kept, from the first.

    Raises:
        BadRowError: with the reason the row is quarantined under.
    """
    return build_conversation(_read_turns(row, column), source=source, max_turns=max_turns)


def turn_texts(row: object, *, column: str) -> list[str]:
    """The text of every turn of a row, whoever speaks.

    Raises:
        BadRowError: as `read_row`, for what is no turn at all, and for an empty or broken one.
    """
    texts = [text for _, text in _read_turns(row, column)]
    if any(is_broken(text) for text in texts):
        raise BadRowError("broken text")
    if not texts or not all(text.strip() for text in texts):
        raise BadRowError("empty turn")
    return texts


def _read_turns(row: object, column: str) -> list[tuple[str, str]]:
    if isinstance(row, BadRowError):
        raise row
    if isinstance(row, bytes):
        raise BadRowError("not UTF-8 JSON")
    return _turns(_value(row, column))


def build_conversation(turns: Sequence[tuple[str, str]], *, source: str, max_turns: int) -> Conversation:
    """Keep the system message and the first `max_turns` user turns of `turns` = [(role, text)].

    System messages that open a conversation are joined into one, and so are neighbouring user turns: templates know
    one system message, and many of them refuse two user turns in a row. A conversation of nothing but instructions is
    a prompt.

    Raises:
        BadRowError: broken text, an empty turn, an assistant who speaks first, a late system message, no user turn.
    """
    merged: list[tuple[str, str]] = []
    for role, text in turns:
        if is_broken(text):
            raise BadRowError("broken text")
        if not text.strip():
            raise BadRowError("empty turn")
        if role == "assistant" and not any(earlier == "user" for earlier, _ in merged):
            raise BadRowError("wrong role order: assistant first")
        if role == "system" and any(earlier != "system" for earlier, _ in merged):
            raise BadRowError("wrong role order: system message after the start")
        if merged and merged[-1][0] == role:
            merged[-1] = (role, f"{merged[-1][1]}\n{text.strip()}")
        else:
            merged.append((role, text.strip()))
    if [role for role, _ in merged] == ["system"]:
        merged = [("user", merged[0][1])]
    system = [Message("system", text) for role, text in merged if role == "system"]
    users = [Message("user", text) for role, text in merged if role == "user"]
    if not users:
        raise BadRowError("no user turn")
    return Conversation.of((*system, *users[:max_turns]), source=source)


def _value(row: object, column: str) -> object:
    if not isinstance(row, Mapping):
        return row
    for name in (column, *TURN_COLUMNS, *PROMPT_COLUMNS):
        value = row.get(name)
        if value is None or value == "":
            continue
        if name == "instruction" and isinstance(row.get("input"), str) and row["input"]:
            return f"{value}\n\n{row['input']}"
        if name == "input" and isinstance(value, str) and isinstance(row.get("instruction"), str):
            return f"{row['instruction']}\n\n{value}"
        return value
    raise BadRowError("no column with messages or a prompt")


def _turns(value: object) -> list[tuple[str, str]]:
    if isinstance(value, str):
        return [("user", value)]
    if not isinstance(value, Sequence) or isinstance(value, bytes):
        raise BadRowError(f"turns are neither a list nor a text but {type(value).__name__}")
    if value and all(isinstance(turn, str) for turn in value):
        return [("user" if index % 2 == 0 else "assistant", turn) for index, turn in enumerate(value)]
    return [_turn(turn) for turn in value]


def _turn(turn: object) -> tuple[str, str]:
    if not isinstance(turn, Mapping):
        raise BadRowError("a turn is not a mapping")
    role = ROLES.get(str(turn.get("role") or turn.get("from") or "").lower())
    if role is None:
        raise BadRowError("unknown role")
    text = turn.get("content") if turn.get("content") is not None else turn.get("value")
    if isinstance(text, Sequence) and not isinstance(text, str):  # OpenAI content parts
        text = "".join(str(part.get("text", "")) for part in text if isinstance(part, Mapping))
    if not isinstance(text, str):
        raise BadRowError("a turn without text")
    return role, text
