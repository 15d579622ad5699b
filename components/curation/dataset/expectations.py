"""Great Expectations on a scalar frame derived from the rows: one line per conversation, never the
tokens.

Expectations are critical (the dataset is not written) or warnings (it is written, and the result
is reported). The checkpoint runs in an ephemeral context; only the Data Docs it builds are kept,
beside the dataset.
"""

from __future__ import annotations

import os
import warnings
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from sys import intern
from typing import TYPE_CHECKING, Any

from components.curation.conversation import Row
from components.curation.dataset.split import TRAIN, VALIDATION
from components.curation.sieve.language import UNKNOWN
from components.errors import DatasetValidationError
from components.settings import CurationSettings

if TYPE_CHECKING:
    import pandas as pd

_NUMBERS: dict[str, type] = {
    "num_turns": int,
    "num_tokens": int,
    "num_loss_tokens": int,
    "mask_share": float,
    "mask_length_gap": int,
    "min_token_id": int,
    "max_token_id": int,
    "truncated": bool,
    "exact_tokens": bool,
    "contaminated": bool,
}
"""Columns of the frame that are numbers, and what they are."""

SUITE = "curated_conversations"
MAX_NAMED_ROWS = 5
MIN_MEAN_LOSS_TOKENS = 16.0
"""Below this mean, answers are too short to learn drafting from; a warning."""


@dataclass(frozen=True)
class Finding:
    """One expectation that failed: what it said, how severe it is, and the conversations that broke
    it.
    """

    expectation: str
    severity: str
    observed: str
    conversation_ids: tuple[str, ...]


@dataclass(frozen=True)
class Validation:
    """Outcome of the checkpoint; critical failures raise instead."""

    docs_path: Path
    num_expectations: int
    warnings: tuple[Finding, ...]


class ScalarFrame:
    """One line per row: identity, split, source, language, lengths, mask share, id range. Filled
    row by row, without the tokens.
    """

    def __init__(self) -> None:
        self._ids: list[str] = []
        self._splits: list[str] = []
        self._sources: list[str] = []
        self._languages: list[str] = []
        self._numbers: dict[str, array[float]] = {name: array("d") for name in _NUMBERS}

    def add(self, row: Row, split: str, *, contaminated: bool) -> None:
        """Note a row.

        Args:
            row: as rendered.
            split: `train` or `validation`.
            contaminated: whether its prompts repeat a held-out one.
        """
        self._ids.append(row.conversation_id)
        self._splits.append(split)
        self._sources.append(intern(row.source))
        self._languages.append(intern(row.origin.language))
        values = (
            row.num_turns,
            len(row.token_ids),
            row.num_loss_tokens,
            row.num_loss_tokens / max(1, len(row.token_ids)),
            len(row.token_ids) - len(row.loss_mask),
            min(row.token_ids, default=-1),
            max(row.token_ids, default=-1),
            row.truncated,
            row.exact,
            contaminated,
        )

        for numbers, value in zip(self._numbers.values(), values, strict=True):
            numbers.append(value)

    @property
    def splits(self) -> list[str]:
        """The split of each row, in the order added."""
        return self._splits

    def frame(self, similarity: Mapping[str, float]) -> pd.DataFrame:
        """All rows, with the similarity of validation rows (by id) to the training split; 0 for the
        others.
        """
        import numpy as np
        import pandas as pd

        numbers: dict[str, Any] = {
            name: np.asarray(values).astype(kind)
            for (name, values), kind in zip(self._numbers.items(), _NUMBERS.values(), strict=True)
        }
        return pd.DataFrame(
            {
                "conversation_id": self._ids,
                "split": self._splits,
                "source": self._sources,
                "language": self._languages,
                **numbers,
                "cross_split_similarity": [similarity.get(key, 0.0) for key in self._ids],
            }
        )


def validate_frame(
    frame: pd.DataFrame,
    *,
    docs_dir: Path,
    settings: CurationSettings,
    vocab_size: int,
    max_tokens: int,
) -> Validation:
    """Run the checkpoint and build its Data Docs under `docs_dir`.

    Args:
        frame: of `ScalarFrame`.
        docs_dir: where the static site is written; its entry is `index.html`.
        settings: `min_mask_share`, `near_duplicate_threshold`.
        vocab_size: of the target; ids must lie below it.
        max_tokens: longest row the engines take.

    Raises:
        DatasetValidationError: a critical expectation failed; expectations and rows are named, the
            docs stay.
    """
    gx = _great_expectations()
    context = gx.get_context(mode="ephemeral")
    context.variables.progress_bars = {"globally": False}
    context.add_data_docs_site(
        site_name="local",
        site_config={
            "class_name": "SiteBuilder",
            "store_backend": {
                "class_name": "TupleFilesystemStoreBackend",
                "base_directory": str(docs_dir.resolve()),
            },
            "site_index_builder": {"class_name": "DefaultSiteIndexBuilder"},
        },
    )

    batch = (
        context.data_sources.add_pandas("curation")
        .add_dataframe_asset("rows")
        .add_batch_definition_whole_dataframe("all")
    )
    suite = context.suites.add(
        gx.ExpectationSuite(
            name=SUITE, expectations=_expectations(gx, settings, vocab_size, max_tokens)
        )
    )

    definition = context.validation_definitions.add(
        gx.ValidationDefinition(name=SUITE, data=batch, suite=suite)
    )
    checkpoint = context.checkpoints.add(
        gx.Checkpoint(
            name=SUITE,
            validation_definitions=[definition],
            actions=[gx.checkpoint.UpdateDataDocsAction(name="docs", site_names=["local"])],
            result_format={
                "result_format": "COMPLETE",
                "unexpected_index_column_names": ["conversation_id"],
            },
        )
    )

    result = checkpoint.run(batch_parameters={"dataframe": frame})
    outcomes = [item for run in result.run_results.values() for item in run.results]
    findings = [_finding(item) for item in outcomes if not item.success]
    _raise_critical(
        [finding for finding in findings if finding.severity == "critical"], docs_dir / "index.html"
    )

    return Validation(docs_dir / "index.html", len(outcomes), tuple(findings))


