"""Reading the dataset's shards, counting tokens, and the order of a run."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from components.contracts import DatasetRef, TargetFingerprint
from components.errors import TrainingError
from components.training.data import count_tokens, load_split, requests, training_order

ROWS = [("b", [1, 2, 3], [False, True, True]), ("a", [4, 3], [False, True])]


@pytest.fixture
def dataset(tmp_path: Path) -> DatasetRef:
    """Two shards of one row each."""
    for number, (name, token_ids, loss_mask) in enumerate(ROWS):
        table = pa.table(
            {
                "conversation_id": [name],
                "source": ["s"],
                "token_ids": pa.array([token_ids], pa.list_(pa.int32())),
                "loss_mask": pa.array([loss_mask], pa.list_(pa.bool_())),
            }
        )
        path = tmp_path / f"train-{number:05d}.arrow"
        with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, table.schema) as writer:
            writer.write_table(table)
    (tmp_path / "manifest.json").write_text(json.dumps({"digest": "d"}))
    fingerprint = TargetFingerprint(weights="a", quantization="b", tokenizer="c", serving="d")
    return DatasetRef(
        path=str(tmp_path),
        digest="d",
        fingerprint=fingerprint,
        num_conversations={},
        num_tokens={},
        num_loss_tokens={},
        funnel={},
        docs_path="",
    )


def test_rows_of_all_shards_become_requests_in_the_order_of_the_run(dataset: DatasetRef) -> None:
    rows = load_split(dataset, "train")
    made = list(requests(rows, np.array([1, 0, 1]), indices=range(1, 3)))
    assert [(request.index, request.sample_id) for request in made] == [(1, "b"), (2, "a")]
    assert made[0].token_ids.tolist() == [1, 2, 3] and made[0].loss_mask.tolist() == [
        False,
        True,
        True,
    ]


def test_supervised_and_context_tokens_are_counted_apart(dataset: DatasetRef) -> None:
    supervised_V, context_V = count_tokens(load_split(dataset, "train"), vocab_size=6)
    assert supervised_V.tolist() == [0, 0, 1, 2, 0, 0]
    assert context_V.tolist() == [0, 1, 0, 0, 1, 0]


def test_tokens_the_target_lacks_are_refused(dataset: DatasetRef) -> None:
    with pytest.raises(TrainingError, match="a token the target does not have"):
        count_tokens(load_split(dataset, "train"), vocab_size=4)


def test_another_dataset_a_missing_split_and_a_missing_manifest_are_refused(
    dataset: DatasetRef,
) -> None:
    with pytest.raises(TrainingError, match="no validation rows"):
        load_split(dataset, "validation")
    with pytest.raises(TrainingError, match="another dataset"):
        load_split(dataset.model_copy(update={"digest": "e"}), "train")
    with pytest.raises(TrainingError, match="manifest cannot be read"):
        load_split(dataset.model_copy(update={"path": f"{dataset.path}/nothing"}), "train")


def test_every_epoch_is_a_seeded_permutation_of_its_own() -> None:
    order = training_order(50, num_epochs=3, seed=4)
    epochs = order.reshape(3, 50)
    assert all(sorted(epoch) == list(range(50)) for epoch in epochs.tolist())
    assert not np.array_equal(epochs[0], epochs[1])
    assert np.array_equal(order[:50], training_order(50, num_epochs=1, seed=4))
    assert not np.array_equal(order, training_order(50, num_epochs=3, seed=5))
