"""Curates synthetic conversations in a process of its own:
`python -m tests.benchmarks.curation_scale NUM TARGET DIR`.

Prints one JSON line: rows per second of filter, dedup, split and render, and the process's peak
memory.
"""

from __future__ import annotations

import json
import random
import resource
import sys
import time
from pathlib import Path

from components.contracts import TargetFingerprint
from components.curation.chunks import round_size
from components.curation.conversation import Answer, AnsweredConversation
from components.curation.curate import RowRenderer
from components.curation.dataset.row_spool import RowSpool
from components.curation.dataset.split import split_of
from components.curation.dataset.write import write_dataset
from components.curation.quarantine import Quarantine
from components.curation.sieve.decontaminate import HeldOut
from components.curation.sieve.sieve import BATCH, Sieve, judge, renderer_here
from components.curation.sources.mixture import load_conversations
from components.curation.text import batches
from components.evaluation.prompts import load_prompts
from components.settings import CurationSettings, SourceSettings, load_recipe

FINGERPRINT = TargetFingerprint(weights="w", quantization="none", tokenizer="t", serving="s")
NUM_WORDS = 20_000
ANSWER = (
    "That is a good question, and there is a short answer to it: yes, in most cases, but "
    "not in all of them."
)


def write_prompts(path: Path, num: int) -> None:
    """Prompts of 12 to 40 words, one in fifty a near copy of an earlier one, one in a hundred an
    exact copy.
    """
    rng = random.Random(0)
    words = [f"{rng.choice('bcdfghklmnprst')}{rng.choice('aeiou')}{n:x}" for n in range(NUM_WORDS)]
    recent: list[str] = []
    with path.open("w") as file:
        for number in range(num):
            if recent and number % 50 == 0:
                text = f"{rng.choice(recent)} {rng.choice(words)}"
            elif recent and number % 100 == 1:
                text = rng.choice(recent)
            else:
                text = " ".join(rng.choices(words, k=rng.randint(12, 40)))
                recent = [*recent[-999:], text]
            file.write(json.dumps({"prompt": text}) + "\n")


def curate(num: int, target: Path, folder: Path) -> dict[str, float]:
    """Filter, deduplicate, split, render, tell the language and write `num` conversations with an
    answer each.
    """
    recipe = load_recipe("demo")
    source = SourceSettings(
        name="synthetic", kind="file", path=str(folder / "prompts.jsonl"), column="prompt"
    )
    values = {**recipe.curation.model_dump(), "sources": [source], "num_conversations": num}
    settings = CurationSettings.model_validate(values)
    held_out = HeldOut(
        m["content"] for prompt in load_prompts(recipe.evaluation) for m in prompt.messages
    )
    renderer, render = renderer_here(str(target), "demo"), RowRenderer(str(target), "demo")
    sieve = Sieve(settings, held_out, Quarantine())
    staging = folder / "staging"
    staging.mkdir()
    rows = RowSpool(staging)
    started = time.perf_counter()
    answer = Answer(ANSWER, (), (), 24, False, 0.0)
    for drawn in batches(load_conversations(settings), round_size(num, least=BATCH)):
        reasons = [
            reason for batch in batches(drawn, BATCH) for reason in judge(batch, renderer, settings)
        ]
        verdicts = sieve.sift(drawn, reasons, at_most=num)
        kept = [item for item, is_kept in zip(drawn, verdicts, strict=True) if is_kept]
        for batch in batches(kept, BATCH):
            for row in render([AnsweredConversation(item, (answer,)) for item in batch])[1]:
                rows.add(
                    row, split_of(row.conversation_id, validation_share=settings.validation_share)
                )
    num_rows = sum(rows.counts().values())
    write_dataset(
        rows,
        output_dir=folder,
        fingerprint=FINGERPRINT,
        funnel=sieve.funnel.as_dict(),
        manifest={},
        staging=staging,
    )
    duration_s = time.perf_counter() - started
    peak_mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return {"num_rows": num_rows, "rows_per_s": num / duration_s, "peak_mib": peak_mib}


if __name__ == "__main__":
    number, model, work = int(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3])
    write_prompts(work / "prompts.jsonl", number)
    print(json.dumps(curate(number, model, work)))
