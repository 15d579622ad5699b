"""Prompts that ship inside installed distributions: real data with no account, no download and a
pinned version.

    chitchat       `chitchat-dataset` (MIT): people talking to people
    evals          the registry of `evals` (MIT but for the families left out here): several
                   hundred task families
    reasoning_gym  `reasoning-gym` (Apache-2.0): generators, so as many rows as wanted, by seed
    python_stdlib  heads of documented functions of this Python's standard library (PSF-2.0):
                   coding prompts

Each adapter yields `(where, row)`: a locator for the quarantine, and a row for `rows.read_row`, or
the `BadRowError` that says why there is none.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import json
import platform
import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from components.contracts import is_held_out
from components.curation.quarantine import BadRowError
from components.curation.sources.stdlib_code import stdlib_prompts
from components.errors import CurationError

LocatedRow = tuple[str, object]

LICENCES = {
    "chitchat": "MIT",
    "evals": "MIT",
    "reasoning_gym": "Apache-2.0",
    "python_stdlib": "PSF-2.0",
}
DISTRIBUTIONS = {"chitchat": "chitchat-dataset", "evals": "evals", "reasoning_gym": "reasoning-gym"}

EVALS_LEFT_OUT = frozenset(
    {
        "already_said_that",
        "ballots",
        "sandbagging",
        "schelling_point",
        "steganography",
        "text_compression",
        "theory_of_mind",
    }
)
"""Families of `evals` whose data carry other licences than the package."""

GENERATORS = (
    "gsm_symbolic",
    "aiw",
    "calendar_arithmetic",
    "coin_flip",
    "family_relationships",
    "jugs",
    "gsm_symbolic",
    "knights_knaves",
    "leg_counting",
    "number_sequence",
    "polynomial_equations",
    "propositional_logic",
    "gsm_symbolic",
    "self_reference",
    "simple_equations",
    "simple_geometry",
    "syllogism",
    "word_sorting",
)
"""Generators of `reasoning_gym` drawn in turn: word problems most often, then others whose
questions are sentences and whose answers a chat model writes out.
"""

MAX_TRAINING_SEED = 1_000_000
"""Training draws seeds below it, evaluation at or above it, so the two never share a generated
problem.
"""

MIN_OPENING_WORDS = 6
"""A chat is entered at its first turn of so many words: 'hi' a thousand times teaches nothing."""

_LFS_POINTER = b"version https://git-lfs"
_ROWS_PER_FILE_SCANNED = 400
_BUFFER_ROWS = 48


def package_rows(name: str, *, seed: int, parts: Sequence[str] = ()) -> Iterator[LocatedRow]:
    """Rows of a package source in seeded order.

    Args:
        name: `chitchat`, `evals`, `reasoning_gym` or `python_stdlib`.
        seed: the same seed gives the same rows in the same order.
        parts: families of `evals` or generators of `reasoning_gym` to draw from; empty takes the
            defaults.

    Raises:
        CurationError: an unknown source or part, or a distribution that is not installed.
    """
    if name not in _ADAPTERS:
        raise CurationError(
            "no package source of that name", got=name, expected=", ".join(sorted(_ADAPTERS))
        )
    return _ADAPTERS[name](seed, tuple(parts))


def package_version(name: str) -> str:
    """Installed version of a package source, for the manifest.

    Raises:
        CurationError: the distribution is not installed.
    """
    if name == "python_stdlib":
        return platform.python_version()
    try:
        return importlib.metadata.version(DISTRIBUTIONS[name])
    except importlib.metadata.PackageNotFoundError:
        raise _not_installed(name) from None


def _not_installed(name: str) -> CurationError:
    return CurationError(
        f"source '{name}' needs a package that is not installed",
        fix=f"Install it: pip install {DISTRIBUTIONS[name]}",
    )


def _package_folder(name: str, module: str) -> Path:
    # Found, not imported: the data are all we want, and `evals` imports clients of hosted models.
    spec = importlib.util.find_spec(module)
    if spec is None or spec.origin is None:
        raise _not_installed(name)
    return Path(spec.origin).parent


def _chitchat(seed: int, parts: tuple[str, ...]) -> Iterator[LocatedRow]:
    if parts:
        raise CurationError("source 'chitchat' has no parts to choose from", got=", ".join(parts))
    table = json.loads(
        (_package_folder("chitchat", "chitchat_dataset") / "dataset.json").read_bytes()
    )
    names = sorted(table)
    random.Random(seed).shuffle(names)
    for name in names:
        turns = [" ".join(part["text"] for part in turn) for turn in table[name]["messages"]]
        yield f"conversation {name}", _from_opening(turns)


def _from_opening(turns: list[str]) -> object:
    """Turns from the first substantial one on; a chat whose true opening is evaluation's stays
    whole: held out.
    """
    if turns and is_held_out(turns[0]):
        return turns
    opening = next(
        (i for i, turn in enumerate(turns) if len(turn.split()) >= MIN_OPENING_WORDS), None
    )
    return BadRowError("no substantial turn") if opening is None else turns[opening:]


def _evals(seed: int, parts: tuple[str, ...]) -> Iterator[LocatedRow]:
    """Families in turn, one row of each, so that variety is as wide as the number of rows
    allows.
    """
    root = _package_folder("evals", "evals") / "registry" / "data"
    families = sorted(
        folder.name
        for folder in root.iterdir()
        if folder.is_dir() and folder.name not in EVALS_LEFT_OUT
    )

    if unknown := sorted(set(parts) - set(families)):
        raise CurationError(
            "source 'evals' has no such families, or leaves them out", got=", ".join(unknown)
        )

    families = [family for family in families if not parts or family in parts]
    random.Random(seed).shuffle(families)
    running = [_evals_family(root / family, seed) for family in families]
    while running:
        still: list[Iterator[LocatedRow]] = []
        for family in running:
            row = next(family, None)
            if row is not None:
                yield row
                still.append(family)
        running = still


def _evals_family(folder: Path, seed: int) -> Iterator[LocatedRow]:
    """Rows of one family through a small shuffle buffer, read lazily: the registry holds 750 MB."""
    rng = random.Random(f"{seed}:{folder.name}")
    buffer: list[LocatedRow] = []
    for path in sorted(folder.rglob("*.jsonl")):
        for row in _json_lines(path, where=f"{folder.name}/{path.name}"):
            buffer.append(row)
            if len(buffer) >= _BUFFER_ROWS:
                yield buffer.pop(rng.randrange(len(buffer)))
    rng.shuffle(buffer)
    yield from buffer


def _json_lines(path: Path, *, where: str) -> Iterator[LocatedRow]:
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if number == 1 and line.startswith(_LFS_POINTER):
                yield where, BadRowError("git-LFS pointer: the data is not in the package")
                return
            if number > _ROWS_PER_FILE_SCANNED:
                return
            if line.strip():
                yield f"{where}:{number}", parse_json_line(line)


def parse_json_line(line: bytes) -> object:
    """A parsed line, or the raw bytes where it is not UTF-8 JSON: `read_row` then quarantines it
    with a reason.
    """
    try:
        return json.loads(line.decode())
    except ValueError:
        return line


def _reasoning_gym(seed: int, parts: tuple[str, ...]) -> Iterator[LocatedRow]:
    try:
        factory: Any = importlib.import_module("reasoning_gym.factory")
    except ModuleNotFoundError:
        raise _not_installed("reasoning_gym") from None

    if unknown := sorted(set(parts) - set(factory.DATASETS)):
        raise CurationError("source 'reasoning_gym' has no such generators", got=", ".join(unknown))
    # An item's own seed is dataset seed + index: both stay below the boundary.
    rng = random.Random(seed)
    starts = parts or GENERATORS

    while True:
        for generator in starts:
            item_seed = rng.randrange(MAX_TRAINING_SEED)
            dataset = factory.create_dataset(generator, seed=item_seed, size=1)
            yield f"{generator} seed {item_seed}", str(dataset[0]["question"])


def _python_stdlib(seed: int, parts: tuple[str, ...]) -> Iterator[LocatedRow]:
    if parts:
        raise CurationError(
            "source 'python_stdlib' has no parts to choose from", got=", ".join(parts)
        )
    yield from stdlib_prompts(seed=seed)


_ADAPTERS: dict[str, Callable[[int, tuple[str, ...]], Iterator[LocatedRow]]] = {
    "chitchat": _chitchat,
    "evals": _evals,
    "reasoning_gym": _reasoning_gym,
    "python_stdlib": _python_stdlib,
}
