"""pydantic models of `configs/*.yaml`: the recipe of a target, and what the services need.

Each component owns one small section; functions take their own section, never the whole recipe.
Unknown keys are errors. A recipe may carry `budgets`: named overlays merged over it (`make demo BUDGET=full`).
"""

from __future__ import annotations

from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal, Self, TypeVar

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from components.errors import ConfigError

CONFIGS_DIR = Path(__file__).resolve().parent.parent / "configs"
PRESETS_DIR = CONFIGS_DIR / "presets"


class Settings(BaseModel):
    """Base of all settings: immutable, unknown keys refused."""

    model_config = ConfigDict(frozen=True, extra="forbid")


SettingsT = TypeVar("SettingsT", bound=Settings)


class TargetSettings(Settings):
    """Where the target's weights come from."""

    name: str = Field(pattern=r"^[a-z0-9][a-z0-9.-]*$", description="short name; the model is '<name>-drafter'")
    source: Literal["package", "huggingface", "local"]
    package: str | None = Field(default=None, description="distribution that ships a GGUF file (source: package)")
    package_version: str | None = None
    package_file: str | None = Field(default=None, description="path of the GGUF file inside the distribution")
    sha256: str | None = Field(default=None, description="of the GGUF file, 64 hex digits")
    repo_id: str | None = Field(default=None, description="Hugging Face id (source: huggingface)")
    revision: str | None = Field(default=None, description="commit or tag; a moving branch is allowed but warned of")
    path: str | None = Field(default=None, description="local folder with safetensors (source: local)")

    @model_validator(mode="after")
    def _complete(self) -> Self:
        needs = {
            "package": ("package", "package_version", "package_file", "sha256"),
            "huggingface": ("repo_id",),
            "local": ("path",),
        }[self.source]
        missing = [name for name in needs if getattr(self, name) is None]
        if missing:
            raise ValueError(f"source '{self.source}' needs {', '.join(missing)}")
        return self


