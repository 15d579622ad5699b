"""Personal data in prompts: e-mail addresses, phone numbers, card and account numbers, social
security numbers.

A pattern finds what looks like one; a library that knows the numbering plan decides: `phonenumbers`
(Google's metadata) for phones, `python-stdnum` for cards (Luhn), IBANs and US social security
numbers. Names and addresses need a model of language and are not looked for.
"""

from __future__ import annotations

import re
from collections.abc import Callable

import phonenumbers
from stdnum import iban, luhn
from stdnum.us import ssn

REGIONS = (None, "US", "GB", "DE", "FR", "IN")
"""Countries whose national way of writing phone numbers is known; None: the international one, of
every country.
"""

MIN_PHONE_DIGITS = 9
"""A shorter number is a year, a price or a house number more often than a phone."""

_EMAIL = re.compile(r"[\w.+-]+@(?:[A-Za-z0-9-]+\.)+[A-Za-z]{2,}")
_PLACEHOLDERS = re.compile(
    r"@(?:[\w.-]+\.)?(?:example\.(?:com|org|net)|test|invalid|localhost)$", re.IGNORECASE
)
_CARD = re.compile(r"(?<!\d)(?<!\d\.)\d(?:[ -]?\d){12,18}(?!\.?\d)")
_CARD_OPENING = re.compile(r"^(?:3[47]|4|5[1-5]|2[2-7]|6(?:011|5))")
_IBAN = re.compile(r"\b[A-Z]{2}\d{2}(?: ?[A-Z0-9]{4}){2,7}(?: ?[A-Z0-9]{1,3})?\b")
_SSN = re.compile(r"(?<![\d-])\d{3}-\d{2}-\d{4}(?![\d-])")
_PHONE_LIKE = re.compile(r"[+(]?\d(?:[ ().\-/]{0,2}\d){8,14}")


def personal_data(text: str) -> str | None:
    """What kind of personal data `text` holds; None if none was found."""
    return next((kind for kind, finds in _KINDS if finds(text)), None)


def _has_email(text: str) -> bool:
    return "@" in text and any(not _PLACEHOLDERS.search(match) for match in _EMAIL.findall(text))


def _has_card(text: str) -> bool:
    for match in _CARD.findall(text):
        digits = re.sub(r"\D", "", match)
        if _CARD_OPENING.match(digits) and luhn.is_valid(digits):
            return True
    return False


def _has_iban(text: str) -> bool:
    return any(iban.is_valid(match) for match in _IBAN.findall(text))


def _has_ssn(text: str) -> bool:
    return any(ssn.is_valid(match) for match in _SSN.findall(text))


def _has_phone(text: str) -> bool:
    # The matcher walks the text once for every region: only texts with enough digits in a row are
    # worth it.
    if not any(
        sum(char.isdigit() for char in match) >= MIN_PHONE_DIGITS
        for match in _PHONE_LIKE.findall(text)
    ):
        return False

    for region in REGIONS:
        for match in phonenumbers.PhoneNumberMatcher(
            text, region, leniency=phonenumbers.Leniency.STRICT_GROUPING
        ):
            if (
                sum(char.isdigit() for char in match.raw_string) >= MIN_PHONE_DIGITS
                and not match.raw_string.isdigit()
            ):
                return True

    return False


_KINDS: tuple[tuple[str, Callable[[str], bool]], ...] = (
    ("e-mail address", _has_email),
    ("card number", _has_card),
    ("account number", _has_iban),
    ("social security number", _has_ssn),
    ("phone number", _has_phone),
)
