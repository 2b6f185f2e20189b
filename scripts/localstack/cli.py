"""`python -m scripts.localstack run | up | demo | down`: the whole profile on one machine. Needs root.

run [--short]    up, demo and down; nothing is left, or it fails and says what
up               start everything and say how to use it
demo [--short]   play the demo against what is up
down [--all]     end everything; --all: images and caches, too
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
import urllib.request
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import boto3

from scripts.bundle import CannotBundle
from scripts.localstack import daemons as parts
from scripts.localstack.daemons import DaemonError, Daemons
from scripts.localstack.demo import Demo, DemoFailed
from scripts.localstack.docker import Docker, DockerError
from scripts.localstack.events import Events
from scripts.localstack.functions import make_bundle
from scripts.localstack.leftovers import leftovers, remove_empty_cgroups
from scripts.localstack.machines import Machines, clients
from scripts.localstack.places import REGION, ROOT, Places, places
from scripts.localstack.terraform import Terraform, TerraformError
from shoal import ShoalError

IMAGE = "shoal-agent:dev"
#: Processes of the API's function that are started beforehand.
_WARM = 5
_DAEMONS = ("machines", "ministack", "moto")


class CannotStart(Exception):
    """Something is missing; the message says what to install."""


def main(argv: Sequence[str] | None = None) -> int:
    """0: done; 1: it failed, and stderr says why."""
    parser = argparse.ArgumentParser(
        prog="python -m scripts.localstack", description=__doc__.partition("\n")[0]
    )
    commands = parser.add_subparsers(dest="command", required=True)
    for name in ("run", "up", "demo", "down"):
        command = commands.add_parser(name)
        if name in ("run", "demo"):
            command.add_argument("--short", action="store_true", help="the small image, fewer sessions")
        if name == "down":
            command.add_argument("--all", action="store_true", help="caches, too")
    options = parser.parse_args(argv)
    where = places()
    try:
        if options.command == "run":
            return _run(where, short=options.short)
        if options.command == "up":
            _up(where)
        elif options.command == "demo":
            _demo(where, short=options.short)
        else:
            _down(where, destroy=True)
            if options.all:
                shutil.rmtree(where.cache, ignore_errors=True)
    except (
        CannotStart,
        CannotBundle,
        DaemonError,
        DemoFailed,
        DockerError,
        ShoalError,
        TerraformError,
    ) as error:
        print(f"localstack: {error}", file=sys.stderr)
        return 1
    return 0


def _run(where: Places, *, short: bool) -> int:
    _down(where, destroy=False)
    failed = True
    try:
        _up(where)
        _demo(where, short=short)
        failed = False
    finally:
        if failed:
            _tell_logs(where)
        _down(where, destroy=not short and not failed)
    return 0


# -- up ---------------------------------------------------------------------------------------------------------------


def _up(where: Places) -> None:
    _check()
    daemons = Daemons(where)
    where.state.mkdir(parents=True, exist_ok=True, mode=0o755)
    with ThreadPoolExecutor() as pool:
        with _timed("Docker, MiniStack and moto"):
            starts = [
                pool.submit(start, daemons, where) for start in (parts.start_moto, parts.start_ministack)
            ]
            parts.start_dockerd(daemons, where)
            bundling = pool.submit(make_bundle, where)
            for start in starts:
                start.result()
        with _timed("machines"):
            _start_machines(daemons, where)
        with _timed("agent image, functions, terraform apply"):
            building = pool.submit(_build_image, where)
            bundle, runtime = bundling.result()
            outputs = Terraform(where).apply(
                {
                    "bundle_path": str(bundle),
                    "runtime": runtime,
                    "agent_image": IMAGE,
                    "ami_id": _any_ami(where),
                    "ministack_url": where.ministack,
                    "moto_url": where.moto,
                }
            )
            print(building.result())
    (where.state / "outputs.json").write_text(json.dumps(outputs))
    with _timed("first key"):
        key = _bootstrap(where, outputs["table_name"])
    with _timed("functions warm"):
        _warm(outputs["url"])
    credentials = where.state / "client.json"
    credentials.touch(mode=0o600)
    credentials.write_text(json.dumps({"url": outputs["url"], "api_key": key}))
    print(f"up: {outputs['url']}\nexport SHOAL_CREDENTIALS={credentials}")


def _warm(url: str) -> None:
    """Start several processes of the API's function side by side: hosts, the trainer and long polls share them."""

    def ask(_: int) -> None:
        with urllib.request.urlopen(f"{url}/healthz", timeout=120):
            pass

    with ThreadPoolExecutor(_WARM) as pool:
        list(pool.map(ask, range(_WARM)))


