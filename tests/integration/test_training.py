"""The trainer process on real parts: vLLM with our connector on a tiny target, a Mooncake master,
MLflow on SQLite.
"""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from components.contracts import DatasetRef, TargetRef
from components.drafter.checkpoint import load_checkpoint_ref, read_calibration, require_bound
from components.errors import TrainingError
from components.hidden_states.launch import extraction_args
from components.hidden_states.store import count_run_keys
from components.serving.engines.command import EngineSpec
from components.serving.engines.engine import Engine
from components.settings import DrafterSettings, EngineSettings, StreamSettings, TrainingSettings
from components.system.child_lines import ChildLine
from components.training.job import TrainingJob, TrainingResult
from components.training.launch import run_trainer
from tests.support.offline_reader import random_requests
from tests.support.stream_services import FINGERPRINT, Master, free_port, running_master

pytestmark = pytest.mark.integration

TRAINER_TIMEOUT_S = 1200.0  # a safety net
RUN = "training-run"
STREAM = StreamSettings(
    aux_layer_ids=(1, 3), budget_mib=16, requests_in_flight=8, request_timeout_s=30, max_retries=1
)
ENGINE = EngineSettings(
    device="cpu",
    max_model_len=256,
    max_num_seqs=16,
    max_num_batched_tokens=256,
    kv_cache_gib=0.25,
    startup_timeout_s=900,
)
DRAFTER = DrafterSettings(
    num_layers=1,
    block_size=4,
    markov_rank=8,
    draft_vocab_size=256,
    min_vocab_coverage=0.1,
    start="target_layers",
    start_layers=(3,),
)
TRAINING = TrainingSettings(
    num_epochs=2, tokens_per_step=96, anchors_per_step=32, learning_rate=3e-3, log_every_steps=2,
    checkpoint_every_steps=5, validate_every_steps=5, validation_anchors=64,
)  # fmt: skip


@pytest.fixture(scope="module")
def master(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Master]:
    with running_master(tmp_path_factory.mktemp("master")) as master:
        yield master


@pytest.fixture(scope="module")
def engine(
    master: Master, tiny_target: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Engine]:
    args, environment = extraction_args(
        settings=STREAM,
        num_hidden_layers=4,
        store=master.endpoint,
        run_id=RUN,
        fingerprint=FINGERPRINT,
        segment_mib=64,
    )
    spec = EngineSpec(
        name="extraction",
        model_path=str(tiny_target),
        served_model_name="t",
        settings=ENGINE,
        port=free_port(),
        device="cpu",
        extra_args=tuple(args),
        extra_env=environment,
        num_cores=1,
    )
    log_path = tmp_path_factory.mktemp("engine") / "engine.log"
    with Engine.start(spec, log_path=log_path, fingerprint=None) as engine:
        yield engine.wait_ready()


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> DatasetRef:
    """120 train and 12 validation rows in the layout that curation writes."""
    folder = tmp_path_factory.mktemp("dataset")
    for split, num_rows, seed in (("train", 120, 1), ("validation", 12, 2)):
        rows = random_requests(num_rows, vocab_size=512, seed=seed)
        table = pa.table(
            {
                "conversation_id": [f"{split}-{row.index}" for row in rows],
                "source": ["test"] * num_rows,
                "token_ids": pa.array(
                    [row.token_ids.tolist() for row in rows], pa.list_(pa.int32())
                ),
                "loss_mask": pa.array(
                    [row.loss_mask.tolist() for row in rows], pa.list_(pa.bool_())
                ),
            }
        )
        with (
            pa.OSFile(str(folder / f"{split}-00000.arrow"), "wb") as file,
            pa.ipc.new_file(file, table.schema) as out,
        ):
            out.write_table(table)
    (folder / "manifest.json").write_text(json.dumps({"digest": "data-1"}))
    return DatasetRef(
        path=str(folder),
        digest="data-1",
        fingerprint=FINGERPRINT,
        num_conversations={"train": 120, "validation": 12},
        num_tokens={},
        num_loss_tokens={},
        funnel={},
        docs_path="",
    )


@pytest.fixture
def job(
    master: Master, engine: Engine, dataset: DatasetRef, tiny_target: Path, tmp_path: Path
) -> TrainingJob:
    return make_job(master, engine, dataset, tiny_target, tmp_path / "run")


