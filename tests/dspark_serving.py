"""A vLLM CPU engine as a plain subprocess, and completions of token ids, for the tests that compare served drafting."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from components.evaluation.greedy_answers import NUM_TOP_LOGPROBS, TopLogprobs
from components.serving import guard

# Safety nets: a slow machine takes minutes.
STARTUP_TIMEOUT_S = 900.0
REQUEST_TIMEOUT_S = 900.0
STOP_GRACE_S = 10.0
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
    target: Path, *, log: Path, dtype: str, speculative: dict[str, Any] | None = None, trace: Path | None = None
) -> Iterator[str]:
    """Serve `target` on a free port; yields the base URL and ends the engine on exit."""
    port = _free_port()
    # Few tokens per engine step, so that prompts are prefilled in chunks beside requests that draft.
    command = [
        sys.executable, "-m", "vllm.entrypoints.openai.api_server",
        "--model", str(target), "--served-model-name", MODEL, "--host", "127.0.0.1", "--port", str(port),
        "--dtype", dtype, "--enforce-eager", "--max-model-len", "512", "--max-num-seqs", "32",
        "--max-num-batched-tokens", "256",
    ]  # fmt: skip
    if speculative:
        command += ["--speculative-config", json.dumps(speculative), "--per-request-spec-decode-metrics", "summary"]
    environment = os.environ | {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_NUM_OF_RESERVED_CPU": "0"}
    if trace:
        environment["DSPARK_CPU_TRACE"] = str(trace)
    # Ends the engine with this process, even if that is killed.
    owner_file = log.with_suffix(".owner")
    guard.write_owner(owner_file, os.getpid())
    command = [sys.executable, "-I", str(guard.__file__), str(owner_file), str(STOP_GRACE_S), *command]
    with log.open("w") as output:
        process = subprocess.Popen(command, env=environment, stdout=output, stderr=output, start_new_session=True)
        try:
            _wait_until_ready(process, f"http://127.0.0.1:{port}", log)
            yield f"http://127.0.0.1:{port}"
        finally:
            _end(process)


def complete(
    url: str,
    prompts: Sequence[Sequence[int]],
    *,
    max_tokens: int | Sequence[int],
    temperatures: Sequence[float] | None = None,
    num_in_flight: int = 8,
    with_logprobs: bool = False,
) -> list[Completion]:
    """Complete token-id prompts; request i carries the id `request-<i>`. End tokens do not end a completion."""
    temperatures = temperatures or [0.0] * len(prompts)
    lengths = [max_tokens] * len(prompts) if isinstance(max_tokens, int) else max_tokens

    def one(index: int) -> Completion:
        body: dict[str, Any] = {
            "model": MODEL, "prompt": list(prompts[index]), "max_tokens": lengths[index], "ignore_eos": True,
            "temperature": temperatures[index], "return_token_ids": True,
        }  # fmt: skip
        if with_logprobs:
            # As ids: distinct tokens with the same text would fall together in one dictionary key.
            body |= {"logprobs": NUM_TOP_LOGPROBS, "return_tokens_as_token_ids": True}
        response = client.post("/v1/completions", json=body, headers={"X-Request-Id": f"request-{index}"})
        response.raise_for_status()
        return _parse(response.json(), with_logprobs=with_logprobs)

    # One client for all: making one per request costs more time than a tiny target needs for an answer.
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
            ids = [(int(token.removeprefix("token_id:")), float(logprob)) for token, logprob in top.items()]
            told.append(tuple(sorted(ids, key=lambda item: -item[1])))
    speculation = (answer.get("metrics") or {}).get("speculative_decoding")
    return Completion(tuple(choice["token_ids"]), tuple(told), speculation)


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def _wait_until_ready(process: subprocess.Popen[bytes], url: str, log: Path) -> None:
    deadline = time.monotonic() + STARTUP_TIMEOUT_S
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise RuntimeError(
                f"the engine ended with {process.returncode}:\n" + "\n".join(log.read_text().splitlines()[-60:])
            )
        try:
            if httpx.get(f"{url}/health", timeout=10).status_code == httpx.codes.OK:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.5)
    raise RuntimeError(f"no engine within {STARTUP_TIMEOUT_S} s:\n" + "\n".join(log.read_text().splitlines()[-60:]))


def _end(process: subprocess.Popen[bytes]) -> None:
    members = guard.session_members(process.pid)
    process.terminate()  # the guard ends the rest
    with suppress(subprocess.TimeoutExpired):
        process.wait(10 * STOP_GRACE_S)
    if process.poll() is None:
        guard.kill_all([process.pid, *members], signal.SIGKILL)
        process.wait()
