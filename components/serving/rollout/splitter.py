"""Moves traffic between two engines through HAProxy's runtime API, without a reload and without a
dropped request.

HAProxy holds one backend with two server slots, `candidate` and `baseline` (components/services
renders it). Everything else is decided here at run time: which engine sits in a slot, whether it
takes traffic, and with what weight.
"""

from __future__ import annotations

import csv
import io
import math
import socket
import time
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from components.contracts import Slot
from components.errors import SplitterError

BACKEND = "engines"
ARM_HEADER = "X-Arm"
"""Response header that names the slot which answered."""

MAX_WEIGHT = 256
MAX_SHARE_ERROR = 0.001
"""Largest difference between the share asked for and the share that HAProxy's integer weights give,
0 to 1.
"""

COMMAND_TIMEOUT_S = 5.0
POLL_S = 0.1
_SERVERS_OF_STAT = 4  # `show stat` type filter: bit 2 is servers


@dataclass(frozen=True, kw_only=True)
class SlotState:
    """One server slot as HAProxy sees it.

    Attributes:
        url: base URL of the engine in the slot.
        weight: 0 to 256.
        status: HAProxy's word, such as UP, DOWN, MAINT, DRAIN, "UP 1/3".
        num_sessions: requests in flight.
        num_total: requests sent there since HAProxy started.
        num_redispatched: requests that failed there and were sent to the other slot instead, since
            HAProxy started.
    """

    url: str
    weight: int
    status: str
    num_sessions: int
    num_total: int
    num_redispatched: int

    @property
    def is_up(self) -> bool:
        """Whether the slot takes traffic; right after maintenance it does before any health check
        has passed.
        """
        return self.status.startswith(("UP", "no check"))

    @property
    def is_checked(self) -> bool:
        """Whether the slot takes traffic and its last health check passed ("UP 1/3" is up, not yet
        checked).
        """
        return self.status in ("UP", "no check")


