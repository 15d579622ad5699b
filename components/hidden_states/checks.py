"""Checks of hidden states before a batch trains on them. Cheap; what they cannot explain never
reaches the trainer.

T tokens, L layers, H hidden, V vocabulary. The last layer slot is the residual stream before the
final norm, so `lm_head(norm(states_TLH[:, -1]))` are the target's own logits (Llama, Qwen2/3, GLM:
RMSNorm, x / rms(x) * w). A wrong layer list, a shifted slot, zeros or another target behind the URL
all break that equality.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from safetensors import safe_open

from components.contracts import TargetFingerprint
from components.errors import StreamError, TargetError
from components.hidden_states.wire import SampleHeader, payload_checksum
from components.settings import StreamSettings

_NUM_PROBED_TOKENS = (
    64  # variance is judged on this many tokens, evenly spaced, whatever the length
)
_NUM_LM_HEAD_POSITIONS = (
    32  # a full vocabulary per position: enough to tell 0.9 from 0.5, cheap enough to run beside
)
_BF16_INFINITY = 0x7F80
_MIN_VARIANCE = 1e-10
_MAX_VARIANCE = 1e8
_MAX_DRIFT = 1e3  # times the run's own median: a layer swapped for another, or a scale lost
_NUM_REFERENCE_SAMPLES = 8
_NUM_BEFORE_VERDICT = 32  # positions; fewer say nothing about a share
# of the logits' spread: bf16 states round, the engine's own logits come from unrounded ones
_TIE_TOLERANCE = 0.02


class FaultyStatesError(StreamError):
    """One sample is wrong; `reason` is a short category for counting. The sample may be asked for
    again.
    """

    def __init__(
        self, reason: str, problem: str, *, got: object = None, expected: object = None
    ) -> None:
        super().__init__(problem, got=got, expected=expected)
        self.reason = reason


def check_header(
    header: SampleHeader,
    *,
    run_id: str,
    sample: str,
    fingerprint: TargetFingerprint,
    layer_ids: tuple[int, ...],
    dtype: str,
    shape: tuple[int, int, int],
) -> None:
    """Compare a sample's stamp with what was asked for.

    Raises:
        FaultyStatesError: named by the first field that differs. `fingerprint` and `layers` never
            heal by a retry.
    """
    wanted: dict[str, tuple[object, object]] = {
        "fingerprint": (header.fingerprint, fingerprint.digest),
        "layers": (header.layer_ids, layer_ids),
        "dtype": (header.dtype, dtype),
        "shape": (header.shape, shape),
        "run": (header.run_id, run_id),
        "sample": (header.sample, sample),
    }

    for reason, (got, expected) in wanted.items():
        if got != expected:
            raise FaultyStatesError(
                reason, f"a sample carries another {reason}", got=got, expected=expected
            )


def check_payload(buffer: memoryview, header: SampleHeader) -> None:
    """Compare the bytes with the writer's checksum.

    Raises:
        FaultyStatesError: 'checksum'.
    """
    got = payload_checksum(buffer)
    if got != header.checksum:
        raise FaultyStatesError(
            "checksum", "a sample was damaged on its way", got=got, expected=header.checksum
        )


def check_token_ids(got: np.ndarray, expected: np.ndarray) -> None:
    """Compare the token ids the engine ran with those that were sent.

    Raises:
        FaultyStatesError: 'token_ids', with the count and the first position that differ.
    """
    if not np.array_equal(got, expected):
        where = np.flatnonzero(got != expected)
        first = int(where[0])
        raise FaultyStatesError(
            "token_ids",
            f"{len(where)} of {len(expected)} token ids differ, first at position {first}",
            got=int(got[first]),
            expected=int(expected[first]),
        )


class LayerVariance:
    """Per-layer variance of a run: neither zero nor exploding, nor far from what the run has shown
    so far.

    The variance of a layer is the median over tokens of the variance over the hidden dimension, so
    that the few tokens with massive activations that every large model has do not decide.
    """

    def __init__(self, layer_ids: tuple[int, ...]) -> None:
        self._layer_ids = layer_ids
        self._history: list[torch.Tensor] = []

    def check(self, states_TLH: torch.Tensor) -> None:
        """Check one sample.

        Raises:
            FaultyStatesError: 'not_finite', 'zero' or 'exploding', with layer, shape and counts.
        """
        self._check_finite(states_TLH)
        step = max(1, -(-states_TLH.shape[0] // _NUM_PROBED_TOKENS))
        # NumPy, here and below: torch would wake its thread pool for a sample, beside a trainer
        # that needs it.
        with np.errstate(over="ignore"):  # infinite: out of every range below
            variance_TL = torch.from_numpy(states_TLH[::step].float().numpy().var(axis=-1))
        self._check_zero(variance_TL, tuple(states_TLH.shape))
        variance_L = variance_TL.median(dim=0).values
        self._check_scale(variance_L, tuple(states_TLH.shape))
        if len(self._history) < _NUM_REFERENCE_SAMPLES:
            self._history.append(variance_L)

    def _check_finite(self, states_TLH: torch.Tensor) -> None:
        # bfloat16 is the upper half of a float32: the exponent's eight bits are all set in NaN and
        # infinity only.
        bits = states_TLH.view(torch.int16).numpy()
        if int((bits & 0x7FFF).max(initial=0)) < _BF16_INFINITY:
            return
        bad_L = (~torch.isfinite(states_TLH)).sum(dim=(0, 2))
        worst = int(bad_L.argmax())
        raise FaultyStatesError(
            "not_finite",
            f"layer {self._layer_ids[worst]} holds NaN or infinity in states of shape "
            f"{tuple(states_TLH.shape)}",
            got=f"{int(bad_L[worst])} of {states_TLH.shape[0] * states_TLH.shape[2]} values",
            expected="0",
        )

    def _check_zero(self, variance_TL: torch.Tensor, shape: tuple[int, ...]) -> None:
        zero_L = (variance_TL <= _MIN_VARIANCE).sum(dim=0)
        if int(zero_L.sum()):
            worst = int(zero_L.argmax())
            raise FaultyStatesError(
                "zero",
                f"layer {self._layer_ids[worst]} is constant over the hidden dimension in "
                f"states of shape {shape}",
                got=f"{int(zero_L[worst])} of {variance_TL.shape[0]} probed tokens",
                expected="0",
            )

    def _check_scale(self, variance_L: torch.Tensor, shape: tuple[int, ...]) -> None:
        low = torch.full_like(variance_L, _MIN_VARIANCE)
        high = torch.full_like(variance_L, _MAX_VARIANCE)
        if len(self._history) == _NUM_REFERENCE_SAMPLES:
            usual = torch.stack(self._history).median(dim=0).values
            low = torch.maximum(low, usual / _MAX_DRIFT)
            high = torch.minimum(high, usual * _MAX_DRIFT)

        for slot, layer in enumerate(self._layer_ids):
            if not low[slot] <= variance_L[slot] <= high[slot]:
                raise FaultyStatesError(
                    "exploding" if variance_L[slot] > high[slot] else "vanishing",
                    f"variance of layer {layer} is out of range in states of shape {shape}",
                    got=f"{float(variance_L[slot]):.3g}",
                    expected=f"{float(low[slot]):.3g} to {float(high[slot]):.3g}",
                )


@dataclass
class Agreement:
    """Positions where the recomputed argmax agreed, out of those compared."""

    num_agreed: int = 0
    num_compared: int = 0

    def add(self, num_agreed: int, num_compared: int) -> None:
        """Count more positions."""
        self.num_agreed += num_agreed
        self.num_compared += num_compared

    @property
    def share(self) -> float:
        """Agreed of compared, 0 to 1; 1 before anything was compared."""
        return self.num_agreed / self.num_compared if self.num_compared else 1.0


class LmHead:
    """The target's final norm and output matrix, nothing else of it. Weights stay in the target's
    dtype on the CPU.
    """

    def __init__(self, target_path: Path) -> None:
        config = json.loads((Path(target_path) / "config.json").read_text())
        config = config.get("text_config", config)
        self._eps = float(config["rms_norm_eps"])
        # Gemma stores the norm's weight as a difference from one.
        self._offset = 1.0 if str(config.get("model_type", "")).startswith("gemma") else 0.0
        names = (
            ("norm.weight", "embed_tokens.weight")
            if config.get("tie_word_embeddings")
            else ("norm.weight",)
        )

        tensors = _load_tensors(Path(target_path), (*names, "lm_head.weight"))
        self._norm_H = tensors["norm.weight"].float()
        matrix = tensors.get("lm_head.weight", tensors.get("embed_tokens.weight"))
        if matrix is None:
            raise TargetError("the target has neither lm_head nor tied embeddings", got=target_path)

        self._matrix_VH = matrix

    def logits(self, states_TH: torch.Tensor) -> torch.Tensor:
        """Logits (T, V), float32, of states before the final norm."""
        x = states_TH.float()
        x = (
            x
            * torch.rsqrt(x.pow(2).mean(dim=-1, keepdim=True) + self._eps)
            * (self._norm_H + self._offset)
        )
        return torch.nn.functional.linear(x.to(self._matrix_VH.dtype), self._matrix_VH).float()

    def agree(self, states_TH: torch.Tensor, next_ids: torch.Tensor) -> torch.Tensor:
        """Whether each position's argmax is `next_ids`, or so close to it that rounding decides
        (T,), bool.

        Close: within 2 % of the distance from the mean logit to the largest.
        """
        logits_TV = self.logits(states_TH)
        top_T = logits_TV.max(dim=-1).values
        spread_T = top_T - logits_TV.mean(dim=-1)
        close_T = (
            logits_TV.gather(1, next_ids[:, None]).squeeze(1) > top_T - _TIE_TOLERANCE * spread_T
        )
        # Strictly close: where all logits are equal (states lost to zero), every token would be "at
        # the top".
        return close_T | ((logits_TV.argmax(dim=-1) == next_ids) & (spread_T > 0))


@dataclass
class LmHeadCheck:
    """Agreement of the states with the target's own next tokens, on one sample in
    `settings.check_every`.

    Two comparisons. `engine`: the token that this very request's forward pass chose greedily after
    the last position; exact on any data, so it always counts. `answers`: supervised positions
    against the answer's own tokens; exact only where the answer was generated greedily, so it is
    enforced for requests that say so and reported for all.
    """

    settings: StreamSettings
    head: LmHead
    engine: Agreement = field(default_factory=Agreement)
    answers: Agreement = field(default_factory=Agreement)
    greedy_answers: Agreement = field(default_factory=Agreement)

    def check(
        self,
        last_TH: torch.Tensor,
        *,
        token_ids: np.ndarray,
        loss_mask: np.ndarray,
        engine_token: int,
        greedy: bool | None,
    ) -> None:
        """Add one sample to the counts.

        Raises:
            StreamError: the run's agreement is below `min_lm_head_agreement`; states and target do
                not belong together.
        """
        # Position t predicts token t + 1; it is supervised if t + 1 is.
        places = np.flatnonzero(loss_mask[1:])
        if len(places) > _NUM_LM_HEAD_POSITIONS:
            places = places[np.linspace(0, len(places) - 1, _NUM_LM_HEAD_POSITIONS).astype(int)]
        rows = torch.from_numpy(np.append(places, len(token_ids) - 1))
        wanted = torch.from_numpy(np.append(token_ids[places + 1], engine_token).astype(np.int64))
        agreed = self.head.agree(last_TH[rows], wanted)
        self.engine.add(int(agreed[-1]), 1)
        self.answers.add(int(agreed[:-1].sum()), len(places))
        if greedy:
            self.greedy_answers.add(int(agreed[:-1].sum()), len(places))
        self._judge("the engine's own next tokens", self.engine, at_least=_NUM_BEFORE_VERDICT // 4)
        self._judge("greedy answers", self.greedy_answers, at_least=_NUM_BEFORE_VERDICT)

    def _judge(self, what: str, agreement: Agreement, *, at_least: int) -> None:
        limit = self.settings.min_lm_head_agreement
        if agreement.num_compared >= at_least and agreement.share < limit:
            raise StreamError(
                f"lm_head(norm(last layer)) does not agree with {what}: wrong layers, or "
                "another target's states",
                got=f"{agreement.num_agreed} of {agreement.num_compared} positions "
                f"({agreement.share:.2f})",
                expected=f"at least {limit:.2f}",
                fix="Compare the engine's model and layer ids with the recipe; see "
                "stream.min_lm_head_agreement.",
            )


def _load_tensors(target_path: Path, suffixes: tuple[str, ...]) -> dict[str, torch.Tensor]:
    """The tensors of a safetensors target whose names are, or end with, the given suffixes (layers'
    own excluded).
    """
    found: dict[str, torch.Tensor] = {}
    files = sorted(target_path.glob("*.safetensors"))
    if not files:
        raise TargetError("the target has no safetensors files", got=target_path)

    for file in files:
        with safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 - safe_open is no mapping
                suffix = next(
                    (s for s in suffixes if name == s or name.endswith(f"model.{s}")), None
                )
                if suffix is not None:
                    found[suffix] = tensors.get_tensor(name)

    if "norm.weight" not in found:
        raise TargetError(
            "the target has no final norm", got=target_path, expected="a tensor 'model.norm.weight'"
        )
    return found
