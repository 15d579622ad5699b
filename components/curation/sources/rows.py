"""One row of any known schema -> a conversation of prompts, or `BadRowError` with the reason.

Known schemas: OpenAI messages (`[{role, content}]`), ShareGPT (`[{from, value}]`), Alpaca
(`instruction`, `input`), a list of strings (turns, user first), and a plain prompt. Only prompts
are kept: whatever a row's assistant said was not said by our target. Its tool calls stay with their
results, as what stood before the answer: they are context, and nothing is learnt from them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import pairwise

from components.curation.conversation import Conversation, Message, Role
from components.curation.quarantine import BadRowError
from components.curation.text import is_broken

ROLES: dict[str, Role] = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "human": "user",
    "prompter": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "model": "assistant",
    "bot": "assistant",
    "function_call": "assistant",
    "tool_call": "assistant",
    "tool": "tool",
    "function": "tool",
    "observation": "tool",
    "ipython": "tool",
    "tool_response": "tool",
}
CALL_ROLES = ("function_call", "tool_call")
"""ShareGPT's roles whose text is the JSON of a call."""
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
    tools = _tools(row.get("tools")) if isinstance(row, Mapping) else ""
    return build_conversation(
        _read_turns(row, column), source=source, max_turns=max_turns, tools=tools
    )


def read_context(row: object, *, column: str) -> tuple[tuple[Message, ...], str]:
    """Read one row as what stands before its last answer, the row's own earlier answers included.

    An answer at the end, or a call there that nothing answers, is left out: giving it is the
    target's part. What opens the row, system messages and neighbouring turns, is put together as
    `build_conversation` does it.

    Args:
        row: a mapping with a known column, or the value of such a column itself.
        column: looked at first; the known columns follow.

    Returns:
        The turns, the last one the user's or a tool result; and the row's `tools` as JSON, empty
        without any.

    Raises:
        BadRowError: as `read_row`, and for a call without a result.
    """
    tools = _tools(row.get("tools")) if isinstance(row, Mapping) else ""
    turns = _read_turns(row, column)
    while turns and turns[-1].role == "assistant":
        turns = turns[:-1]
    kept = _merged(turns)
    _check_calls(kept)
    if [message.role for message in kept] == ["system"]:
        kept = [Message("user", kept[0].content)]
    if not any(message.role == "user" for message in kept):
        raise BadRowError("no user turn")
    return tuple(kept), tools


def turn_texts(row: object, *, column: str) -> list[str]:
    """The text of every turn of a row, whoever speaks; tool calls and results that carry an id or a
    name are left out.

    Raises:
        BadRowError: as `read_row`, for what is no turn at all, and for an empty or broken one.
    """
    texts = [message.content for message in _read_turns(row, column) if not message.extra]
    if any(is_broken(text) for text in texts):
        raise BadRowError("broken text")
    if not texts or not all(text.strip() for text in texts):
        raise BadRowError("empty turn")
    return texts


def _read_turns(row: object, column: str) -> list[Message]:
    if isinstance(row, BadRowError):
        raise row
    if isinstance(row, bytes):
        raise BadRowError("not UTF-8 JSON")
    return _turns(_value(row, column))


def build_conversation(
    messages: Sequence[Message], *, source: str, max_turns: int, tools: str = ""
) -> Conversation:
    """Keep the system message and the first `max_turns` user turns, with their tool calls and
    results.

    System messages that open a conversation are joined into one, and so are neighbouring user
    turns: templates know one system message, and many of them refuse two user turns in a row. A
    conversation of nothing but instructions is a prompt. A call that nothing answers at the end is
    left out: what to do there is the target's to say.

    Raises:
        BadRowError: broken text, an empty turn, an assistant who speaks first, a late system
            message, a tool result without a call or a call without one, no user turn.
    """
    kept = _without_answers(_merged(messages))
    if [message.role for message in kept] == ["system"]:
        kept = [Message("user", kept[0].content)]
    if not any(message.role == "user" for message in kept):
        raise BadRowError("no user turn")
    starts = [index for index, message in enumerate(kept) if message.role == "user"]
    end = starts[max_turns] if len(starts) > max_turns else len(kept)
    return Conversation.of(tuple(kept[:end]), source=source, tools=tools)


def _merged(messages: Sequence[Message]) -> list[Message]:
    """Neighbours of one role as one message, each role where it may stand."""
    merged: list[Message] = []
    for message in messages:
        _check(message, merged)
        message = Message(message.role, message.content.strip(), message.extra)
        if merged and merged[-1].role == message.role and not (message.extra or merged[-1].extra):
            merged[-1] = Message(message.role, f"{merged[-1].content}\n{message.content}")
        else:
            merged.append(message)
    return merged


