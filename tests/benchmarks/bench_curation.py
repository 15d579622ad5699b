"""Curation: scale, rendering, near duplicates, regeneration against vLLM's offline batch, kills."""

from __future__ import annotations

import json
import os
import pickle
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any

from components.contracts import TargetRef
from components.curation.answers.regenerate import Regeneration, regenerate
from components.curation.answers.shards import AnswerShards
from components.curation.conversation import Answer, AnsweredConversation, Conversation, Message
from components.curation.curate import Collected, collect, finish
from components.curation.dataset.render import Renderer, load_renderer
from components.curation.sieve.dedup import NearDuplicateIndex, jaccard, shingles
from components.curation.sieve.sieve import BATCH
from components.curation.sources.packages import package_rows
from components.curation.text import batches
from components.errors import ServiceError
from components.services.endpoints import REPO_DIR
from components.serving.engines.command import EngineSpec, engine_environment
from components.serving.engines.engine import Engine
from components.settings import CurationSettings, EngineSettings, load_recipe
from components.system.ports import free_port
from components.targets.resolve import resolve_target
from tests.benchmarks.loop_figures import at_least, at_most
from tests.benchmarks.processes import last_json
from tests.benchmarks.run import Figure

SMALL, LARGE = 50_000, 500_000
NUM_RENDERED = 2_000
NUM_PAIRS = 2_000
NUM_REGENERATED = 256
NUM_KILLED, NUM_KILLS = 160, 10

OFFLINE = """
import json, sys, time
from vllm import LLM, SamplingParams
job = json.load(open(sys.argv[1]))
llm = LLM(**job["engine"])
limit = job["max_tokens"]
sampling = [SamplingParams(temperature=t, max_tokens=limit) for t in job["temperatures"]]
llm.chat(job["messages"][:8], sampling[:8], use_tqdm=False)
started = time.perf_counter()
answers = llm.chat(job["messages"], sampling, use_tqdm=False)
duration_s = time.perf_counter() - started
print(json.dumps({"tokens_per_s": sum(len(a.outputs[0].token_ids) for a in answers) / duration_s}))
"""

REGENERATE = """
import pickle, sys
from pathlib import Path
from components.curation.answers.regenerate import regenerate
regenerate(**pickle.loads(Path(sys.argv[1]).read_bytes()), progress=lambda what, done, total: None)
"""


def run() -> list[Figure]:
    """All figures of curation; the first ones need no engine."""
    recipe = load_recipe("demo")
    with tempfile.TemporaryDirectory(prefix="bench") as name:
        folder = Path(name)
        target = resolve_target(recipe.target, cache_dir=folder, engine=recipe.engine)
        return [
            *scale(target, folder),
            *rendering(load_renderer(target)),
            *near_duplicates(),
            *regeneration(target, folder),
            *kills(target, folder),
        ]


def scale(target: TargetRef, folder: Path) -> list[Figure]:
    """Filter, dedup, split and render, each size in a process of its own."""
    small, large = (_curate(num, target, folder / f"scale-{num}") for num in (SMALL, LARGE))
    growth_bytes = (large["peak_mib"] - small["peak_mib"]) * 2**20 / (LARGE - SMALL)
    return [
        at_least("rows_per_s_at_500k", large["rows_per_s"], 1500, "conversations/s"),
        at_least("rows_per_s_at_50k", small["rows_per_s"], 1500, "conversations/s"),
        at_most("peak_memory_at_500k", large["peak_mib"] / 1024, 4, "GiB"),
        at_most("peak_memory_at_50k", small["peak_mib"] / 1024, 4, "GiB"),
        # What still grows are the ids and places of the rows and their order; everything else of a
        # row is on disk.
        at_most("memory_growth", growth_bytes, 256, "B/conversation"),
    ]


def _curate(num: int, target: TargetRef, folder: Path) -> dict[str, float]:
    folder.mkdir()
    command = [
        sys.executable,
        "-m",
        "tests.benchmarks.curation_scale",
        str(num),
        target.path,
        str(folder),
    ]
    result: dict[str, float] = last_json(command, os.environ)
    return result