def make_job(
    master: Master, engine: Engine, dataset: DatasetRef, target: Path, output_dir: Path
) -> TrainingJob:
    return TrainingJob(
        drafter=DRAFTER,
        training=TRAINING,
        stream=STREAM,
        target=TargetRef(
            name="tiny",
            path=str(target),
            source="test",
            fingerprint=FINGERPRINT,
            quantization="none",
        ),
        dataset=dataset,
        engine_urls=(engine.url,),
        model="t",
        store=master.endpoint,
        stream_run_id=RUN,
        output_dir=str(output_dir),
        num_threads=1,
    )


@dataclass(frozen=True)
class Trained:
    """The job as it is, run to its end with metrics in MLflow."""

    result: TrainingResult
    lines: list[str]
    tracking_uri: str
    run_id: str


@pytest.fixture(scope="module")
def trained(
    master: Master,
    engine: Engine,
    dataset: DatasetRef,
    tiny_target: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Trained:
    from mlflow import MlflowClient

    folder = tmp_path_factory.mktemp("trained")
    tracking_uri = f"sqlite:///{folder}/mlflow.db"
    client = MlflowClient(tracking_uri=tracking_uri)
    run_id = client.create_run(client.create_experiment("e")).info.run_id
    job = make_job(master, engine, dataset, tiny_target, folder / "run")
    live = job.model_copy(update={"tracking_uri": tracking_uri, "mlflow_run_id": run_id})
    lines: list[str] = []
    return Trained(
        run_trainer(
            live, on_line=lambda line: lines.append(line.what), timeout_s=TRAINER_TIMEOUT_S
        ),
        lines,
        tracking_uri,
        run_id,
    )


def test_it_trains_from_streamed_states_and_exports_a_bound_checkpoint(
    trained: Trained, master: Master
) -> None:
    from mlflow import MlflowClient

    result = trained.result
    client = MlflowClient(tracking_uri=trained.tracking_uri)
    run_id = trained.run_id
    assert result.stopped_by == "data" and result.curve[-1].loss < result.curve[0].loss
    assert result.num_trained_tokens == sum(
        2 * len(row.token_ids) for row in random_requests(120, vocab_size=512, seed=1)
    )
    assert (
        result.stream.bytes_on_disk,
        result.stream.keys_left,
        result.stream.num_quarantined,
    ) == (0, 0, 0)
    assert (
        result.stream.num_samples >= 240
        and result.stream.peak_bytes_held <= result.stream.budget_bytes
    )
    for ref in (result.checkpoint, result.untrained):
        assert load_checkpoint_ref(Path(ref.path)) == ref
        require_bound(Path(ref.path), FINGERPRINT)
    best = max(point.acceptance_length for point in result.validation)
    assert result.checkpoint.expected_acceptance_length == best
    assert [point.step for point in result.validation][:3] == [0, 5, 10]
    assert 0 < result.draft_vocab_coverage["validation"] < 1
    assert any(line.startswith("validation at step 5:") for line in trained.lines)
    history = client.get_metric_history(run_id, "train/loss")
    assert [point.step for point in history] == [point.step for point in result.curve]
    assert client.get_metric_history(run_id, "validation/acceptance_length")
    assert result.calibration is not None and result.calibration.num_conversations == 12
    assert read_calibration(Path(result.checkpoint.path)) == result.calibration
    assert read_calibration(Path(result.untrained.path)) is None
    assert (
        client.get_metric_history(run_id, "calibration/ece_after")[0].value
        == result.calibration.after.ece
    )
    assert count_run_keys(master.endpoint, run_id=RUN) == 0


def test_eagle3_trains_from_the_same_stream(job: TrainingJob) -> None:
    drafter = DRAFTER.model_copy(update={"algorithm": "eagle3"})
    short = TRAINING.model_copy(update={"num_epochs": 1})
    result = run_trainer(
        job.model_copy(update={"drafter": drafter, "training": short}),
        on_line=print,
        timeout_s=TRAINER_TIMEOUT_S,
    )
    assert result.curve[-1].loss < result.curve[0].loss and result.stream.keys_left == 0
    ref = load_checkpoint_ref(Path(result.checkpoint.path))
    assert (ref.algorithm, ref.num_draft_tokens) == ("eagle3", 3)


@pytest.mark.long
def test_sigterm_saves_the_state_and_a_resumed_run_goes_on(
    job: TrainingJob, master: Master
) -> None:
    long = job.model_copy(update={"training": TRAINING.model_copy(update={"num_epochs": 40})})
    pids: list[int] = []

    def stop_after_steps(line: ChildLine) -> None:
        if line.what.startswith("validation at step 5:"):
            pids.append(child_pid(long))
            os.kill(pids[0], signal.SIGTERM)

    with pytest.raises(TrainingError, match=r"exit code 1.*state saved"):
        run_trainer(long, on_line=stop_after_steps, timeout_s=TRAINER_TIMEOUT_S)
    assert count_run_keys(master.endpoint, run_id=RUN) == 0
    states = sorted((Path(job.output_dir) / "state").glob("step-*"))
    assert states and not (Path(job.output_dir) / "result.json").exists()
    stopped_at = int(states[-1].name.removeprefix("step-"))
    short = TRAINING.model_copy(update={"num_epochs": 40, "num_steps": stopped_at + 6})
    result = run_trainer(
        job.model_copy(update={"resume": True, "training": short}),
        on_line=print,
        timeout_s=TRAINER_TIMEOUT_S,
    )
    assert result.num_steps == stopped_at + 6 and result.stopped_by == "steps"


def child_pid(job: TrainingJob) -> int:
    """The trainer that runs `job`, by its command line."""
    wanted = str(Path(job.output_dir) / "job.json").encode()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and wanted in (entry / "cmdline").read_bytes().split(b"\0"):
            return int(entry.name)
    raise AssertionError("no trainer runs")


@pytest.mark.long
def test_a_dead_master_is_one_clear_line(job: TrainingJob) -> None:
    port = free_port()
    store = job.store.model_copy(update={"master_address": f"127.0.0.1:{port}"})
    started = threading.Event()
    with pytest.raises(TrainingError, match=r"exit code 1: .*127\.0\.0\.1"):
        run_trainer(
            job.model_copy(update={"store": store}),
            on_line=lambda _: started.set(),
            timeout_s=TRAINER_TIMEOUT_S,
        )
    assert not (Path(job.output_dir) / "result.json").exists()


def test_a_warm_start_takes_the_parents_weights_and_vocabulary(
    job: TrainingJob, trained: Trained
) -> None:
    first = trained.result
    one_epoch = TRAINING.model_copy(update={"num_epochs": 1})
    child = job.model_copy(update={"training": one_epoch, "parent": first.checkpoint})
    second = run_trainer(child, on_line=print, timeout_s=TRAINER_TIMEOUT_S)
    assert second.checkpoint.parent_digest == first.checkpoint.digest
    start = second.validation[0]
    end = first.checkpoint.expected_acceptance_length
    assert end is not None and start.acceptance_length == pytest.approx(end, abs=0.02)
    assert np.isfinite(second.curve[-1].loss)


@pytest.mark.long
def test_a_cache_filled_while_training_trains_the_same_drafter_without_an_engine(
    job: TrainingJob, tmp_path: Path
) -> None:
    hybrid = STREAM.model_copy(
        update={"mode": "hybrid", "cache_dir": str(tmp_path / "cache"), "cache_gib": 0.1}
    )
    first = run_trainer(
        job.model_copy(update={"stream": hybrid}), on_line=print, timeout_s=TRAINER_TIMEOUT_S
    )
    # The second epoch comes from the cache, but for samples it wants while their first epoch is
    # still under way: the feeder runs ahead as far as credits go. With this seed 12 samples come
    # back within 61 places, none within 19.
    assert 108 <= first.stream.num_cached <= 120 and first.stream.cache_bytes > 0
    assert first.stream.num_samples == 244  # however they came
    offline = job.model_copy(
        update={
            "stream": hybrid.model_copy(update={"mode": "offline"}), "engine_urls": (),
            "output_dir": str(tmp_path / "offline"),
        }
    )  # fmt: skip
    second = run_trainer(offline, on_line=print, timeout_s=TRAINER_TIMEOUT_S)
    assert (
        second.stream.num_cached == second.stream.num_samples and second.stream.bytes_streamed == 0
    )
    losses = [[point.loss for point in result.curve] for result in (first, second)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)
    assert second.checkpoint.expected_acceptance_length == pytest.approx(
        first.checkpoint.expected_acceptance_length
    )


@pytest.mark.long
def test_two_trainer_processes_share_one_engine_and_each_sample_is_trained_once(
    job: TrainingJob, master: Master
) -> None:
    sharded = TRAINING.model_copy(update={"num_processes": 2, "num_epochs": 1, "parallel": "fsdp2"})
    two = job.model_copy(update={"training": sharded})
    result = run_trainer(two, on_line=print, timeout_s=TRAINER_TIMEOUT_S)
    assert result.stopped_by == "data" and np.isfinite(result.curve[-1].loss)
    # Each has half of the samples; what the main one streamed besides is for validation.
    assert 60 <= result.stream.num_samples < 120 and result.stream.num_quarantined == 0
    assert count_run_keys(master.endpoint, run_id=RUN) == 0
