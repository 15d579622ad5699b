"""Rollouts through a real HAProxy: on small HTTP servers for every fault, on two vLLM engines for
the whole.
"""

from __future__ import annotations

import json
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from components.contracts import ArmEndpoint, CanaryReport, CanaryStep
from components.errors import ConfigError, RolloutError, SplitterError
from components.reporting.plots import canary_weights
from components.services.haproxy import render_haproxy_config
from components.serving.engines.command import EngineSpec
from components.serving.engines.engine import Engine, start_engines
from components.serving.rollout.rollout import run_canary
from components.serving.rollout.splitter import Splitter
from components.serving.rollout.traffic import RequestRecord, replay
from components.settings import CanarySettings, EngineSettings, ServicesSettings
from components.system import guard
from components.system.ports import free_port

pytestmark = pytest.mark.integration

PROMPTS = [[{"role": "user", "content": f"prompt number {number}"}] for number in range(7)]
SETTINGS = CanarySettings(
    step_s=1.0, max_step_s=20, requests_in_flight=4, max_tokens=8, min_requests_for_statistics=10
)
# Longer than any test waits: what ends such a step is what the test does to it.
ENDLESS = {"step_s": 3600.0, "max_step_s": 3600.0}
PNG_MAGIC = b"\x89PNG"


@dataclass
class SmallEngine:
    """An HTTP server that answers as an engine does, with acceptance, delay and faults to
    choose.
    """

    num_accepted: int = 4
    delay_s: float = 0.01
    fails_after: int | None = None
    model: str = "m"
    num_served: int = 0
    server: ThreadingHTTPServer = field(init=False)

    def __enter__(self) -> SmallEngine:
        engine = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                self.reply(200, {})

            def do_POST(self) -> None:
                self.rfile.read(int(self.headers["content-length"]))
                time.sleep(engine.delay_s)
                engine.num_served += 1
                if engine.fails_after is not None and engine.num_served > engine.fails_after:
                    self.reply(500, {"error": "out of order"})
                    return
                metrics = {"num_spec_steps": 4, "num_accepted_draft_tokens": engine.num_accepted}
                usage = {"completion_tokens": 5 + engine.num_accepted}
                choice = {
                    "token_ids": list(range(usage["completion_tokens"])),
                    "finish_reason": "length",
                }
                told = {
                    "choices": [choice],
                    "usage": usage,
                    "metrics": {"speculative_decoding": metrics},
                }
                self.reply(200, told)

            def reply(self, status: int, body: dict[str, Any]) -> None:
                payload = json.dumps(body).encode()
                self.send_response(status)
                self.send_header("content-length", str(len(payload)))
                self.end_headers()
                self.wfile.write(payload)

            def log_message(self, *_: object) -> None:
                pass

        class Server(ThreadingHTTPServer):
            daemon_threads = True

            def handle_error(self, request: Any, client_address: Any) -> None:
                pass  # HAProxy closes health-check connections early

        self.server = Server(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.server.shutdown()
        self.server.server_close()

    def endpoint(self, arm: str) -> ArmEndpoint:
        return ArmEndpoint(
            arm=arm, url=f"http://127.0.0.1:{self.server.server_address[1]}", model=self.model
        )


@pytest.fixture
def splitter(tmp_path: Path) -> Iterator[Splitter]:
    services = ServicesSettings(haproxy_port=free_port(), haproxy_stats_port=free_port())
    config, socket_path = tmp_path / "haproxy.cfg", tmp_path / "haproxy.sock"
    config.write_text(render_haproxy_config(services, socket_path=socket_path))
    with (tmp_path / "haproxy.log").open("wb") as log:
        haproxy = subprocess.Popen(["haproxy", "-db", "-f", str(config)], stdout=log, stderr=log)
    try:
        splitter = Splitter(socket_path, f"http://127.0.0.1:{services.haproxy_port}")
        wait_until(lambda: haproxy_answers(splitter), limit_s=60)
        yield splitter
    finally:
        haproxy.kill()
        haproxy.wait()


def haproxy_answers(splitter: Splitter) -> bool:
    try:
        return bool(splitter.state())
    except SplitterError:
        return False


def wait_until(condition: Any, *, limit_s: float) -> None:
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.05)


