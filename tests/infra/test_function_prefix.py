"""What a gateway sends to routers, and what it leaves to the function."""

from __future__ import annotations

import re
from fnmatch import fnmatchcase
from pathlib import Path

from shoal.contract.route import BY_FUNCTION

API = Path(__file__).parents[2] / "infra" / "modules" / "api"


def routed() -> list[str]:
    """The paths of both entrances that go to routers, as patterns of a shell."""
    http = re.findall(r'"(?:ANY|GET|PUT|POST) (/[^"]+)"', (API / "router_routes.tf").read_text())
    (alb,) = re.findall(r"path_pattern \{\s+values = \[([^\]]+)\]", (API / "alb.tf").read_text())
    return [re.sub(r"\{[^}]+\}", "*", each) for each in http] + re.findall(r'"([^"]+)"', alb)


def test_what_clients_ask_below_the_prefix_goes_to_no_router() -> None:
    """Else it would be answered as the route itself: not at all, while there is no host."""
    patterns = routed()
    for path in ("/v1/sessions/ses_1/actions", "/v1/sessions/ses_1/files", "/v1/actions:wait"):
        assert sum(fnmatchcase(path, each) for each in patterns) >= 2, "both entrances route it"
        assert not any(fnmatchcase(BY_FUNCTION + path, each) for each in patterns)
