"""Section of the gate's page: kinds of request with and without a drafter."""

from __future__ import annotations

from collections.abc import Collection
from html import escape

from components.contracts import CompatibilityTable, RequestFeature, Served
from components.reporting.html_table import html_table

FEATURE_WORDS: dict[RequestFeature, str] = {
    "chat": "a greedy chat completion",
    "stream": "streamed, with usage at the end",
    "max_tokens_1": "an answer of one token",
    "empty_message": "a message without text",
    "n": "two answers to one request (n)",
    "logprobs": "log-probabilities, top 3",
    "stop": "a stop string",
    "json_schema": "JSON after a schema",
    "tool_choice_none": "tools given, none to be called",
    "top_k": "top-k",
    "top_p": "top-p",
    "min_p": "min-p",
    "repetition_penalty": "repetition penalty",
    "presence_penalty": "presence penalty",
    "frequency_penalty": "frequency penalty",
    "logit_bias": "logit bias",
    "seed": "a seed",
    "end_of_context": "an answer that ends with the context",
    "past_the_context": "one token more than the context holds, refused",
}
BADGES = {Served.OK: "pass", Served.REFUSED: "fail", Served.WRONG: "fail"}


def compatibility_section(
    table: CompatibilityTable | None, *, required: Collection[RequestFeature] = ()
) -> str:
    """Every kind of request, and what became of it on both engines; empty where it was not
    measured.

    Args:
        table: as measured.
        required: `gate.required_requests`.
    """
    if table is None:
        return ""
    rows = [
        [
            f"{escape(FEATURE_WORDS[row.feature])} <span class='soft'>{escape(row.feature)}</span>",
            "yes" if row.feature in required else "",
            _badge(row.plain),
            _badge(row.drafting, is_lost=row.is_lost),
            f"<span class='soft'>{escape(row.detail)}</span>",
        ]
        for row in table.rows
    ]

    lost = [FEATURE_WORDS[row.feature] for row in table.rows if row.is_lost]
    words = (
        f"Served without a drafter and not with it: {', '.join(lost)}."
        if lost
        else "Nothing is lost to drafting."
    )
    note = (
        f"vLLM {table.engine_version} on {table.device}, method {table.method}, measured"
        f" {table.created_at:%Y-%m-%d %H:%M} UTC on {table.model}, one request at a time."
    )

    columns = ("request", "required", "no draft", "drafting", "")
    body = (
        f"<p>{escape(words)}</p>{html_table(columns, rows, numbers=())}<p "
        f"class='note'>{escape(note)}</p>"
    )

    return f"<section><h2>Requests served</h2>{body}</section>\n"


def _badge(served: Served, *, is_lost: bool = False) -> str:
    """A request that both engines refuse is no fault of drafting, so only a loss is red."""
    kind = BADGES[served] if served is Served.OK or is_lost else "info"
    return f"<span class='badge small {kind}'>{escape(served)}</span>"