def rendering(renderer: Renderer) -> list[Figure]:
    """Real chats of three turns with masks, against `apply_chat_template` row by row: the same ids,
    and no mask there.

    What the tokenizer's own batch call takes for the same texts bounds the figure, whatever is done
    around it.
    """
    items = list(islice(_human_chats(), NUM_RENDERED))
    turns = [[message.as_dict() for message in item.messages] for item in items]
    core = renderer.tokenizer.backend_tokenizer
    texts = [renderer.text(item.messages) for item in items]
    ratios, limits = [], []
    for _ in range(5):
        started = time.perf_counter()
        theirs = [
            renderer.tokenizer.apply_chat_template(chat, return_dict=True)["input_ids"]
            for chat in turns
        ]
        row_by_row_s = time.perf_counter() - started
        started = time.perf_counter()
        rows = [row for batch in batches(items, BATCH) for row in renderer.render_all(batch)]
        ratios.append(row_by_row_s / (time.perf_counter() - started))
        started = time.perf_counter()
        for batch in batches(texts, BATCH):
            core.encode_batch(list(batch), add_special_tokens=False)
        limits.append(row_by_row_s / (time.perf_counter() - started))
        if [list(row.token_ids) for row in rows] != theirs:
            raise ServiceError("batched rendering gives other tokens than apply_chat_template")
    limit = statistics.median(limits)
    return [
        at_least("rendering_speedup", statistics.median(ratios), 3, "x"),
        Figure(name="rendering_limit_by_the_tokenizer", value=limit, unit="x", goal="-", ok=True),
    ]


def _human_chats() -> Iterator[AnsweredConversation]:
    for _, row in package_rows("chitchat", seed=1):
        if (
            isinstance(row, list)
            and len(row) >= 6
            and all(isinstance(text, str) and text.strip() for text in row[:6])
        ):
            prompts = tuple(Message("user", text.strip()) for text in row[:6:2])
            answers = tuple(Answer(text.strip(), (), (), 1, False, 0.0) for text in row[1:6:2])
            yield AnsweredConversation(Conversation.of(prompts, source="chitchat"), answers)


def near_duplicates() -> list[Figure]:
    """Pairs planted just above and well below 0.8 Jaccard: the last words of a text are others in
    its copy.
    """
    rng = random.Random(2)
    found = {True: 0, False: 0}
    planted = {True: 0, False: 0}
    index = NearDuplicateIndex(threshold=0.8)
    for number in range(NUM_PAIRS):
        words = [_word(rng) for _ in range(50)]
        # Of 48 three-word shingles: Jaccard 43/53 = 0.81 or 40/56 = 0.71.
        num_changed = rng.choice((5, 8))
        text = " ".join(words)
        copy = " ".join([*words[:-num_changed], *(_word(rng) for _ in range(num_changed))])
        is_near = jaccard(shingles(text), shingles(copy)) >= 0.8
        index.add(f"{number:064x}", text)
        planted[is_near] += 1
        found[is_near] += index.add_if_new(f"{NUM_PAIRS + number:064x}", copy) is not None
    return [
        at_least("near_duplicate_recall", found[True] / planted[True], 0.95, "of_pairs_at_0.81"),
        at_least(
            "near_duplicate_precision",
            found[True] / max(1, sum(found.values())),
            0.99,
            "of_pairs_found",
        ),
    ]


def regeneration(target: TargetRef, folder: Path) -> list[Figure]:
    """Tokens per second through the served engine against vLLM's offline batch, the same prompts
    and settings.
    """
    recipe = load_recipe("demo")
    settings = recipe.curation.model_copy(update={"num_conversations": NUM_REGENERATED})
    collected = _collect(settings, target, folder / "regenerate")
    with _engine(target, recipe.engine, folder) as url:
        served = _regenerate(collected, url, settings, target, folder / "regenerate")
    offline = _offline(collected, served, target, recipe.engine, settings, folder)
    return [
        at_least("regeneration_over_offline", served.tokens_per_s / offline, 0.9, "x"),
        Figure(name="regeneration", value=served.tokens_per_s, unit="tok/s", goal="-", ok=True),
    ]


def _offline(
    collected: Collected,
    served: Regeneration,
    target: TargetRef,
    engine: EngineSettings,
    settings: CurationSettings,
    folder: Path,
) -> float:
    temperatures = {item.conversation.id: item.answers[0].temperature for item in served.answered}
    job = {
        "engine": {
            "model": target.path,
            "dtype": engine.dtype,
            "max_model_len": engine.max_model_len,
            "max_num_seqs": engine.max_num_seqs,
            "max_num_batched_tokens": engine.max_num_batched_tokens,
            "enforce_eager": engine.enforce_eager,
            "kv_cache_memory_bytes": int(engine.kv_cache_gib * 2**30),
        },
        "messages": [
            [message.as_dict() for message in chat.messages] for chat in collected.conversations
        ],
        "temperatures": [temperatures.get(chat.id, 0.0) for chat in collected.conversations],
        "max_tokens": settings.max_answer_tokens,
    }
    path = folder / "offline.json"
    path.write_text(json.dumps(job))
    spec = _spec(target, engine)
    result: dict[str, float] = last_json(
        [sys.executable, "-c", OFFLINE, str(path)], os.environ | engine_environment(spec)
    )
    return result["tokens_per_s"]


