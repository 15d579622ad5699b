"""The key that decisions are signed with, where one is configured."""

from __future__ import annotations

import os
from pathlib import Path

from components.errors import ConfigError

KEY_VARIABLE = "DSPARK_SIGNING_KEY"
KEY_FILE_VARIABLE = "DSPARK_SIGNING_KEY_FILE"
MIN_KEY_BYTES = 16


def signing_key() -> bytes | None:
    """The key of `DSPARK_SIGNING_KEY`, or of the file that `DSPARK_SIGNING_KEY_FILE` names; None
    where neither is set.

    Surrounding white space does not count.

    Raises:
        ConfigError: both are set, the file cannot be read, or the key is shorter than 16 bytes.
    """
    value, name = os.environ.get(KEY_VARIABLE), os.environ.get(KEY_FILE_VARIABLE)
    if value is not None and name is not None:
        raise ConfigError(
            f"{KEY_VARIABLE} and {KEY_FILE_VARIABLE} are both set", fix="Keep one of them."
        )
    if name is not None:
        try:
            value = Path(name).read_text()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(
                f"the signing key in {KEY_FILE_VARIABLE} cannot be read", got=error
            ) from None

    if value is None:
        return None
    key = value.strip().encode()
    if len(key) < MIN_KEY_BYTES:
        raise ConfigError(
            "the signing key is too short",
            got=f"{len(key)} bytes",
            expected=f"at least {MIN_KEY_BYTES}",
            fix="Make one with: openssl rand -hex 32",
        )

    return key
