"""A vLLM CPU engine, and completions of token ids, for the tests that compare served drafting."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import httpx

from components.evaluation.outputs.greedy_answers import NUM_TOP_LOGPROBS, TopLogprobs
from components.serving.engines.command import EngineSpec
from components.serving.engines.engine import Engine
from components.settings import EngineSettings
from components.system.ports import free_port

# Safety nets: a slow machine takes minutes.
STARTUP_TIMEOUT_S = 900.0
REQUEST_TIMEOUT_S = 900.0
MODEL = "target"


@dataclass(frozen=True)
class Completion:
    """What came back for one prompt."""

    token_ids: tuple[int, ...]
    top: tuple[TopLogprobs, ...]
    """The best tokens at each position, where asked for."""
    speculation: dict[str, Any] | None
    """vLLM's own `speculative_decoding` metrics of the request."""


@contextmanager
def serve(
    target: Path,
    *,
    log: Path,
    dtype: Literal["float32", "bfloat16"],
    speculative: dict[str, Any] | None = None,
    trace: Path | None = None,
    num_cores: int | None = 1,
    environment: Mapping[str, str] | None = None,
) -> Iterator[str]:
    """Serve `target` on a free port; yields the base URL and ends the engine on exit.

    Matrices as small as a tiny target's are many times slower on two cores than on one: None takes
    all, for real ones.
    """
    arguments: tuple[str, ...] = ()
    if speculative:
        arguments = (
            "--speculative-config",
            json.dumps(speculative),
            "--per-request-spec-decode-metrics",
            "summary",
        )
    spec = EngineSpec(
        name="served",
        model_path=str(target),
        served_model_name=MODEL,
        port=free_port(),
        device="cpu",
        # Few tokens per engine step, so that prompts are prefilled in chunks beside requests that
        # draft.
        settings=EngineSettings(
            device="cpu",
            dtype=dtype,
            max_model_len=512,
            max_num_seqs=32,
            max_num_batched_tokens=256,
            kv_cache_gib=1,
            startup_timeout_s=STARTUP_TIMEOUT_S,
        ),
        extra_args=arguments,
        extra_env=dict(environment or {}) | ({"DSPARK_CPU_TRACE": str(trace)} if trace else {}),
        num_cores=num_cores,
    )
    with Engine.start(spec, log_path=log, fingerprint=None) as engine:
        yield engine.wait_ready().url


def complete(
    url: str,
    prompts: Sequence[Sequence[int]],
    *,
    max_tokens: int | Sequence[int],
    temperatures: Sequence[float] | None = None,
    num_in_flight: int = 8,
    with_logprobs: bool = False,
    seeds: Sequence[int] | None = None,
) -> list[Completion]:
    """Complete token-id prompts; request i carries the id `request-<i>`. End tokens do not end a
    completion.
    """
    temperatures = temperatures or [0.0] * len(prompts)
    lengths = [max_tokens] * len(prompts) if isinstance(max_tokens, int) else max_tokens

    def one(index: int) -> Completion:
        body: dict[str, Any] = {
            "model": MODEL,
            "prompt": list(prompts[index]),
            "max_tokens": lengths[index],
            "ignore_eos": True,
            "temperature": temperatures[index],
            "return_token_ids": True,
        }
        if seeds is not None:
            body["seed"] = seeds[index]
        if with_logprobs:
            # As ids: distinct tokens with the same text would fall together in one dictionary key.
            body |= {"logprobs": NUM_TOP_LOGPROBS, "return_tokens_as_token_ids": True}
        response = client.post(
            "/v1/completions", json=body, headers={"X-Request-Id": f"request-{index}"}
        )
        response.raise_for_status()
        return _parse(response.json(), with_logprobs=with_logprobs)

    # One client for all: making one per request costs more time than a tiny target needs for an
    # answer.
    limits = httpx.Limits(max_connections=num_in_flight)
    with (
        httpx.Client(base_url=url, timeout=REQUEST_TIMEOUT_S, limits=limits) as client,
        ThreadPoolExecutor(num_in_flight) as pool,
    ):
        return list(pool.map(one, range(len(prompts))))


def read_trace(path: Path) -> dict[int, list[dict[str, Any]]]:
    """Trace lines by the number of the request that `complete` sent."""
    rows: dict[int, list[dict[str, Any]]] = {}
    for line in path.read_text().splitlines():
        row = json.loads(line)
        rows.setdefault(int(row["request"].split("request-")[1].split("-")[0]), []).append(row)
    return rows


def _parse(answer: dict[str, Any], *, with_logprobs: bool) -> Completion:
    choice = answer["choices"][0]
    told = []
    if with_logprobs:
        for top in choice["logprobs"]["top_logprobs"]:
            ids = [
                (int(token.removeprefix("token_id:")), float(logprob))
                for token, logprob in top.items()
            ]
            told.append(tuple(sorted(ids, key=lambda item: -item[1])))
    speculation = (answer.get("metrics") or {}).get("speculative_decoding")
    return Completion(tuple(choice["token_ids"]), tuple(told), speculation)
