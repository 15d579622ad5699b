"""What the watch looks at."""

from __future__ import annotations

from pathlib import Path

from components.settings import load_recipe
from components.stages.targets import watched_path


def test_a_package_target_is_watched_in_the_state_folder() -> None:
    assert watched_path(load_recipe("demo"), Path("state")) == Path("state/published/smollm2-135m")


def test_a_hub_target_is_watched_at_its_source() -> None:
    assert watched_path(load_recipe("qwen3-8b"), Path("state")) is None
