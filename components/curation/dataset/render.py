"""Conversation -> token ids and an assistant-only loss mask, through the target's own chat
template.

Where the engine returned token ids, a row is exactly what the target saw and produced: the last
turn's prompt ids, then the answer's. An earlier answer is supervised only if its very ids stand at
their very place in that sequence; text that tokenises differently the second time is not what the
target produced, and stays masked.

Where it did not, the texts are tokenised again: with `{% generation %}` the template marks the
answers itself; without, an answer is the difference between the rendering up to its turn with and
without it. Most chats need one rendering for that (`skeleton.py`). Turns that call tools were not
produced by the target and are never supervised.

Either way the end-of-turn token is supervised only where the target produced it.

A template may take variables (Qwen3's `enable_thinking`): a conversation's variant travels with it,
to the engine and to every rendering.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from jinja2 import TemplateError

from components.contracts import TargetRef
from components.curation.conversation import (
    NO_VARIANT,
    AnsweredConversation,
    Message,
    Origin,
    Row,
    Variant,
)
from components.curation.dataset.skeleton import Skeleton, Span, has_skeleton
from components.errors import CurationError

Chat = tuple[Sequence[Message], Variant]
"""Messages, and the variables the template gets with them."""

Rendered = tuple[tuple[int, ...], tuple[bool, ...]]
"""Token ids and loss mask."""

_PROBE = (
    Message("user", "What is two plus two?"),
    Message("assistant", "<think>\nAdd them.\n</think>\n\nFour, of course."),
    Message("user", "And three plus three?"),
    Message("assistant", "Six."),
)


class Renderer:
    """The target's tokenizer and chat template. Build it with `load_renderer`.

    `tokenizer` is the target's own. Rows are rendered and prompts counted in batches, one call of
    the tokenizer each.
    """

    def __init__(self, tokenizer: Any, *, name: str) -> None:
        self.tokenizer = tokenizer
        self._name = name
        template = tokenizer.get_chat_template()
        # Gemma's <end_of_turn> is not its eos token, so whatever special token follows an answer
        # ends it.
        specials = {
            str(token) for token in (*tokenizer.all_special_tokens, tokenizer.eos_token or "")
        } - {""}
        self._closings = sorted(specials, key=len, reverse=True)

        self.injects_date = "strftime_now" in template
        self._marks_answers = "{% generation %}" in template.replace("{%-", "{%").replace(
            "-%}", "%}"
        )
        self.vocab_size = len(tokenizer)
        self._skeletons: dict[str, Skeleton | None] = {}

    def prompt_token_ids(
        self, messages: Sequence[Message], variant: Variant = NO_VARIANT
    ) -> list[int]:
        """Token ids of a prompt as the engine will see it, the opening of the answer included."""
        return self.encode_all(self._texts([(messages, variant)], open_answer=True))[0]

    def text(self, messages: Sequence[Message], variant: Variant = NO_VARIANT) -> str:
        """A finished conversation through the template."""
        return self._texts([(messages, variant)], open_answer=False)[0]

    def num_prompt_tokens(self, chats: Sequence[Chat]) -> list[int | None]:
        """Tokens of each prompt; None where the template refuses it."""
        try:
            texts: list[str | None] = [*self._texts(chats, open_answer=True)]
        except CurationError:
            texts = [self._text_or_none(chat) for chat in chats]
        lengths = iter(
            [len(ids) for ids in self.encode_all([text for text in texts if text is not None])]
        )
        return [None if text is None else next(lengths) for text in texts]

    def _text_or_none(self, chat: Chat) -> str | None:
        try:
            return self._texts([chat], open_answer=True)[0]
        except CurationError:
            return None

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of `token_ids`, special tokens left out."""
        return str(self.tokenizer.decode(list(token_ids), skip_special_tokens=True))

    def encode(self, text: str) -> list[int]:
        """Token ids of `text` as it stands: no special tokens are added."""
        return self.encode_all([text])[0]

    def encode_all(self, texts: Sequence[str]) -> list[list[int]]:
        """As `encode`, for many texts."""
        return [list(encoding.ids) for encoding in self._encodings(texts)]

    def render(self, answered: AnsweredConversation) -> Row:
        """Render one answered conversation; see `render_all`."""
        return self.render_all([answered])[0]

    def render_all(self, answered: Sequence[AnsweredConversation]) -> list[Row]:
        """Render answered conversations, in order. Their language is not looked at.

        Raises:
            CurationError: the engine's prompt is not what this template gives, or the template
                rewrites history.
        """
        exact = [item for item in answered if _is_exact(item)]
        others = [item for item in answered if not _is_exact(item)]
        rendered = iter(self._exact(exact))
        retokenised = iter(self._retokenised(others))
        return [
            _row(item, *next(rendered if _is_exact(item) else retokenised), exact=_is_exact(item))
            for item in answered
        ]

    def _exact(self, answered: Sequence[AnsweredConversation]) -> Iterator[Rendered]:
        """Rows of the engine's own ids, each compared with what the template gives here."""
        texts = self._texts(
            [(item.messages[:-1], item.template_variables) for item in answered], open_answer=True
        )
        for item, ours in zip(answered, self.encode_all(texts), strict=True):
            last = item.answers[-1]
            # A template with today's date in it reads differently tomorrow, when a rerun takes up
            # yesterday's answers.
            if ours != list(last.prompt_token_ids) and not self.injects_date:
                raise CurationError(
                    f"the engine rendered conversation {item.conversation.id[:16]} differently "
                    "from the chat template"
                    f" of {self._name}",
                    got=f"{len(last.prompt_token_ids)} prompt tokens",
                    expected=f"{len(ours)}",
                    fix="Serve the target with its own tokenizer and chat template.",
                )
            token_ids = (*last.prompt_token_ids, *last.token_ids)
            mask = [False] * len(token_ids)
            for answer in item.answers:
                start = len(answer.prompt_token_ids)
                end = start + len(answer.token_ids)
                if token_ids[:end] == (*answer.prompt_token_ids, *answer.token_ids):
                    mask[start:end] = [True] * (end - start)
            yield token_ids, tuple(mask)

    def _retokenised(self, answered: Sequence[AnsweredConversation]) -> Iterator[Rendered]:
        """Rows of texts that are tokenised again."""
        unmarked = [item for item in answered if not self._is_marked(item)]
        placed = self.place_answers([(item.messages, item.template_variables) for item in unmarked])
        rendered = self._masked(
            [_cut(item, *place) for item, place in zip(unmarked, placed, strict=True)]
        )
        for item in answered:
            yield self._marked(item) if self._is_marked(item) else next(rendered)

    def _is_marked(self, item: AnsweredConversation) -> bool:
        # A template marks every assistant's turn, also the calls that the target did not make.
        calls_tools = any(message.extra for message in item.conversation.messages)
        return self._marks_answers and not calls_tools and not item.answers[-1].truncated

    def place_answers(self, chats: Sequence[Chat]) -> list[tuple[str, list[Span]]]:
        """Each chat as text with the spans of its answers, as `answer_spans`: from its skeleton
        where that fits.

        Raises:
            CurationError: the template alters answers, or rewrites history.
        """
        placed = []
        for (messages, variant), text in zip(
            chats, self._texts(chats, open_answer=False), strict=True
        ):
            skeleton = self.skeleton(messages, variant) if has_skeleton(messages) else None
            spans = skeleton.spans(messages, text) if skeleton is not None else None
            placed.append(self.answer_spans(messages, variant) if spans is None else (text, spans))
        return placed

    def skeleton(self, messages: Sequence[Message], variant: Variant) -> Skeleton | None:
        """The skeleton of chats with the roles of `messages`; None where the template has none."""
        key = json.dumps([[message.role for message in messages], variant], default=str)
        if key not in self._skeletons:
            try:
                found = Skeleton.of(messages, lambda chat: self.answer_spans(chat, variant))
            except CurationError:
                found = (
                    None  # a template that rewrites history does so to some texts and not to others
                )
            self._skeletons[key] = found
        return self._skeletons[key]

    def _masked(self, placed: Sequence[tuple[str, list[Span]]]) -> Iterator[Rendered]:
        """Token ids of each text, and which of them meet its spans."""
        if not placed:
            return
        texts = [text for text, _ in placed]
        for encoding, (text, spans) in zip(self._encodings(texts), placed, strict=True):
            yield tuple(encoding.ids), _mask(encoding, spans, num_chars=len(text))

    def _encodings(self, texts: Sequence[str]) -> list[Any]:
        # The tokenizer's own core, many texts at once: its wrapper copies every list, which costs
        # as much again.
        core = self.tokenizer.backend_tokenizer
        core.no_truncation()
        core.no_padding()
        return list(core.encode_batch(list(texts), add_special_tokens=False))

    def _marked(self, item: AnsweredConversation) -> Rendered:
        encoded = self.tokenizer.apply_chat_template(
            [message.as_dict() for message in item.messages],
            return_dict=True,
            return_assistant_tokens_mask=True,
            **item.template_variables,
        )
        return tuple(encoded["input_ids"]), tuple(
            bool(value) for value in encoded["assistant_masks"]
        )

    def answer_spans(
        self, messages: Sequence[Message], variant: Variant = NO_VARIANT
    ) -> tuple[str, list[Span]]:
        """The whole chat as text, and the character span of each answer, its end-of-turn token
        included.

        Raises:
            CurationError: the template alters answers, or rewrites history.
        """
        turns = [
            index
            for index, message in enumerate(messages)
            if message.role == "assistant" and not message.extra
        ]
        befores = self._texts([(messages[:index], variant) for index in turns], open_answer=True)
        finished = [messages[: index + 1] for index in turns]

        if not finished or len(finished[-1]) < len(messages):
            finished.append(messages)
        uptos = self._texts([(chat, variant) for chat in finished], open_answer=False)
        whole = uptos[-1]
        spans: list[Span] = []

        for index, before, upto in zip(turns, befores, uptos, strict=False):
            if not upto.startswith(before) or not whole.startswith(upto.rstrip()):
                raise CurationError(
                    f"the chat template of {self._name} rewrites history",
                    got=f"turn {index} reads differently once the conversation goes on",
                    fix="Train on single turns (max_turns: 1), or on an engine that returns "
                    "token ids.",
                )
            spans.append(
                (len(before), self._end_of_answer(upto, len(before), messages[index].content))
            )

        return whole, spans

    def _end_of_answer(self, text: str, start: int, answer: str) -> int:
        position = text.find(answer.strip(), start)
        if position < 0:
            raise CurationError(
                f"the chat template of {self._name} alters answers",
                got=repr(text[start : start + 80]),
            )
        end = position + len(answer.strip())
        return end + next(
            (len(closing) for closing in self._closings if text.startswith(closing, end)), 0
        )

    def _texts(self, chats: Sequence[Chat], *, open_answer: bool) -> list[str]:
        """Each chat through the template; neighbours with the same variables in one call."""
        texts: list[str] = []
        for variant, run in groupby(chats, key=lambda chat: chat[1]):
            turns = [[message.as_dict() for message in messages] for messages, _ in run]
            try:
                texts += self.tokenizer.apply_chat_template(
                    turns, tokenize=False, add_generation_prompt=open_answer, **variant
                )
            except TemplateError as error:
                raise CurationError(
                    f"the chat template of {self._name} refuses a conversation", got=error
                ) from error
        return texts


