"""Number formats that a recipe leaves to the machine."""

from __future__ import annotations

from pathlib import Path

import pytest

from components.settings import CONFIGS_DIR, load_recipe, precision

AVX2 = "processor : 0\nflags\t\t: fpu sse sse2 avx f16c fma avx2 bmi2 vaes\n"
AVX512 = "processor : 0\nflags\t\t: avx2 avx512f avx512dq avx512cd avx512bw avx512vl\n"


@pytest.mark.parametrize(
    ("cpuinfo", "dtype"),
    [
        (AVX2, "float32"),
        (AVX512, "bfloat16"),
        (AVX512.replace("avx512bw ", ""), "float32"),
        ("Features\t: fp asimd bf16 i8mm\n", "bfloat16"),
        ("Features\t: fp asimd\n", "float32"),
        ("", "float32"),
    ],
)
def test_bfloat16_only_where_the_processor_multiplies_in_it(cpuinfo: str, dtype: str) -> None:
    assert precision.cpu_dtype(cpuinfo) == dtype


@pytest.fixture
def cpuinfo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "cpuinfo"
    monkeypatch.setattr(precision, "CPUINFO", path)
    monkeypatch.setattr(precision, "native_dtype", precision.native_dtype.__wrapped__)
    return path


@pytest.mark.parametrize(
    ("text", "dtype", "mixed"), [(AVX2, "float32", "no"), (AVX512, "bfloat16", "bf16")]
)
def test_the_demo_takes_the_machines_format(
    cpuinfo: Path, text: str, dtype: str, mixed: str
) -> None:
    cpuinfo.write_text(text)
    path = CONFIGS_DIR / "demo.yaml"
    recipe = load_recipe(path).model_copy()
    on_cpu = recipe.model_copy(
        update={
            "engine": recipe.engine.model_copy(update={"dtype": "native", "device": "cpu"}),
            "training": recipe.training.model_copy(update={"mixed_precision": "native"}),
        }
    )
    here = precision.on_this_machine(on_cpu)
    assert (here.engine.dtype, here.training.mixed_precision) == (dtype, mixed)


def test_a_format_that_the_recipe_names_stays(cpuinfo: Path) -> None:
    cpuinfo.write_text(AVX2)
    recipe = load_recipe("qwen3-8b")
    assert (recipe.engine.dtype, recipe.training.mixed_precision) == ("bfloat16", "bf16")


def test_a_loaded_recipe_leaves_nothing_to_the_machine() -> None:
    recipe = load_recipe("demo")
    assert recipe.engine.dtype in ("bfloat16", "float32")
    assert recipe.training.mixed_precision in ("bf16", "no")