class EngineSettings(Settings):
    """How vLLM is started. The fields that change numerics or limits enter the fingerprint's `serving` part."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    dtype: Literal["bfloat16", "float16", "float32", "auto"] = "bfloat16"
    kv_cache_dtype: str = "auto"
    max_model_len: int = Field(default=2048, ge=64, description="tokens")
    max_num_seqs: int = Field(default=64, ge=1, description="requests in one batch")
    max_num_batched_tokens: int = Field(default=4096, ge=64, description="tokens in one engine step")
    kv_cache_gib: float = Field(default=1.0, gt=0, description="KV space of a CPU engine, GiB")
    gpu_memory_utilization: float = Field(default=0.85, gt=0, le=1)
    tensor_parallel_size: int = Field(default=1, ge=1)
    enforce_eager: bool = True
    startup_timeout_s: float = Field(default=300, gt=0)
    request_timeout_s: float = Field(default=300, gt=0)
    extra_args: tuple[str, ...] = ()


class SourceSettings(Settings):
    """One source of conversations."""

    name: str
    kind: Literal["package", "huggingface", "file", "preset", "target"] = Field(
        default="package", description="target: prompts that the target itself writes (curation/self_prompts.py)"
    )
    preset: str | None = Field(default=None, description="a data set of curation/presets.py (kind: preset); None: name")
    repo_id: str | None = Field(default=None, description="Hugging Face dataset id (kind: huggingface)")
    subset: str | None = Field(default=None, description="configuration of a Hugging Face dataset that has several")
    revision: str | None = Field(default=None, description="commit, tag or branch of a Hugging Face dataset")
    split: str | None = Field(default=None, description="None: the preset's, else train")
    streaming: bool = Field(
        default=True, description="read a Hugging Face dataset as it comes, without downloading all"
    )
    path: str | None = Field(
        default=None, description="JSONL, JSON, Parquet, Arrow or text file, or a folder of them (kind: file)"
    )
    column: str | None = Field(
        default=None, description="with OpenAI messages, ShareGPT turns or a prompt; None: the preset's, else messages"
    )
    weight: float = Field(default=1.0, gt=0, description="share of the mixture, relative")
    parts: tuple[str, ...] = Field(default=(), description="evals families, reasoning_gym generators; empty: defaults")
    max_rows: int | None = Field(default=None, ge=1)


class CurationSettings(Settings):
    """Conversations in, validated on-policy dataset out."""

    sources: tuple[SourceSettings, ...] = Field(min_length=1)
    num_conversations: int = Field(ge=8, description="conversations wanted after filters and dedup")
    validation_share: float = Field(default=0.05, gt=0, lt=0.5)
    min_prompt_chars: int = Field(default=8, ge=1)
    max_prompt_tokens: int = Field(default=384, ge=8)
    min_ascii_share: float = Field(
        default=0.0, ge=0, le=1, description="of a prompt's letters; for targets of one script"
    )
    languages: tuple[str, ...] = Field(default=(), description="ISO 639-1 codes kept, as en; none: any language")
    keep_personal_data: bool = Field(default=False, description="prompts with e-mail addresses, phone or card numbers")
    keep_terse_prompts: bool = Field(default=True, description="keep prompts that ask for a word, a letter or yes/no")
    max_answer_tokens: int = Field(default=192, ge=8, description="per regenerated answer")
    max_turns: int = Field(default=1, ge=1, description="user turns kept per conversation")
    decontaminate_against: tuple[SourceSettings, ...] = Field(
        default=(), description="further evaluation sets; the recipe's own slices always count"
    )
    near_duplicate_threshold: float = Field(default=0.8, gt=0, lt=1, description="Jaccard of word shingles")
    temperatures: tuple[float, ...] = Field(default=(0.0, 0.7), description="sampling mix of regeneration")
    keep_truncated_answers: bool = Field(default=True, description="answers cut at max_answer_tokens, up to the cut")
    keep_refusals: bool = Field(default=True, description="answers that open by declining to answer")
    template_variants: tuple[dict[str, Any], ...] = Field(
        default=({},), min_length=1, description="variables of the chat template, as {enable_thinking: false}; mixed"
    )
    requests_in_flight: int = Field(default=32, ge=1)
    task_runner: Literal["threads", "dask"] = Field(
        default="threads", description="where filters and rendering run: the flow's process, or Prefect's Dask runner"
    )
    dask_address: str | None = Field(
        default=None,
        description="of a Dask scheduler whose workers see the state folder; none: a cluster on this machine",
    )
    min_mask_share: float = Field(default=0.05, ge=0, lt=1, description="least share of supervised tokens in a row")
    seed: int = 0


class StreamSettings(Settings):
    """The hidden-state stream between the extraction engine and the trainer."""

    aux_layer_ids: tuple[int, ...] = Field(min_length=1, description="residual stream after layer N, N >= 1")
    dtype: Literal["bfloat16", "float8_e4m3fn"] = Field(
        default="bfloat16",
        description="on the wire and in the cache; float8 halves the bytes and rounds a state by 2.6 % (RMS)",
    )
    budget_mib: int = Field(default=256, ge=16, description="bound on store content plus reader buffers, MiB")
    requests_in_flight: int = Field(default=16, ge=1)
    request_timeout_s: float = Field(default=120, gt=0)
    max_retries: int = Field(default=3, ge=0)
    engine_outage_s: float = Field(
        default=180, ge=0, description="how long an engine may be away, to start again, before the stream ends"
    )
    max_quarantine_share: float = Field(default=0.02, ge=0, le=1, description="above this the run stops")
    check_every: int = Field(default=16, ge=1, description="lm_head check on one sample in this many")
    min_lm_head_agreement: float = Field(default=0.9, ge=0, le=1, description="target argmax against its own answer")
    orphan_ttl_s: float = Field(default=600, gt=0)
    protocol: Literal["tcp", "rdma"] = "tcp"
    rdma_devices: str = ""
    mode: Literal["online", "hybrid", "offline"] = Field(
        default="online",
        description="online: nothing touches a disk; hybrid: samples are kept in cache_dir and read from there when"
        " they come again; offline: all of them are read from there, without an engine",
    )
    cache_dir: str | None = Field(default=None, description="folder of the cache; hybrid and offline need one")
    cache_gib: float = Field(default=16.0, gt=0, description="bound on the cache of one target and layer list, GiB")

    @model_validator(mode="after")
    def _require_cache_dir(self) -> StreamSettings:
        if (self.mode == "online") != (self.cache_dir is None):
            raise ValueError(f"stream.mode {self.mode} {'takes no' if self.cache_dir else 'needs a'} cache_dir")
        return self


class DrafterSettings(Settings):
    """Shape of the drafter and where its weights start."""

    algorithm: Literal["dspark", "dflash", "eagle3"] = "dspark"
    num_layers: int = Field(default=2, ge=1)
    block_size: int = Field(default=5, ge=2, description="anchor plus K = block_size - 1 draft tokens")
    markov_rank: int = Field(default=128, ge=0, description="0 switches the Markov head off")
    markov_head: Literal["vanilla", "gated", "rnn"] = Field(
        default="vanilla", description="vLLM serves vanilla only; the others can be trained and compared"
    )
    confidence_head: bool = True
    draft_vocab_size: int | None = Field(default=None, ge=16, description="None: the target's own vocabulary")
    min_vocab_coverage: float = Field(default=0.98, gt=0, le=1, description="of supervised tokens in the dataset")
    start: Literal["plain", "target_layers"] = "plain"
    start_layers: tuple[int, ...] = Field(default=(), description="target layers (from 0) copied into draft layers")
    start_aux_slot: int = Field(default=-1, description="aux layer whose states the identity in fc passes on")
    start_norm_scale: float = Field(
        default=1.0, gt=0, le=1, description="factor on the copied final norm; small: the backbone starts quiet"
    )
    markov_start: Literal["random", "bigrams"] = Field(
        default="random", description="bigrams: low-rank log p(next | prev) of the target itself"
    )
    mask_token_id: int | None = Field(default=None, description="a real id of the vocabulary; None: chosen")


class TrainingSettings(Settings):
    """The training loop."""

    preset: str | None = Field(
        default=None,
        description="configs/presets/<preset>.yaml holds the values of drafter and training that the recipe leaves out",
    )
    num_steps: int | None = Field(default=None, ge=1, description="None: epochs decide")
    num_epochs: int = Field(default=1, ge=1)
    max_trainer_s: float | None = Field(default=None, gt=0, description="stop cleanly after this wall time")
    tokens_per_step: int = Field(
        default=768, ge=32, description="samples share a step up to this; a longer sample is a step of its own"
    )
    anchors_per_step: int = Field(default=96, ge=1)
    blocks_in_prompts: bool = Field(
        default=False,
        description="draw blocks from prompts too, not from answers alone: more to learn from the same states",
    )
    updates_per_pack: int = Field(
        default=1, ge=1, description="optimizer steps on each streamed pack, each with anchors drawn anew"
    )
    packs_per_step: int = Field(
        default=1, ge=1, description="gradient accumulation: packs whose mean gradient makes one optimizer step"
    )
    gradient_checkpointing: bool = Field(
        default=False, description="compute each draft layer again going backward: less memory, more time"
    )
    optimizer: Literal["adamw", "muon"] = Field(
        default="adamw", description="muon: for the backbone's matrices, AdamW for all else"
    )
    learning_rate: float = Field(default=6e-4, gt=0)
    heads_lr_scale: float = Field(default=1.0, gt=0, description="learning rate of the heads, relative")
    warmup_share: float = Field(default=0.04, ge=0, lt=1)
    weight_decay: float = Field(default=0.0, ge=0)
    max_grad_norm: float = Field(default=1.0, gt=0)
    loss: dict[str, float] = Field(default={"kl": 1.0}, description="weights of ce, kl, tv (tv is half-L1)")
    loss_decay: Literal["fixed", "dpace"] = Field(
        default="fixed", description="weights of positions: exp(-(k-1)/gamma), or what hangs on each (D-PACE)"
    )
    loss_gamma: float = Field(default=4.0, gt=0, description="decay of position weights exp(-(k-1)/gamma)")
    dpace_alpha: float = Field(default=0.5, gt=0, le=1, description="smoothing of D-PACE's likelihoods; 1: none matter")
    confidence_weight: float = Field(default=1.0, ge=0)
    mixed_precision: Literal["no", "bf16"] = "bf16"
    num_processes: int = Field(default=1, ge=1, description="one per GPU")
    parallel: Literal["ddp", "fsdp2"] = Field(
        default="ddp",
        description="several processes hold all weights and optimizer states each, or a share of them each",
    )
    checkpoint_every_steps: int = Field(default=100, ge=1)
    keep_checkpoints: int = Field(default=2, ge=1)
    validate_every_steps: int = Field(default=100, ge=1)
    early_stop_validations: int | None = Field(
        default=None, ge=1, description="stop after this many validations without a longer acceptance; None: never"
    )
    validation_anchors: int = Field(default=1024, ge=16, description="supervised tokens whose states stay in memory")
    calibration_anchors: int = Field(
        default=16384,
        ge=0,
        description="supervised tokens of the validation split that the confidence head is calibrated on, streamed"
        " once after training; 0: not calibrated",
    )
    log_every_steps: int = Field(default=10, ge=1)
    seed: int = 0

    @model_validator(mode="after")
    def _one_way_to_count_steps(self) -> Self:
        if self.updates_per_pack > 1 and self.packs_per_step > 1:
            raise ValueError("updates_per_pack and packs_per_step cannot both be above 1")
        return self


class EvaluationSettings(Settings):
    """What is measured on vLLM as served."""

    slices: dict[str, int] = Field(description="prompts per held-out slice: mt_bench, humaneval, gsm_symbolic, ...")
    max_tokens: int = Field(default=96, ge=8)
    temperatures: tuple[float, ...] = Field(
        default=(0.0,), min_length=1, description="the first is measured in full, the others on num_sampled_prompts"
    )
    num_sampled_prompts: int = Field(default=16, ge=2, description="prompts, of all slices, per further temperature")
    acceptance_concurrency: int = Field(default=4, ge=1, description="requests in flight while acceptance is measured")
    speed_concurrency: tuple[int, ...] = (1, 4, 8)
    speed_requests: int = Field(default=8, ge=1, description="requests per arm and concurrency")
    speed_repeats: int = Field(default=3, ge=1, description="interleaved rounds; medians are reported")
    num_untrained_prompts: int = Field(default=8, ge=0, description="prompts the untrained drafter is measured on")
    num_gap_prompts: int = Field(
        default=16, ge=1, description="prompts, of all slices, for gate.max_train_served_gap, where that is set"
    )
    max_excluded_share: float = Field(default=0.1, ge=0, lt=1, description="prompts the engine may refuse as too long")
    measure_schedule: bool = Field(
        default=False, description="measure the speed of the schedule that would be shipped, on one more engine"
    )
    prompts_per_checkpoint: int = Field(
        default=64, ge=1, description="kept and checked together: what an engine that dies costs at most"
    )

    @model_validator(mode="after")
    def _temperatures(self) -> Self:
        if min(self.temperatures) < 0 or len(set(self.temperatures)) != len(self.temperatures):
            raise ValueError("temperatures must differ and not be negative")
        return self

    @property
    def temperature(self) -> float:
        """The one that all prompts, the losslessness check and the speed are measured at."""
        return self.temperatures[0]


class GateSettings(Settings):
    """Rules a candidate must pass. Levels are one-sided; what they bound is in evaluation/statistics.py."""

    min_acceptance_length: float = Field(default=1.2, ge=1)
    min_sampled_acceptance_length: float | None = Field(
        default=None, ge=1, description="at each further temperature; None: reported, no rule"
    )
    non_inferiority_margin: float = Field(
        default=0.05, ge=0, lt=1, description="relative, against the champion, per slice"
    )
    non_inferiority_alpha: float = Field(
        default=0.005,
        gt=0,
        lt=0.5,
        description="level of each slice's test: a drafter worse by the margin there passes about as often, up to twice"
        " as often where prompts are heavy-tailed",
    )
    alpha: float = Field(default=0.025, gt=0, lt=0.5, description="level of every other claim, fails included")
    min_prompts_per_slice: int = Field(default=4, ge=2, description="a slice with fewer is never a pass")
    require_superiority: bool = Field(default=False, description="over all slices against the champion, to pass")
    max_further_prompts: int = Field(default=500, ge=0, description="budget for deciding an inconclusive rule")
    min_position_acceptance: float = Field(
        default=0.1, ge=0, le=1, description="share accepted at a draft position of those accepted before it"
    )
    max_position_loss: float = Field(
        default=0.5, gt=0, le=1, description="of that share against the champion's, relative, at any position"
    )
    min_draft_coverage: float = Field(default=0.9, ge=0, le=1)
    serving_concurrency: int = Field(default=1, ge=1, description="requests in flight that min_speedup is about")
    min_speedup: float | None = Field(default=None, gt=0, description="tok/s over no draft at serving_concurrency")
    max_train_served_gap: float | None = Field(
        default=None,
        ge=0,
        description="relative difference of teacher-forced and reference-decoded acceptance length from the served one;"
        " None: not measured",
    )
    max_memory_growth: float | None = Field(
        default=None, ge=0, description="peak memory of the candidate's engine over no draft's, less 1; None: no rule"
    )
    min_equal_output_share: float = Field(default=0.9, ge=0, le=1, description="greedy outputs equal to no draft's")
    bootstrap_samples: int = Field(default=2000, ge=100, description="resamples behind each BCa interval")
    seed: int = Field(default=0, description="of the bootstrap: the same report always gets the same decision")


class CanarySettings(Settings):
    """Traffic shares and the judge's limits."""

    weights_percent: tuple[int, ...] = (1, 5, 25, 50, 100)
    step_s: float = Field(default=15, gt=0, description="least duration of a step")
    max_step_s: float = Field(default=120, gt=0, description="a step without enough requests by then is undecided")
    min_requests: int = Field(default=1, ge=1, description="requests the candidate must answer in a step")
    requests_in_flight: int = Field(default=4, ge=1, description="of the replayed traffic")
    max_tokens: int = Field(default=48, ge=1)
    max_error_share: float = Field(default=0.02, ge=0, le=1)
    min_acceptance_share: float = Field(default=0.8, gt=0, le=1, description="of the gate's acceptance length")
    min_draft_coverage: float = Field(default=0.5, ge=0, le=1, description="not judged where a schedule has K = 0")
    max_latency_ratio: float = Field(default=3.0, gt=0, description="candidate p95 over baseline p95, same step")
    min_requests_for_statistics: int = Field(default=20, ge=2, description="below this latency is not judged")
    min_steps_for_acceptance: int = Field(default=100, ge=1, description="below this acceptance is not judged")


