"""Prompts that the target writes itself: its chat template, open at a user's turn, is the whole
question.

A model tuned on chats continues an open user turn with what users asked in its tuning data (Xu et
al. 2024, "Magpie", arXiv:2406.08464). So a drafter can be trained where no prompts are at hand, and
on more kinds of prompts than the sources have. The prompts are kept in a file per target and added
to when more are wanted; filters, duplicate search and decontamination treat them as any other
source's.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from components.contracts import Progress, TargetRef, digest_json
from components.curation.answers.client import AnswerClient
from components.curation.dataset.render import renderer_of
from components.errors import CurationError
from components.settings import CurationSettings, SourceSettings

TEMPERATURE = 1.0
"""The target's own distribution: below it, prompts repeat."""
SURPLUS = 1.7
"""Written for one wanted: some run past the length limit, some are duplicates or fall to the
filters.
"""
LONGEST_TOKENS = 96
"""What goes on for longer seldom ends: of 120 prompts of the demo target 92 ended by 96 tokens, no
more by 128.
"""
REPORT_INTERVAL_S = 4.0
_MARK = "MarkOfTheUser"


@dataclass(frozen=True)
class OpenTurn:
    """A user's turn of the chat template, still empty, and how it ends."""

    prompt_ids: tuple[int, ...]
    stop_token_ids: tuple[int, ...]
    stop: tuple[str, ...]


def open_turn(tokenizer: Any, *, name: str) -> OpenTurn:
    """What comes before a user's first words, and the mark that ends them.

    Args:
        tokenizer: with a chat template.
        name: of the target, for messages.

    Raises:
        CurationError: the template changes the words, or nothing ends a user's turn.
    """
    text = tokenizer.apply_chat_template([{"role": "user", "content": _MARK}], tokenize=False)
    if text.count(_MARK) != 1:
        raise CurationError(
            f"the chat template of {name} does not show a user's words once", got=text[:200]
        )

    before, after = text.split(_MARK)
    ending = after.strip()
    if not ending:
        raise CurationError(
            f"the chat template of {name} does not mark the end of a user's turn, so the target "
            "cannot write prompts",
            got=text[-80:],
            fix="Leave sources of kind 'target' out of the recipe.",
        )

    first = tokenizer(ending, add_special_tokens=False)["input_ids"][0]
    is_special = first in tokenizer.added_tokens_decoder
    return OpenTurn(
        prompt_ids=tuple(tokenizer(before, add_special_tokens=False)["input_ids"]),
        stop_token_ids=(int(first),) if is_special else (),
        stop=() if is_special else (ending.splitlines()[0],),
    )


def with_written_prompts(
    settings: CurationSettings,
    *,
    engine_url: str,
    model: str,
    target: TargetRef,
    folder: Path,
    progress: Progress,
    request_timeout_s: float = 300.0,
    stop_after_s: float | None = None,
) -> CurationSettings:
    """Let the target write what sources of kind 'target' need; the same settings with the file's
    path in them.

    Args:
        settings: of the recipe.
        engine_url: base URL of an engine that serves the target, without `/v1`.
        model: served model name.
        target: its tokenizer and template open the turn; its fingerprint names the file.
        folder: where such files lie; prompts of an earlier run are used first.
        progress: called every few seconds.
        stop_after_s: no prompt is begun after that long, whatever is wanted; None: all are written.

    Raises:
        CurationError: the template cannot be opened at a user's turn.
        EngineError: the engine is gone or fails after all retries; what was written is kept.
    """
    wanted = _num_wanted(settings)
    if not wanted:
        return settings
    turn = open_turn(renderer_of(Path(target.path), name=target.name).tokenizer, name=target.name)
    path = _path(settings, target, folder)
    writer = _Writer(turn, path, settings=settings, progress=progress, stop_after_s=stop_after_s)
    asyncio.run(
        writer.write(
            AnswerClient(engine_url, model, timeout_s=request_timeout_s), num_wanted=wanted
        )
    )
    return settings.model_copy(update={"sources": _with_path(settings.sources, path)})