@contextmanager
def once(condition: Callable[[], bool], action: Callable[[], object]) -> Iterator[None]:
    """In a thread beside the body: `action`, as soon as `condition` holds; given up where the body
    ends before.
    """
    is_over = threading.Event()

    def watch() -> None:
        while not is_over.wait(0.05):
            if condition():
                action()
                return

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield
    finally:
        is_over.set()
        watcher.join()


def roll_out(
    splitter: Splitter, candidate: ArmEndpoint, baseline: ArmEndpoint, **changes: Any
) -> CanaryReport:
    arguments: dict[str, Any] = {
        "baseline_kind": "no_draft",
        "candidate_digest": "c" * 64,
        "prompts": PROMPTS,
        "settings": SETTINGS,
        "gate_acceptance_length": 2.0,
        "model": "m",
    }
    return run_canary(
        splitter=splitter, candidate=candidate, baseline=baseline, **(arguments | changes)
    )


def ask(splitter: Splitter, *, num_requests: int = 20) -> list[RequestRecord]:
    return replay(
        splitter.frontend_url,
        "m",
        PROMPTS,
        requests_in_flight=2,
        max_tokens=8,
        num_requests=num_requests,
    )


def assert_all_on_baseline(splitter: Splitter) -> None:
    assert splitter.state()["candidate"].weight == 0
    assert {(record.slot, record.ok) for record in ask(splitter)} == {("baseline", True)}


def test_healthy_candidate_is_promoted_and_serves(splitter: Splitter, tmp_path: Path) -> None:
    seen: list[CanaryStep] = []
    with SmallEngine() as candidate, SmallEngine() as baseline:
        report = roll_out(
            splitter,
            candidate.endpoint("candidate"),
            baseline.endpoint("baseline"),
            on_step=seen.append,
        )
        assert report.promoted and report.rolled_back_to is None
        assert [step.weight_percent for step in report.steps] == [1, 5, 25, 50, 100]
        assert list(report.steps) == seen
        for step in report.steps:
            num_requests = sum(step.num_requests.values())
            expected = step.weight_percent / 100 * num_requests
            assert step.num_requests["candidate"] == pytest.approx(
                expected, abs=2 + 0.02 * num_requests
            )
            assert sum(step.num_errors.values()) == 0
        assert report.steps[-1].acceptance_length == 2.0
        assert {(record.slot, record.ok) for record in ask(splitter)} == {("candidate", True)}
    assert canary_weights(report, tmp_path / "canary.png").read_bytes().startswith(PNG_MAGIC)


def test_outputs_that_are_not_the_targets_own_end_it(splitter: Splitter) -> None:
    """Whoever checks outputs sees each answer with its prompt and its token ids, and its word ends
    the rollout.
    """
    seen: set[tuple[int, tuple[int, ...]]] = set()

    def check(records: Sequence[RequestRecord]) -> str | None:
        mine = [record for record in records if record.slot == "candidate"]
        seen.update((record.prompt, record.token_ids) for record in mine)
        return "outputs part from the target's own" if len(mine) >= 3 else None

    with SmallEngine() as candidate, SmallEngine() as baseline:
        report = roll_out(
            splitter,
            candidate.endpoint("candidate"),
            baseline.endpoint("baseline"),
            check_outputs=check,
        )
        assert not report.promoted and report.rolled_back_to == "no_draft"
        assert (
            not report.steps[-1].healthy and "outputs part from the target's own" in report.reason
        )
        assert_all_on_baseline(splitter)
    assert {prompt for prompt, _ in seen} <= set(range(len(PROMPTS))) and all(
        tokens for _, tokens in seen
    )


def test_next_rollout_moves_the_champion_to_the_baseline_without_a_lost_request(
    splitter: Splitter,
) -> None:
    with SmallEngine() as champion, SmallEngine() as first, SmallEngine() as challenger:
        settings = SETTINGS.model_copy(update={"weights_percent": (50, 100)})
        roll_out(
            splitter, champion.endpoint("candidate"), first.endpoint("baseline"), settings=settings
        )
        background: list[RequestRecord] = []
        is_over = threading.Event()
        client = threading.Thread(
            target=lambda: background.extend(
                replay(
                    splitter.frontend_url, "m", PROMPTS, requests_in_flight=2, max_tokens=8,
                    watch=lambda records, elapsed_s: is_over.is_set(),
                )
            )
        )  # fmt: skip
        client.start()
        try:
            report = roll_out(
                splitter, challenger.endpoint("candidate"), champion.endpoint("baseline"),
                baseline_kind="champion", settings=settings,
            )  # fmt: skip
        finally:
            is_over.set()
            client.join()
        assert report.promoted
        assert len(background) > 20
        assert [record.error for record in background if not record.ok] == []