class Splitter:
    """Client of one HAProxy: fills the slots `candidate` and `baseline` and splits traffic between
    them.
    """

    def __init__(
        self, socket_path: Path, frontend_url: str, *, timeout_s: float = COMMAND_TIMEOUT_S
    ) -> None:
        self.socket_path = Path(socket_path)
        self.frontend_url = frontend_url.rstrip("/")
        self._timeout_s = timeout_s

    def assign(self, slot: Slot, url: str, *, ready_timeout_s: float = 10.0) -> None:
        """Put the engine at `url` into a slot and wait until HAProxy's health check finds it up.

        A slot that already holds this engine is left alone, so a champion in service loses no
        request.

        Raises:
            SplitterError: HAProxy refuses, or the engine is not up in `ready_timeout_s`.
        """
        address = urlsplit(url)
        if address.hostname is None or address.port is None:
            raise SplitterError("an engine URL needs a host and a port", got=url)
        state = self.state()[slot]
        if state.url != f"http://{address.hostname}:{address.port}" or not state.is_up:
            self._set(slot, "state maint")
            self._set(slot, f"addr {address.hostname} port {address.port}")
            self._set(slot, "state ready")
        self._wait_up(slot, timeout_s=ready_timeout_s)

    def set_weight_percent(self, candidate_percent: float) -> None:
        """Send this share of requests to the candidate, and read back that it is so.

        Raises:
            SplitterError: a share HAProxy's weights cannot give within 0.1 %, or HAProxy refuses.
        """
        candidate, baseline = weights_for(candidate_percent)
        # At no moment may both weights be zero. And a server keeps its place in HAProxy's rotation
        # when its weight changes: raised from 1 to 5 % the candidate would wait out the rest of a
        # round of 100. Through zero it enters anew.
        changes = [(Slot.CANDIDATE, candidate), (Slot.BASELINE, baseline)]
        if baseline:
            changes = [(Slot.BASELINE, baseline), (Slot.CANDIDATE, 0), (Slot.CANDIDATE, candidate)]

        for slot, weight in changes:
            self._command(f"set weight {BACKEND}/{slot} {weight}")
        wanted = {Slot.CANDIDATE: candidate, Slot.BASELINE: baseline}
        found = {name: one.weight for name, one in self.state().items()}
        if found != wanted:
            raise SplitterError("HAProxy did not take the weights", got=found, expected=wanted)

    def drain(self, slot: Slot) -> None:
        """Send no new request to the slot; those in flight finish.

        Raises:
            SplitterError: HAProxy refuses.
        """
        self._set(slot, "state drain")

    def disable(self, slot: Slot) -> None:
        """Put the slot into maintenance: no request, no health check.

        Raises:
            SplitterError: HAProxy refuses.
        """
        self._set(slot, "state maint")

    def state(self) -> dict[str, SlotState]:
        """Both slots as HAProxy sees them.

        Raises:
            SplitterError: HAProxy does not answer, or has not both slots.
        """
        text = self._command(f"show stat {BACKEND} {_SERVERS_OF_STAT} -1")
        slots = parse_stat(text)
        missing = [slot for slot in Slot if slot not in slots]
        if missing:
            raise SplitterError(
                f"HAProxy has no server slot {' and '.join(missing)} in backend '{BACKEND}'",
                got=text.strip().splitlines()[:1],
                fix="Start it with the configuration that `make up` writes.",
            )
        return {slot: slots[slot] for slot in Slot}

    def _set(self, slot: Slot, what: str) -> None:
        self._command(f"set server {BACKEND}/{slot} {what}")

    def _wait_up(self, slot: Slot, *, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        while not (state := self.state()[slot]).is_checked:
            if time.monotonic() > deadline:
                raise SplitterError(
                    f"the engine in slot '{slot}' did not pass HAProxy's health check in "
                    f"{timeout_s:g} s",
                    got=f"{state.url} is {state.status}",
                )
            time.sleep(POLL_S)

    def _command(self, command: str) -> str:
        """Send one command and return HAProxy's answer.

        Raises:
            SplitterError: no connection, no answer in time, or an answer that says no.
        """
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
                connection.settimeout(self._timeout_s)
                connection.connect(str(self.socket_path))
                connection.sendall(command.encode() + b"\n")
                answer = b"".join(iter(lambda: connection.recv(65536), b"")).decode()
        except OSError as error:
            raise SplitterError(
                "HAProxy's runtime API does not answer",
                got=f"{self.socket_path}: {error}",
                fix="Is it running? `make up` starts it.",
            ) from error

        if not command.startswith("show") and not is_success(answer):
            raise SplitterError(f"HAProxy refused '{command}'", got=answer.strip())
        return answer


def weights_for(candidate_percent: float) -> tuple[int, int]:
    """HAProxy weights (candidate, baseline), the smallest pair of 0 to 256 that gives the share
    within 0.1 %.

    Raises:
        SplitterError: not a percentage, or a share no pair of weights gives (such as 0.1 %).
    """
    if not 0 <= candidate_percent <= 100:
        raise SplitterError(
            "a traffic share is a percentage", got=candidate_percent, expected="0 to 100"
        )

    share = candidate_percent / 100
    if share in (0.0, 1.0):
        return round(100 * share), round(100 * (1 - share))
    if candidate_percent == int(candidate_percent):
        # Over any 100 requests HAProxy's smooth round robin then sends exactly this many to the
        # candidate.
        divisor = math.gcd(int(candidate_percent), 100)
        return int(candidate_percent) // divisor, (100 - int(candidate_percent)) // divisor

    pairs = (
        (abs(c / (c + b) - share), c + b, c, b)
        for c in range(1, MAX_WEIGHT + 1)
        for b in _near(c, share)
    )
    error, _, candidate, baseline = min(pairs)

    if error > MAX_SHARE_ERROR:
        raise SplitterError(
            "HAProxy's weights cannot give this traffic share",
            got=f"{candidate_percent:g} %",
            expected=f"0, 100, or {100 / (MAX_WEIGHT + 1):.1f} to "
            f"{100 * MAX_WEIGHT / (MAX_WEIGHT + 1):.1f} %",
        )

    return candidate, baseline


def _near(candidate: int, share: float) -> list[int]:
    """Baseline weights next to the ideal one for this candidate weight."""
    ideal = candidate * (1 - share) / share
    return sorted(
        {min(MAX_WEIGHT, max(1, weight)) for weight in (math.floor(ideal), math.ceil(ideal))}
    )


def is_success(answer: str) -> bool:
    """Whether HAProxy's answer to a `set` command means yes: it is empty, or says what changed or
    need not.
    """
    text = answer.strip()
    return not text or "changed" in text or text.startswith("no need to change")


def parse_stat(text: str) -> dict[str, SlotState]:
    """Server slots by name out of `show stat` CSV."""
    rows = csv.DictReader(io.StringIO(text.strip().removeprefix("# ")))
    return {
        row["svname"]: SlotState(
            url=f"http://{row['addr']}",
            weight=int(row["weight"] or 0),
            status=row["status"],
            num_sessions=int(row["scur"] or 0),
            num_total=int(row["stot"] or 0),
            num_redispatched=int(row["wredis"] or 0),
        )
        for row in rows
        if row.get("svname") and row.get("status")
    }
