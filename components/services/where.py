"""Print one address or folder of the running services, for shells:
`python -m components.services.where mlflow_url`.
"""

from __future__ import annotations

import sys

from components.contracts import StoreEndpoint
from components.errors import ConfigError, run_main
from components.services.endpoints import Endpoints, load_endpoints


def main(arguments: list[str]) -> None:
    """Print the named field of `Endpoints` (the store as host:port).

    Raises:
        ConfigError: no such field.
        ServiceError: the services are not up.
    """
    fields = Endpoints.model_fields
    if len(arguments) != 1 or arguments[0] not in fields:
        raise ConfigError(
            "no such address", got=" ".join(arguments) or None, expected=" | ".join(fields)
        )
    value = getattr(load_endpoints(), arguments[0])
    print(value.master_address if isinstance(value, StoreEndpoint) else value)


if __name__ == "__main__":
    run_main(lambda: main(sys.argv[1:]))