def num_missing_prompts(settings: CurationSettings, *, target: TargetRef, folder: Path) -> int:
    """How many prompts `with_written_prompts` would still let the target write."""
    return max(0, _num_wanted(settings) - _mend(_path(settings, target, folder)))


def _num_wanted(settings: CurationSettings) -> int:
    weight = sum(source.weight for source in settings.sources if source.kind == "target")
    if not weight:
        return 0
    share = weight / sum(source.weight for source in settings.sources)
    return int(SURPLUS * share * settings.num_conversations) + 1


def _path(settings: CurationSettings, target: TargetRef, folder: Path) -> Path:
    key = {
        "fingerprint": target.fingerprint.digest,
        "max_tokens": _longest(settings),
        "temperature": TEMPERATURE,
    }
    return folder / f"prompts-{digest_json(key)[:16]}.jsonl"


def _with_path(sources: Sequence[SourceSettings], path: Path) -> tuple[SourceSettings, ...]:
    return tuple(
        source.model_copy(update={"path": str(path)}) if source.kind == "target" else source
        for source in sources
    )


class _Writer:
    """Adds prompts to a file until it holds enough lines. A line is a prompt, or null for one that
    never ended, so that a rerun does not ask for it again.
    """

    def __init__(
        self,
        turn: OpenTurn,
        path: Path,
        *,
        settings: CurationSettings,
        progress: Progress,
        stop_after_s: float | None = None,
    ) -> None:
        self._path = path
        self._stop_after_s = float("inf") if stop_after_s is None else stop_after_s
        self._stop_at_s = float("inf")
        self._settings = settings
        self._progress = progress
        self._num_wanted = 0
        self._num_left = 0

        self._request = {
            "prompt": list(turn.prompt_ids),
            "temperature": TEMPERATURE,
            "max_tokens": _longest(settings),
            "stop_token_ids": list(turn.stop_token_ids),
            "stop": list(turn.stop),
        }

    async def write(self, client: AnswerClient, *, num_wanted: int) -> None:
        num_known = _mend(self._path)
        self._num_wanted = num_wanted
        self._num_left = max(0, num_wanted - num_known)
        if not self._num_left:
            return

        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._stop_at_s = time.monotonic() + self._stop_after_s
        num_workers = min(self._settings.requests_in_flight, self._num_left)
        async with client.session(httpx.Limits(max_connections=num_workers + 1)):
            tasks = [asyncio.create_task(self._work(client)) for _ in range(num_workers)]
            reporter = asyncio.create_task(self._report())
            try:
                await asyncio.gather(*tasks)
            finally:
                for task in (*tasks, reporter):
                    task.cancel()
                await asyncio.gather(*tasks, reporter, return_exceptions=True)

        self._progress("done", num_wanted - self._num_left, num_wanted)

    async def _work(self, client: AnswerClient) -> None:
        while self._num_left > 0 and time.monotonic() < self._stop_at_s:
            self._num_left -= 1
            written = await client.continue_text(self._request, temperature=TEMPERATURE)
            text = None if written.truncated else written.text.strip()
            row = {"messages": [{"role": "user", "content": text}]} if text else None
            with self._path.open("a") as file:  # one write a line: a kill tears at most the last
                file.write(json.dumps(row, ensure_ascii=False) + "\n")

    async def _report(self) -> None:
        started = time.monotonic()
        while True:
            await asyncio.sleep(REPORT_INTERVAL_S)
            self._progress(
                f"{time.monotonic() - started:.0f} s",
                self._num_wanted - self._num_left,
                self._num_wanted,
            )


def _longest(settings: CurationSettings) -> int:
    return min(LONGEST_TOKENS, settings.max_prompt_tokens)


def _mend(path: Path) -> int:
    """Lines of the file; one torn by a kill is cut off, or the next would be written onto it."""
    if not path.is_file():
        return 0
    data = path.read_bytes()
    whole = data[: data.rfind(b"\n") + 1]
    if len(whole) < len(data):
        path.write_bytes(whole)
    return whole.count(b"\n")