class WatchSettings(Settings):
    """Where new versions of the target appear."""

    path: str | None = Field(default=None, description="folder or symlink watched; None: the target's own source")
    interval_s: float = Field(default=60, gt=0)
    rebind_acceptance_share: float = Field(
        default=0.97, gt=0, le=1, description="old drafter on new target against its own release: at or above re-bind"
    )
    retrain_num_conversations: int | None = Field(default=None, description="curation size of a retrain")


class Recipe(Settings):
    """Everything the loop needs to know about one target."""

    name: str
    target: TargetSettings
    engine: EngineSettings = EngineSettings()
    curation: CurationSettings
    stream: StreamSettings
    drafter: DrafterSettings = DrafterSettings()
    training: TrainingSettings = TrainingSettings()
    evaluation: EvaluationSettings
    gate: GateSettings = GateSettings()
    canary: CanarySettings = CanarySettings()
    watch: WatchSettings = WatchSettings()

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        needed = self.curation.max_prompt_tokens + self.curation.max_answer_tokens
        if needed > self.engine.max_model_len:
            raise ValueError(
                f"curation.max_prompt_tokens + max_answer_tokens = {needed} exceeds engine.max_model_len"
                f" = {self.engine.max_model_len}"
            )
        if self.gate.min_speedup is not None and self.gate.serving_concurrency not in self.evaluation.speed_concurrency:
            raise ValueError("gate.min_speedup needs gate.serving_concurrency among evaluation.speed_concurrency")
        if self.drafter.start == "target_layers" and len(self.drafter.start_layers) != self.drafter.num_layers:
            raise ValueError("drafter.start_layers must name one target layer per draft layer (num_layers)")
        return self


