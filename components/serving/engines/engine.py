"""One vLLM engine as a supervised process: start, wait until it answers, stop with nothing left
behind.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import re
import signal
import subprocess
import sys
import time
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

import httpx

from components.contracts import (
    FINGERPRINT_FILE,
    ArmEndpoint,
    CheckpointRef,
    Progress,
    TargetFingerprint,
)
from components.errors import EngineError, FingerprintMismatchError, PortInUseError
from components.serving.engines.command import (
    HOST,
    NOT_INHERITED,
    EngineSpec,
    engine_command,
    engine_environment,
)
from components.system import guard
from components.system.ports import free_port, is_free

STOP_GRACE_S = 10.0
"""Time between SIGTERM and SIGKILL for an engine."""

READY_POLL_S = 0.25
PROGRESS_EVERY_S = 4.0
NUM_ERROR_LINES = 4
MAX_ERROR_CHARS = 240

_ERROR_LINE = re.compile(
    r"(\w*(Error|Exception|Interrupt)\b.*:|\bERROR\b|\bFATAL\b|error: |Killed|out of memory)"
)
_LOG_PREFIX = re.compile(
    r"^(\([^)]*\) *)*((ERROR|WARNING|INFO|CRITICAL) [\d-]+ [\d:]+ \[[^\]]*\] *)?"
)
_EMPTY_OF_NEWS = re.compile(
    r"(Engine core initialization failed|See root cause above|Traceback|^\s*raise |^\s*File )"
)

_running: weakref.WeakSet[Engine] = weakref.WeakSet()


@dataclass(frozen=True, kw_only=True)
class EngineIdentity:
    """What another process needs to find and end an engine: its guard's pid and that pid's start
    time.
    """

    pid: int
    start_ticks: int


class Engine:
    """A running engine. Use `Engine.start`, then `wait_ready`; `stop` or leave the `with` block to
    end it.

    The engine ends with its owner (the calling process, or `owner_pid`), however that ends.
    """

    def __init__(
        self, spec: EngineSpec, process: subprocess.Popen[bytes], *, log_path: Path
    ) -> None:
        self.spec = spec
        self.log_path = log_path
        self.started_at = time.monotonic()
        self._process = process
        self._was_stopped = False
        _running.add(self)

    @classmethod
    def start(
        cls,
        spec: EngineSpec,
        *,
        log_path: Path,
        fingerprint: TargetFingerprint | None,
        allow_unbound: bool = False,
        owner_pid: int | None = None,
    ) -> Self:
        """Start the engine and return at once.

        Args:
            spec: what to start.
            log_path: file that gets the engine's output (replaced).
            fingerprint: of the target at `spec.model_path`; a drafter must carry the same.
            allow_unbound: serve a drafter bound to another target, to measure it; never for
                traffic.
            owner_pid: process with whose end the engine ends; None is this process.

        Raises:
            FingerprintMismatchError: the drafter is bound to another target.
            PortInUseError: `spec.port` is taken.
            ConfigError: the arguments ask for lossy speculation.
        """
        if spec.checkpoint is not None and not allow_unbound:
            check_binding(spec.checkpoint, fingerprint)
        command = engine_command(spec)
        check_port_free(spec.port, name=spec.name)
        environment = {key: value for key, value in os.environ.items() if key not in NOT_INHERITED}
        process = _start_guarded(
            command,
            environment | engine_environment(spec),
            log_path=log_path,
            owner_pid=owner_pid or os.getpid(),
        )
        return cls(spec, process, log_path=log_path)

    @property
    def url(self) -> str:
        """Base URL of the engine, without /v1."""
        return self.spec.url

    @property
    def identity(self) -> EngineIdentity:
        """How another process finds this engine, for `stop_engine`.

        Raises:
            EngineError: the engine has ended.
        """
        start_ticks = guard.process_start(self._process.pid)
        if start_ticks is None:
            raise EngineError(f"engine '{self.spec.name}' is not running", got=self._ending())
        return EngineIdentity(pid=self._process.pid, start_ticks=start_ticks)

    def endpoint(self, arm: str) -> ArmEndpoint:
        """This engine as the arm `arm` of a measurement or a rollout."""
        checkpoint = self.spec.checkpoint
        return ArmEndpoint(
            arm=arm,
            url=self.url,
            model=self.spec.served_model_name,
            checkpoint_digest=checkpoint.digest if checkpoint else None,
            num_draft_tokens=self.spec.num_draft_tokens,
            rival=self.spec.rival,
        )

    def is_ready(self) -> bool:
        """Whether it answers /health now."""
        with httpx.Client(timeout=1.0) as client:
            return self._answers(client)

    def is_alive(self) -> bool:
        """Whether the engine's process runs (it may not answer yet)."""
        return self._process.poll() is None

    def wait_ended(self, timeout_s: float) -> bool:
        """Whether the engine's process ends within `timeout_s`."""
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return False
        return True

    def peak_memory_bytes(self) -> int:
        """Largest resident set so far, summed over the engine's processes, as the kernel kept it
        (VmHWM).

        Each process' peak counts in full, pages shared between them once each. It knows nothing of
        a GPU's memory.

        Raises:
            EngineError: the engine has ended.
        """
        return sum(
            guard.peak_resident_bytes(pid) for pid in guard.session_members(self.identity.pid)
        )

    def wait_ready(self, *, progress: Progress | None = None) -> Self:
        """Wait until the engine answers /health, at most `settings.startup_timeout_s` from its
        start.

        Raises:
            EngineError: it died or is late; the telling lines of its log are in the message. It is
                stopped then.
        """
        timeout_s = self.spec.settings.startup_timeout_s
        next_word_s = PROGRESS_EVERY_S
        with httpx.Client(timeout=2.0) as client:
            while not self._answers(client):
                waited_s = time.monotonic() - self.started_at
                if not self.is_alive():
                    raise self._failure("ended before it was ready", got=self._ending())
                if waited_s > timeout_s:
                    raise self._failure(
                        f"was not ready in {timeout_s:g} s", got=f"{waited_s:.0f} s"
                    )
                if progress is not None and waited_s >= next_word_s:
                    progress(f"starting engine {self.spec.name}", int(waited_s), int(timeout_s))
                    next_word_s = waited_s + PROGRESS_EVERY_S
                time.sleep(READY_POLL_S)

        return self

    def stop(self) -> None:
        """End the engine and every process it started. Safe to call twice."""
        self._was_stopped = True
        _stop_session(self._process)
        _running.discard(self)

    def hand_over(self, owner_pid: int) -> EngineIdentity:
        """Let the engine live on with another process, e.g. the services' supervisor; `stop_engine`
        ends it there.

        Raises:
            EngineError: the engine or the new owner is gone.
        """
        identity = self.identity
        _own(_owner_file(self.log_path), owner_pid)
        _running.discard(self)
        return identity

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.stop()

    def _answers(self, client: httpx.Client) -> bool:
        try:
            return client.get(f"{self.url}/health").status_code == httpx.codes.OK
        except httpx.TransportError:
            return False

    def _ending(self) -> str:
        if self._was_stopped:
            return "stopped"
        code = self._process.poll()
        return "running" if code is None else f"exit code {code}"

    def _failure(self, problem: str, *, got: str) -> EngineError:
        self.stop()
        lines = telling_lines(self.log_path)
        return EngineError(
            f"engine '{self.spec.name}' on port {self.spec.port} {problem}",
            got=" | ".join([got, *lines]),
            fix=f"Its log is {self.log_path}.",
        )


