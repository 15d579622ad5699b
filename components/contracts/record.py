"""What every record is built on: immutable, unknown keys refused, written whole, read back
checked.
"""

from __future__ import annotations

from pathlib import Path
from typing import Self

from pydantic import BaseModel, ConfigDict, ValidationError

from components.contracts.digests import digest_json
from components.contracts.files import write_atomic
from components.errors import ConfigError


class Reference(BaseModel):
    """Base of everything passed between stages: immutable, unknown keys refused.

    A reference to content has a field `digest` of that content; a `Record` has a property `digest`
    of itself.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    def write(self, path: Path) -> Path:
        """Write the record as indented JSON, atomically."""
        return write_atomic(path, self.model_dump_json(indent=2) + "\n")

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read a record written by `write`.

        Raises:
            ConfigError: the file is missing or does not hold this record.
        """
        try:
            return cls.model_validate_json(Path(path).read_text())
        except FileNotFoundError:
            raise ConfigError(f"{cls.__name__} file is missing", got=path) from None
        except ValidationError as error:
            first = error.errors()[0]
            raise ConfigError(
                f"{path} is not a {cls.__name__}",
                got=f"{'.'.join(map(str, first['loc']))}: {first['msg']}",
            ) from None


class Record(Reference):
    """Base of records that are themselves content: `digest` identifies them."""

    @property
    def digest(self) -> str:
        """sha256 (hex) of the record's canonical JSON."""
        return digest_json(self.model_dump(mode="json"))