class ServicesSettings(Settings):
    """Ports and folders of the services that `make up` runs. Port 0 takes a free one at `up`."""

    host: str = "127.0.0.1"
    state_dir: str = Field(default=".dspark", description="databases, caches, logs, artifacts; relative to the repo")
    prefect_port: int = 4200
    mlflow_port: int = 5000
    mooncake_rpc_port: int = 50051
    mooncake_metrics_port: int = 9003
    mooncake_segment_mib: int = Field(default=512, ge=64, description="store memory an extraction engine contributes")
    haproxy_port: int = Field(default=8080, description="where clients send chat completions")
    haproxy_stats_port: int = 8404
    engine_port_base: int = Field(default=8100, description="engines take this port and the next ones, if free")
    startup_timeout_s: float = Field(default=120, gt=0)


def load_recipe(name_or_path: str | Path, *, budget: str | None = None) -> Recipe:
    """Load `configs/<name>.yaml` (or a path) over its `training.preset`, and the overlay `budgets.<budget>` over both.

    Raises:
        ConfigError: no such recipe or budget, not YAML, an unknown key (the nearest known key is named) or a bad value.
    """
    path = _recipe_path(name_or_path)
    raw = _read_yaml(path)
    budgets = raw.pop("budgets", {})
    if budget is not None:
        if budget not in budgets:
            raise ConfigError(
                f"{path.name} has no budget of that name", got=budget, expected=", ".join(budgets) or "none defined"
            )
        raw = _merge(raw, budgets[budget])
    for overlay in budgets:  # a mistyped key in an unused overlay is an error today, not on the night it is used
        _validate(Recipe, _on_preset(_merge(raw, budgets[overlay])), f"{path.name} (budget {overlay})")
    return _validate(Recipe, _on_preset(raw), path.name)


