"""Which language a text is in, by py3langid (Lui and Baldwin 2012, langid.py: n-gram naive Bayes
over 97 languages).
"""

from __future__ import annotations

MIN_LETTERS = 24
"""Shorter texts say too little: 'OK merci' is called Danish."""

UNKNOWN = "unknown"


def language_of(text: str) -> str:
    """ISO 639-1 code of the likeliest language; `unknown` for texts with fewer than `MIN_LETTERS`
    letters.
    """
    if sum(char.isalpha() for char in text) < MIN_LETTERS:
        return UNKNOWN
    # Imported here: the model takes half a second and 60 MB, and most processes never ask.
    import py3langid

    return str(py3langid.classify(text)[0])
