"""Which failures are worth another try by Prefect."""

from __future__ import annotations

from typing import Any

from components.errors import DSparkError, EngineError, RegistryError, StoreError


def is_transient(_task: Any, _run: Any, state: Any) -> bool:
    """Retry what a restart of a service can cure, and errors nobody foresaw; never bad input."""
    try:
        state.result()
    except (EngineError, RegistryError, StoreError):
        return True
    except DSparkError:
        return False
    except Exception:  # noqa: BLE001 - unforeseen: the retry count of the task bounds it
        return True
    return False


def transient(*, retries: int, delay_s: float) -> dict[str, Any]:
    """Arguments of `@task` for work that a restart of a service can cure."""
    return {
        "retries": retries,
        "retry_delay_seconds": delay_s,
        "retry_condition_fn": is_transient,
    }
