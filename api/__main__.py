"""`python -m api`: Shoal on one machine, or one replica of a deployment on AWS."""

from __future__ import annotations

import sys

from api.down import run_down
from api.home import HomeBusy
from api.options import DownOptions, ServeOptions, parse
from api.serve import run_serve
from api.up import CannotStart, run_up


def main() -> int:
    """Exit codes: 0 stopped as told, 1 could not start or stop, 2 wrong options."""
    options = parse(sys.argv[1:])
    try:
        if isinstance(options, DownOptions):
            return run_down(options)
        if isinstance(options, ServeOptions):
            return run_serve(options)
        return run_up(options)
    except (HomeBusy, CannotStart) as error:
        print(f"shoal: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    raise SystemExit(main())