def _great_expectations() -> Any:
    # Read at import: no usage statistics leave the machine.
    os.environ["GX_ANALYTICS_ENABLED"] = "false"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import great_expectations as gx
        import great_expectations.checkpoint
    return gx


def _expectations(
    gx: Any, settings: CurationSettings, vocab_size: int, max_tokens: int
) -> list[Any]:
    """Long, for each line is a rule of the dataset: one that is critical ends the run, a warning is
    told.
    """
    e = gx.expectations
    critical = {"severity": "critical"}
    warning = {"severity": "warning"}
    wanted = [*settings.languages, UNKNOWN] if settings.languages else None
    languages = (
        [e.ExpectColumnValuesToBeInSet(column="language", value_set=wanted, **critical)]
        if wanted
        else []
    )

    return [
        *languages,
        e.ExpectColumnValuesToNotBeNull(column="language", **critical),
        e.ExpectTableRowCountToBeBetween(min_value=2, **critical),
        e.ExpectColumnValuesToBeUnique(column="conversation_id", **critical),
        e.ExpectColumnValuesToMatchRegex(
            column="conversation_id", regex="^[0-9a-f]{64}$", **critical
        ),
        e.ExpectColumnDistinctValuesToEqualSet(
            column="split", value_set=[TRAIN, VALIDATION], **critical
        ),
        e.ExpectColumnValuesToNotBeNull(column="source", **critical),
        e.ExpectColumnValuesToBeBetween(
            column="num_tokens", min_value=2, max_value=max_tokens, **critical
        ),
        e.ExpectColumnValuesToBeBetween(column="num_loss_tokens", min_value=1, **critical),
        e.ExpectColumnValuesToBeBetween(
            column="mask_share", max_value=1, strict_max=True, **critical
        ),
        e.ExpectColumnValuesToBeBetween(
            column="mask_length_gap", min_value=0, max_value=0, **critical
        ),
        e.ExpectColumnValuesToBeBetween(column="min_token_id", min_value=0, **critical),
        e.ExpectColumnValuesToBeBetween(
            column="max_token_id", max_value=vocab_size - 1, **critical
        ),
        e.ExpectColumnValuesToBeBetween(
            column="num_turns", min_value=1, max_value=settings.max_turns, **critical
        ),
        e.ExpectColumnValuesToBeInSet(column="contaminated", value_set=[False], **critical),
        e.ExpectColumnValuesToBeBetween(
            column="cross_split_similarity",
            max_value=settings.near_duplicate_threshold,
            strict_max=True,
            **critical,
        ),
        e.ExpectColumnMeanToBeBetween(
            column="num_loss_tokens", min_value=MIN_MEAN_LOSS_TOKENS, **warning
        ),
        e.ExpectColumnValuesToBeBetween(
            column="mask_share", min_value=settings.min_mask_share, mostly=0.95, **warning
        ),
        e.ExpectColumnValuesToBeInSet(
            column="exact_tokens", value_set=[True], mostly=0.99, **warning
        ),
        e.ExpectColumnUniqueValueCountToBeBetween(
            column="source", min_value=len(settings.sources), **warning
        ),
    ]


def _finding(outcome: Any) -> Finding:
    config = outcome.expectation_config
    column = config.kwargs.get("column", "table")
    limits = {
        key: value
        for key, value in config.kwargs.items()
        if key in {"min_value", "max_value", "value_set", "regex", "mostly"} and value is not None
    }

    rows = outcome.result.get("unexpected_index_list") or []
    severity = outcome.expectation_config.severity
    return Finding(
        expectation=f"{config.type}({column}, "
        f"{', '.join(f'{key}={value}' for key, value in limits.items())})",
        severity=str(getattr(severity, "value", severity)),
        observed=str(
            outcome.result.get(
                "observed_value", f"{outcome.result.get('unexpected_count', '?')} rows"
            )
        ),
        conversation_ids=tuple(str(row["conversation_id"]) for row in rows),
    )


def _raise_critical(findings: Sequence[Finding], docs: Path) -> None:
    if not findings:
        return
    parts = []
    for finding in findings:
        named = ", ".join(name[:16] for name in finding.conversation_ids[:MAX_NAMED_ROWS])
        more = len(finding.conversation_ids) - MAX_NAMED_ROWS
        rows = f" in {named}{f' and {more} more' if more > 0 else ''}" if named else ""
        parts.append(f"{finding.expectation}: {finding.observed}{rows}")

    raise DatasetValidationError(
        "the dataset fails its critical expectations",
        got="; ".join(parts),
        fix=f"See the Data Docs: {docs}",
    )
