"""hs_connectors' Mooncake connector in a vLLM without an accelerator, for the comparison with
speculators' loader.
"""

from __future__ import annotations

from typing import Any

from hs_connectors.mooncake_hidden_states_connector import MooncakeHiddenStatesConnector

from components.hidden_states.in_vllm.connector import CpuDevice


class CpuMooncakeConnector(MooncakeHiddenStatesConnector):
    """As it stands, with a stand-in for the accelerator's streams."""

    def _device(self) -> Any:
        return CpuDevice
