"""The Lambda bundle: what Lambda takes, the same bytes each time, and importable where nothing else is."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from tests.emulators import aws_environment

ROOT = Path(__file__).resolve().parents[2]


def _script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("shoal_bundle", ROOT / "scripts" / "bundle.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


bundle = _script()


def test_a_zip_depends_on_names_and_contents_alone(tmp_path: Path) -> None:
    """Order of writing, times and modes of files do not show in it."""
    made = []
    for number, names in enumerate((["b/x.py", "a.py"], ["a.py", "b/x.py"])):
        tree = tmp_path / f"tree{number}"
        for name in names:
            path = tree / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(f"# {name}\n")
            path.chmod(0o600 + number * 0o55)
            os.utime(path, (1e9 + number, 1e9 + number))
        target = tmp_path / f"{number}.zip"
        bundle.write_zip(tree, target)
        made.append(target.read_bytes())
    assert made[0] == made[1]
    with zipfile.ZipFile(tmp_path / "0.zip") as archive:
        assert archive.namelist() == ["a.py", "b/x.py"]
        assert {info.external_attr >> 16 for info in archive.infolist()} == {0o100644}


def test_what_lambda_would_refuse_is_not_left_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A zip over the limit is an error, and no file of its name is there to be deployed."""
    (tmp_path / "tree").mkdir()
    (tmp_path / "tree" / "big").write_bytes(os.urandom(2000))
    monkeypatch.setattr(bundle, "MAX_ZIP_BYTES", 1000)
    with pytest.raises(bundle.CannotBundle, match="more than Lambda takes"):
        bundle.write_zip(tmp_path / "tree", tmp_path / "big.zip")
    assert not (tmp_path / "big.zip").exists()


def test_of_the_sdk_only_what_is_called_is_kept() -> None:
    """Each service's newest description, and none of the hundreds that nobody here calls."""
    names = [
        "botocore/data/ec2/2014-09-01/service-2.json.gz",
        "botocore/data/ec2/2016-11-15/service-2.json.gz",
        "botocore/data/lex/2017-01-01/service-2.json.gz",
        "botocore/data/endpoints.json",
        "botocore/client.py",
    ]
    latest = bundle._latest_descriptions(names)
    assert [name for name in names if bundle._is_run(name, latest)] == [names[1], names[3], names[4]]


@pytest.fixture(scope="module")
def zips(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, Path, str]]:
    """The x86_64 bundle, made twice from the same wheels, and the Python that runs it."""
    try:
        interpreter = bundle.python()
    except bundle.CannotBundle as error:
        if os.environ.get("CI") == "true":
            pytest.fail(str(error))
        pytest.skip(str(error))
    work = tmp_path_factory.mktemp("bundle")
    patch = pytest.MonkeyPatch()
    (architecture,) = (each for each in bundle.ARCHITECTURES if each.name == "x86_64")
    wheels = bundle.download(architecture, work / "wheels")
    # A copy, lest somebody works on the sources between the two.
    for room in bundle.ROOMS:
        shutil.copytree(ROOT / room, work / "sources" / room)
    patch.setattr(bundle, "ROOT", work / "sources")
    one, two = work / "one.zip", work / "two.zip"
    for target in (one, two):
        bundle.bundle(architecture, wheels, target, interpreter)
    yield one, two, interpreter
    patch.undo()


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_bundle_is_reproducible_and_small_enough(zips: tuple[Path, Path, str]) -> None:
    """The same bytes twice, under what can be uploaded directly."""
    one, two, _ = zips
    assert one.read_bytes() == two.read_bytes()
    assert one.stat().st_size < bundle.MAX_ZIP_BYTES


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_handlers_are_importable_from_the_bundle_alone(
    zips: tuple[Path, Path, str], tmp_path: Path
) -> None:
    """In a clean interpreter with nothing but the unpacked zip, all that the first request needs included; from
    bytecode, since a function's disk cannot keep what is compiled."""
    one, _, interpreter = zips
    with zipfile.ZipFile(one) as archive:
        archive.extractall(tmp_path)
        names = set(archive.namelist())
    script = (
        f"import sys; sys.path.insert(0, {str(tmp_path)!r}); sys.dont_write_bytecode = True\n"
        "import api.lambda_handler, provisioner.handlers, provisioner.capacity.ecs, provisioner.capacity.batch\n"
        "assert callable(api.lambda_handler.handler) and callable(provisioner.handlers.reconcile)\n"
        "assert 'mangum' in sys.modules and 'aioboto3' in sys.modules\n"
        "print(*sorted(m.__name__ for m in list(sys.modules.values()) if getattr(m, '__file__', None) "
        f"and m.__file__.startswith({str(tmp_path)!r}) and m.__file__.endswith('.py') and not m.__cached__))"
    )
    command = [interpreter, "-I", "-S", "-W", "error", "-c", script]
    environment = {"PATH": os.environ["PATH"], "AWS_LAMBDA_FUNCTION_NAME": "api"}
    told = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert told.returncode == 0, told.stderr
    assert not told.stdout.split()
    sources = {name for name in names if name.endswith(".py")}
    tag = "cpython-" + bundle.PYTHON.replace(".", "")
    compiled = {name for name in names if name.endswith(f".{tag}.pyc")}
    assert len(compiled) == len(sources)
    assert not any(name.startswith(("shoal/client", "shoal/cli", "runtime_image", "tests")) for name in names)


