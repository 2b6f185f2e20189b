"""Terraform on a copy of `infra/`, so that its state and lock file stay out of the tree."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from scripts.localstack.places import ROOT, Places


class TerraformError(Exception):
    """It failed; the message is what it said."""


class Terraform:
    """The root module `infra/localstack` of one installation."""

    def __init__(self, places: Places) -> None:
        # The provider's unpacking and hashing takes a minute, so that it is kept from one run to the next.
        self._copy = places.cache / "terraform"
        self._root = self._copy / "localstack"

    def apply(self, variables: Mapping[str, str]) -> dict[str, Any]:
        """Make what is declared; the outputs."""
        self._copy.mkdir(parents=True, exist_ok=True)
        for room in ("modules", "localstack"):
            for file in (self._copy / room).rglob("*.tf"):
                if ".terraform" not in file.parts:
                    file.unlink()
            shutil.copytree(ROOT / "infra" / room, self._copy / room, dirs_exist_ok=True)
        told = {name: json.dumps(value) for name, value in variables.items()}
        (self._root / "terraform.tfvars").write_text(
            "".join(f"{name} = {value}\n" for name, value in told.items())
        )
        self._call("init")
        self._call("apply", "-auto-approve")
        answer = json.loads(self._call("output", "-json", told=False))
        return {name: each["value"] for name, each in answer.items()}

    def destroy(self) -> None:
        """Unmake it. Nothing happens where nothing was made."""
        if (self._root / "terraform.tfstate").exists():
            self._call("destroy", "-auto-approve")
        self.forget()

    def forget(self) -> None:
        """Whatever was made is gone with its emulator."""
        for file in self._root.glob("*.tfstate*"):
            file.unlink()

    def _call(self, command: str, *options: str, told: bool = True) -> str:
        program = shutil.which("terraform")
        if program is None:
            raise TerraformError("terraform is missing: 1.9 or newer, on the PATH")
        flags = ["-no-color", *(["-input=false"] if told else [])]
        done = subprocess.run(
            [program, command, *flags, *options],
            cwd=self._root,
            env=self._environment(),
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            raise TerraformError(f"terraform {command}: {done.stdout[-3000:]}{done.stderr[-5000:]}")
        return done.stdout

    def _environment(self) -> dict[str, str]:
        environment = {**os.environ, "TF_IN_AUTOMATION": "1", "CHECKPOINT_DISABLE": "1"}
        mirror = plugin_mirror()
        if mirror is not None:
            config = self._copy / "cli.tfrc"
            config.write_text(
                f"provider_installation {{\n  filesystem_mirror {{\n    path = {json.dumps(str(mirror))}\n  }}\n}}\n"
            )
            environment["TF_CLI_CONFIG_FILE"] = str(config)
        return environment


def plugin_mirror() -> Path | None:
    """A directory of providers on this machine, `<mirror>/<host>/hashicorp/aws/...`; None: the registry is asked."""
    return next(_mirrors(), None)


def _mirrors() -> Iterator[Path]:
    if told := os.environ.get("TF_PLUGIN_DIR"):
        yield Path(told)
    home = Path.home()
    for place in (
        home / ".terraform.d/plugins",
        Path("/usr/local/share/terraform/plugins"),
        *Path("/opt").glob("*"),
    ):
        if any(place.glob("*/hashicorp/aws")):
            yield place
