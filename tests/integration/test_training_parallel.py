"""Two gloo processes against one: the same steps, the same losses, whichever way they share the
work.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from components.errors import TrainingError
from components.training.packing import Pack, pack_samples
from components.training.state import StateFolder
from tests.support.offline_reader import OfflineReader, random_requests
from tests.support.parallel_worker import NUM_STEPS, make_loop

pytestmark = [pytest.mark.integration, pytest.mark.long]

AUX = (1, 3)


@pytest.fixture(scope="module")
def packs(tiny_target: Path) -> list[Pack]:
    reader = OfflineReader(tiny_target, aux_layer_ids=AUX)
    made = list(pack_samples(reader.stream(random_requests(48, vocab_size=512)), max_tokens=96))
    assert len(made) >= 2 * NUM_STEPS
    return made[: 2 * NUM_STEPS]


@pytest.fixture(scope="module")
def folder(tiny_target: Path, packs: list[Pack], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where two ranks left their curves."""
    folder = tmp_path_factory.mktemp("parallel")
    (folder / "target").symlink_to(tiny_target)
    torch.save([vars(pack) for pack in packs], folder / "packs.pt")
    ranks = ["--standalone", "--nproc_per_node", "2"]
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        *ranks,
        "-m",
        "tests.support.parallel_worker",
        str(folder),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1200, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return folder


def alone(
    folder: Path, packs: list[Pack], **changes: object
) -> tuple[list[list[float]], dict[str, torch.Tensor]]:
    """Curve and last weights of one process that averages over the packs that two would take."""
    name = "alone-" + "-".join(str(value) for value in changes.values())
    loop = make_loop(folder, name, packs, **changes)
    loop.run(iter(packs))
    state = StateFolder(folder / name, keep=9).load_newest()
    assert state is not None
    return [[point.loss, point.grad_norm] for point in loop.progress.curve], state["weights"]


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("ddp", {"packs_per_step": 2}),
        ("fsdp2", {"packs_per_step": 2}),
        ("muon", {"packs_per_step": 2, "optimizer": "muon"}),
        ("accumulated", {"packs_per_step": 4, "num_steps": NUM_STEPS // 2}),
    ],
)
def test_two_processes_make_the_steps_of_one(
    folder: Path, packs: list[Pack], name: str, changes: dict[str, object]
) -> None:
    one, weights = alone(folder, packs, **changes)
    two = json.loads((folder / "curves.json").read_text())[name]
    assert len(one) == changes.get("num_steps", NUM_STEPS) and one[-1][0] < one[0][0]
    assert [point[0] for point in two] == pytest.approx([point[0] for point in one], rel=1e-5)
    assert [point[1] for point in two] == pytest.approx([point[1] for point in one], rel=1e-3)
    state = StateFolder(folder / name, keep=9).load_newest()
    assert state is not None and set(state["weights"]) == set(weights)
    if name == "muon":
        # its Newton-Schulz iterations round to bf16: sums in another order move single weights
        return
    for parameter, value in weights.items():
        torch.testing.assert_close(state["weights"][parameter], value, rtol=1e-3, atol=1e-4)


def test_a_sharded_run_that_was_stopped_goes_on_as_if_it_had_not(folder: Path) -> None:
    curves = json.loads((folder / "curves.json").read_text())
    assert [point[0] for point in curves["cut"]] == pytest.approx(
        [point[0] for point in curves["fsdp2"]], abs=1e-6
    )


def test_a_shard_is_half_of_what_is_trained(folder: Path) -> None:
    assert json.loads((folder / "share.json").read_text()) == pytest.approx(0.5, abs=0.05)


def test_shards_are_not_taken_up_by_replicas(folder: Path, packs: list[Pack]) -> None:
    state = StateFolder(folder / "fsdp2", keep=9).load_newest()
    assert state is not None
    state["ranks"] = state["ranks"][:1]
    with pytest.raises(TrainingError, match=r"another way.*got fsdp2.*expected ddp"):
        make_loop(folder, "other", packs).restore(state)
