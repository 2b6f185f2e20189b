"""The builder on one machine: the image builder's own program, run as a subprocess, its layers put into the blobs."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import tempfile
from collections import deque
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from provisioner.blobs import names
from provisioner.blobs.port import CHUNK_BYTES, BlobError, BlobMissing, Blobs
from provisioner.builders.port import Progress
from shoal.contract.errors import ErrorCode, ShoalError, invalid
from shoal.contract.images import (
    ArchiveSource,
    ImageManifest,
    Layer,
    RecipeSource,
    RegistrySource,
)

_LOG_LINES = 60
_PULLING = frozenset({"pull_failed", "no_mirror"})
#: Reasons that the request itself is at fault for, whatever is tried again, and the field that says it.
_INVALID = {"bad_reference": "source.ref"}
_KILL_S = 10.0


class LocalBuilder:
    """The `Builder` port over a command.

    Args:
        command: How the builder starts, such as `[python, "-m", "runtime_image.builder"]`.
        work: A directory for what is being built; made when missing, and emptied of each build when it ends.
        cache: Where images are kept by the digest of their recipe; None keeps none.
        at_once: How many builds run at a time; the others wait.
    """

    def __init__(
        self, blobs: Blobs, command: Sequence[str], *, work: Path, cache: Path | None = None, at_once: int = 1
    ) -> None:
        self._blobs = blobs
        self._command = tuple(command)
        self._work = work
        self._cache = cache
        self._limit = asyncio.Semaphore(at_once)

    async def build(
        self, name: str, tag: str, source: RecipeSource | RegistrySource | ArchiveSource, progress: Progress
    ) -> ImageManifest:
        """As the port says."""
        if isinstance(source, ArchiveSource) and await asyncio.to_thread(Path(source.archive).is_dir):
            await progress("storing")
            return await self._store(Path(source.archive))
        async with self._directory() as directory:
            await self._run(self._arguments(name, tag, source, directory), progress)
            await progress("storing")
            return await self._store(directory / "out")

    async def repack(
        self, layers: Sequence[Layer], exclude: Sequence[str], progress: Progress
    ) -> list[Layer]:
        """As the port says."""
        async with self._directory() as directory:
            await progress("fetching")
            paths = [await self._fetch(layer, directory) for layer in layers]
            globs, out = directory / "exclude.json", directory / "out"
            globs.write_text(json.dumps(list(exclude)))
            arguments = ["repack", "--exclude-file", str(globs), "--out", str(out), "--json-progress", "--"]
            await self._run([*arguments, *map(str, paths)], progress)
            await progress("storing")
            made = (await self._manifest(out)).layers
            if len(made) != len(layers):
                raise ShoalError(ErrorCode.INTERNAL, f"The builder made {len(made)} layers of {len(layers)}.")
            after = [
                # The same content, perhaps compressed otherwise: hosts have the old one.
                old
                if old.diff_id == new.diff_id
                else new.model_copy(update={"role": old.role, "name": old.name})
                for old, new in zip(layers, made, strict=True)
            ]
            for layer in after:
                if layer not in layers:
                    await self._store_layer(out, layer)
            return after

    @asynccontextmanager
    async def _directory(self) -> AsyncIterator[Path]:
        """A directory of its own, once it is this build's turn."""
        async with self._limit:
            self._work.mkdir(parents=True, exist_ok=True, mode=0o700)
            directory = Path(await asyncio.to_thread(tempfile.mkdtemp, prefix="build-", dir=self._work))
            try:
                yield directory
            finally:
                await asyncio.to_thread(shutil.rmtree, directory, ignore_errors=True)

    async def _fetch(self, layer: Layer, directory: Path) -> Path:
        """A layer from the blob store, as the builder names blobs: by that name it checks them."""
        path = directory / _blob_name(layer.digest)
        try:
            with await asyncio.to_thread(path.open, "wb") as file:
                async for chunk in self._blobs.get(names.layer(layer.digest)):
                    await asyncio.to_thread(file.write, chunk)
        except BlobMissing as error:
            raise ShoalError(
                ErrorCode.IMAGE_BUILD_FAILED, f"The layer {layer.digest} is not in the blob store."
            ) from error
        except (BlobError, OSError) as error:
            raise ShoalError(
                ErrorCode.UNAVAILABLE, f"The layer {layer.digest} cannot be fetched: {error}."
            ) from error
        return path

    def _arguments(
        self,
        name: str,
        tag: str,
        source: RecipeSource | RegistrySource | ArchiveSource,
        directory: Path,
    ) -> list[str]:
        out = ["--out", str(directory / "out"), "--json-progress"]
        named = ["--name", name.replace("/", "-"), "--tag", tag]
        match source:
            case RecipeSource(recipe=recipe):
                path = directory / "recipe.toml"
                path.write_text(recipe)
                cache = ["--cache", str(self._cache)] if self._cache is not None else []
                return ["build", "--recipe", str(path), *cache, *out]
            case RegistrySource(ref=ref):
                return ["import-oci", *named, *out, "--", ref]
            case ArchiveSource(archive=archive):
                return ["import-tar", *named, *out, "--", archive]

    async def _run(self, arguments: list[str], progress: Progress) -> None:
        try:
            process = await asyncio.create_subprocess_exec(
                *self._command,
                *arguments,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.DEVNULL,
                stderr=asyncio.subprocess.PIPE,
                start_new_session=True,
                limit=1 << 20,
            )
        except OSError as error:
            raise ShoalError(
                ErrorCode.UNAVAILABLE, f"The image builder cannot be started: {error}."
            ) from error
        log: deque[str] = deque(maxlen=_LOG_LINES)
        said: dict[str, Any] = {}
        assert process.stderr is not None
        try:
            while True:
                try:
                    line = (await process.stderr.readline()).decode(errors="replace").rstrip()
                except ValueError:
                    # A line over the limit: it is dropped, the next one is read.
                    continue
                if not line and process.stderr.at_eof():
                    break
                log.append(line[:2000])
                fields = _fields(line)
                if fields.get("phase") == "failed":
                    said = fields
                elif "phase" in fields:
                    await progress(str(fields["phase"]))
            code = await process.wait()
        finally:
            await _end(process)
        if code != 0:
            reason = str(said.get("reason", f"exit code {code}"))
            detail = str(said.get("detail", log[-1] if log else ""))
            if reason in _INVALID:
                raise invalid(_INVALID[reason], detail[:2000])
            pulling = ErrorCode.IMAGE_PULL_FAILED if reason in _PULLING else ErrorCode.IMAGE_BUILD_FAILED
            raise ShoalError(
                pulling,
                f"{reason}: {detail}"[:2000],
                details={"reason": reason, "log": "\n".join(log)[-16_000:]},
            )

    async def _store(self, directory: Path) -> ImageManifest:
        manifest = await self._manifest(directory)
        for layer in manifest.layers:
            await self._store_layer(directory, layer)
        return manifest

    async def _manifest(self, directory: Path) -> ImageManifest:
        try:
            # The builder writes the contract's manifest, and beside it what only it needs.
            text = await asyncio.to_thread((directory / "image.json").read_bytes)
            return ImageManifest.model_validate_json(text)
        except (OSError, ValidationError) as error:
            raise ShoalError(
                ErrorCode.IMAGE_BUILD_FAILED, f"{directory} holds no image.json that can be used: {error}."
            ) from error

    async def _store_layer(self, directory: Path, layer: Layer) -> None:
        name = names.layer(layer.digest)
        hexed = layer.digest.removeprefix("sha256:")
        path = directory / _blob_name(layer.digest)
        try:
            there = await self._blobs.head(name)
            if there is not None and there.size_bytes == layer.size_bytes:
                return
            await self._blobs.put(name, _chunks(path), sha256=hexed)
        except OSError as error:
            raise ShoalError(
                ErrorCode.IMAGE_BUILD_FAILED, f"The layer {layer.digest} cannot be read: {error}."
            ) from error
        except BlobError as error:
            raise ShoalError(
                ErrorCode.IMAGE_BUILD_FAILED,
                f"The layer {layer.digest} cannot be stored: {error}.",
                details={"reason": type(error).__name__},
            ) from error


def _blob_name(digest: str) -> str:
    return f"{digest.removeprefix('sha256:')}.tar.zst"


async def _chunks(path: Path) -> AsyncIterator[bytes]:
    with await asyncio.to_thread(path.open, "rb") as source:
        while chunk := await asyncio.to_thread(source.read, CHUNK_BYTES):
            yield chunk


def _fields(line: str) -> dict[str, Any]:
    if not line.startswith("{"):
        return {}
    try:
        fields = json.loads(line)
    except ValueError:
        return {}
    return fields if isinstance(fields, dict) else {}


async def _end(process: asyncio.subprocess.Process) -> None:
    """Nothing of a build outlives it, also when it was cancelled."""
    if process.returncode is not None:
        return
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, number)
        except ProcessLookupError:
            break
        try:
            await asyncio.wait_for(process.wait(), _KILL_S)
            break
        except TimeoutError:
            continue
