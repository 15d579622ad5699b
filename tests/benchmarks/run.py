"""Runs the benchmarks of this folder: `python -m tests.benchmarks.run [NAME ...]`, all of them with
no name.

A benchmark is a file `bench_<name>.py` with a function `run() -> list[Figure]`. One line per figure
is printed, `name value unit goal ok|short`, and all of them are written as JSON to
`<state folder>/bench/<time>.json`.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import platform
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from components.contracts import now_utc, write_atomic
from components.errors import ConfigError, DSparkError, run_main
from components.services.endpoints import resolve_state_dir

FOLDER = Path(__file__).resolve().parent


@dataclass(frozen=True, kw_only=True)
class Figure:
    """One measured number against its goal."""

    name: str
    value: float
    unit: str
    goal: str
    """As printed, without spaces: '>=1.40', '<=900', or '-' where none is set."""
    ok: bool

    def __str__(self) -> str:
        return (
            f"{self.name} {self.value:.6g} {self.unit} {self.goal} {'ok' if self.ok else 'short'}"
        )


def discover() -> dict[str, str]:
    """Module path of each benchmark by its name."""
    files = sorted(FOLDER.glob("bench_*.py"))
    return {file.stem.removeprefix("bench_"): f"tests.benchmarks.{file.stem}" for file in files}


def select(names: list[str], *, known: dict[str, str]) -> dict[str, str]:
    """The benchmarks of these names; all of them when there are none.

    Raises:
        ConfigError: no benchmark of that name.
    """
    for name in names:
        if name not in known:
            raise ConfigError(
                "no such benchmark", got=name, expected=", ".join(known) or "a bench_*.py file"
            )
    return {name: known[name] for name in names} if names else known


def run_one(name: str, module: str) -> dict[str, object]:
    """Run one benchmark and print its figures; one that fails becomes a record of its error, and
    the rest still run.
    """
    started_s = time.perf_counter()
    try:
        function: Callable[[], list[Figure]] = importlib.import_module(module).run
        figures = function()
    except DSparkError as error:
        print(f"{name} failed: {error}", file=sys.stderr, flush=True)
        return {"benchmark": name, "error": str(error), "figures": []}
    for figure in figures:
        print(figure, flush=True)
    duration_s = round(time.perf_counter() - started_s, 3)
    return {
        "benchmark": name,
        "duration_s": duration_s,
        "figures": [asdict(figure) for figure in figures],
    }


def machine() -> dict[str, object]:
    """What the figures depend on: platform, cores, memory."""
    memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "platform": platform.platform(),
        "python": platform.python_version(),
        "num_cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(memory_bytes / 2**30, 1),
    }


def main(arguments: list[str]) -> int:
    """Run, print, write; exit status 1 when a benchmark failed or a figure is short of its goal."""
    parser = argparse.ArgumentParser(description="Run benchmarks.")
    parser.add_argument("names", nargs="*", help="names without bench_; none runs all")
    options = parser.parse_args(arguments)
    chosen = select(options.names, known=discover())
    started_at = now_utc()
    results = [run_one(name, module) for name, module in chosen.items()]
    path = resolve_state_dir() / "bench" / f"{started_at:%Y%m%dT%H%M%SZ}.json"
    record = {"started_at": started_at.isoformat(), "machine": machine(), "benchmarks": results}
    write_atomic(path, json.dumps(record, indent=2) + "\n")
    print(f"written to {path}", file=sys.stderr)
    return 0 if all(_reached(result) for result in results) else 1


def _reached(result: dict[str, object]) -> bool:
    figures = result["figures"]
    return (
        "error" not in result
        and isinstance(figures, list)
        and all(figure["ok"] for figure in figures)
    )


if __name__ == "__main__":
    run_main(lambda: main(sys.argv[1:]))