def _check() -> None:
    if os.geteuid() != 0:
        raise CannotStart("needs root: it starts a Docker daemon and containers that make sandboxes")
    missing = [name for name in ("dockerd", "docker", "zstd") if shutil.which(name) is None]
    missing += [name for name in ("ministack", "moto") if not (ROOT / f".venv-{name}").exists()]
    if missing:
        raise CannotStart(f"missing: {', '.join(missing)}; run: make setup-aws")
    if shutil.which("terraform") is None:
        raise CannotStart("terraform is missing: 1.9 or newer, on the PATH (docs/localstack.md)")


def _start_machines(daemons: Daemons, where: Places) -> None:
    ready = where.run / "machines.ready"
    ready.unlink(missing_ok=True)
    argv = [sys.executable, "-m", "scripts.localstack.machines"]
    daemons.start("machines", argv, {**os.environ, **where.environment()}, ready.exists, ROOT)


def _build_image(where: Places) -> str:
    environment = {**os.environ, "DOCKER_HOST": where.docker_host}
    done = subprocess.run(
        [str(ROOT / "scripts" / "agent_image"), IMAGE],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise DockerError(f"the agent's image cannot be built:\n{done.stderr[-3000:]}")
    return done.stdout.strip()


def _any_ami(where: Places) -> str:
    """An image that the emulator knows: launch templates must name one."""
    images = _client(where, "ec2").describe_images(Owners=["amazon"])["Images"]
    return str(images[0]["ImageId"])


def _client(where: Places, service: str) -> Any:
    return boto3.client(
        service,
        region_name=REGION,
        endpoint_url=where.endpoint(service),
        aws_access_key_id="test",
        aws_secret_access_key="test",
    )


def _bootstrap(where: Places, table: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "provisioner.admin", "bootstrap", "--table", table, "--another-key", "--json"],
        cwd=ROOT,
        env={**os.environ, **where.environment()},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise CannotStart(f"no first key: {done.stderr}")
    return str(json.loads(done.stdout)["api_key"])


# -- demo -------------------------------------------------------------------------------------------------------------


def _demo(where: Places, *, short: bool) -> None:
    try:
        outputs = json.loads((where.state / "outputs.json").read_text())
        credentials = json.loads((where.state / "client.json").read_text())
    except FileNotFoundError as error:
        raise CannotStart("nothing is up: python -m scripts.localstack up") from error
    services = {name: _client(where, name) for name in ("ecs", "ec2", "autoscaling", "s3", "dynamodb")}
    image = where.cache.parent / "images" / ("minimal" if short else "code")
    if not image.is_dir():
        raise CannotStart(f"there is no {image}: run make setup")
    Demo(
        url=credentials["url"],
        api_key=credentials["api_key"],
        outputs=outputs,
        clients=services,
        docker=Docker(where.docker_host),
        image=image,
        sessions=2 if short else 8,
    ).play()


# -- down -------------------------------------------------------------------------------------------------------------


def _down(where: Places, *, destroy: bool) -> None:
    daemons = Daemons(where)
    terraform = Terraform(where)
    with _timed("down"):
        if destroy and daemons.running("moto") and daemons.running("ministack"):
            _empty_groups(where)
            terraform.destroy()
        terraform.forget()
        daemons.stop("machines")
        if daemons.running("dockerd") and daemons.running("moto"):
            by_name = clients(where)
            Machines(by_name, Docker(where.docker_host), where, Events(by_name)).end_all()
        elif daemons.running("dockerd"):
            docker = Docker(where.docker_host)
            for container in docker.containers():
                docker.remove(container["Id"])
        for name in _DAEMONS:
            daemons.stop(name)
        parts.stop_dockerd(daemons, where)
        remove_empty_cgroups(where)
        left = leftovers(where)
        if left:
            raise DaemonError("left behind:\n  " + "\n  ".join(left))
        shutil.rmtree(where.state, ignore_errors=True)


def _empty_groups(where: Places) -> None:
    """Instances that are protected from scale-in keep their group from being deleted, here as on AWS; the emulator
    does not end them by itself when the group is deleted by force."""
    groups = _client(where, "autoscaling")
    for group in groups.describe_auto_scaling_groups()["AutoScalingGroups"]:
        for instance in group["Instances"]:
            groups.terminate_instance_in_auto_scaling_group(
                InstanceId=instance["InstanceId"], ShouldDecrementDesiredCapacity=True
            )


def _tell_logs(where: Places) -> None:
    for log in sorted(where.logs.glob("*.log")):
        text = log.read_text(errors="replace")
        print(f"--- {log.name}\n{text[-3000:]}", file=sys.stderr)
    try:
        docker = Docker(where.docker_host)
        for container in docker.containers():
            print(f"--- container {container['Id'][:12]}\n{docker.logs(container['Id'])}", file=sys.stderr)
    except DockerError as error:
        print(error, file=sys.stderr)


class _timed:
    """Say how long something took."""

    def __init__(self, what: str) -> None:
        self._what = what

    def __enter__(self) -> None:
        self._begun = time.monotonic()

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None:
            print(f"{self._what}: {time.monotonic() - self._begun:.1f} s", flush=True)