def load_services(path: str | Path | None = None) -> ServicesSettings:
    """Load `configs/services.yaml` or the given file.

    Raises:
        ConfigError: as `load_recipe`.
    """
    path = Path(path) if path else CONFIGS_DIR / "services.yaml"
    return _validate(ServicesSettings, _read_yaml(path), path.name)


def _recipe_path(name_or_path: str | Path) -> Path:
    path = Path(name_or_path)
    if path.suffix not in {".yaml", ".yml"}:
        path = CONFIGS_DIR / f"{name_or_path}.yaml"
    if not path.is_file():
        known = sorted(p.stem for p in CONFIGS_DIR.glob("*.yaml") if p.stem != "services")
        raise ConfigError("no such recipe", got=name_or_path, expected=f"a YAML file or one of {', '.join(known)}")
    return path


def _read_yaml(path: Path) -> dict[str, Any]:
    try:
        raw = yaml.safe_load(path.read_text())
    except FileNotFoundError:
        raise ConfigError("settings file is missing", got=path) from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{path.name} is not valid YAML", got=str(error).replace("\n", " ")) from None
    if not isinstance(raw, dict):
        raise ConfigError(f"{path.name} must hold a mapping", got=type(raw).__name__)
    return raw


def _on_preset(raw: dict[str, Any]) -> dict[str, Any]:
    """The recipe over what its preset, if it names one, says of `drafter` and `training`."""
    training = raw.get("training")
    name = training.get("preset") if isinstance(training, dict) else None
    if name is None:
        return raw
    known = sorted(path.stem for path in PRESETS_DIR.glob("*.yaml"))
    if name not in known:
        raise ConfigError("no such training.preset", got=name, expected=", ".join(known))
    preset = _read_yaml(PRESETS_DIR / f"{name}.yaml")
    if set(preset) - {"drafter", "training"}:
        raise ConfigError(f"presets/{name}.yaml", got=", ".join(preset), expected="drafter and training")
    return _merge(preset, raw)


