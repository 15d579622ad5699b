"""What one measurement has so far: groups of prompts whose counts were checked, on disk if wanted.

A line of JSON per group, the first line says which measurement it is. A line is written whole and
synced before the next group starts; a last line cut short by a kill is left out, so its group is
measured again.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from pydantic import ValidationError

from components.contracts import (
    ArmEndpoint,
    PromptMeasurement,
    append_line,
    digest_json,
    write_atomic,
)
from components.evaluation.outputs.greedy_answers import GreedyAnswer
from components.evaluation.prompts import Prompt
from components.settings import EvaluationSettings


class Journal:
    """Measurements and answers by prompt id, excluded prompts, and the counters' growth over all of
    them.

    Args:
        path: file; None keeps everything in memory only.
        key: says which measurement this is; a file of another one is replaced.
    """

    def __init__(self, path: Path | None, *, key: str) -> None:
        self.measurements: dict[str, PromptMeasurement] = {}
        self.answers: dict[str, GreedyAnswer] = {}
        self.excluded: dict[str, str] = {}
        self.counters: dict[str, float] = {}
        self._path = path
        if path is not None and not self._load(path, key):
            write_atomic(path, json.dumps({"key": key}) + "\n")

    @classmethod
    def of(
        cls,
        path: Path | None,
        endpoint: ArmEndpoint,
        settings: EvaluationSettings,
        prompts: Sequence[Prompt],
        *,
        with_logprobs: bool,
    ) -> Journal:
        """The journal of one arm over `prompts`; the engine's address may change, what it serves
        may not.
        """
        measurement = {
            "served": endpoint.model_dump(mode="json", exclude={"url"}),
            "temperature": settings.temperature,
            "max_tokens": settings.max_tokens,
            "num_in_flight": settings.acceptance_requests_in_flight,
            "with_logprobs": with_logprobs,
            "prompts": sorted(prompt.prompt_id for prompt in prompts),
        }

        variants = sorted(
            {json.dumps(dict(prompt.variant), sort_keys=True) for prompt in prompts} - {"{}"}
        )
        if variants:  # a single one is in no prompt's id
            measurement["variants"] = variants

        return cls(path, key=digest_json(measurement))

    @property
    def done(self) -> set[str]:
        """Ids of prompts that need not be asked again."""
        return self.measurements.keys() | self.excluded.keys()

    def append(
        self,
        measurements: Sequence[PromptMeasurement],
        answers: Mapping[str, GreedyAnswer],
        excluded: Mapping[str, str],
        growth: Mapping[str, float],
    ) -> None:
        """Keep a group whose counts agree; on disk before this returns."""
        if self._path is not None:
            told = [measurement.model_dump(mode="json") for measurement in measurements]
            texts = {name: [answer.token_ids, answer.top] for name, answer in answers.items()}
            entry = {
                "prompts": told,
                "answers": texts,
                "excluded": dict(excluded),
                "counters": dict(growth),
            }
            append_line(self._path, json.dumps(entry))
        self._add(measurements, answers, excluded, growth)

    def _add(
        self,
        measurements: Sequence[PromptMeasurement],
        answers: Mapping[str, GreedyAnswer],
        excluded: Mapping[str, str],
        growth: Mapping[str, float],
    ) -> None:
        self.answers |= answers
        self.measurements |= {measurement.prompt_id: measurement for measurement in measurements}
        self.excluded |= excluded
        for name, value in growth.items():
            self.counters[name] = self.counters.get(name, 0.0) + value

    def _load(self, path: Path, key: str) -> bool:
        """Read the groups of `path`; False when it is missing or another measurement's."""
        if not path.is_file():
            return False
        lines = path.read_text().splitlines(keepends=True)
        whole = [line for line in lines if line.endswith("\n")]

        try:
            entries = [json.loads(line) for line in whole]
            if not entries or entries[0].get("key") != key:
                return False
            for entry in entries[1:]:
                prompts = [PromptMeasurement.model_validate(told) for told in entry["prompts"]]
                answers = {name: _answer(*told) for name, told in entry["answers"].items()}
                self._add(prompts, answers, entry["excluded"], entry["counters"])
        except (ValueError, KeyError, TypeError, ValidationError):
            # Not one of ours, or written by another version: nothing of it can be trusted.
            self.measurements = {}
            self.answers = {}
            self.excluded = {}
            self.counters = {}
            return False

        if len(whole) < len(lines):
            write_atomic(path, "".join(whole))
        return True


def _answer(token_ids: list[int], top: list[list[list[float]]]) -> GreedyAnswer:
    told = tuple(tuple((int(token), float(logprob)) for token, logprob in place) for place in top)
    return GreedyAnswer(tuple(map(int, token_ids)), told)
