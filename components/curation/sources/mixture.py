"""Sources of conversations, mixed by weight.

A source is a small adapter that yields located rows (`packages.package_rows`, Hugging Face
datasets, local files); `rows.read_row` turns each into a conversation or quarantines it.
Evaluation's share of every source (`contracts.is_held_out`) is left out here, at the door, so
nothing downstream can leak it.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path

from components.contracts import digest_file, digest_json, is_held_out
from components.curation.conversation import Conversation
from components.curation.quarantine import BadRowError, Quarantine
from components.curation.sources import packages
from components.curation.sources.packages import LocatedRow, parse_json_line
from components.curation.sources.presets import Preset, preset_of
from components.curation.sources.rows import read_row, turn_texts
from components.errors import CurationError
from components.settings import CurationSettings, SourceSettings

DRAW_COST = 0.02
"""What a drawn but rejected row counts for against an accepted one when the next source is chosen:
a source that gives nothing usable falls behind instead of holding the mixture up.
"""

SHUFFLE_BUFFER_ROWS = 1000


@dataclass
class _Open:
    source: SourceSettings
    rows: Iterator[LocatedRow]
    num_drawn: int = 0
    num_accepted: int = 0

    @property
    def progress(self) -> float:
        return (
            self.num_accepted + DRAW_COST * (self.num_drawn - self.num_accepted)
        ) / self.source.weight


class Mixture:
    """Draws conversations from several sources so that the *accepted* ones stand in the ratio of
    the weights.

    Iterate, and call `refuse(source)` for each conversation that did not survive the filters; until
    then it counts as accepted, so that filters may work on batches. Deterministic: the next draw
    comes from the source that is furthest behind its share, the first named one on a tie.
    """

    def __init__(self, settings: CurationSettings, *, quarantine: Quarantine) -> None:
        self._settings = settings
        self._quarantine = quarantine
        self._open = [
            _Open(source, open_rows(source, seed=settings.seed)) for source in settings.sources
        ]
        self.num_read = 0
        self.num_held_out = 0

    def refuse(self, source: str) -> None:
        """Take back a conversation that was drawn from `source`: it did not survive."""
        next(entry for entry in self._open if entry.source.name == source).num_accepted -= 1

    @property
    def num_accepted(self) -> dict[str, int]:
        """Accepted conversations by source; a source that ran dry keeps its count."""
        return {entry.source.name: entry.num_accepted for entry in self._open}

    def __iter__(self) -> Iterator[Conversation]:
        running = list(self._open)
        while running:
            entry = min(running, key=lambda candidate: candidate.progress)
            cap = entry.source.max_rows
            located = None if cap is not None and entry.num_drawn >= cap else next(entry.rows, None)
            if located is None:
                running.remove(entry)
                continue
            conversation = self._read(entry, *located)
            if conversation is not None:
                entry.num_accepted += 1
                yield conversation

    def _read(self, entry: _Open, where: str, row: object) -> Conversation | None:
        entry.num_drawn += 1
        self.num_read += 1
        try:
            conversation = read_row(
                row,
                column=column_of(entry.source),
                source=entry.source.name,
                max_turns=self._settings.max_turns,
            )
        except BadRowError as reason:
            self._quarantine.add(entry.source.name, str(reason), where=where)
            return None

        if is_held_out(conversation.user_turns[0]):
            self.num_held_out += 1
            return None
        return conversation


def load_conversations(
    settings: CurationSettings, *, quarantine: Quarantine | None = None
) -> Iterator[Conversation]:
    """Conversations of all sources, mixed by weight and seeded; endless where a source is a
    generator.

    Args:
        settings: `sources`, `seed`, `max_turns`; a source's `max_rows` caps the rows read from it.
        quarantine: where bad rows are counted.

    Raises:
        CurationError: a source that cannot be opened.
    """
    mixture = Mixture(settings, quarantine=quarantine if quarantine is not None else Quarantine())
    yield from mixture


def open_rows(source: SourceSettings, *, seed: int) -> Iterator[LocatedRow]:
    """Located rows of one source, shuffled by `seed`.

    Raises:
        CurationError: unknown package source or preset, a preset that is evaluation's, missing
            file, or a dataset that cannot be loaded.
    """
    if source.kind == "package":
        return packages.package_rows(source.name, seed=seed, parts=source.parts)
    if source.kind == "file":
        return _shuffled(_file_rows(source), seed=seed)
    if source.kind == "target":
        # None stands for a prompt that never ended. Short prompts were finished, and so written,
        # first.
        return _shuffled(
            (located for located in _file_rows(source) if located[1] is not None), seed=seed
        )
    if source.kind == "preset" and preset_of(source.preset or source.name).is_evaluation:
        raise CurationError(
            f"source '{source.name}' is an evaluation set, not training data",
            fix="Name it under curation.decontaminate_against, or take a preset with a "
            "training split.",
        )

    return _hub_rows(source, seed=seed)


def evaluation_texts(sources: Sequence[SourceSettings]) -> Iterator[str]:
    """Every turn of other evaluation sets, to be kept out of training.

    Raises:
        CurationError: a source that cannot be opened, or a row of it that cannot be read: a set
            that is known only in part would let the rest through.
    """
    for source in sources:
        for where, row in rows_in_order(source):
            try:
                yield from turn_texts(row, column=column_of(source))
            except BadRowError as reason:
                raise CurationError(
                    f"evaluation set '{source.name}' has a row that cannot be read",
                    got=f"{where}: {reason}",
                ) from None


def rows_in_order(source: SourceSettings) -> Iterator[LocatedRow]:
    """Located rows of a file, folder, preset or Hub dataset, as they stand there, not shuffled.

    Raises:
        CurationError: unknown preset, missing file, or a dataset that cannot be loaded.
    """
    return _file_rows(source) if source.kind == "file" else _hub_rows(source, seed=None)


def source_state(source: SourceSettings) -> tuple[tuple[str, int, int], ...]:
    """Path, size in bytes and time of change (ns) of each file of a source; empty for the Hub.

    Raises:
        CurationError: missing file, or one that cannot be read.
    """
    if source.kind != "file":
        return ()
    stats = [(str(path), path.stat()) for path in _source_files(source)]
    return tuple((path, stat.st_size, stat.st_mtime_ns) for path, stat in stats)


def column_of(source: SourceSettings) -> str:
    """The column looked at first: the recipe's, else the preset's, else `messages`."""
    if source.column is not None:
        return source.column
    return preset_of(source.preset or source.name).column if source.kind == "preset" else "messages"


def describe_source(source: SourceSettings) -> dict[str, str]:
    """What the manifest says about a source: its name, revision or content hash, and licence where
    it is known.
    """
    if source.kind == "package":
        version = packages.package_version(source.name)
        return {"name": source.name, "revision": version, "licence": packages.LICENCES[source.name]}
    if source.kind == "file":
        digests = [digest_file(path) for path in _source_files(source)]
        revision = digests[0] if len(digests) == 1 else digest_json(digests)
        return {"name": source.name, "revision": revision, "licence": "unknown"}
    if source.kind == "target":
        revision = digest_file(_source_files(source)[0])
        return {"name": source.name, "revision": revision, "licence": "written by the target"}

    preset = _hub_location(source)
    return {
        "name": source.name,
        "revision": f"{preset.repo_id}@{source.revision or 'main'}",
        "licence": preset.licence,
    }


def _hub_location(source: SourceSettings) -> Preset:
    """Where the rows of a Hub source lie: the preset's place, with what the recipe says itself in
    front.
    """
    if source.kind == "preset":
        base = preset_of(source.preset or source.name)
    elif source.repo_id is not None:
        base = Preset(
            repo_id=source.repo_id, split="train", column="messages", licence="see the hub"
        )
    else:
        raise CurationError(f"source '{source.name}' of kind 'huggingface' needs a repo_id")

    return replace(
        base,
        repo_id=source.repo_id or base.repo_id,
        subset=source.subset or base.subset,
        split=source.split or base.split,
        column=column_of(source),
    )


def _source_files(source: SourceSettings) -> list[Path]:
    if source.path is None:
        raise CurationError(f"source '{source.name}' of kind '{source.kind}' needs a path")
    path = Path(source.path)
    if path.is_dir():
        found = sorted(file for file in path.rglob("*") if file.suffix in _READERS)
        if not found:
            raise CurationError(
                f"the folder of source '{source.name}' has no data",
                got=path,
                expected=", ".join(_READERS),
            )
        return found
    if not path.is_file():
        raise CurationError(f"the file of source '{source.name}' is missing", got=path)
    if path.suffix not in _READERS:
        raise CurationError(
            f"cannot read {path.name}", got=path.suffix or "no suffix", expected=", ".join(_READERS)
        )

    return [path]


def _file_rows(source: SourceSettings) -> Iterator[LocatedRow]:
    return chain.from_iterable(_READERS[path.suffix](path) for path in _source_files(source))


def _text(path: Path) -> Iterator[LocatedRow]:
    """One prompt a line."""
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            try:
                text: object = line.decode().strip()
            except UnicodeDecodeError:
                text = BadRowError("not UTF-8 text")
            if text:
                yield f"{path.name}:{number}", text


def _json(path: Path) -> Iterator[LocatedRow]:
    """A JSON array of rows, as ShareGPT and Alpaca come; else JSON lines."""
    with path.open("rb") as file:
        opening = file.read(64).lstrip()[:1]
    if opening != b"[":
        yield from _jsonl(path)
        return
    try:
        rows = json.loads(path.read_bytes())
    except ValueError as error:
        raise CurationError(f"{path.name} is not JSON", got=error) from None
    for number, row in enumerate(rows, start=1):
        yield f"{path.name}[{number}]", row


def _jsonl(path: Path) -> Iterator[LocatedRow]:
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if line.strip():
                yield f"{path.name}:{number}", parse_json_line(line)


def _parquet(path: Path) -> Iterator[LocatedRow]:
    import pyarrow.parquet as pq

    number = 0
    for batch in pq.ParquetFile(path).iter_batches(batch_size=256):
        for row in batch.to_pylist():
            number += 1
            yield f"{path.name}:{number}", row


def _arrow(path: Path) -> Iterator[LocatedRow]:
    import pyarrow as pa

    number = 0
    with pa.memory_map(str(path)) as file:
        try:
            batches = pa.ipc.open_file(file)
            for index in range(batches.num_record_batches):
                for row in batches.get_batch(index).to_pylist():
                    number += 1
                    yield f"{path.name}:{number}", row
        except pa.ArrowInvalid:
            raise CurationError(f"{path.name} is not an Arrow IPC file") from None


_READERS: dict[str, Callable[[Path], Iterator[LocatedRow]]] = {
    ".jsonl": _jsonl, ".json": _json, ".parquet": _parquet, ".arrow": _arrow, ".txt": _text
}  # fmt: skip


def _hub_rows(source: SourceSettings, *, seed: int | None) -> Iterator[LocatedRow]:
    from datasets import load_dataset

    place = _hub_location(source)
    try:
        rows = load_dataset(
            place.repo_id,
            place.subset,
            split=place.split,
            revision=source.revision,
            streaming=source.streaming,
        )
    except Exception as error:
        raise CurationError(
            f"cannot load the dataset of source '{source.name}'", got=f"{place.repo_id}: {error}"
        ) from error
    _check_column(rows.column_names, source=source, column=place.column)
    if seed is not None:
        # Streamed rows are shuffled through a buffer, downloaded ones as a whole.
        rows = rows.shuffle(
            seed=seed, **({"buffer_size": SHUFFLE_BUFFER_ROWS} if source.streaming else {})
        )
    return ((f"{place.repo_id}[{index}]", row) for index, row in enumerate(rows))


def _check_column(names: Sequence[str] | None, *, source: SourceSettings, column: str) -> None:
    """A column the recipe or a preset names must be there: another one in its place would train on
    other text.
    """
    is_named = source.column is not None or source.kind == "preset"
    if is_named and names is not None and column not in names:
        raise CurationError(
            f"the dataset of source '{source.name}' has no column '{column}'",
            got=", ".join(names),
            fix=f"Set curation.sources.{source.name}.column.",
        )


def _shuffled(rows: Iterator[LocatedRow], *, seed: int) -> Iterator[LocatedRow]:
    """Shuffle through a bounded buffer, so memory does not grow with the file."""
    rng = random.Random(seed)
    buffer: list[LocatedRow] = []
    for row in rows:
        buffer.append(row)
        if len(buffer) >= SHUFFLE_BUFFER_ROWS:
            yield buffer.pop(rng.randrange(len(buffer)))
    rng.shuffle(buffer)
    yield from buffer
