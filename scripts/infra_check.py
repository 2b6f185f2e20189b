"""Checks everything below `infra/` without AWS: `make infra`, or `python -m scripts.infra_check`.

    format        terraform fmt -check
    readmes       each module's README has the tables of its variables and outputs (scripts/infra_docs.py)
    terraform     init, validate and test of every module and example, with the mocked provider of infra/mocks
    policy        checkov, where `.venv-checkov` is; each skip is justified beside what it skips
    pytest        tests/infra: cost at rest, least privilege, settings, table and bucket as the code wants them

Works on a copy, so that nothing of Terraform's stays in the tree. The provider comes from a mirror on this machine
where there is one, else from the registry.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scripts.localstack.terraform import plugin_mirror

ROOT = Path(__file__).resolve().parents[1]
INFRA = ROOT / "infra"
#: Where tests/infra finds what the examples come to, when `main` has worked it out already.
PLANS = "SHOAL_INFRA_PLANS"
#: A module's own tests take seconds; with a mirror, two at once keep two cores busy.
WORKERS = 2


class InfraError(Exception):
    """A check failed; the message is what it said."""


@dataclass(frozen=True, kw_only=True)
class Resource:
    """A managed resource in the state of a test run."""

    address: str
    type: str
    values: Mapping[str, Any]


class Workshop:
    """A copy of `infra/`, and Terraform in it."""

    def __init__(self, place: Path) -> None:
        program = shutil.which("terraform")
        if program is None:
            raise InfraError("terraform is missing: 1.9 or newer, on the PATH")
        self._program = program
        self.infra = place / "infra"
        shutil.copytree(
            INFRA,
            self.infra,
            ignore=shutil.ignore_patterns(".terraform", "*.tfstate*", ".terraform.lock.hcl"),
        )
        self._mirror = plugin_mirror()
        self._cache = place / "plugins"
        self._cache.mkdir()

    def roots(self) -> list[str]:
        """Every module and example that has tests, by its path below `infra/`."""
        return sorted(
            str(tests.parent.relative_to(self.infra))
            for room in ("modules", "examples")
            for tests in (self.infra / room).glob("*/tests")
        )

    def init(self, root: str) -> None:
        """Make a root ready."""
        source = [f"-plugin-dir={self._mirror}"] if self._mirror else []
        self.run(root, "init", "-input=false", "-backend=false", *source)

    def run(self, root: str, command: str, *options: str) -> str:
        """One command; what it printed.

        Raises:
            InfraError: It failed.
        """
        done = subprocess.run(
            [self._program, command, *(["-no-color"] if command != "fmt" else []), *options],
            cwd=self.infra / root,
            env=self._environment(),
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            raise InfraError(f"{root}: terraform {command}\n{_tail(done.stdout)}{_tail(done.stderr)}")
        return done.stdout

    def states(self, root: str) -> dict[str, list[Resource]]:
        """Test a root; the resources of each run that applied, by the run's name."""
        printed = self.run(root, "test", "-json", "-verbose")
        states: dict[str, list[Resource]] = {}
        for line in printed.splitlines():
            event = json.loads(line)
            if event.get("type") == "test_state":
                module = event["test_state"].get("root_module") or {}
                states[event["@testrun"]] = list(_resources(module))
        return states

    def _environment(self) -> dict[str, str]:
        told = {**os.environ, "TF_IN_AUTOMATION": "1", "CHECKPOINT_DISABLE": "1"}
        if self._mirror:
            told["TF_CLI_CONFIG_FILE"] = os.devnull
        else:
            told["TF_PLUGIN_CACHE_DIR"] = str(self._cache)
            told["TF_PLUGIN_CACHE_MAY_BREAK_DEPENDENCY_LOCK_FILE"] = "1"
        # A test that asks AWS for something fails at once instead of reaching an account.
        told |= {
            "AWS_ACCESS_KEY_ID": "none",
            "AWS_SECRET_ACCESS_KEY": "none",
            "AWS_EC2_METADATA_DISABLED": "true",
        }
        told.pop("AWS_PROFILE", None)
        return told


def _resources(module: Mapping[str, Any]) -> Iterator[Resource]:
    for resource in module.get("resources") or ():
        if resource["mode"] == "managed":
            yield Resource(address=resource["address"], type=resource["type"], values=resource["values"])
    for child in module.get("child_modules") or ():
        yield from _resources(child)


def dump(states: Mapping[str, Sequence[Resource]], path: Path) -> None:
    """Keep states for another process."""
    path.write_text(json.dumps({run: [vars(one) for one in found] for run, found in states.items()}))


def load(path: Path) -> dict[str, list[Resource]]:
    """What `dump` kept."""
    told = json.loads(path.read_text())
    return {run: [Resource(**one) for one in found] for run, found in told.items()}


def _check_format() -> None:
    done = subprocess.run(
        ["terraform", "fmt", "-check", "-recursive", "-diff", str(INFRA)],
        env={**os.environ, "TF_CLI_CONFIG_FILE": os.devnull},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise InfraError(f"run: terraform fmt -recursive infra\n{done.stdout}{done.stderr}")


def _check_program(*command: str, **environment: str) -> None:
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, **environment}, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise InfraError(f"{_tail(done.stdout, 12_000)}{_tail(done.stderr)}")


def _check_policy(workshop: Workshop) -> str:
    """checkov over modules and examples."""
    program = ROOT / ".venv-checkov/bin/checkov"
    if not program.exists():
        return "skipped: there is no .venv-checkov (requirements/checkov.txt)"
    _check_program(
        str(program),
        "--directory", str(workshop.infra),
        "--framework", "terraform",
        "--skip-path", "localstack|tests|\\.terraform",
        "--download-external-modules", "false",
        "--skip-download", "--compact", "--quiet",
        LOG_LEVEL="ERROR",
    )  # fmt: skip
    return "passed"


def _tail(text: str, size: int = 6000) -> str:
    return text if len(text) <= size else "...\n" + text[-size:]


def _check_root(workshop: Workshop, root: str, plans: Path) -> str:
    began = time.monotonic()
    workshop.init(root)
    workshop.run(root, "validate")
    dump(workshop.states(root), plans / f"{Path(root).name}.json")
    return f"{time.monotonic() - began:.0f} s"


def main(argv: Sequence[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m scripts.infra_check", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument(
        "--only", metavar="ROOT", action="append", help="one root, such as modules/pool; repeatable"
    )
    options = parser.parse_args(argv)
    with tempfile.TemporaryDirectory(prefix="shoal-infra-") as place:
        try:
            workshop = Workshop(Path(place))
            _check_format()
            _check_program(sys.executable, "-m", "scripts.infra_docs", "--check")
            print("format, readmes: passed")
            plans = Path(place) / "plans"
            plans.mkdir()
            roots = options.only or workshop.roots()
            with ThreadPoolExecutor(WORKERS) as pool:
                jobs = {pool.submit(_check_root, workshop, root, plans): root for root in roots}
                failed = []
                for job in as_completed(jobs):
                    error = job.exception()
                    failed += [str(error)] if error else []
                    print(f"{jobs[job]}: {'FAILED' if error else f'passed ({job.result()})'}", flush=True)
            if failed:
                raise InfraError("\n".join(failed))
            if options.only:
                return 0
            print(f"policy: {_check_policy(workshop)}", flush=True)
            _check_program(
                sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/infra", "tests/unit/costs",
                **{PLANS: str(plans)},
            )  # fmt: skip
            print("tests/infra: passed")
        except InfraError as error:
            print(error, file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
