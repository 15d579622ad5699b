"""The demo's target, converted once for all tests of the loop."""

from __future__ import annotations

from pathlib import Path

import pytest

from components.settings import load_recipe
from components.targets.resolve import resolve_target


@pytest.fixture(scope="session")
def real_target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of the demo recipe's target; read-only by agreement."""
    recipe = load_recipe("demo")
    return Path(
        resolve_target(
            recipe.target, cache_dir=tmp_path_factory.mktemp("cache"), engine=recipe.engine
        ).path
    )