def test_candidate_that_dies_costs_at_most_the_requests_it_had(splitter: Splitter) -> None:
    """Whatever HAProxy can still hand to the baseline, it does; a request that lay in the dying
    engine's own queue is lost with it, and ends the rollout too.
    """
    settings = SETTINGS.model_copy(update={"weights_percent": (50, 100), **ENDLESS})
    with SmallEngine() as candidate, SmallEngine() as baseline:
        with once(lambda: candidate.num_served >= 20, candidate.server.server_close):
            report = roll_out(
                splitter,
                candidate.endpoint("candidate"),
                baseline.endpoint("baseline"),
                settings=settings,
            )
        assert not report.promoted and report.rolled_back_to == "no_draft"
        assert (
            "finds the candidate DOWN" in report.reason
            or "candidate requests failed" in report.reason
        )
        num_errors = report.steps[0].num_errors
        assert num_errors["baseline"] == 0
        assert num_errors["candidate"] <= settings.requests_in_flight
        assert_all_on_baseline(splitter)


def test_failing_candidate_is_rolled_back(splitter: Splitter) -> None:
    with SmallEngine(fails_after=5) as candidate, SmallEngine() as baseline:
        report = roll_out(splitter, candidate.endpoint("candidate"), baseline.endpoint("baseline"))
        assert not report.promoted and report.rolled_back_to == "no_draft"
        assert "HTTP 500" in report.reason
        assert not report.steps[-1].healthy and all(step.healthy for step in report.steps[:-1])
        assert_all_on_baseline(splitter)


def test_candidate_that_accepts_less_than_at_the_gate(splitter: Splitter, tmp_path: Path) -> None:
    with SmallEngine(num_accepted=2) as candidate, SmallEngine() as baseline:
        report = roll_out(
            splitter,
            candidate.endpoint("candidate"),
            baseline.endpoint("baseline"),
            baseline_kind="champion",
        )
        assert report.rolled_back_to == "champion"
        assert "acceptance length 1.500, at least 1.600" in report.reason
        assert_all_on_baseline(splitter)
    assert canary_weights(report, tmp_path / "canary.png").exists()


def test_slow_candidate(splitter: Splitter) -> None:
    with SmallEngine(delay_s=0.5) as candidate, SmallEngine(delay_s=0.02) as baseline:
        settings = SETTINGS.model_copy(
            update={
                "weights_percent": (50, 100),
                "min_requests": SETTINGS.min_requests_for_statistics,
                "max_step_s": 300,
            }
        )
        report = roll_out(
            splitter,
            candidate.endpoint("candidate"),
            baseline.endpoint("baseline"),
            settings=settings,
        )
        assert not report.promoted and "p95 latency" in report.reason
        assert_all_on_baseline(splitter)


def test_undecided_step_is_rolled_back(splitter: Splitter) -> None:
    settings = SETTINGS.model_copy(update={"min_requests": 10**6, "max_step_s": 2.0})
    with SmallEngine() as candidate, SmallEngine() as baseline:
        report = roll_out(
            splitter,
            candidate.endpoint("candidate"),
            baseline.endpoint("baseline"),
            settings=settings,
        )
        assert not report.promoted and "undecided after 2 s" in report.reason
        assert_all_on_baseline(splitter)


@pytest.mark.parametrize(
    "problem", [KeyboardInterrupt(), ValueError("a bug"), SplitterError("gone")]
)
def test_whatever_is_raised_takes_the_candidate_out(
    splitter: Splitter, problem: BaseException
) -> None:
    def on_step(step: CanaryStep) -> None:
        if step.weight_percent == 25:
            raise problem

    with SmallEngine() as candidate, SmallEngine() as baseline:
        expected = RolloutError if isinstance(problem, SplitterError) else type(problem)
        with pytest.raises(expected):
            roll_out(
                splitter,
                candidate.endpoint("candidate"),
                baseline.endpoint("baseline"),
                on_step=on_step,
            )
        assert_all_on_baseline(splitter)


