"""The curated dataset on disk, written atomically and verified when loaded.

Layout, which the trainer reads by itself::

    <output_dir>/<digest[:16]>/
        train-00000.arrow       Arrow IPC file: conversation_id string, source string, token_ids
        list<int32>, validation-00000.arrow      loss_mask list<bool>, language string, temperature
        float, max_answer_tokens int32,
                                engine_version string; rows sorted by conversation_id; the schema's
                                metadata names the target's fingerprint
        manifest.json           digest, schema_version, fingerprint, counts, funnel, sources,
        quarantine, recipe
                                section, code revision, engine version, sha256 of each shard
        quarantine.jsonl        examples of rows that could not be read, with reasons; likewise
        refused.jsonl (filters,
                                duplicates, decontamination) and unanswered.jsonl
        funnel.png              what is left after each step
        data_docs/index.html    Great Expectations Data Docs

`loss_mask[t]` is true where the target produced `token_ids[t]`. Both lists have the same length, T
>= 2.

The digest is over the rows (id, source, tokens, mask) and the target's fingerprint, and over
nothing else: not over paths, times, engine versions, counts of what was thrown away, or how the
rows are cut into shards. Equal rows give an equal digest.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from components.contracts import DatasetRef, TargetFingerprint, digest_file, write_atomic
from components.curation.dataset.row_spool import RowSpool, StoredRow
from components.curation.text import batches
from components.errors import CurationError

SCHEMA_VERSION = 2
MANIFEST = "manifest.json"
DOCS_INDEX = "data_docs/index.html"
ROWS_PER_BATCH = 1024
ROWS_PER_SHARD = 100_000

SCHEMA = pa.schema(
    [
        ("conversation_id", pa.string()),
        ("source", pa.string()),
        ("token_ids", pa.list_(pa.int32())),
        ("loss_mask", pa.list_(pa.bool_())),
        ("language", pa.string()),
        ("temperature", pa.float32()),
        ("max_answer_tokens", pa.int32()),
        ("engine_version", pa.string()),
    ]
)


@contextmanager
def staging_dir(output_dir: Path) -> Iterator[Path]:
    """A temporary folder inside `output_dir`, removed unless it was renamed into place."""
    output_dir.mkdir(parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(dir=output_dir, prefix=".staging-"))
    try:
        yield staging
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def write_dataset(
    rows: RowSpool,
    *,
    output_dir: Path,
    fingerprint: TargetFingerprint,
    funnel: Mapping[str, int],
    manifest: Mapping[str, Any],
    staging: Path,
) -> DatasetRef:
    """Write shards and manifest into `staging`, then rename it to `<output_dir>/<digest[:16]>`.

    Args:
        rows: of both splits; the spool's files are deleted.
        output_dir: parent of all datasets; `staging` must lie inside it (see `staging_dir`).
        fingerprint: of the target that wrote the answers.
        funnel: counts of `funnel.Funnel`.
        manifest: further JSON-able entries (sources, recipe section, versions); they do not enter
            the digest.
        staging: may hold more files (Data Docs, quarantine), which are moved along.

    Returns:
        The dataset. If the very same one is there already, that one is verified and returned.

    Raises:
        CurationError: the folder of that digest holds something else.
    """
    digest, names = _write_shards(rows, staging, fingerprint)
    rows.remove()
    final = Path(output_dir) / digest[:16]
    if final.exists():
        return load_dataset_ref(final)

    entries = {
        "digest": digest,
        "schema_version": SCHEMA_VERSION,
        "fingerprint": fingerprint.model_dump(mode="json"),
        "num_conversations": rows.counts(),
        "num_tokens": rows.num_tokens(),
        "num_loss_tokens": rows.num_loss_tokens(),
        "funnel": dict(funnel),
        "shards": {name: digest_file(staging / name) for name in names},
    }

    write_atomic(staging / MANIFEST, json.dumps({**manifest, **entries}, indent=2) + "\n")
    staging.chmod(0o755)  # mkdtemp makes it private; readers may be other users
    _publish(staging, final)
    return load_dataset_ref(final)


def load_dataset_ref(path: Path) -> DatasetRef:
    """Read a dataset's manifest and verify every shard against it.

    Raises:
        CurationError: no manifest, another schema version, a missing or altered shard.
    """
    path = Path(path)
    try:
        manifest = json.loads((path / MANIFEST).read_text())
    except FileNotFoundError:
        raise CurationError("not a curated dataset: it has no manifest", got=path) from None
    except ValueError as error:
        raise CurationError(f"{path / MANIFEST} is not JSON", got=error) from None

    if manifest.get("schema_version") != SCHEMA_VERSION:
        raise CurationError(
            f"{path.name} has another schema version",
            got=manifest.get("schema_version"),
            expected=SCHEMA_VERSION,
        )

    for name, expected in manifest["shards"].items():
        if not (path / name).is_file():
            raise CurationError(
                "a shard of the dataset is missing", got=path / name, fix="Curate it again."
            )
        if (found := digest_file(path / name)) != expected:
            raise CurationError(
                f"shard {name} of dataset {path.name} was altered",
                got=f"sha256 {found}",
                expected=expected,
            )

    return DatasetRef(
        path=str(path.resolve()),
        digest=manifest["digest"],
        fingerprint=TargetFingerprint.model_validate(manifest["fingerprint"]),
        num_conversations=manifest["num_conversations"],
        num_tokens=manifest["num_tokens"],
        num_loss_tokens=manifest["num_loss_tokens"],
        funnel=manifest["funnel"],
        docs_path=str((path / DOCS_INDEX).resolve()),
    )


def _write_shards(
    rows: RowSpool, folder: Path, fingerprint: TargetFingerprint
) -> tuple[str, list[str]]:
    """The digest, sha256 (hex) over schema version, fingerprint and the ordered rows of each split;
    and shard names.
    """
    digest = hashlib.sha256(f"{SCHEMA_VERSION}:{fingerprint.digest}".encode())
    names: list[str] = []
    for split in sorted(rows.counts()):
        digest.update(f"\n{split}:{rows.counts()[split]}\n".encode())
        ordered = rows.ordered(split)
        for number in range(max(1, -(-rows.counts()[split] // ROWS_PER_SHARD))):
            name = f"{split}-{number:05d}.arrow"
            schema = SCHEMA.with_metadata({"fingerprint": fingerprint.digest})
            _write_shard(islice(ordered, ROWS_PER_SHARD), folder / name, digest, schema)
            names.append(name)
    return digest.hexdigest(), names


def _write_shard(
    rows: Iterable[StoredRow], path: Path, digest: hashlib._Hash, schema: pa.Schema
) -> None:
    with path.open("wb") as file:
        with pa.ipc.new_file(file, schema) as writer:
            for batch in batches(rows, ROWS_PER_BATCH):
                for row in batch:
                    digest.update(
                        f"{row.conversation_id}:{row.source}:{len(row.token_ids)}\n".encode()
                    )
                    digest.update(row.token_ids.tobytes())
                    digest.update(row.loss_mask.tobytes())
                writer.write_batch(_record_batch(batch))
        file.flush()
        os.fsync(file.fileno())


def _record_batch(rows: Sequence[StoredRow]) -> pa.RecordBatch:
    starts = pa.array(np.cumsum([0, *(len(row.token_ids) for row in rows)]), pa.int32())
    tokens = pa.array(np.concatenate([row.token_ids for row in rows]))
    mask = pa.array(np.concatenate([row.loss_mask for row in rows]))
    columns = [
        pa.array([row.conversation_id for row in rows], pa.string()),
        pa.array([row.source for row in rows], pa.string()),
        pa.ListArray.from_arrays(starts, tokens),
        pa.ListArray.from_arrays(starts, mask),
        pa.array([row.origin.language for row in rows], pa.string()),
        pa.array([row.origin.temperature for row in rows], pa.float32()),
        pa.array([row.origin.max_answer_tokens for row in rows], pa.int32()),
        pa.array([row.origin.engine_version for row in rows], pa.string()),
    ]

    return pa.record_batch(columns, schema=SCHEMA)


def _publish(staging: Path, final: Path) -> None:
    try:
        staging.rename(final)
    except OSError:
        if not (final / MANIFEST).is_file():
            raise
        # Another run published the same rows first; `load_dataset_ref` checks that they are.
