"""The rows that move through curation: prompts first, then the answers the target gave to them.

    Conversation          system and user turns only, named by the hash of its content
    Answer                one regenerated assistant turn, with the tokens the target produced
    AnsweredConversation  both; a conversation that a truncated answer cut short has fewer answers than user turns
    Row                   token ids and loss mask, as the trainer reads them

Plain slotted dataclasses, not pydantic records: there are hundreds of thousands of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from components.contracts import digest_json

Role = Literal["system", "user", "assistant"]
Variant = Mapping[str, Any]
"""Variables given to the chat template, such as {"enable_thinking": False}."""

NO_VARIANT: Variant = {}


@dataclass(frozen=True, slots=True)
class Message:
    """One turn of a chat."""

    role: Role
    content: str

    def as_dict(self) -> dict[str, str]:
        """The OpenAI form, as chat templates and engines take it."""
        return {"role": self.role, "content": self.content}


@dataclass(frozen=True, slots=True)
class Conversation:
    """The prompts of one conversation: an optional system message, then user turns. Build it with `of`."""

    id: str
    source: str
    messages: tuple[Message, ...]

    @classmethod
    def of(cls, messages: tuple[Message, ...], *, source: str) -> Conversation:
        """Name a conversation by its content: sha256 (hex) over roles and texts.

        Equal prompts from two sources have one id, so the exact-duplicate filter is a look-up.
        """
        return cls(id=digest_json([message.as_dict() for message in messages]), source=source, messages=messages)

    @property
    def user_turns(self) -> tuple[str, ...]:
        """Texts of the user turns, in order."""
        return tuple(message.content for message in self.messages if message.role == "user")

    @property
    def system(self) -> tuple[Message, ...]:
        """The system message as a tuple of none or one."""
        return tuple(message for message in self.messages if message.role == "system")

    @property
    def text(self) -> str:
        """All prompts as one text, for the filters and duplicate searches."""
        return "\n".join(message.content for message in self.messages)


@dataclass(frozen=True, slots=True)
class Answer:
    """One assistant turn as the target gave it.

    `token_ids` and `prompt_token_ids` are what the engine produced and saw. They are empty where the endpoint does not
    return token ids; rendering then tokenises `text` again.
    """

    text: str
    token_ids: tuple[int, ...]
    prompt_token_ids: tuple[int, ...]
    num_tokens: int
    truncated: bool
    """Cut at the token limit: a valid prefix of an answer, without the end-of-turn token."""
    temperature: float


@dataclass(frozen=True, slots=True)
class AnsweredConversation:
    """A conversation with the answers to its first `len(answers)` user turns."""

    conversation: Conversation
    answers: tuple[Answer, ...]
    variant: Variant = field(default_factory=dict)
    """Template variables the answers were given under."""

    @property
    def messages(self) -> tuple[Message, ...]:
        """System message, then user and assistant turns in order, ending with the last answer."""
        turns: list[Message] = list(self.conversation.system)
        for prompt, answer in zip(self.conversation.user_turns, self.answers, strict=False):
            turns += [Message("user", prompt), Message("assistant", answer.text)]
        return tuple(turns)


@dataclass(frozen=True, slots=True)
class Row:
    """One training row: `token_ids` [T] and `loss_mask` [T], true where the target produced the token."""

    conversation_id: str
    source: str
    token_ids: tuple[int, ...]
    loss_mask: tuple[bool, ...]
    num_turns: int
    truncated: bool
    exact: bool
    """Whether the ids are the engine's own; false where the texts were tokenised again."""

    @property
    def num_loss_tokens(self) -> int:
        """Supervised tokens."""
        return sum(self.loss_mask)
