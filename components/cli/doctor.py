"""`dspark doctor`: what this machine lacks, and what to do about each thing."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

import typer

from components.cli.output import Json, print_json, print_table

if TYPE_CHECKING:
    from components.cli.facts import Facts

PYTHON = (3, 11)
MIN_MEMORY_GIB = 12.0
"""Available: what the demo takes at its peak (docs/lab-notes)."""
MIN_DISK_GIB = 10.0
NUM_PINS_SHOWN = 5


class Level(StrEnum):
    """How bad a diagnosis is."""

    OK = "ok"
    NOTE = "note"
    MISSING = "missing"


@dataclass(frozen=True)
class Diagnosis:
    """One thing that was looked at.

    Attributes:
        what: that was looked at.
        level: whether something must be done.
        found: in words.
        to_do: what to do; empty where nothing is.
    """

    what: str
    level: Level
    found: str
    to_do: str = ""


def add_to(app: typer.Typer) -> None:
    """Add the command."""
    app.command(rich_help_panel="Services")(doctor)


def doctor(as_json: Json = False) -> None:
    """Say what this machine lacks, what holds the ports, which versions do not fit; what to do.

    Exits with 1 where something is missing. Example: dspark doctor
    """
    from components.cli.facts import look

    diagnoses = list(judge(look()))
    if as_json:
        print_json([asdict(diagnosis) for diagnosis in diagnoses])
    else:
        print_table(("", "what", "found"), [(f.level, f.what, f.found) for f in diagnoses])
        for diagnosis in diagnoses:
            if diagnosis.to_do:
                print(f"\n{diagnosis.what}: {diagnosis.to_do}")
    if any(diagnosis.level is Level.MISSING for diagnosis in diagnoses):
        raise typer.Exit(1)


def judge(facts: Facts) -> Iterator[Diagnosis]:
    """What the facts mean, in the order they are shown."""
    yield _python(facts)
    yield from _programs(facts)
    yield _versions(facts)
    yield _processor(facts)
    yield _memory(facts)
    yield _disk(facts)
    yield from _ports(facts)
    yield from _services(facts)


def _python(facts: Facts) -> Diagnosis:
    told = ".".join(map(str, facts.python))
    if facts.python[:2] == PYTHON:
        return Diagnosis("Python", Level.OK, told)
    wanted = ".".join(map(str, PYTHON))
    return Diagnosis("Python", Level.MISSING, told, f"Install Python {wanted} and run make setup.")


def _programs(facts: Facts) -> Iterator[Diagnosis]:
    if not facts.missing_programs:
        yield Diagnosis("programs", Level.OK, "all are installed")
    for name, fix in facts.missing_programs.items():
        yield Diagnosis(name, Level.MISSING, "not installed", fix)


def _versions(facts: Facts) -> Diagnosis:
    other = [
        f"{name} {facts.installed[name]} instead of {pin}"
        for name, pin in facts.pins.items()
        if name in facts.installed and not _fits(facts.installed[name], pin)
    ]
    absent = [name for name in facts.pins if name not in facts.installed]
    wrong = [*other, *(f"{name} is absent" for name in absent)]
    if not wrong:
        return Diagnosis("packages", Level.OK, f"all {len(facts.pins)} are of the pinned versions")
    shown = "; ".join(wrong[:NUM_PINS_SHOWN])
    more = f"; and {len(wrong) - NUM_PINS_SHOWN} more" if len(wrong) > NUM_PINS_SHOWN else ""
    return Diagnosis("packages", Level.MISSING, shown + more, "Run make setup.")


def _fits(installed: str, pin: str) -> bool:
    """A local build, as 2.13.0+cpu, is of its version."""
    return installed == pin or installed.partition("+")[0] == pin


def _processor(facts: Facts) -> Diagnosis:
    if facts.has_gpu:
        return Diagnosis("processor", Level.OK, "a GPU")
    flags = facts.cpu_flags
    if "amx_bf16" in flags:
        return Diagnosis(
            "processor", Level.OK, "no GPU; CPU with AMX, which multiplies in bfloat16"
        )
    if "avx512f" in flags:
        return Diagnosis("processor", Level.OK, "no GPU; CPU with AVX-512")

    found = "no GPU; CPU with AVX2 only" if "avx2" in flags else "no GPU; CPU without AVX2"
    to_do = (
        "The demo works, several times slower than on a CPU with AVX-512: it computes in float32"
        " (engine.dtype: native) and its pace gives amounts up."
    )

    return Diagnosis("processor", Level.NOTE, found, to_do)


def _memory(facts: Facts) -> Diagnosis:
    found = f"{facts.memory_gib:.1f} GiB available"
    if facts.memory_gib >= MIN_MEMORY_GIB:
        return Diagnosis("memory", Level.OK, found)
    to_do = f"The demo takes {MIN_MEMORY_GIB:g} GiB at its peak: end what else runs."
    return Diagnosis("memory", Level.NOTE, found, to_do)


def _disk(facts: Facts) -> Diagnosis:
    found = f"{facts.disk_gib:.0f} GiB free under {facts.state_dir}"
    if facts.disk_gib >= MIN_DISK_GIB:
        return Diagnosis("disk", Level.OK, found)
    to_do = f"Make {MIN_DISK_GIB:g} GiB of room, or set DSPARK_STATE_DIR to another disk."
    return Diagnosis("disk", Level.NOTE, found, to_do)


def _ports(facts: Facts) -> Iterator[Diagnosis]:
    if not facts.held_ports:
        told = "held by these services" if facts.services == "up" else "free"
        yield Diagnosis("ports", Level.OK, told)
    for name, holder in facts.held_ports.items():
        to_do = f"End that process, or set {name} in configs/services.yaml (0 takes a free port)."
        yield Diagnosis(name, Level.MISSING, holder, to_do)


def _services(facts: Facts) -> Iterator[Diagnosis]:
    if facts.services == "half":
        found = "their supervisor is gone, their state file is not"
        yield Diagnosis("services", Level.MISSING, found, "Run dspark down, then dspark up.")
        return
    if facts.services == "down":
        yield Diagnosis("services", Level.NOTE, "down", "Start them: dspark up.")
        return
    if not facts.failing_services:
        yield Diagnosis("services", Level.OK, "up, and all usable")
    for name, reason in facts.failing_services.items():
        to_do = "Look at its log in the state folder; dspark down, then dspark up starts it anew."
        yield Diagnosis(name, Level.MISSING, reason, to_do)
