"""One exception tree. Each message says what was got, what was expected, and what to do.

    DSparkError
    ├── ConfigError                recipe or service settings that cannot be used
    ├── TargetError                a target that cannot be resolved, converted, verified or read
    │   └── FingerprintMismatchError   a drafter, dataset or cache bound to another target
    ├── CurationError              sources, regeneration or rendering cannot go on
    │   └── DatasetValidationError     a critical expectation failed; rows are named
    ├── ServiceError               a service (engine, store, splitter, registry, port) is not usable
    │   ├── PortInUseError
    │   ├── EngineError                vLLM did not start, died or answered wrongly
    │   ├── StoreError                 Mooncake master or store is down, full or lost a key
    │   └── SplitterError              HAProxy refused a command or did not start
    ├── StreamError                hidden states are wrong, late or over a rate of failures
    ├── TrainingError              diverged, or cannot resume
    │   └── CheckpointError            missing, incomplete or not loadable
    ├── EvaluationError            could not measure (never a pass)
    ├── RegistryError              MLflow refused or holds something inconsistent
    └── RolloutError               canary cannot be run or rolled back

User-facing entry points turn a ``DSparkError`` into one line on stderr and a non-zero exit code
(`run_main`).
"""

from __future__ import annotations

import sys
from collections.abc import Callable


class DSparkError(Exception):
    """Base of every error this project raises on purpose.

    Args:
        problem: what is wrong, in one sentence.
        got: the offending value, if one can be shown.
        expected: what would have been accepted.
        fix: what the user can do about it.
    """

    def __init__(
        self, problem: str, *, got: object = None, expected: object = None, fix: str | None = None
    ) -> None:
        self.problem = problem
        self.got = got
        self.expected = expected
        self.fix = fix
        super().__init__(self._message())

    def __reduce__(self) -> tuple[object, ...]:
        # Exceptions cross process borders (Prefect results, multiprocessing); keyword-only fields
        # need help.
        return (_rebuild, (type(self), self.problem, self.got, self.expected, self.fix))

    def _message(self) -> str:
        parts = [self.problem.rstrip(".")]
        if self.got is not None:
            parts.append(f"got {self.got}")
        if self.expected is not None:
            parts.append(f"expected {self.expected}")
        text = "; ".join(parts)
        return f"{text}. {self.fix}" if self.fix else text


def _rebuild(
    cls: type[DSparkError], problem: str, got: object, expected: object, fix: str | None
) -> DSparkError:
    return cls(problem, got=got, expected=expected, fix=fix)


class ConfigError(DSparkError):
    """Recipe or service settings that cannot be used."""


class TargetError(DSparkError):
    """A target that cannot be resolved, converted, verified or read."""


class FingerprintMismatchError(TargetError):
    """A drafter, dataset or cache is bound to another target than the one in use."""


class CurationError(DSparkError):
    """Sources, regeneration or rendering cannot go on."""


class DatasetValidationError(CurationError):
    """A critical expectation failed on a dataset; the rows are named in the message."""


class ServiceError(DSparkError):
    """A service is not usable."""


class PortInUseError(ServiceError):
    """A configured port is already bound by another process."""


class EngineError(ServiceError):
    """vLLM did not start in its time, died, or answered wrongly."""


class StoreError(ServiceError):
    """The Mooncake master or store is down, full, or lost a key."""


class SplitterError(ServiceError):
    """HAProxy did not start or refused a runtime command."""


class StreamError(DSparkError):
    """Hidden states are wrong or late, or too many samples failed."""


class TrainingError(DSparkError):
    """Training diverged or cannot resume."""


class CheckpointError(TrainingError):
    """A checkpoint is missing, incomplete or cannot be loaded."""


class EvaluationError(DSparkError):
    """Something could not be measured; it never counts as a pass."""


class RegistryError(DSparkError):
    """MLflow refused a call or holds something inconsistent."""


class RolloutError(DSparkError):
    """A canary could not be run or rolled back."""


def run_main(main: Callable[[], int | None], *, error_code: int = 1) -> None:
    """Run a command-line entry point: a ``DSparkError`` becomes one line on stderr and
    `error_code`.

    Ctrl-C exits with 130 and no traceback. Everything else is a bug and keeps its traceback.
    """
    try:
        sys.exit(main() or 0)
    except DSparkError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(error_code)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(130)