def _cut(item: AnsweredConversation, text: str, spans: list[Span]) -> tuple[str, list[Span]]:
    """Text and spans up to where the answers end: a truncated one ends at the limit, without an
    end-of-turn token.
    """
    if item.answers[-1].truncated:
        start, _ = spans[-1]
        answer = item.messages[-1].content.strip()
        end = text.index(answer, start) + len(answer)
        text = text[:end]
        spans = [*spans[:-1], (start, end)]
    return text, [span for span in spans if span[0] < span[1]]


def _is_exact(item: AnsweredConversation) -> bool:
    return all(answer.token_ids and answer.prompt_token_ids for answer in item.answers)


def _row(
    item: AnsweredConversation, token_ids: tuple[int, ...], mask: tuple[bool, ...], *, exact: bool
) -> Row:
    return Row(
        conversation_id=item.conversation.id,
        source=item.conversation.source,
        token_ids=token_ids,
        loss_mask=mask,
        num_turns=len(item.answers),
        truncated=item.answers[-1].truncated,
        exact=exact,
        origin=_origin(item),
    )


def _origin(item: AnsweredConversation) -> Origin:
    last = item.answers[-1]
    return Origin(
        temperature=last.temperature,
        max_answer_tokens=last.max_tokens,
        engine_version=last.engine_version,
    )