def test_ctrl_c_in_the_middle_of_a_step(splitter: Splitter) -> None:
    settings = SETTINGS.model_copy(update={"weights_percent": (50, 100), **ENDLESS})
    with SmallEngine() as candidate, SmallEngine() as baseline:
        interrupted = once(
            lambda: candidate.num_served >= 20, lambda: signal.raise_signal(signal.SIGINT)
        )
        with pytest.raises(KeyboardInterrupt), interrupted:
            roll_out(
                splitter,
                candidate.endpoint("candidate"),
                baseline.endpoint("baseline"),
                settings=settings,
            )
        assert_all_on_baseline(splitter)


def test_candidate_that_is_not_there_never_gets_traffic(splitter: Splitter) -> None:
    gone = ArmEndpoint(arm="candidate", url=f"http://127.0.0.1:{free_port()}", model="m")
    with SmallEngine() as baseline:
        with pytest.raises(SplitterError, match="did not pass HAProxy's health check"):
            roll_out(splitter, gone, baseline.endpoint("baseline"))
        assert_all_on_baseline(splitter)


def test_a_baseline_that_is_not_there_leaves_the_champion_in_service(splitter: Splitter) -> None:
    settings = SETTINGS.model_copy(update={"weights_percent": (100,)})
    gone = ArmEndpoint(arm="baseline", url=f"http://127.0.0.1:{free_port()}", model="m")
    with SmallEngine() as champion, SmallEngine() as first, SmallEngine() as challenger:
        roll_out(
            splitter, champion.endpoint("candidate"), first.endpoint("baseline"), settings=settings
        )
        with pytest.raises(SplitterError):
            roll_out(splitter, challenger.endpoint("candidate"), gone, settings=settings)
        assert {(record.slot, record.ok) for record in ask(splitter)} == {("candidate", True)}
        assert challenger.num_served == 0


def test_arms_with_different_model_names(splitter: Splitter) -> None:
    with SmallEngine(model="other") as candidate, SmallEngine() as baseline:
        with pytest.raises(RolloutError, match="one model name"):
            roll_out(splitter, candidate.endpoint("candidate"), baseline.endpoint("baseline"))
        settings = SETTINGS.model_copy(update={"weights_percent": (1, 50)})
        with pytest.raises(ConfigError, match="end at 100"):
            roll_out(
                splitter,
                baseline.endpoint("candidate"),
                baseline.endpoint("baseline"),
                settings=settings,
            )


ENGINE_SETTINGS = EngineSettings(
    device="cpu",
    max_model_len=256,
    max_num_seqs=8,
    max_num_batched_tokens=256,
    kv_cache_gib=0.1,
    startup_timeout_s=900,
)


@pytest.mark.long
def test_real_engines_promotion_and_then_a_killed_candidate(
    splitter: Splitter, tiny_target: Path, tmp_path: Path
) -> None:
    specs = [
        EngineSpec(
            name=name, model_path=str(tiny_target), served_model_name="m", settings=ENGINE_SETTINGS,
            port=port, device="cpu", num_cores=1,
        )
        for name, port in (("candidate", free_port()), ("baseline", free_port()))
    ]  # fmt: skip
    with start_engines(specs, log_dir=tmp_path, fingerprint=None) as (candidate, baseline):
        settings = SETTINGS.model_copy(
            update={"max_step_s": 600.0, "max_latency_ratio": 1000.0, "min_draft_coverage": 0.0}
        )
        arms = {
            "candidate": candidate.endpoint("candidate"),
            "baseline": baseline.endpoint("baseline"),
        }
        report = roll_out(splitter, **arms, settings=settings, gate_acceptance_length=None)
        assert report.promoted, report.reason
        assert {record.slot for record in ask(splitter, num_requests=4)} == {"candidate"}

        settings = settings.model_copy(update={"weights_percent": (50, 100), **ENDLESS})
        before = num_sent_to_candidate(splitter)
        with once(
            lambda: num_sent_to_candidate(splitter) > before + 10, lambda: kill_engine(candidate)
        ):
            report = roll_out(splitter, **arms, settings=settings, gate_acceptance_length=None)
        assert not report.promoted and report.rolled_back_to == "no_draft"
        assert_all_on_baseline(splitter)


def num_sent_to_candidate(splitter: Splitter) -> int:
    return splitter.state()["candidate"].num_total


def kill_engine(engine: Engine) -> None:
    for pid in guard.session_members(engine.identity.pid):
        guard.kill_all([pid], signal.SIGKILL)