def _check(message: Message, before: Sequence[Message]) -> None:
    if is_broken(message.content) or is_broken(message.extra):
        raise BadRowError("broken text")
    if not message.content.strip() and not message.extra:
        raise BadRowError("empty turn")
    if message.role in ("assistant", "tool") and not any(
        earlier.role == "user" for earlier in before
    ):
        raise BadRowError(f"wrong role order: {message.role} first")
    if message.role == "system" and any(earlier.role != "system" for earlier in before):
        raise BadRowError("wrong role order: system message after the start")
    if message.role == "tool" and not (before[-1].role == "tool" or before[-1].extra):
        raise BadRowError("wrong role order: tool result without a call")


def _without_answers(messages: Sequence[Message]) -> list[Message]:
    """Everything but the assistant's texts, which the target gives again."""
    _check_calls(messages)
    kept = [message for message in messages if message.role != "assistant" or message.extra]
    return kept[:-1] if kept and kept[-1].role == "assistant" else kept


def _check_calls(messages: Sequence[Message]) -> None:
    for call, following in pairwise(messages):
        if call.role == "assistant" and call.extra and following.role != "tool":
            raise BadRowError("wrong role order: tool call without a result")


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


def _turns(value: object) -> list[Message]:
    if isinstance(value, str):
        return [Message("user", value)]
    if not isinstance(value, Sequence) or isinstance(value, bytes):
        raise BadRowError(f"turns are neither a list nor a text but {type(value).__name__}")
    if value and all(isinstance(turn, str) for turn in value):
        return [
            Message("user" if index % 2 == 0 else "assistant", turn)
            for index, turn in enumerate(value)
        ]
    return [_turn(turn) for turn in value]


def _turn(turn: object) -> Message:
    if not isinstance(turn, Mapping):
        raise BadRowError("a turn is not a mapping")
    name = str(turn.get("role") or turn.get("from") or "").lower()
    role = ROLES.get(name)
    if role is None:
        raise BadRowError("unknown role")

    text = turn.get("content") if turn.get("content") is not None else turn.get("value")
    if isinstance(text, Sequence) and not isinstance(text, str):  # OpenAI content parts
        text = "".join(str(part.get("text", "")) for part in text if isinstance(part, Mapping))

    if role == "assistant" and (name in CALL_ROLES or turn.get("tool_calls")):
        calls = [_json_of(text)] if name in CALL_ROLES else turn["tool_calls"]
        said = text if isinstance(text, str) and name not in CALL_ROLES else ""
        return Message(role, said, _extra(tool_calls=_calls(calls)))
    if not isinstance(text, str):
        raise BadRowError("a turn without text")
    if role == "tool":
        fields = {key: str(turn[key]) for key in ("tool_call_id", "name") if turn.get(key)}
        return Message(role, text, _extra(**fields) if fields else "")

    return Message(role, text)


def _calls(calls: object) -> list[dict[str, object]]:
    """Tool calls in the form chat templates take, their arguments as an object."""
    if isinstance(calls, Mapping):
        calls = [calls]
    if not isinstance(calls, Sequence) or isinstance(calls, str):
        raise BadRowError("tool calls that are no list")
    return [_call(call) for call in calls]


def _call(call: object) -> dict[str, object]:
    function = call.get("function", call) if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise BadRowError("a tool call without a name")

    arguments = function.get("arguments") or {}
    if isinstance(arguments, str):
        arguments = _json_of(arguments)

    if not isinstance(arguments, Mapping):
        raise BadRowError("arguments of a tool call that are no object")
    given = (
        {"id": call["id"]} if isinstance(call, Mapping) and isinstance(call.get("id"), str) else {}
    )

    return {
        **given,
        "type": "function",
        "function": {"name": function["name"], "arguments": dict(arguments)},
    }


def _tools(tools: object) -> str:
    """The `tools` of a row, a list or its JSON, as JSON."""
    if tools is None or tools == "":
        return ""
    if isinstance(tools, str):
        tools = _json_of(tools)
    if not isinstance(tools, Sequence) or not all(isinstance(tool, Mapping) for tool in tools):
        raise BadRowError("tools that are no list of functions")
    # Bare functions, as some sets list them, in the OpenAI wrapping that templates and engines
    # want.
    wrapped = [
        tool if "function" in tool else {"type": "function", "function": tool} for tool in tools
    ]
    return _canonical(wrapped) if wrapped else ""


def _json_of(text: object) -> object:
    try:
        return json.loads(text) if isinstance(text, str) else text
    except ValueError:
        raise BadRowError("a tool call or tools that are not JSON") from None


def _extra(**fields: object) -> str:
    return _canonical(fields)


def _canonical(value: object) -> str:
    try:
        return json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    except (TypeError, ValueError):
        raise BadRowError("a tool call or tools that are not JSON") from None
