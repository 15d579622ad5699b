"""The trainer's lines become a progress artifact."""

from __future__ import annotations

import pytest

from tasks import training


def test_lines_that_say_how_far_it_is_move_the_artifact(monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[tuple[float, str]] = []
    logged: list[str] = []
    monkeypatch.setattr(
        training,
        "progress_artifact",
        lambda name: lambda percent, words: shown.append((percent, words)),
    )
    on_line = training._shown(logged.append)
    lines = [
        "reading 12 validation conversations",
        "training   3 % step 20 loss 3.603 acceptance 1.114 1,200 tok/s waiting 2 %",
        "validation at step 20: acceptance 1.2 (walked 1.1, expected 1.1)",
        "training 100 % step 591 loss 2.400 acceptance 1.500 best 1.488 1,300 tok/s waiting 1 % "
        "(for 12 s)",
    ]
    for line in lines:
        on_line(line)
    assert logged == lines
    assert shown == [(3.0, lines[1]), (100.0, lines[3])]
