"""The dataset on disk, its expectations, and the steps from prompts to it."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import random
import struct
from collections.abc import Sequence
from pathlib import Path

import pandas as pd
import pyarrow as pa
import pytest

from components.contracts import TargetFingerprint, TargetRef
from components.curation.answers.regenerate import Regeneration
from components.curation.conversation import (
    Answer,
    AnsweredConversation,
    Conversation,
    Message,
    Origin,
    Row,
)
from components.curation.curate import Collected, collect, finish
from components.curation.dataset.expectations import ScalarFrame, validate_frame
from components.curation.dataset.plots import plot_funnel
from components.curation.dataset.render import load_renderer
from components.curation.dataset.row_spool import spool_rows
from components.curation.dataset.write import (
    SCHEMA,
    SCHEMA_VERSION,
    load_dataset_ref,
    staging_dir,
    write_dataset,
)
from components.errors import CurationError, DatasetValidationError
from components.settings import CurationSettings

FINGERPRINT = TargetFingerprint(weights="w", quantization="q", tokenizer="t", serving="s")
WORDS = (
    "red", "blue", "stone", "river", "light", "paper", "small", "tree", "house",
    "door", "glass", "cloud", "wind", "night", "bread", "salt", "fire", "moon",
)  # fmt: skip


def quiet(what: str, num_done: int, num_total: int) -> None:
    pass


def curation(path: Path, **values: object) -> CurationSettings:
    source = {"name": "prompts", "kind": "file", "path": str(path), "column": "prompt"}
    return CurationSettings.model_validate(
        {
            "sources": [source],
            "num_conversations": 60,
            "validation_share": 0.2,
            "min_mask_share": 0.0,
            **values,
        }
    )


def prompt_file(folder: Path, num: int = 90) -> Path:
    rng = random.Random(0)
    prompts = [" ".join(rng.choices(WORDS, k=12)) + f" number {n}?" for n in range(num)]
    path = folder / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts))
    return path


@pytest.fixture
def target(tiny_target: Path) -> TargetRef:
    return TargetRef(
        name="tiny",
        path=str(tiny_target),
        source="test",
        fingerprint=FINGERPRINT,
        quantization="none",
    )


def answer_all(
    conversations: Sequence[Conversation], target: TargetRef
) -> tuple[AnsweredConversation, ...]:
    renderer = load_renderer(target)

    def answer(conversation: Conversation) -> Answer:
        text = f"The answer is {conversation.id[:12]}."
        ids = tuple(renderer.encode(text + "<|im_end|>"))
        return Answer(
            text, ids, tuple(renderer.prompt_token_ids(conversation.messages)), len(ids), False, 0.0
        )

    return tuple(AnsweredConversation(item, (answer(item),)) for item in conversations)


def row(
    number: int, *, tokens: tuple[int, ...] = (1, 2, 3, 4), mask: tuple[bool, ...] | None = None
) -> Row:
    on = mask if mask is not None else (False, False, *(True,) * (len(tokens) - 2))
    return Row(f"{number:064x}", "test", tokens, on, 1, False, True, Origin("en", 0.7, 64, "9.9"))


def write(
    folder: Path, splits: dict[str, list[Row]], fingerprint: TargetFingerprint = FINGERPRINT
) -> Path:
    with staging_dir(folder) as staging:
        funnel = {"read": 9, "rendered": 3}
        ref = write_dataset(
            spool_rows(splits, staging),
            output_dir=folder,
            fingerprint=fingerprint,
            funnel=funnel,
            manifest={},
            staging=staging,
        )
    return Path(ref.path)


SPLITS = {"train": [row(1), row(2)], "validation": [row(3, tokens=(5, 6, 7))]}


def test_the_layout_the_trainer_reads(tmp_path: Path) -> None:
    path = write(tmp_path, SPLITS)
    with pa.memory_map(str(path / "train-00000.arrow")) as file:
        table = pa.ipc.open_file(file).read_all()
    assert table.schema == SCHEMA
    assert table.schema.metadata == {b"fingerprint": FINGERPRINT.digest.encode()}
    assert table.to_pylist() == [
        {
            "conversation_id": f"{n:064x}",
            "source": "test",
            "token_ids": [1, 2, 3, 4],
            "loss_mask": [False, False, True, True],
            "language": "en",
            "temperature": pytest.approx(0.7),
            "max_answer_tokens": 64,
            "engine_version": "9.9",
        }
        for n in (1, 2)
    ]
    ref = load_dataset_ref(path)
    assert (ref.num_conversations, ref.num_tokens) == (
        {"train": 2, "validation": 1},
        {"train": 8, "validation": 3},
    )
    assert ref.num_loss_tokens == {"train": 4, "validation": 1}
    assert path.name == ref.digest[:16]
    assert list(tmp_path.glob(".staging*")) == []


def test_the_digest_covers_content_only(tmp_path: Path) -> None:
    turned = {"validation": SPLITS["validation"], "train": SPLITS["train"][::-1]}
    first, again = write(tmp_path / "a", SPLITS), write(tmp_path / "b", turned)
    assert first.name == again.name
    assert (first / "train-00000.arrow").read_bytes() == (again / "train-00000.arrow").read_bytes()
    assert write(tmp_path / "a", SPLITS) == first
    upgraded = {
        split: [
            dataclasses.replace(item, origin=Origin(engine_version="10.0"))
            for item in SPLITS[split]
        ]
        for split in SPLITS
    }
    assert write(tmp_path / "d", upgraded).name == first.name
    changed = [
        {**SPLITS, "train": [row(1), row(2, tokens=(1, 2, 3, 5))]},
        {**SPLITS, "train": [row(1), row(2, mask=(False, True, True, True))]},
        {"train": [*SPLITS["train"], *SPLITS["validation"]], "validation": []},
    ]
    others = [write(tmp_path / "c", splits).name for splits in changed]
    others.append(
        write(tmp_path / "c", SPLITS, FINGERPRINT.model_copy(update={"weights": "x"})).name
    )
    assert len({first.name, *others}) == 5


def test_the_digest_is_of_the_rows_as_written_down(tmp_path: Path) -> None:
    # Recomputed from the definition in the module's docstring: equal rows must give this digest for
    # ever.
    digest = hashlib.sha256(f"{SCHEMA_VERSION}:{FINGERPRINT.digest}".encode())
    for split in ("train", "validation"):
        digest.update(f"\n{split}:{len(SPLITS[split])}\n".encode())
        for item in SPLITS[split]:
            digest.update(f"{item.conversation_id}:{item.source}:{len(item.token_ids)}\n".encode())
            digest.update(struct.pack(f"<{len(item.token_ids)}i", *item.token_ids))
            digest.update(bytes(item.loss_mask))
    assert load_dataset_ref(write(tmp_path, SPLITS)).digest == digest.hexdigest()


def test_rows_come_back_in_the_order_of_their_ids(tmp_path: Path) -> None:
    ids = [f"{number:064x}" for number in (2**255, 3, 2**64, 2**64 - 1, 256, 0)] + [
        "ff" * 31 + "00"
    ]
    rows = [
        dataclasses.replace(row(0, tokens=(n, n + 1, 9)), conversation_id=key)
        for n, key in enumerate(ids)
    ]
    spool = spool_rows({"train": rows}, tmp_path)
    stored = list(spool.ordered("train"))
    assert [item.conversation_id for item in stored] == sorted(ids)
    assert {item.conversation_id: item.token_ids.tolist() for item in stored} == {
        item.conversation_id: list(item.token_ids) for item in rows
    }
    assert list(spool.ordered("validation")) == []
    with pytest.raises(CurationError, match="mask of another length"):
        spool.add(row(1, mask=(True,)), "train")


def test_loading_finds_altered_and_missing_shards(tmp_path: Path) -> None:
    path = write(tmp_path, SPLITS)
    shard = path / "train-00000.arrow"
    data = bytearray(shard.read_bytes())
    data[len(data) // 2] ^= 1
    shard.write_bytes(data)
    with pytest.raises(CurationError, match=r"shard train-00000.arrow .* was altered"):
        load_dataset_ref(path)
    shard.unlink()
    with pytest.raises(CurationError, match="missing"):
        load_dataset_ref(path)
    with pytest.raises(CurationError, match="no manifest"):
        load_dataset_ref(tmp_path)


def test_an_interrupted_write_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt), staging_dir(tmp_path) as staging:
        (staging / "train-00000.arrow").write_bytes(b"half")
        raise KeyboardInterrupt
    assert list(tmp_path.iterdir()) == []


def test_from_prompts_to_a_validated_dataset(target: TargetRef, tmp_path: Path) -> None:
    settings = curation(prompt_file(tmp_path))
    collected = gather(settings, target, tmp_path)
    assert len(collected.conversations) == collected.funnel["decontaminated"] == 60
    counts = list(collected.funnel.values())
    assert counts == sorted(counts, reverse=True)
    # The last batch holds more rows than were needed: those count nowhere.
    left_out = collected.quarantine.total + collected.refused.total
    held_out = collected.funnel["well_formed"] - collected.funnel["not_held_out"]
    assert collected.funnel["read"] == 60 + left_out + held_out
    assert collected.num_by_source == {"prompts": 60}
    done = finish_with(settings, target, collected, tmp_path / "out")
    assert done.dataset.funnel["rendered"] == 60
    assert sum(done.dataset.num_conversations.values()) == 60
    assert Path(done.dataset.docs_path).is_file() and done.funnel_plot.is_file()
    manifest = json.loads((Path(done.dataset.path) / "manifest.json").read_text())
    assert manifest["recipe"]["num_conversations"] == 60
    assert len(manifest["sources"][0]["revision"]) == 64
    assert {"code_revision", "engine_version", "quarantined", "refused"} <= manifest.keys()
    again = finish_with(
        settings, target, gather(settings, target, tmp_path), tmp_path / "elsewhere"
    )
    assert again.dataset.digest == done.dataset.digest


def gather(
    settings: CurationSettings, target: TargetRef, folder: Path, **values: object
) -> Collected:
    return collect(
        settings, target=target, spool_path=folder / "collected.spool", progress=quiet, **values
    )


def finish_with(
    settings: CurationSettings,
    target: TargetRef,
    collected: Collected,
    folder: Path,
    **values: object,
):
    regeneration = Regeneration(answer_all(collected.conversations, target))
    return finish(
        collected,
        regeneration,
        settings=settings,
        target=target,
        max_model_len=1024,
        output_dir=folder,
        progress=quiet,
        **values,
    )


def test_evaluation_prompts_are_taken_out_and_checked_again(
    target: TargetRef, tmp_path: Path
) -> None:
    settings = curation(prompt_file(tmp_path))
    everything = gather(settings, target, tmp_path)
    leaked = everything.conversations[0]
    clean = gather(settings, target, tmp_path / "clean", held_out=[leaked.text])
    assert leaked.id not in {conversation.id for conversation in clean.conversations}
    assert clean.refused.by_source()["prompts"]["repeats an evaluation prompt"] == 1
    (found,) = (
        one for one in clean.refused.examples if one["reason"] == "repeats an evaluation prompt"
    )
    assert found["where"] == leaked.id and found["detail"] in leaked.text.lower()
    with pytest.raises(
        DatasetValidationError, match=f"contaminated.* in {leaked.id[:16]}"
    ) as failure:
        finish_with(settings, target, everything, tmp_path / "out", held_out=[leaked.text])
    docs = Path(str(failure.value.fix).removeprefix("See the Data Docs: "))
    assert docs.is_file()
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["failed"]


def test_too_few_conversations_for_two_sides_is_an_error(target: TargetRef, tmp_path: Path) -> None:
    settings = curation(prompt_file(tmp_path, num=12), validation_share=0.001)
    with pytest.raises(CurationError, match="validation split"):
        gather(settings, target, tmp_path)


def conversations(num: int) -> list[AnsweredConversation]:
    items = [
        Conversation.of((Message("user", f"{WORDS[n]} {n} {WORDS[n + 1]}"),), source="prompts")
        for n in range(num)
    ]
    return [AnsweredConversation(item, ()) for item in items]


def frame_of(rows: list[Row], splits: list[str]) -> pd.DataFrame:
    frame = ScalarFrame()
    for item, split in zip(rows, splits, strict=True):
        frame.add(item, split, contaminated=False)
    return frame.frame({})


@pytest.mark.parametrize(
    ("change", "expectation"),
    [
        ({"token_ids": (1, 2, 3, 600)}, "max_token_id"),
        ({"token_ids": (1, 2, 3, -1)}, "min_token_id"),
        ({"loss_mask": (False,) * 4}, "num_loss_tokens"),
        ({"loss_mask": (True,) * 4}, "mask_share"),
        ({"loss_mask": (False, True)}, "mask_length_gap"),
        ({"num_turns": 7}, "num_turns"),
        ({"origin": Origin("fr")}, "language"),
    ],
)
def test_critical_expectations_name_the_rows(
    change: dict[str, object], expectation: str, tmp_path: Path
) -> None:
    items = conversations(6)
    settings = curation(prompt_file(tmp_path)).model_copy(update={"languages": ("en",)})
    rows = [
        dataclasses.replace(row(0), conversation_id=item.conversation.id, source="prompts")
        for item in items
    ]
    rows[2] = dataclasses.replace(rows[2], **change)
    frame = frame_of(rows, ["train"] * 4 + ["validation"] * 2)
    with pytest.raises(
        DatasetValidationError, match=rf"{expectation}.*{rows[2].conversation_id[:16]}"
    ):
        validate_frame(
            frame, docs_dir=tmp_path / "docs", settings=settings, vocab_size=512, max_tokens=64
        )
    assert (tmp_path / "docs" / "index.html").is_file()


def test_a_warning_passes_and_is_reported(tmp_path: Path) -> None:
    items = conversations(6)
    settings = curation(prompt_file(tmp_path))
    rows = [
        dataclasses.replace(
            row(0), conversation_id=item.conversation.id, source="prompts", exact=False
        )
        for item in items
    ]
    frame = frame_of(rows, ["train"] * 4 + ["validation"] * 2)
    result = validate_frame(
        frame, docs_dir=tmp_path / "docs", settings=settings, vocab_size=512, max_tokens=64
    )
    assert {finding.severity for finding in result.warnings} == {"warning"}
    assert any("exact_tokens" in finding.expectation for finding in result.warnings)
    assert any("num_loss_tokens" in finding.expectation for finding in result.warnings)


def test_the_funnel_plot_is_a_png(tmp_path: Path) -> None:
    path = plot_funnel({"read": 100, "filtered": 40, "rendered": 0}, tmp_path / "funnel.png")
    assert path.read_bytes().startswith(b"\x89PNG")
