"""Frozen, metadata-only records passed between stages. No tensors, no clients, no behaviour beyond digests and files.

Every record serialises to JSON; `digest` is the sha256 of its canonical JSON, so a record can be checked later
wherever it turns up. Records refer to large things (datasets, checkpoints) by path and content digest.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Callable
from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from components.errors import CheckpointError, ConfigError

FINGERPRINT_FILE = "target_fingerprint.json"
"""Name of the file inside a drafter checkpoint that binds it to one target."""

CALIBRATION_FILE = "calibration.json"
"""Name of the file inside a drafter checkpoint that calibrates its confidence head; absent where it has none."""

Progress = Callable[[str, int, int], None]
"""Called as progress(what, num_done, num_total) by anything longer than ten seconds, at least every 5 s."""


def is_held_out(text: str) -> bool:
    """Whether a conversation opening with `text` belongs to evaluation (one in twenty), never to training.

    A hash of the content decides, so the answer is stable under row order and growth of the source.
    """
    normalised = " ".join(text.lower().split())
    return int(hashlib.sha256(normalised.encode()).hexdigest()[:8], 16) % 20 == 0


def write_atomic(path: Path, data: bytes | str) -> Path:
    """Write `data` to `path` through a temporary file, fsync and rename, so no reader sees half a file."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    payload = data.encode() if isinstance(data, str) else data
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(payload)
            file.flush()
            os.fsync(file.fileno())
        Path(temporary).chmod(0o644)
        Path(temporary).replace(path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
    return path


def append_line(path: Path, line: str) -> None:
    """Append one line to an append-only log and fsync it."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.write(line.rstrip("\n") + "\n")
        file.flush()
        os.fsync(file.fileno())


def digest_json(value: object) -> str:
    """sha256 (hex) of the canonical JSON of `value`: sorted keys, no spaces."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def digest_file(path: Path) -> str:
    """sha256 (hex) of a file's bytes."""
    with Path(path).open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def digest_checkpoint(path: Path) -> str:
    """sha256 (hex) of a drafter checkpoint: over (relative name, sha256) of what decides how it drafts.

    That is config.json, *.safetensors, the binding and, where there is one, the calibration of the confidence head.
    Logs, optimiser states and reports beside the weights do not count.

    Raises:
        CheckpointError: `path` holds no config.json, weights or fingerprint file.
    """
    root = Path(path)
    files = [root / "config.json", root / FINGERPRINT_FILE, *sorted(root.glob("*.safetensors"))]
    missing = [file.name for file in files[:2] if not file.is_file()] + ["*.safetensors"] * (len(files) == 2)
    files += sorted(root.glob(CALIBRATION_FILE))
    if missing:
        raise CheckpointError(f"{root} is not a complete checkpoint", got=f"no {', '.join(missing)}")
    return digest_json(sorted((file.relative_to(root).as_posix(), digest_file(file)) for file in files))


def now_utc() -> datetime:
    """Current time, UTC."""
    return datetime.now(UTC)


class Reference(BaseModel):
    """Base of everything passed between stages: immutable, unknown keys refused.

    A reference to content has a field `digest` of that content; a `Record` has a property `digest` of itself.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    def write(self, path: Path) -> Path:
        """Write the record as indented JSON, atomically."""
        return write_atomic(path, self.model_dump_json(indent=2) + "\n")

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read a record written by `write`.

        Raises:
            ConfigError: the file is missing or does not hold this record.
        """
        try:
            return cls.model_validate_json(Path(path).read_text())
        except FileNotFoundError:
            raise ConfigError(f"{cls.__name__} file is missing", got=path) from None
        except ValidationError as error:
            first = error.errors()[0]
            raise ConfigError(
                f"{path} is not a {cls.__name__}", got=f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
            ) from None


class Record(Reference):
    """Base of records that are themselves content: `digest` identifies them."""

    @property
    def digest(self) -> str:
        """sha256 (hex) of the record's canonical JSON."""
        return digest_json(self.model_dump(mode="json"))


class TargetFingerprint(Record):
    """What makes two targets the same for a drafter; each part is a sha256 (hex)."""

    weights: str = Field(description="over every tensor's name, dtype, shape and bytes, and the architecture config")
    quantization: str = Field(description="over the quantization config, or of the word 'none'")
    tokenizer: str = Field(description="over vocabulary, merges, special tokens and chat template")
    serving: str = Field(description="over engine settings that change numerics or limits (dtype, KV dtype, length)")


class ChangeKind(StrEnum):
    """Which part of a target changed, most severe first."""

    TOKENIZER = "tokenizer"
    WEIGHTS = "weights"
    QUANTIZATION = "quantization"
    SERVING = "serving"
    NONE = "none"


class ChangeAction(StrEnum):
    """What the policy asks for: before a measurement, and (REBIND or RETRAIN) after one."""

    NOTHING = "nothing"
    REMEASURE = "remeasure"
    REBIND = "rebind"
    RETRAIN = "retrain"


class TargetChange(Record):
    """A classified difference between the target a release is bound to and the target found now."""

    old: TargetFingerprint | None
    new: TargetFingerprint
    kinds: tuple[ChangeKind, ...]
    action: ChangeAction
    reason: str


class TargetRef(Record):
    """A target on disk, with its content identity."""

    name: str = Field(description="short name; the registered model is '<name>-drafter'")
    path: str = Field(description="folder with config.json, safetensors and tokenizer")
    source: str = Field(description="where it came from: package, Hub id with revision, or folder")
    fingerprint: TargetFingerprint
    quantization: str = Field(description="readable: 'none', 'compressed-tensors int-quantized W8A8', ...")


class DatasetRef(Reference):
    """A curated dataset on disk: Arrow shards and a manifest, bound to the target that wrote the answers."""

    path: str
    digest: str = Field(description="over the content of all shards, independent of paths and times")
    fingerprint: TargetFingerprint
    num_conversations: dict[str, int] = Field(description="by split: train, validation")
    num_tokens: dict[str, int]
    num_loss_tokens: dict[str, int]
    funnel: dict[str, int] = Field(description="rows left after each curation step, in order")
    docs_path: str = Field(description="index.html of the Great Expectations Data Docs")


class StoreEndpoint(Record):
    """Where the Mooncake master is, and how its clients talk."""

    master_address: str = Field(description="host:port of the master's RPC")
    metrics_url: str = Field(description="http://host:port/metrics of the master")
    local_hostname: str = Field(default="127.0.0.1", description="address other clients reach this process under")
    protocol: str = "tcp"
    rdma_devices: str = ""


class ArmEndpoint(Record):
    """One served arm: an engine and the drafter it serves, if any."""

    arm: str = Field(description="candidate, champion, untrained, no_draft or baseline")
    url: str = Field(description="base URL of the engine, without /v1")
    model: str = Field(description="served model name")
    checkpoint_digest: str | None = None
    num_draft_tokens: int = Field(default=0, description="K; 0 with no drafter")


class StreamReport(Record):
    """What the hidden-state stream did during one training run."""

    num_samples: int
    num_tokens: int
    bytes_streamed: int
    budget_bytes: int
    peak_bytes_held: int = Field(description="largest store content plus reader buffers seen at once")
    bytes_on_disk: int = Field(description="hidden-state bytes written to disk: measured, expected 0")
    keys_left: int = Field(description="keys of this run left in the store at the end")
    num_cached: int = Field(default=0, description="of the samples, read from the cache on disk")
    cache_bytes: int = Field(default=0, description="what the cache holds at the end; 0 in mode online")
    num_retried: int
    num_quarantined: int
    quarantine_reasons: dict[str, int]
    trainer_wait_share: float = Field(description="share of trainer wall time spent waiting for states, 0 to 1")
    engine_idle_share: float = Field(default=0.0, description="share of it in which no engine had a request, 0 to 1")
    tokens_per_s: float
    duration_s: float


class CheckpointRef(Reference):
    """A drafter checkpoint that vLLM loads as it stands, bound to a target by `target_fingerprint.json`."""

    path: str
    digest: str = Field(description="over config.json, the weight files, the binding and the calibration")
    algorithm: str = Field(description="dspark, dflash or eagle3")
    fingerprint: TargetFingerprint
    dataset_digest: str | None = None
    parent_digest: str | None = Field(default=None, description="checkpoint it was warm-started or re-bound from")
    step: int = 0
    num_trained_tokens: int = 0
    num_draft_tokens: int = Field(description="K, draft tokens proposed per target step")
    expected_acceptance_length: float | None = Field(
        default=None, description="teacher-forced on the validation split, bonus token included"
    )


class ReliabilityBin(Record):
    """Scores of about the same height, and what became of their prefixes."""

    mean_score: float
    accepted_share: float
    num_scores: int


class ReliabilityFigures(Record):
    """How well scores, each the predicted probability that a prefix of drafts is accepted, fit what happened."""

    num_scores: int
    mean_score: float
    accepted_share: float
    ece: float = Field(description="expected calibration error over `bins`, which hold equally many scores, 0 to 1")
    ece_floor: float = Field(description="the ECE to be expected of right scores: what is left is sampling noise")
    brier: float = Field(description="mean squared difference, 0 to 1")
    auc: float | None = Field(description="area under the ROC curve; None where all prefixes had the same fate")
    bins: tuple[ReliabilityBin, ...] = Field(description="by rising score")
    histogram: tuple[int, ...] = Field(description="scores in equally wide bins over 0 to 1")


class PrefixThreshold(Record):
    """The threshold on a prefix's survival that gives most tokens for one price of a draft token."""

    cost_ratio: float = Field(description="price of one scheduled draft token over that of the target pass alone")
    threshold: float = Field(description="a draft is scheduled while its prefix's survival is at least this, 0 to 1")
    tokens_per_cost: float = Field(description="(sum of tokens) / (sum of costs); 1 without drafts")
    tokens_per_step: float = Field(description="the bonus token included")
    num_scheduled: float = Field(description="mean draft tokens per step")


class Calibration(Record):
    """Sequential temperature scaling of a confidence head: c_k = sigmoid(logit_k / temperature_k + bias_k).

    The product c_1 .. c_k is the survival of the first k drafts. Figures are of survivals, each scored by parameters
    fitted on other conversations; the parameters here are fitted on all of them.
    """

    event: str = Field(description="what a survival is the probability of")
    temperatures: tuple[float, ...] = Field(description="by draft position; 1 where not fitted")
    biases: tuple[float, ...] = Field(description="by draft position, in logits; 0 where not fitted or not asked for")
    is_fitted: tuple[bool, ...] = Field(description="False: the position had too few events of one kind")
    num_blocks: int
    num_conversations: int
    num_folds: int = Field(description="of the cross-fit by conversation; 0: too few conversations, nothing is fitted")
    before: ReliabilityFigures = Field(description="all positions together, logits as they are")
    after: ReliabilityFigures
    before_by_position: tuple[ReliabilityFigures, ...]
    after_by_position: tuple[ReliabilityFigures, ...]
    thresholds: tuple[PrefixThreshold, ...] = Field(description="by rising cost ratio")
    target_weights: str | None = Field(default=None, description="fingerprint part of the target it was measured on")


class PromptMeasurement(Record):
    """One request, as the engine itself reported it."""

    prompt_id: str
    slice: str
    num_prompt_tokens: int
    num_output_tokens: int
    num_steps: int = Field(description="speculative target steps; 0 with no drafter")
    num_draft_tokens: int
    num_accepted_tokens: int
    accepted_by_position: tuple[int, ...] = Field(description="accepted drafts at positions 1..K")
    latency_s: float
    output_digest: str = Field(description="sha256 of the generated text")


class ServedAnswer(Record):
    """An answer to the token, and the engine's own count of the steps it took."""

    prompt_id: str
    prompt_token_ids: tuple[int, ...]
    token_ids: tuple[int, ...] = Field(description="as answered; an end token included")
    num_steps: int = Field(description="speculative target steps")
    accepted_by_position: tuple[int, ...] = Field(description="steps that accepted drafts 1..k")


class TrainServedGap(Record):
    """Acceptance length of the same prompts, three ways. Lengths are tokens kept per target step: all tokens of
    an answer but the first, which the prefill gives, over its steps."""

    teacher_forced: float = Field(description="the trained objective over the served answers")
    reference: float = Field(description="reference decoding of the prompts")
    served: float = Field(description="vLLM")
    diverging_position: int | None = Field(
        default=None, description="draft position (from 1) whose acceptance differs most; None where all agree"
    )
    num_prompts: int
    acceptance_by_position: dict[str, tuple[float, ...]] = Field(
        default_factory=dict, description="per way: share of steps that accepted drafts 1..k"
    )

    @property
    def gap(self) -> float:
        """Largest relative difference from what is served, not negative; infinite where nothing was served."""
        if self.served <= 0:
            return float("inf")
        return max(abs(self.teacher_forced / self.served - 1), abs(self.reference / self.served - 1))


class SpeedPoint(Record):
    """Throughput and latency of one arm at one concurrency."""

    concurrency: int
    num_requests: int
    output_tokens_per_s: float
    ttft_p50_ms: float
    ttft_p99_ms: float
    itl_p50_ms: float
    itl_p99_ms: float
    round_tokens_per_s: tuple[float, ...] = Field(
        default=(), description="output_tokens_per_s of each interleaved round, in order: how noisy the machine was"
    )


class ArmReport(Record):
    """One arm (candidate, champion, untrained or no_draft) over the same prompts."""

    arm: str
    checkpoint_digest: str | None
    acceptance_length: float = Field(description="(accepted + steps) / steps; 1.0 with no drafter")
    acceptance_interval: tuple[float, float] | None = Field(default=None, description="95 % interval over prompts")
    acceptance_by_slice: dict[str, float]
    interval_by_slice: dict[str, tuple[float, float]] = Field(
        default={}, description="95 % interval over prompts; slices with one prompt or no drafter have none"
    )
    acceptance_by_position: tuple[float, ...] = Field(description="share of steps whose draft position k was accepted")
    draft_coverage: float = Field(description="(steps + accepted) / output tokens, 0 to 1")
    prompts: tuple[PromptMeasurement, ...]
    speed: tuple[SpeedPoint, ...]
    engine_counters: dict[str, float] = Field(description="vllm:spec_decode_* deltas over the measurement")
    acceptance_histogram: tuple[int, ...] = Field(
        default=(), description="target steps that accepted exactly 0, 1, ... K draft tokens; empty with no drafter"
    )
    peak_memory_bytes: int | None = Field(
        default=None, description="largest memory of the engine's processes while it was measured; None: not measured"
    )


class TemperatureReport(Record):
    """The arms over the first prompts of the measurement at a further temperature."""

    temperature: float
    arms: dict[str, ArmReport]


class AcceptanceReport(Record):
    """Served measurement of all arms on one target, paired over the same prompts."""

    target: TargetRef
    temperature: float
    max_tokens: int
    prompt_digest: str
    arms: dict[str, ArmReport]
    num_equal_outputs: int = Field(description="prompts whose candidate output equals no_draft's at temperature 0")
    num_compared_outputs: int
    excluded: dict[str, str] = Field(default={}, description="prompt id to reason; left out of every arm")
    further_temperatures: tuple[TemperatureReport, ...] = ()
    train_served_gap: TrainServedGap | None = None
    engine_version: str
    created_at: datetime


class Verdict(StrEnum):
    """Outcome of a gate or one of its rules."""

    PASS = "pass"
    FAIL = "fail"
    INCONCLUSIVE = "inconclusive"


class RuleResult(Record):
    """One gate rule with the numbers it used."""

    rule: str
    verdict: Verdict
    value: float | None
    threshold: float | None
    detail: str
    interval: tuple[float, float] | None = Field(default=None, description="of `value`, that the verdict rests on")
    confidence: float | None = Field(default=None, description="two-sided level of the intervals, 0.95 for 95 %")
    bootstrap_interval: tuple[float, float] | None = Field(default=None, description="BCa, as a second opinion")
    p_values: dict[str, float] = Field(default={}, description="one-sided, by claim; '(Holm)' ones over all slices")
    binding: bool = Field(default=True, description="counts for the verdict; others are told for information")
    num_prompts: int | None = None
    num_further_prompts: int | None = Field(
        default=None, description="that an inconclusive rule needs to be decided; None: not inconclusive, or unknown"
    )


class GateDecision(Record):
    """The gate's written decision: every input by digest, every rule, every number, one verdict.

    `signature` is the digest of all the rest, so a decision file that was changed by hand is refused (`read`). It says
    that a file is whole, not who wrote it.
    """

    candidate_digest: str
    champion_digest: str | None
    target_fingerprint: TargetFingerprint
    report_digest: str
    rules: tuple[RuleResult, ...]
    verdict: Verdict
    speculative_schedule: tuple[tuple[int, int, int], ...] = Field(
        default=(), description="[from, to, K] by requests in flight; vLLM's num_speculative_tokens_per_batch_size"
    )
    drafter_out_above: int | None = Field(
        default=None,
        description="requests in flight above which the drafter should not be loaded at all: with the schedule, plain"
        " decoding was more than 5 % faster there, or nothing was measured; None: no such load, or no speed measured",
    )
    superior: bool = Field(
        default=False, description="passed, and the paired difference to the champion over all slices lies above 0"
    )
    settings: dict[str, Any] = Field(default={}, description="the recipe's gate section it was decided by")
    created_at: datetime
    signature: str = Field(default="", description="sha256 (hex) over everything else")

    def signed(self) -> Self:
        """The same decision with its signature."""
        return self.model_copy(update={"signature": self._content_digest()})

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read a decision written by `write`.

        Raises:
            ConfigError: the file is missing, holds no decision, or was changed after it was signed.
        """
        decision = super().read(path)
        if decision.signature != decision._content_digest():
            raise ConfigError(
                f"{path} was changed after it was signed",
                got=decision.signature or "no signature",
                expected=decision._content_digest(),
                fix="Decide again from the report: python -m components.evaluation.gate --report ...",
            )
        return decision

    def _content_digest(self) -> str:
        return digest_json(self.model_dump(mode="json", exclude={"signature"}))


class Release(Record):
    """One registered version of a drafter, as it may be served."""

    model_name: str
    version: int
    checkpoint: CheckpointRef
    target: TargetRef
    gate_digest: str
    run_id: str
    speculative_schedule: tuple[tuple[int, int, int], ...] = ()
    drafter_out_above: int | None = Field(default=None, description="as `GateDecision.drafter_out_above`")
    acceptance_length: float | None = Field(default=None, description="as the gate measured it on `target`")


class Promotion(Record):
    """One entry of a model's append-only promotions log; `previous_digest` chains it to the entry before."""

    index: int = Field(description="from 1")
    model_name: str
    alias: str = Field(description="champion, challenger, ...")
    from_version: int | None = Field(description="version the alias stood on before; None: it was not set")
    to_version: int | None = Field(description="version it stands on now; None: it was removed")
    reason: str
    decision_digest: str = Field(description="of the gate decision or canary report that led to it")
    previous_digest: str | None = Field(description="digest of entry index - 1; None for the first")
    created_at: datetime


class CanaryStep(Record):
    """One step of a rollout: a traffic share, what each arm did, and the judge's word."""

    weight_percent: int = Field(description="share of requests sent to the candidate")
    started_at: datetime
    duration_s: float
    num_requests: dict[str, int] = Field(description="by arm: candidate, baseline")
    num_errors: dict[str, int]
    acceptance_length: float | None = Field(description="of the candidate arm during the step")
    draft_coverage: float | None
    latency_p50_s: dict[str, float | None]
    latency_p95_s: dict[str, float | None]
    healthy: bool
    reason: str


class CanaryReport(Record):
    """A finished rollout."""

    candidate_digest: str
    baseline: str = Field(description="'champion' or 'no_draft'")
    steps: tuple[CanaryStep, ...]
    promoted: bool
    rolled_back_to: str | None = Field(default=None, description="'champion' or 'no_draft' when not promoted")
    reason: str
    created_at: datetime


class StageTiming(Record):
    """Wall time of one stage of the loop."""

    stage: str
    started_at: datetime
    duration_s: float
    num_tokens: int | None = None