_FIRST_REQUESTS = """
import json, sys, time
sys.path.insert(0, {path!r})
sys.dont_write_bytecode = True
import asyncio
from provisioner.aws.clients import AwsClients
from provisioner.store.table import create_table

async def prepare():
    clients = AwsClients()
    await create_table(clients, "bundle")
    await (await clients.get("s3")).create_bucket(Bucket="bundle")
    await clients.close()

asyncio.run(prepare())

class Context:
    end = time.monotonic() + 25
    aws_request_id = "1"
    def get_remaining_time_in_millis(self):
        return int((self.end - time.monotonic()) * 1000)

import api.lambda_handler, provisioner.handlers
event = {{
    "version": "2.0", "rawPath": "/readyz", "rawQueryString": "", "headers": {{"host": "x"}}, "isBase64Encoded": False,
    "requestContext": {{"http": {{"method": "GET", "path": "/readyz", "sourceIp": "192.0.2.1"}}, "timeEpoch": 0}},
}}
ready = api.lambda_handler.handler(event, Context())
looked = provisioner.handlers.reconcile({{"source": "aws.events"}}, Context())
print(json.dumps([ready["statusCode"], looked]))
"""


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_first_events_are_answered_from_the_bundle_alone(
    zips: tuple[Path, Path, str], tmp_path: Path, ministack: str
) -> None:
    """Nothing that a first request needs was left out: the table is read, the reconciler looks at its clusters."""
    one, _, interpreter = zips
    with zipfile.ZipFile(one) as archive:
        archive.extractall(tmp_path)
    environment = {
        **aws_environment(ministack),
        "PATH": os.environ["PATH"],
        "AWS_LAMBDA_FUNCTION_NAME": "bundle",
        "SHOAL_AWS_TABLE": "bundle",
        "SHOAL_AWS_BUCKET": "bundle",
        "SHOAL_AWS_POOLS": json.dumps(
            [{"kind": "batch", "pool": "default", "job_queue": "none", "job_definition": "none"}]
        ),
    }
    program = _FIRST_REQUESTS.format(path=str(tmp_path))
    told = subprocess.run(
        [interpreter, "-I", "-S", "-c", program], capture_output=True, text=True, env=environment, check=False
    )
    assert told.returncode == 0, told.stderr[-4000:]
    status, looked = json.loads(told.stdout.splitlines()[-1])
    assert status == 200
    assert looked["ticks"] >= 1
    assert looked["failed"] == 0, told.stderr[-4000:]


def test_terraform_runs_the_functions_on_the_python_they_are_bundled_for() -> None:
    """The default runtime of both modules is the bundle's, and their handlers are there."""
    for module, handler in (
        ("api", "api.lambda_handler.handler"),
        ("reconciler", "provisioner.handlers.reconcile"),
    ):
        written = "".join(
            path.read_text() for path in sorted((ROOT / "infra" / "modules" / module).glob("*.tf"))
        )
        assert f'"python{bundle.PYTHON}"' in written
        assert f'"{handler}"' in written