def _merge(base: dict[str, Any], overlay: dict[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for key, value in overlay.items():
        # The weights of a loss are one value: an overlay's `kl` does not join the `ce` below it.
        both = isinstance(value, dict) and isinstance(merged.get(key), dict) and key != "loss"
        merged[key] = _merge(merged[key], value) if both else value
    return merged


def _validate(model: type[SettingsT], raw: dict[str, Any], where: str) -> SettingsT:
    try:
        return model.model_validate(raw)
    except ValidationError as error:
        raise ConfigError(f"{where} is not valid", got=_explain(model, error)) from None


def _explain(model: type[BaseModel], error: ValidationError) -> str:
    lines = []
    for item in error.errors():
        location = ".".join(str(part) for part in item["loc"]) or "recipe"
        if item["type"] == "extra_forbidden":
            near = get_close_matches(str(item["loc"][-1]), _known_keys(model, item["loc"][:-1]), n=1)
            lines.append(f"unknown key {location}" + (f" (did you mean '{near[0]}'?)" if near else ""))
        else:
            lines.append(f"{location}: {item['msg']}")
    return "; ".join(lines)


def _known_keys(model: type[BaseModel], location: tuple[int | str, ...]) -> list[str]:
    for part in location:
        field = model.model_fields.get(str(part))
        annotation = field.annotation if field else None
        if not (isinstance(annotation, type) and issubclass(annotation, BaseModel)):
            return [key for section in SECTIONS for key in section.model_fields]
        model = annotation
    return list(model.model_fields)


SECTIONS: tuple[type[Settings], ...] = (
    TargetSettings, EngineSettings, SourceSettings, CurationSettings, StreamSettings, DrafterSettings,
    TrainingSettings, EvaluationSettings, GateSettings, CanarySettings, WatchSettings,
)  # fmt: skip