@contextlib.contextmanager
def start_engines(
    specs: Sequence[EngineSpec],
    *,
    log_dir: Path,
    fingerprint: TargetFingerprint | None,
    allow_unbound: bool = False,
    progress: Progress | None = None,
) -> Iterator[list[Engine]]:
    """Start several engines at once, wait for all, and stop all at the end of the block.

    Args:
        specs: engines with distinct ports and names; logs go to `<log_dir>/<name>.log`.
        log_dir: folder for the logs.
        fingerprint: of the target all of them serve.
        allow_unbound: as in `Engine.start`.
        progress: called while waiting.

    Raises:
        As `Engine.start` and `Engine.wait_ready`; engines started so far are stopped then.
    """
    with contextlib.ExitStack() as stack:
        engines = [
            stack.enter_context(
                Engine.start(
                    spec,
                    log_path=log_dir / f"{spec.name}.log",
                    fingerprint=fingerprint,
                    allow_unbound=allow_unbound,
                )
            )
            for spec in specs
        ]

        for engine in engines:
            engine.wait_ready(progress=progress)
        yield engines


def stop_engine(identity: EngineIdentity) -> bool:
    """End an engine that another process started; False when it is already gone."""
    if guard.process_start(identity.pid) != identity.start_ticks:
        return False
    members = guard.session_members(identity.pid)
    os.kill(identity.pid, signal.SIGTERM)
    deadline = time.monotonic() + STOP_GRACE_S + 5.0
    while guard.process_start(identity.pid) == identity.start_ticks and time.monotonic() < deadline:
        time.sleep(0.1)
    if guard.process_start(identity.pid) == identity.start_ticks:
        guard.kill_all(
            [*members, *guard.session_members(identity.pid), identity.pid], signal.SIGKILL
        )
    return True


def check_binding(checkpoint: CheckpointRef, fingerprint: TargetFingerprint | None) -> None:
    """Check that a drafter's record and the file inside its folder both carry the target's
    fingerprint.

    Raises:
        FingerprintMismatchError: they do not, or the target's fingerprint is not given.
        ConfigError: the checkpoint folder holds no readable fingerprint file.
    """
    written = TargetFingerprint.read(Path(checkpoint.path) / FINGERPRINT_FILE)
    for carried in (checkpoint.fingerprint, written):
        if carried != fingerprint:
            parts = [
                part
                for part in TargetFingerprint.model_fields
                if _part(carried, part) != _part(fingerprint, part)
            ]
            raise FingerprintMismatchError(
                "the drafter is bound to another target than the one to be served",
                got=f"drafter {checkpoint.digest[:12]}, differing in {', '.join(parts)}",
                expected="the target's own fingerprint",
                fix="Measure it on this target first: a re-bind or a retrain makes it servable.",
            )