def _mask(encoding: Any, spans: Sequence[Span], *, num_chars: int) -> tuple[bool, ...]:
    """Per token of a text, whether its characters [left, right) meet a span; spans are ascending
    and do not touch.
    """
    mask = [False] * len(encoding)
    for start, end in spans:
        first = encoding.char_to_token(start)
        beyond = len(mask) if end >= num_chars else encoding.char_to_token(end)
        if first is None or beyond is None:  # characters that no token stands for
            return _covered(encoding.offsets, spans)
        if end < num_chars and encoding.token_to_chars(beyond)[0] < end:
            beyond += 1  # a token across the end of the answer belongs to it
        mask[first:beyond] = [True] * (beyond - first)
    return tuple(mask)


def _covered(offsets: Sequence[Span], spans: Sequence[Span]) -> tuple[bool, ...]:
    """As `_mask`, token by token."""
    return tuple(
        any(right > start and left < end and right > left for start, end in spans)
        for left, right in offsets
    )


def load_renderer(target: TargetRef) -> Renderer:
    """Load the tokenizer and chat template from the target's folder.

    Raises:
        CurationError: no tokenizer, or one without a chat template.
    """
    return renderer_of(Path(target.path), name=target.name)


def renderer_of(folder: Path, *, name: str) -> Renderer:
    """As `load_renderer`, from a folder."""
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
    except (OSError, ValueError) as error:
        raise CurationError(
            f"target {name} has no usable tokenizer", got=str(error).splitlines()[0]
        ) from error
    if not tokenizer.chat_template:
        raise CurationError(
            f"target {name} has no chat template",
            got=folder,
            expected="chat_template.jinja, or chat_template in tokenizer_config.json",
            fix="Add the template the model was trained with; a guessed one would train on the "
            "wrong tokens.",
        )
    return Renderer(tokenizer, name=name)


