"""What a plain engine serves and a drafting one refuses or answers wrongly: one table per engine
version and method.

vLLM 0.32 refuses `min_p` and `logit_bias` with a drafter loaded (HTTP 400,
`SamplingParams._validate_spec_decode`); which requests a release costs is measured, not read.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from components.contracts import (
    FEATURES,
    ArmEndpoint,
    CompatibilityRow,
    CompatibilityTable,
    Progress,
    RequestFeature,
    RuleResult,
    Served,
    Verdict,
    now_utc,
)
from components.errors import ConfigError, EvaluationError
from components.evaluation.requests.probes import (
    Probe,
    ProbedEngine,
    baseline,
    probes,
    text_of,
)
from components.settings import GateSettings

RULE = "requests served"
PROGRESS_EVERY_S = 2.0

Result = tuple[Served, str]


@dataclass(frozen=True)
class Probed:
    """What one engine is, and what became of each kind of request."""

    version: str
    max_model_len: int
    results: Mapping[RequestFeature, Result]


def compatibility_of(
    plain: ArmEndpoint,
    drafting: ArmEndpoint,
    *,
    method: str,
    device: str,
    folder: Path,
    timeout_s: float = 120,
    progress: Progress | None = None,
    transport: httpx.BaseTransport | None = None,
) -> CompatibilityTable:
    """The table of this engine version, drafting method and device: from `folder`, or measured now
    and kept there.

    A file that does not hold every kind of request of today's probes is measured anew.

    Args:
        plain: an engine without any draft.
        drafting: one with, of the same version, target and limits.
        method: `CheckpointRef.algorithm`, or a rival's method.
        device: cpu or cuda, for the table's name.
        folder: of the tables, e.g. `<state>/compatibility`.
        timeout_s: bound on each request.
        progress: told every second or so how many requests of both engines are answered.
        transport: for tests; None opens real connections.

    Raises:
        EvaluationError: as `measure_compatibility`.
    """
    with _client(plain, timeout_s, transport) as client:
        version = _version(client, plain)
    path = folder / f"{re.sub(r'[^A-Za-z0-9._-]', '_', version)}-{method}-{device}.json"
    kept = _kept(path)
    if kept is not None:
        return kept

    table = measure_compatibility(
        plain,
        drafting,
        method=method,
        device=device,
        timeout_s=timeout_s,
        progress=progress,
        transport=transport,
    )

    table.write(path)
    return table


def measure_compatibility(
    plain: ArmEndpoint,
    drafting: ArmEndpoint,
    *,
    method: str,
    device: str,
    timeout_s: float = 120,
    progress: Progress | None = None,
    transport: httpx.BaseTransport | None = None,
) -> CompatibilityTable:
    """Send every kind of request to both engines, each engine one at a time. Arguments as
    `compatibility_of`.

    Raises:
        EvaluationError: an engine does not answer, or ends at a request, which is named; the two
            are of different versions or limits; a plain chat request is not served.
    """
    answered: list[RequestFeature] = []

    def probe(endpoint: ArmEndpoint) -> Probed:
        with _client(endpoint, timeout_s, transport) as client:
            version = _version(client, endpoint)
            engine, found = _probe_all(client, endpoint, answered)
            return Probed(version, engine.max_model_len, found)

    # Nothing is timed, so both engines are asked at once.
    with ThreadPoolExecutor(max_workers=2, thread_name_prefix="requests") as pool:
        asked = [pool.submit(probe, endpoint) for endpoint in (plain, drafting)]
        while wait(asked, timeout=PROGRESS_EVERY_S).not_done:
            if progress is not None:
                progress("requests answered", len(answered), 2 * len(FEATURES))
    told = [one.result() for one in asked]
    versions, lengths = {one.version for one in told}, {one.max_model_len for one in told}
    if len(versions) > 1 or len(lengths) > 1:
        raise EvaluationError(
            "the plain and the drafting engine differ in more than drafting",
            got=f"versions {', '.join(sorted(versions))}; context lengths "
            f"{', '.join(map(str, sorted(lengths)))}",
        )
    rows = [_row(feature, *(one.results[feature] for one in told)) for feature in FEATURES]
    return CompatibilityTable(
        engine_version=versions.pop(),
        method=method,
        device=device,
        model=plain.model,
        rows=tuple(rows),
        created_at=now_utc(),
    )


def compatibility_rule(
    table: CompatibilityTable | None, settings: GateSettings
) -> RuleResult | None:
    """Requests of `gate.required_requests` that the plain engine serves are served by the drafting
    one.

    Others that are lost are told in the detail. What the plain engine itself does not serve is no
    loss. None where nothing is required and nothing was measured; inconclusive where something is
    required and nothing was measured.
    """
    required = settings.required_requests
    if table is None:
        if not required:
            return None
        return RuleResult(
            rule=RULE, verdict=Verdict.INCONCLUSIVE, value=None, threshold=0, detail="not measured"
        )

    lost = [row for row in table.rows if row.is_lost]
    binding = [row for row in lost if row.feature in required]
    unknown = [name for name in required if all(row.feature != name for row in table.rows)]
    others = [row for row in lost if row.feature not in required]
    words = [f"with a drafter {row.drafting}: {row.feature} ({row.detail})" for row in binding]
    words += [f"not measured: {', '.join(unknown)}"] if unknown else []
    words += ["all required requests are served"] if not words else []

    words += (
        [f"also lost, not required: {', '.join(row.feature for row in others)}"] if others else []
    )
    verdict = Verdict.FAIL if binding else Verdict.INCONCLUSIVE if unknown else Verdict.PASS
    return RuleResult(
        rule=RULE, verdict=verdict, value=len(binding), threshold=0, detail="; ".join(words)
    )


def _kept(path: Path) -> CompatibilityTable | None:
    if not path.is_file():
        return None
    try:
        table = CompatibilityTable.read(path)
    except ConfigError:  # of an older program
        return None
    return table if tuple(row.feature for row in table.rows) == FEATURES else None


def _probe_all(
    client: httpx.Client,
    endpoint: ArmEndpoint,
    answered: list[RequestFeature],
) -> tuple[ProbedEngine, dict[RequestFeature, Result]]:
    first = baseline(endpoint.model)
    status, body = _send(client, endpoint, first)
    if status != httpx.codes.OK:
        raise EvaluationError(
            f"arm '{endpoint.arm}': a plain chat request is not served",
            got=f"HTTP {status}: {_refusal(body)}",
        )

    engine = ProbedEngine(endpoint.model, _max_model_len(client, endpoint), text_of(body))
    found = {}
    for probe in (first, *probes(engine)):
        found[probe.feature] = _result(probe, *_send(client, endpoint, probe))
        answered.append(probe.feature)

    return engine, found


def _result(probe: Probe, status: int, body: Any) -> Result:
    if probe.check is None:
        if status == httpx.codes.BAD_REQUEST:
            return Served.OK, ""
        return Served.WRONG, f"HTTP {status}; HTTP 400 is right"
    if status != httpx.codes.OK:
        return Served.REFUSED, f"HTTP {status}: {_refusal(body)}"
    try:
        problem = probe.check(body)
    except (KeyError, IndexError, TypeError) as error:
        problem = f"not what was asked for: {type(error).__name__} {error}"
    return (Served.OK, "") if problem is None else (Served.WRONG, problem)


def _row(feature: RequestFeature, plain: Result, drafting: Result) -> CompatibilityRow:
    words = (
        [drafting[1]]
        if plain[1] == drafting[1]
        else [f"plain: {plain[1]}" if plain[1] else "", drafting[1]]
    )
    return CompatibilityRow(
        feature=feature,
        plain=plain[0],
        drafting=drafting[0],
        detail="; ".join(word for word in words if word),
    )


def _client(
    endpoint: ArmEndpoint, timeout_s: float, transport: httpx.BaseTransport | None
) -> httpx.Client:
    return httpx.Client(
        base_url=endpoint.url.rstrip("/"), timeout=timeout_s, transport=transport, trust_env=False
    )


def _send(client: httpx.Client, endpoint: ArmEndpoint, probe: Probe) -> tuple[int, Any]:
    """Status and body; a streamed answer's chunks are put together as `read_stream` says."""
    try:
        response = client.post(probe.path, json=dict(probe.payload))
    except httpx.HTTPError as error:
        raise EvaluationError(
            f"arm '{endpoint.arm}': the engine gave no answer to a request with {probe.feature}",
            got=f"{type(error).__name__} at {endpoint.url}",
            fix="Look at the end of the engine's log: a request that ends an engine must not "
            "reach it.",
        ) from None

    if response.is_server_error and not _is_alive(client):
        raise EvaluationError(
            f"arm '{endpoint.arm}': the engine ended at a request with {probe.feature}",
            got=f"HTTP {response.status_code}: {' '.join(response.text.split())[:200]}",
            fix="Look at the end of the engine's log: a request that ends an engine must not "
            "reach it.",
        )
    if response.is_success and probe.payload.get("stream"):
        return response.status_code, read_stream(response.text)

    try:
        return response.status_code, response.json()
    except ValueError:
        return response.status_code, {"message": response.text}


