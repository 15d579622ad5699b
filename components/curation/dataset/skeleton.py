"""Where the answers of a chat stand in its rendering, without rendering the chat up to each of
them.

A chat template puts fixed text around the turns. `Skeleton` renders a chat of the same roles once,
with a marker for each text, finds the answers there the slow and certain way, and keeps the text
between the markers. A chat whose texts, put between those pieces, give exactly what the template
gave for it has its answers at the same places. Where they do not (a template that trims, drops
reasoning or looks into the texts), the skeleton says nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from components.curation.conversation import Message

Span = tuple[int, int]
"""[start, end) in characters."""

Finder = Callable[[Sequence[Message]], tuple[str, list[Span]]]
"""The certain way: the rendering of a chat and the spans of its answers."""


@dataclass(frozen=True, slots=True)
class Skeleton:
    """The fixed text of one sequence of roles. Build it with `of`."""

    pieces: tuple[str, ...]
    """Text before each turn, and after the last one."""
    leads: tuple[tuple[int, int, int], ...]
    """Of each answer: its turn, how far its span reaches before the text, and how far beyond it."""

    @classmethod
    def of(cls, messages: Sequence[Message], find: Finder) -> Skeleton | None:
        """The skeleton of the roles of `messages`; None if the template does not show each text
        once, in order.
        """
        markers = [f"Marker{turn}of{len(messages)}x" for turn in range(len(messages))]
        chat = [
            Message(message.role, marker) for message, marker in zip(messages, markers, strict=True)
        ]
        text, spans = find(chat)
        pieces = []
        places = []

        end = 0
        for marker in markers:
            place = text.find(marker, end)
            if place < 0 or text.count(marker) != 1:
                return None
            pieces.append(text[end:place])
            places.append(place)
            end = place + len(marker)

        answers = [turn for turn, message in enumerate(messages) if message.role == "assistant"]
        leads = tuple(
            (turn, places[turn] - start, stop - places[turn] - len(markers[turn]))
            for turn, (start, stop) in zip(answers, spans, strict=True)
        )

        return cls((*pieces, text[end:]), leads)

    def spans(self, messages: Sequence[Message], text: str) -> list[Span] | None:
        """Spans of the answers in `text`, the rendering of `messages`; None if it is not this
        skeleton's.
        """
        parts: list[str] = []
        places = []
        length = 0
        for piece, message in zip(self.pieces, messages, strict=False):
            places.append(length + len(piece))
            length += len(piece) + len(message.content)
            parts += (piece, message.content)

        if "".join((*parts, self.pieces[-1])) != text:
            return None
        return [
            (places[turn] - before, places[turn] + len(messages[turn].content) + beyond)
            for turn, before, beyond in self.leads
        ]


def has_skeleton(messages: Sequence[Message]) -> bool:
    """Whether the turns are plain texts without outer spacing: of those alone a template makes the
    same of any text.
    """
    return all(
        not message.extra and message.content and message.content == message.content.strip()
        for message in messages
    )
