"""Images, and an agent of its own for each test."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from runtime_image.agent.guest_runtime import build_guest_runtime
from runtime_image.builder.build import build_recipe
from shoal.contract.host import SandboxSource
from tests.integration.agent.harness import (
    AgentProcess,
    Control,
    control_plane,
    image_source,
    running_agent,
)

RECIPES = Path(__file__).parents[3] / "runtime_image" / "images"


@pytest.fixture(scope="session")
def shared() -> Iterator[Path]:
    """What agents of all tests share: the guest's runtime, unpacked layers, the built image."""
    directory = Path(tempfile.mkdtemp(prefix="shoal-agent-it-"))
    build_guest_runtime(directory / "guest")
    yield directory
    shutil.rmtree(directory)


@pytest.fixture(scope="session")
def minimal_image(shared: Path) -> Path:
    """The `minimal` image: busybox, no Python, no bash."""
    out = shared / "image-minimal"
    build_recipe(RECIPES / "minimal.toml", out, cache=shared / "image-cache")
    return out


@pytest.fixture
def source(minimal_image: Path) -> SandboxSource:
    """What a sandbox of the minimal image starts from."""
    return image_source(minimal_image)


@pytest.fixture
def root() -> Iterator[Path]:
    """A directory for one test's control plane and agents."""
    directory = Path(tempfile.mkdtemp(prefix="shoal-agent-t-"))
    yield directory
    shutil.rmtree(directory)


@pytest.fixture
async def control(root: Path, minimal_image: Path) -> AsyncIterator[Control]:
    """A control plane that has the minimal image."""
    async with control_plane(root, [minimal_image]) as running:
        yield running


@pytest.fixture
async def agent(control: Control, root: Path, shared: Path) -> AsyncIterator[AgentProcess]:
    """A running agent; at the end it stops cleanly and nothing of it is left."""
    async with running_agent(control, root / "h1", **options(shared)) as running:
        yield running


def options(shared: Path) -> dict[str, object]:
    """What agents of these tests have in common."""
    return {"layers_dir": shared / "layers", "guest_dir": shared / "guest"}