def rewrites_history(renderer: Renderer) -> str | None:
    """What the template does to earlier answers once the conversation goes on; None if it leaves
    them alone.

    Thinking models drop the reasoning of earlier turns, others move the system message to the last
    turn. Single-turn training does not mind; multi-turn rows then supervise only the answers whose
    tokens survived.
    """
    for system in ((), (Message("system", "Be brief."),)):
        try:
            renderer.text((*system, _PROBE[0]))
        except CurationError:
            # a template that knows no system message, or no chat at all: its rows are refused one
            # by one
            continue
        try:
            renderer.answer_spans((*system, *_PROBE))
        except CurationError as error:
            return error.problem
    return None


def prove_masks(
    rows: Sequence[Row], answered: Sequence[AnsweredConversation], renderer: Renderer
) -> int:
    """Decode the masked spans of rows and compare them with the answers.

    Returns:
        Answers compared. Answers masked out because they tokenise differently in context are not
        counted.

    Raises:
        CurationError: a span that does not read as its answer; the conversation is named.
    """
    compared = 0
    for row, source in zip(rows, answered, strict=True):
        texts = [_comparable(renderer.decode(span)) for span in _masked_spans(row)]
        answers = [_comparable(answer.text) for answer in source.answers]
        missing = [text for text in texts if text not in answers]
        if missing or (not texts and any(answers)):
            raise CurationError(
                f"the loss mask of conversation {row.conversation_id[:16]} does not cover its "
                "answers",
                got=repr(missing[0][:80]) if missing else "an empty mask",
                expected=repr(answers[0][:80]),
            )
        compared += len(texts)

    return compared


def _comparable(text: str) -> str:
    """Without outer spacing, and without the half character at which a token limit may cut an
    answer: engines hold it back, tokenizers decode it as U+FFFD.
    """
    return text.strip().rstrip("\ufffd").rstrip()


def _masked_spans(row: Row) -> list[list[int]]:
    spans: list[list[int]] = []
    previous = False
    for token_id, supervised in zip(row.token_ids, row.loss_mask, strict=True):
        if supervised and not previous:
            spans.append([])
        if supervised:
            spans[-1].append(token_id)
        previous = supervised
    return spans
