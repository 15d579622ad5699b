"""Exit status 0 when a URL answers 200: the health check of the containers, which need no curl
then.
"""

from __future__ import annotations

import sys
import urllib.error
import urllib.request

TIMEOUT_S = 4.0


def main(url: str) -> int:
    """0 when `url` answers 200 within `TIMEOUT_S`, else 1 with the reason on stderr."""
    try:
        with urllib.request.urlopen(url, timeout=TIMEOUT_S) as response:
            return 0 if response.status == 200 else 1
    except (urllib.error.URLError, OSError) as error:
        print(f"{url}: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
