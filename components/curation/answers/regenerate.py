"""Every answer given again by the target, through an OpenAI-compatible vLLM endpoint.

Drafters trained on answers the target never gave lose acceptance, so the sources' own answers are
thrown away. Many requests are in flight; each answer is appended to a shard the moment it arrives,
under a key of everything that decides it, so a run that is killed pays for nothing twice. No `seed`
is sent: it kills vLLM's CPU engine.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import httpx

from components.contracts import Progress, TargetFingerprint, digest_json
from components.curation.answers.client import AnswerClient, AnswerRefusedError, Tally, watch_tokens
from components.curation.answers.shards import AnswerShards
from components.curation.answers.spool import Spool, answered_spool
from components.curation.conversation import (
    Answer,
    AnsweredConversation,
    Conversation,
    Message,
    Variant,
)
from components.curation.quarantine import Quarantine
from components.curation.sieve.filters import is_refusal
from components.errors import CurationError
from components.settings import CurationSettings

MAX_REFUSED_SHARE = 0.5
"""More refused conversations than this, and the engine, not the prompts, is wrong."""


@dataclass(frozen=True)
class Regeneration:
    """What regeneration gave and cost."""

    answered: Sequence[AnsweredConversation]
    quarantine: Quarantine = field(default_factory=Quarantine)
    num_requested: int = 0
    num_reused: int = 0
    """Answers read from shards of an earlier run."""
    num_tokens: int = 0
    """Tokens of answers requested in this run."""
    duration_s: float = 0.0
    engine_version: str = "unknown"
    exact_tokens: bool = True
    """Whether the engine returned token ids, so rows hold exactly what the target produced."""

    @property
    def tokens_per_s(self) -> float:
        """Answer tokens per second over the whole run."""
        return self.num_tokens / self.duration_s if self.duration_s else 0.0


def regenerate(
    conversations: Sequence[Conversation],
    *,
    engine_url: str,
    model: str,
    settings: CurationSettings,
    fingerprint: TargetFingerprint,
    shard_dir: Path,
    spool_path: Path,
    progress: Progress,
    request_timeout_s: float = 300.0,
) -> Regeneration:
    """Let the target answer every user turn of `conversations`.

    Args:
        engine_url: base URL of the engine, without `/v1`.
        model: served model name.
        settings: `requests_in_flight`, `max_answer_tokens`, `temperatures`.
        fingerprint: of the target that is served; enters the shard keys, so another target's
            answers are never reused.
        shard_dir: append-only JSON-lines shards, created if missing and reused by later runs.
        spool_path: file for the answered conversations, so that memory does not grow with them;
            overwritten.
        progress: called at least every 5 s with the rate and the time left in the text.
        request_timeout_s: for one answer, waiting in the engine's queue included.

    Returns:
        Answered conversations in the order given; those without a first answer are in the
        quarantine.

    Raises:
        EngineError: the engine is not reachable, or answers with server errors after all retries.
        CurationError: more than half of the conversations were refused.
    """
    shards = AnswerShards(shard_dir)
    with shards:
        spool = answered_spool(spool_path)
        run = _Run(settings=settings, fingerprint=fingerprint, shards=shards, spool=spool)
        return asyncio.run(
            run.all(
                conversations,
                AnswerClient(engine_url, model, timeout_s=request_timeout_s),
                progress,
            )
        )


@dataclass
class _Run:
    settings: CurationSettings
    fingerprint: TargetFingerprint
    shards: AnswerShards
    spool: Spool[AnsweredConversation]
    quarantine: Quarantine = field(default_factory=Quarantine)
    tally: Tally = field(init=False)
    num_requested: int = 0
    num_reused: int = 0
    all_exact: bool = True
    version: str = "unknown"

    async def all(
        self, conversations: Sequence[Conversation], client: AnswerClient, progress: Progress
    ) -> Regeneration:
        started = time.monotonic()
        limits = httpx.Limits(max_connections=self.settings.requests_in_flight + 1)
        async with client.session(limits):
            self.version = await client.version()
            self.tally = self._new_tally(conversations)
            reporter = asyncio.create_task(watch_tokens(client, progress, self.tally))
            try:
                positions = await self._gather(conversations, client)
            finally:
                reporter.cancel()
                await asyncio.gather(reporter, return_exceptions=True)

        self._check_refusals(len(conversations))
        progress("done", len(conversations), len(conversations))
        return Regeneration(
            answered=self.spool.selected(
                [position for position in positions if position is not None]
            ),
            quarantine=self.quarantine,
            num_requested=self.num_requested,
            num_reused=self.num_reused,
            num_tokens=self.tally.num_tokens,
            duration_s=time.monotonic() - started,
            engine_version=self.version,
            exact_tokens=self.all_exact,
        )

    def _new_tally(self, conversations: Sequence[Conversation]) -> Tally:
        turns = sum(len(conversation.turns) for conversation in conversations)
        # Half of the limit: truncated answers end a conversation, so later turns seldom all come.
        prior = 0.5 * self.settings.max_answer_tokens * turns / max(1, len(conversations))
        return Tally(
            len(conversations), prior_tokens=prior, num_prior=self.settings.requests_in_flight
        )

    async def _gather(
        self, conversations: Sequence[Conversation], client: AnswerClient
    ) -> list[int | None]:
        """Answer all; the first fatal error ends the others. One task per request in flight, not
        per conversation.

        Returns:
            Where each conversation lies in the spool; None for those without an answer.
        """
        results: list[int | None] = [None] * len(conversations)
        queue = iter(enumerate(conversations))

        async def worker() -> None:
            for index, conversation in queue:
                answered = await self._converse(conversation, client)
                if answered is not None:
                    results[index] = self.spool.append(answered)
                    self.all_exact &= all(answer.token_ids for answer in answered.answers)
                self.tally.num_done += 1

        workers = [asyncio.create_task(worker()) for _ in range(self.settings.requests_in_flight)]
        try:
            await asyncio.gather(*workers)
        finally:
            for task in workers:
                task.cancel()
            await asyncio.gather(*workers, return_exceptions=True)
        return results

    async def _converse(
        self, conversation: Conversation, client: AnswerClient
    ) -> AnsweredConversation | None:
        """Answer turn by turn, each on the target's own earlier answers. A truncated answer ends
        the conversation: the template would close it with an end-of-turn token that the target did
        not give.
        """
        history = list(conversation.system)
        answers: list[Answer] = []
        for turn in conversation.turns:
            history += turn
            try:
                answer = await self._answer(conversation, history, client)
            except AnswerRefusedError as error:
                self.quarantine.add(
                    conversation.source, f"engine refused: {error}", where=conversation.id
                )
                break
            if (reason := self._unwanted(answer)) is not None:
                self.quarantine.add(conversation.source, reason, where=conversation.id)
                break
            answers.append(answer)
            history.append(Message("assistant", answer.text))
            if answer.truncated:
                break

        variant = variant_of(conversation.id, self.settings.template_variants)
        return AnsweredConversation(conversation, tuple(answers), variant) if answers else None

    def _unwanted(self, answer: Answer) -> str | None:
        if not answer.text.strip():
            return "empty answer"
        if answer.truncated and not self.settings.keep_truncated_answers:
            return "truncated answer"
        if not self.settings.keep_refusals and is_refusal(answer.text):
            return "refusal"
        return None

    async def _answer(
        self, conversation: Conversation, history: list[Message], client: AnswerClient
    ) -> Answer:
        """From the shards where the same request was answered before under this fingerprint, else
        from the engine: the whole request is the key, so that no other setting's answer is taken.
        """
        temperature = temperature_of(conversation.id, self.settings.temperatures)
        request: dict[str, Any] = {
            "messages": [message.as_request() for message in history],
            "temperature": temperature,
            "max_tokens": self.settings.max_answer_tokens,
        }

        if conversation.tools:
            # Without a tool choice the engine wants a parser of calls; what the target says is kept
            # as it says it.
            request |= {**conversation.template_tools, "tool_choice": "none"}

        if variant := variant_of(conversation.id, self.settings.template_variants):
            request["chat_template_kwargs"] = dict(variant)
        key = digest_json({"fingerprint": self.fingerprint.digest, **request})
        known = self.shards.get(key)

        if known is not None:
            self.num_reused += 1
            return known

        given = await client.complete(request, temperature=temperature)
        answer = replace(
            given, max_tokens=self.settings.max_answer_tokens, engine_version=self.version
        )
        self.shards.append(key, answer)
        self.num_requested += 1
        self.tally.num_tokens += answer.num_tokens

        return answer

    def _check_refusals(self, num_conversations: int) -> None:
        refused = self.quarantine.total
        if num_conversations and refused / num_conversations > MAX_REFUSED_SHARE:
            reasons = {
                reason: count for (_, reason), count in self.quarantine.counts.most_common(3)
            }
            raise CurationError(
                f"{refused} of {num_conversations} conversations have no answer to train on",
                got=reasons,
                fix="Look at the engine's log, or at keep_refusals and keep_truncated_answers "
                "where those are the"
                " reasons; the answers that came are kept and will be reused.",
            )


def variant_of(conversation_id: str, variants: Sequence[Variant]) -> Variant:
    """Template variables of a conversation: by its id, and independent of its temperature."""
    return variants[int(conversation_id[-16:-8], 16) % len(variants)]


def temperature_of(conversation_id: str, temperatures: Sequence[float]) -> float:
    """Sampling temperature of a conversation: by its id, so a rerun asks the same question
    again.
    """
    return temperatures[int(conversation_id[-8:], 16) % len(temperatures)]
