"""The rows that move through curation: prompts first, then the answers the target gave to them.

    Conversation          what the target is asked, named by the hash of its content: system and
    user turns, and the
                          tool calls and results that stand between a user turn and its answer
    Answer                one regenerated assistant turn, with the tokens the target produced
    AnsweredConversation  both; a conversation that a truncated answer cut short has fewer answers
    than turns Row                   token ids and loss mask, as the trainer reads them

Plain slotted dataclasses, not pydantic records: there are hundreds of thousands of them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from components.contracts import digest_json

Role = Literal["system", "user", "assistant", "tool"]
Variant = Mapping[str, Any]
"""Variables given to the chat template, such as {"enable_thinking": False}."""

NO_VARIANT: Variant = {}


@dataclass(frozen=True, slots=True)
class Message:
    """One turn of a chat."""

    role: Role
    content: str
    extra: str = ""
    """The further fields of a tool call or of its result (`tool_calls`, `tool_call_id`, `name`), as
    a JSON object.
    """

    def as_dict(self) -> dict[str, Any]:
        """The form that chat templates take."""
        turn: dict[str, Any] = {"role": self.role, "content": self.content}
        return turn | json.loads(self.extra) if self.extra else turn

    def as_request(self) -> dict[str, Any]:
        """The form that an OpenAI endpoint takes: the arguments of a call are a JSON text, not an
        object.
        """
        turn = self.as_dict()
        for call in turn.get("tool_calls", ()):
            call["function"]["arguments"] = json.dumps(
                call["function"]["arguments"], ensure_ascii=False
            )
        return turn


@dataclass(frozen=True, slots=True)
class Conversation:
    """The prompts of one conversation: an optional system message, then turns. Build it with
    `of`.
    """

    id: str
    source: str
    messages: tuple[Message, ...]
    tools: str = ""
    """The functions the target may call, as an OpenAI `tools` list in JSON; empty without any."""

    @classmethod
    def of(cls, messages: tuple[Message, ...], *, source: str, tools: str = "") -> Conversation:
        """Name a conversation by its content: sha256 (hex) over roles, texts, tool calls and tools.

        Equal prompts from two sources have one id, so the exact-duplicate filter is a look-up.
        """
        content = [message.as_dict() for message in messages]
        return cls(
            id=digest_json([*content, {"tools": json.loads(tools)}] if tools else content),
            source=source,
            messages=messages,
            tools=tools,
        )

    @property
    def user_turns(self) -> tuple[str, ...]:
        """Texts of the user turns, in order."""
        return tuple(message.content for message in self.messages if message.role == "user")

    @property
    def turns(self) -> tuple[tuple[Message, ...], ...]:
        """What stands before each answer: a user message, with the tool calls and results that
        follow it.
        """
        turns: list[tuple[Message, ...]] = []
        for message in self.messages:
            if message.role == "user":
                turns.append((message,))
            elif message.role != "system":
                turns[-1] = (*turns[-1], message)
        return tuple(turns)

    @property
    def system(self) -> tuple[Message, ...]:
        """The system message as a tuple of none or one."""
        return tuple(message for message in self.messages if message.role == "system")

    @property
    def text(self) -> str:
        """All prompts as one text, for the filters and duplicate searches."""
        return "\n".join(message.content for message in self.messages)

    @property
    def template_tools(self) -> Variant:
        """The tools as a variable of the chat template; nothing without any."""
        return {"tools": json.loads(self.tools)} if self.tools else NO_VARIANT

    def answered_with(self, answers: Sequence[str]) -> tuple[Message, ...]:
        """System message, then as many turns as there are answers, each followed by its answer."""
        messages = list(self.system)
        for turn, answer in zip(self.turns, answers, strict=False):
            messages += [*turn, Message("assistant", answer)]
        return tuple(messages)


@dataclass(frozen=True, slots=True)
class Answer:
    """One assistant turn as the target gave it.

    `token_ids` and `prompt_token_ids` are what the engine produced and saw. They are empty where
    the endpoint does not return token ids; rendering then tokenises `text` again.
    """

    text: str
    token_ids: tuple[int, ...]
    prompt_token_ids: tuple[int, ...]
    num_tokens: int
    truncated: bool
    """Cut at the token limit: a valid prefix of an answer, without the end-of-turn token."""
    temperature: float
    max_tokens: int = 0
    """Token limit it was asked for with; 0 where that is not known."""
    engine_version: str = "unknown"


@dataclass(frozen=True, slots=True)
class AnsweredConversation:
    """A conversation with the answers to its first `len(answers)` turns."""

    conversation: Conversation
    answers: tuple[Answer, ...]
    variant: Variant = field(default_factory=dict)
    """Template variables the answers were given under."""

    @property
    def messages(self) -> tuple[Message, ...]:
        """System message, then turns and answers in order, ending with the last answer."""
        return self.conversation.answered_with([answer.text for answer in self.answers])

    @property
    def template_variables(self) -> Variant:
        """All variables its rendering takes: those of the variant, and the tools."""
        return {**self.variant, **self.conversation.template_tools}


@dataclass(frozen=True, slots=True)
class Origin:
    """What a row says about where it comes from, besides its source."""

    language: str = "unknown"
    """ISO 639-1 code of its prompts."""
    temperature: float = 0.0
    max_answer_tokens: int = 0
    engine_version: str = "unknown"
    """Of the engine that gave the last answer: answers of an earlier run may be another's."""


@dataclass(frozen=True, slots=True)
class Row:
    """One training row: `token_ids` [T] and `loss_mask` [T], true where the target produced the
    token.
    """

    conversation_id: str
    source: str
    token_ids: tuple[int, ...]
    loss_mask: tuple[bool, ...]
    num_turns: int
    truncated: bool
    exact: bool
    """Whether the ids are the engine's own; false where the texts were tokenised again."""
    origin: Origin

    @property
    def num_loss_tokens(self) -> int:
        """Supervised tokens."""
        return sum(self.loss_mask)
