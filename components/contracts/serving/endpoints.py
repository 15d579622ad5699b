"""Where the processes of a run answer: the store of hidden states and the served arms."""

from __future__ import annotations

from pydantic import Field

from components.contracts.gate.rivals import Rival
from components.contracts.record import Record


class StoreEndpoint(Record):
    """Where the Mooncake master is, and how its clients talk."""

    master_address: str = Field(description="host:port of the master's RPC")
    metrics_url: str = Field(description="http://host:port/metrics of the master")
    local_hostname: str = Field(
        default="127.0.0.1", description="address other clients reach this process under"
    )
    protocol: str = "tcp"
    rdma_devices: str = ""


class ArmEndpoint(Record):
    """One served arm: an engine and the drafter it serves, or the rival that drafts in its place,
    if any.
    """

    arm: str = Field(description="an `Arm`, or a rival's method")
    url: str = Field(description="base URL of the engine, without /v1")
    model: str = Field(description="served model name")
    checkpoint_digest: str | None = None
    num_draft_tokens: int = Field(default=0, description="K; 0 with no drafter")
    rival: Rival | None = Field(
        default=None, description="drafts without a drafter; None: it does not"
    )
