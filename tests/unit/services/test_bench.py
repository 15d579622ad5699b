"""The benchmark runner: lines, JSON, exit status."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType

import pytest

from components.errors import ConfigError, ServiceError
from tests.benchmarks import run as bench

FAST = bench.Figure(name="speed", value=2.5, unit="s", goal="<=3", ok=True)
SLOW = bench.Figure(name="size", value=1e9, unit="bytes", goal="<=1e6", ok=False)


def _module(
    monkeypatch: pytest.MonkeyPatch, name: str, outcome: list[bench.Figure] | Exception
) -> str:
    def run() -> list[bench.Figure]:
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    module = ModuleType(name)
    module.run = run  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, name, module)
    return name


def test_one_line_per_figure() -> None:
    assert str(FAST) == "speed 2.5 s <=3 ok"
    assert str(SLOW) == "size 1e+09 bytes <=1e6 short"


def test_unknown_name_is_refused() -> None:
    with pytest.raises(ConfigError, match="no such benchmark; got x; expected a, b"):
        bench.select(["x"], known={"a": "m.a", "b": "m.b"})
    assert bench.select([], known={"a": "m.a"}) == {"a": "m.a"}


def test_results_are_written_and_a_failure_does_not_hide_the_rest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    known = {
        "broken": _module(monkeypatch, "bench_broken", ServiceError("no engine")),
        "good": _module(monkeypatch, "bench_good", [FAST]),
    }
    monkeypatch.setattr(bench, "discover", lambda: known)
    monkeypatch.setenv("DSPARK_STATE_DIR", str(tmp_path))
    assert bench.main([]) == 1
    assert bench.main(["good"]) == 0
    captured = capsys.readouterr()
    assert captured.out.splitlines() == [str(FAST)] * 2
    assert "broken failed: no engine" in captured.err
    written = json.loads(max((tmp_path / "bench").glob("*.json")).read_text())
    assert written["benchmarks"][-1]["figures"][0]["value"] == 2.5