def _is_alive(client: httpx.Client) -> bool:
    try:
        return client.get("/health").is_success
    except httpx.HTTPError:
        return False


def read_stream(text: str) -> dict[str, Any]:
    """Server-sent events of a chat completion as one body, with the usage and whether the end was
    marked.
    """
    events = [line[5:].strip() for line in text.splitlines() if line.startswith("data:")]
    chunks = [json.loads(event) for event in events if event != "[DONE]"]
    pieces = [
        choice["delta"].get("content") or "" for chunk in chunks for choice in chunk["choices"]
    ]
    return {
        "choices": [{"message": {"content": "".join(pieces)}}],
        "usage": chunks[-1].get("usage") if chunks else None,
        "is_done": bool(events) and events[-1] == "[DONE]",
    }


def _version(client: httpx.Client, endpoint: ArmEndpoint) -> str:
    return str(_told(client, endpoint, "/version")["version"])


def _max_model_len(client: httpx.Client, endpoint: ArmEndpoint) -> int:
    models = {one["id"]: one for one in _told(client, endpoint, "/v1/models")["data"]}
    if endpoint.model not in models:
        raise EvaluationError(
            f"arm '{endpoint.arm}': the engine serves another model",
            got=", ".join(models),
            expected=endpoint.model,
        )
    return int(models[endpoint.model]["max_model_len"])


def _told(client: httpx.Client, endpoint: ArmEndpoint, path: str) -> dict[str, Any]:
    try:
        response = client.get(path)
        response.raise_for_status()
        told = response.json()
    except (httpx.HTTPError, ValueError) as error:
        raise EvaluationError(
            f"arm '{endpoint.arm}': the engine does not tell {path}",
            got=f"{type(error).__name__} at {endpoint.url}",
        ) from None

    if not isinstance(told, dict):
        raise EvaluationError(
            f"arm '{endpoint.arm}': the engine's {path} is not what vLLM sends", got=told
        )
    return told


def _refusal(body: Any) -> str:
    told = body.get("error", body) if isinstance(body, dict) else body
    message = told.get("message", told) if isinstance(told, dict) else told
    return " ".join(str(message).split())[:160]