def kills(target: TargetRef, folder: Path) -> list[Figure]:
    """SIGKILL ten times at random points of a greedy regeneration, then to the end; the digest is
    the undisturbed one.

    In float32: in bfloat16 a near-tie falls one way or the other with the batch it is computed in.
    """
    recipe = load_recipe("demo")
    engine = recipe.engine.model_copy(update={"dtype": "float32"})
    values = {"num_conversations": NUM_KILLED, "temperatures": (0.0,), "max_answer_tokens": 64}
    settings = recipe.curation.model_copy(update=values)
    disturbed, calm = folder / "disturbed", folder / "calm"
    collected = _collect(settings, target, disturbed)
    with _engine(target, engine, folder) as url:
        undisturbed = _regenerate(collected, url, settings, target, calm)
        expected_s = undisturbed.duration_s
        kept = [
            _kill(collected, url, settings, target, disturbed, within_s=expected_s / 8)
            for _ in range(NUM_KILLS)
        ]
        last = _regenerate(collected, url, settings, target, disturbed)
    keys = [
        json.loads(line)["key"]
        for path in disturbed.glob("answers-*.jsonl")
        for line in _whole_lines(path)
    ]
    digests = {
        _finish(collected, answers, settings, target, engine, folder)
        for answers in (undisturbed, last)
    }
    print(
        f"answers kept after each kill: {kept}; reused at the end: {last.num_reused}",
        file=sys.stderr,
    )
    return [
        at_least("kills_with_progress", len(set(kept)), 5, "of_10"),
        at_most("answers_lost", kept[-1] - last.num_reused, 0, "answers"),
        at_most("answers_generated_twice", len(keys) - len(set(keys)), 0, "answers"),
        at_most("digests", len(digests), 1, "different"),
    ]


def _kill(
    collected: Collected,
    url: str,
    settings: CurationSettings,
    target: TargetRef,
    folder: Path,
    *,
    within_s: float,
) -> int:
    """Start a regeneration, kill it at a random moment; returns the answers on disk."""
    job = {**_job(collected, url, settings, target, folder)}
    (folder / "job.pickle").write_bytes(pickle.dumps(job))
    process = subprocess.Popen(
        [sys.executable, "-c", REGENERATE, str(folder / "job.pickle")], cwd=REPO_DIR
    )
    before = _num_answers(folder)
    deadline = time.monotonic() + 60
    while _num_answers(folder) == before and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.05)  # the process imports for seconds: its first answer starts the clock
    time.sleep(random.uniform(0, within_s))
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    with AnswerShards(folder) as shards:
        return shards.num_answers


def _num_answers(folder: Path) -> int:
    return sum(len(_whole_lines(path)) for path in folder.glob("answers-*.jsonl"))


def _whole_lines(path: Path) -> list[str]:
    return [line for line in path.read_text().split("\n")[:-1] if line.endswith("}")]


def _collect(settings: CurationSettings, target: TargetRef, folder: Path) -> Collected:
    return collect(settings, target=target, spool_path=folder / "collected.spool", progress=_quiet)


def _job(
    collected: Collected, url: str, settings: CurationSettings, target: TargetRef, folder: Path
) -> dict[str, Any]:
    return {
        "conversations": collected.conversations,
        "engine_url": url,
        "model": "target",
        "settings": settings,
        "fingerprint": target.fingerprint,
        "shard_dir": folder,
        "spool_path": folder / "answered.spool",
    }


def _regenerate(
    collected: Collected, url: str, settings: CurationSettings, target: TargetRef, folder: Path
) -> Regeneration:
    return regenerate(**_job(collected, url, settings, target, folder), progress=_quiet)


def _finish(
    collected: Collected,
    answers: Regeneration,
    settings: CurationSettings,
    target: TargetRef,
    engine: EngineSettings,
    folder: Path,
) -> str:
    finished = finish(
        collected, answers, settings=settings, target=target, max_model_len=engine.max_model_len,
        output_dir=folder / "datasets", progress=_quiet,
    )  # fmt: skip
    return finished.dataset.digest


def _spec(target: TargetRef, engine: EngineSettings) -> EngineSpec:
    return EngineSpec(
        name="bench",
        model_path=target.path,
        served_model_name="target",
        settings=engine,
        port=free_port(),
        device="cpu",
    )


@contextmanager
def _engine(target: TargetRef, engine: EngineSettings, folder: Path) -> Iterator[str]:
    with Engine.start(
        _spec(target, engine), log_path=folder / "engine.log", fingerprint=None
    ).wait_ready() as running:
        yield running.url


def _chat(text: str) -> Conversation:
    return Conversation.of((Message("user", text),), source="synthetic")


def _word(rng: random.Random) -> str:
    return f"{rng.choice('bcdfghklmnprst')}{rng.choice('aeiou')}{rng.randrange(20_000):x}"


def _quiet(what: str, num_done: int, num_total: int) -> None:
    pass
