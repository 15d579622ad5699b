"""An offline reader of hidden states: the target's own states, computed in this process with
transformers.

It has the shape of the stream (`stream(requests)` yields samples with `states_TLH` and
`release()`), so training code can be tested without engines and a store.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from components.hidden_states.sample import SampleRequest


@dataclass
class OfflineSample:
    """A request and its states: the aux layers, then the last state before the final norm; [T, L +
    1, H].
    """

    request: SampleRequest
    states_TLH: torch.Tensor
    num_released: int = 0

    def release(self) -> None:
        """Count the release, so that a test can see that each sample is given back."""
        self.num_released += 1


class OfflineReader:
    """Runs the target on each request. Layer id N is the residual stream after layer N.

    `dtype` is that of the states; the stream's is bf16, the default.
    """

    def __init__(
        self,
        target_path: Path,
        *,
        aux_layer_ids: tuple[int, ...],
        dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        self._model = AutoModelForCausalLM.from_pretrained(
            str(target_path), dtype=torch.float32
        ).eval()
        self._aux_layer_ids = aux_layer_ids
        self._dtype = dtype
        self._last: torch.Tensor | None = None
        self._model.model.norm.register_forward_pre_hook(self._keep_last)
        self.samples: list[OfflineSample] = []

    def _keep_last(self, _module: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
        self._last = inputs[0]

    @torch.no_grad()
    def stream(self, requests: Iterable[SampleRequest]) -> Iterator[OfflineSample]:
        """Samples in the order of the requests."""
        for request in requests:
            token_ids = torch.from_numpy(request.token_ids.astype(np.int64))[None]
            output = self._model.model(token_ids, output_hidden_states=True)
            assert self._last is not None
            # transformers applies the final norm to its last state, the stream's last state is
            # before it.
            states = [*output.hidden_states[:-1], self._last]
            layers = [states[layer] for layer in self._aux_layer_ids] + [self._last]
            sample = OfflineSample(request, torch.stack(layers, dim=2)[0].to(self._dtype))
            self.samples.append(sample)
            yield sample


def random_requests(
    num: int, *, vocab_size: int, seed: int = 0, num_prompt: int = 6, max_answer: int = 30
) -> list[SampleRequest]:
    """Requests of random tokens: a prompt, then a supervised answer of varying length that repeats
    a short cycle.
    """
    rng = np.random.default_rng(seed)
    requests = []
    for index in range(num):
        prompt = rng.integers(0, vocab_size, num_prompt)
        cycle = rng.integers(0, vocab_size, 3)
        answer = np.resize(cycle, int(rng.integers(8, max_answer + 1)))
        token_ids = np.concatenate([prompt, answer]).astype(np.int32)
        loss_mask = np.arange(len(token_ids)) >= num_prompt
        requests.append(SampleRequest(index, f"sample-{index}", token_ids, loss_mask))
    return requests