def check_port_free(port: int, *, name: str) -> None:
    """Check that nothing listens on the loopback port.

    Raises:
        PortInUseError: something does.
    """
    if port in _own_ports() or not is_free(port, host=HOST):
        raise PortInUseError(
            f"port {port} for engine '{name}' is in use",
            fix="Stop what uses it, or set engine_port_base in configs/services.yaml to "
            "another range.",
        )


def free_engine_port(start: int = 0) -> int:
    """A free loopback port: the first one from `start` on, or any. Ports of this process's engines
    count as taken.

    Raises:
        ServiceError: none from `start` on is free.
    """
    return free_port(start, host=HOST, taken=_own_ports())


def _own_ports() -> frozenset[int]:
    # An engine binds its port only after seconds of imports; until then this process must remember
    # it.
    return frozenset(engine.spec.port for engine in list(_running) if engine.is_alive())


def telling_lines(log_path: Path, *, num_lines: int = NUM_ERROR_LINES) -> list[str]:
    """The last distinct error lines of an engine's log, without prefixes; its last line when there
    are none.
    """
    try:
        text = log_path.read_text(errors="replace")
    except FileNotFoundError:
        return []
    lines = [_LOG_PREFIX.sub("", line).strip() for line in text.splitlines() if line.strip()]
    errors = [
        line for line in lines if _ERROR_LINE.search(line) and not _EMPTY_OF_NEWS.search(line)
    ]
    distinct = list(dict.fromkeys(errors))[-num_lines:] or lines[-1:]
    return [line[:MAX_ERROR_CHARS] for line in distinct]


def spec_decode_counters(url: str, *, timeout_s: float = 10.0) -> dict[str, float]:
    """The engine's counters, summed over engines of the process.

    Keys are metric names without `vllm:` and `_total` (`spec_decode_num_drafts`,
    `spec_decode_num_draft_tokens`, `spec_decode_num_accepted_tokens`, `generation_tokens`,
    `prompt_tokens`), and `spec_decode_num_accepted_tokens_per_pos.<k>` with k from 0.

    Raises:
        EngineError: the engine does not answer.
    """
    try:
        response = httpx.get(f"{url}/metrics", timeout=timeout_s)
        response.raise_for_status()
    except httpx.HTTPError as error:
        raise EngineError("the engine's metrics cannot be read", got=f"{url}: {error!r}") from error
    return parse_counters(response.text)


_SAMPLE = re.compile(r"^vllm:(\w+?)_total\{(?P<labels>.*)\} (?P<value>\S+)$", re.MULTILINE)
_COUNTERS = ("spec_decode_", "generation_tokens", "prompt_tokens")


def parse_counters(text: str) -> dict[str, float]:
    """Pick `spec_decode_counters` out of Prometheus text."""
    counters: dict[str, float] = {}
    for match in _SAMPLE.finditer(text):
        name = match.group(1)
        if not name.startswith(_COUNTERS):
            continue
        position = re.search(r'position="(\d+)"', match["labels"])
        key = f"{name}.{position[1]}" if position else name
        counters[key] = counters.get(key, 0.0) + float(match["value"])
    return counters


def _part(fingerprint: TargetFingerprint | None, part: str) -> str | None:
    return None if fingerprint is None else str(getattr(fingerprint, part))


def _start_guarded(
    command: list[str], environment: dict[str, str], *, log_path: Path, owner_pid: int
) -> subprocess.Popen[bytes]:
    log_path.parent.mkdir(parents=True, exist_ok=True)
    owner_file = _owner_file(log_path)
    _own(owner_file, owner_pid)
    # -I: the guard's own folder must not shadow the standard library, nor the parent's PYTHONPATH
    # slow it down.
    prefix = [sys.executable, "-I", str(guard.__file__), str(owner_file), str(STOP_GRACE_S)]

    with log_path.open("wb") as log:
        return subprocess.Popen(
            prefix + command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def _owner_file(log_path: Path) -> Path:
    return log_path.resolve().with_name(log_path.name + ".owner")


def _own(owner_file: Path, pid: int) -> None:
    try:
        guard.write_owner(owner_file, pid)
    except ProcessLookupError:
        raise EngineError(
            "the process that should own the engine is gone", got=f"pid {pid}"
        ) from None


def _stop_session(process: subprocess.Popen[bytes]) -> None:
    members = guard.session_members(process.pid) if process.poll() is None else []
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(STOP_GRACE_S + 5.0)
    # The guard ends its session itself; this is for a guard that was killed or hangs.
    if process.poll() is None or process.returncode < 0:
        guard.kill_all([*members, *guard.session_members(process.pid), process.pid], signal.SIGKILL)
        process.wait()


@atexit.register
def _stop_all() -> None:
    for engine in list(_running):
        engine.stop()
