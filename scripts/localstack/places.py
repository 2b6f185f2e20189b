"""Where the profile keeps its things and where its parts listen."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
REGION = "us-east-1"
#: Any will do: the emulators check no signature.
CREDENTIALS = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test"}
#: What MiniStack does not serve, or not as needed, is asked of moto: the SDK takes an endpoint per service.
AT_MOTO = {"ecs": "ECS", "ec2": "EC2", "autoscaling": "AUTO_SCALING", "batch": "BATCH"}


@dataclass(frozen=True, kw_only=True)
class Places:
    """One installation of the profile.

    Attributes:
        state: Everything it writes is below; short, since sockets are in it.
        cache: Docker's images, kept from one run to the next.
    """

    state: Path
    cache: Path
    ministack_port: int
    moto_port: int

    @property
    def ministack(self) -> str:
        """MiniStack's URL."""
        return f"http://127.0.0.1:{self.ministack_port}"

    @property
    def moto(self) -> str:
        """moto's URL."""
        return f"http://127.0.0.1:{self.moto_port}"

    @property
    def docker_host(self) -> str:
        """For `DOCKER_HOST`."""
        return f"unix://{self.state}/docker.sock"

    @property
    def instances(self) -> Path:
        """A directory for each machine: its disk."""
        return self.state / "instances"

    @property
    def run(self) -> Path:
        """Pid files."""
        return self.state / "run"

    @property
    def logs(self) -> Path:
        """What the daemons print."""
        return self.state / "logs"

    def endpoint(self, service: str) -> str:
        """Who answers for a service, by the SDK's name of it."""
        return self.moto if service in AT_MOTO else self.ministack

    def environment(self) -> dict[str, str]:
        """The SDK's variables for whoever speaks to this profile: our processes, functions, Terraform."""
        return {
            **CREDENTIALS,
            "AWS_REGION": REGION,
            "AWS_DEFAULT_REGION": REGION,
            "AWS_EC2_METADATA_DISABLED": "true",
            "AWS_ENDPOINT_URL": self.ministack,
            **{f"AWS_ENDPOINT_URL_{name}": self.moto for name in AT_MOTO.values()},
        }


def places() -> Places:
    """As the environment says: SHOAL_LOCALSTACK (a directory), SHOAL_LOCALSTACK_PORT, SHOAL_LOCALSTACK_MOTO_PORT."""
    cache = Path(os.environ.get("SHOAL_CACHE") or Path.home() / ".cache" / "shoal")
    return Places(
        state=Path(os.environ.get("SHOAL_LOCALSTACK") or "/var/tmp/shoal-localstack"),
        cache=cache / "localstack",
        ministack_port=int(os.environ.get("SHOAL_LOCALSTACK_PORT") or 4566),
        moto_port=int(os.environ.get("SHOAL_LOCALSTACK_MOTO_PORT") or 5555),
    )
