"""`shoal image ...`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.progress import BarColumn, DownloadColumn, Progress, TaskID, TextColumn, TransferSpeedColumn

from shoal.cli import asking
from shoal.cli.output import Fail, Json, emit, print_json, size, stderr, table
from shoal.contract.images import Image, ImageManifest
from shoal.contract.states import ImageState

app = typer.Typer(help="Build, add, list and remove images.", no_args_is_help=True, rich_markup_mode=None)

Name = Annotated[str, typer.Argument(metavar="NAME:TAG", help="Tags never move.")]
Wait = Annotated[bool, typer.Option(help="Wait until it can be used.")]
Workspace = Annotated[str | None, typer.Option(help="name:tag of an image whose layers go over the base.")]
Toolkits = Annotated[list[str] | None, typer.Option("--toolkit", help="name:tag; repeatable, in order.")]
Workdir = Annotated[str | None, typer.Option(help="Where commands start.")]
User = Annotated[str | None, typer.Option(help="As whom commands run.")]


def _put(name: str, source: Mapping[str, Any], wait: bool, as_json: bool, **options: Any) -> None:
    console = stderr()
    with asking.connected() as shoal:
        if as_json or not console.is_terminal:
            image = shoal.images.put(name, source, wait=wait, **options)
        else:
            with console.status(f"image {name}") as status:

                def watch(now: Image) -> None:
                    status.update(f"image {name}: {now.state} · {now.phase or ''}")

                image = shoal.images.put(name, source, wait=wait, watch=watch, **options)
    emit(image, f"{image.name}:{image.tag}  {image.state}  {image.digest or ''}", as_json=as_json)


@app.command("build")
def build(
    name: Name,
    recipe: Annotated[
        Path,
        typer.Argument(metavar="RECIPE.toml", exists=True, dir_okay=False, help="What to install and run."),
    ],
    workspace: Workspace = None,
    toolkit: Toolkits = None,
    env: asking.Env = None,
    workdir: Workdir = None,
    user: User = None,
    wait: Wait = True,
    json: Json = False,
) -> None:
    """Build an image from a recipe."""
    source = {"recipe": recipe.read_text(encoding="utf-8")}
    options = {"env": asking.pairs(env, "--env"), "workdir": workdir, "user": user}
    _put(name, source, wait, json, workspace=workspace, toolkits=toolkit, **options)


def _is_path(source: str) -> bool:
    """Whether it is a path rather than an OCI reference: a folder named `debian` hides no image of that name."""
    path = Path(source)
    return path.is_absolute() or path.is_file() or (path / "image.json").is_file()


@app.command("add")
def add(
    name: Name,
    source: Annotated[
        str,
        typer.Argument(
            metavar="SOURCE",
            help="An OCI reference (docker://..., oci:DIR), a tarball or a directory that the builder wrote (both "
            "on the service's machine), or a snapshot's id.",
        ),
    ],
    exclude: Annotated[
        list[str] | None,
        typer.Option(
            metavar="GLOB",
            help="For a snapshot: paths left out, relative to /: * within a name, ** across directories. Repeatable.",
        ),
    ] = None,
    workspace: Workspace = None,
    toolkit: Toolkits = None,
    env: asking.Env = None,
    workdir: Workdir = None,
    user: User = None,
    wait: Wait = True,
    json: Json = False,
) -> None:
    """Take an image from a registry, a tarball, a built directory, or a snapshot."""
    made: dict[str, Any]
    if exclude and not source.startswith("snp_"):
        raise typer.BadParameter("only a snapshot can be packed without some paths", param_hint="--exclude")
    if source.startswith("snp_"):
        made = {"snapshot": source, "exclude": exclude or []}
    elif _is_path(source):
        made = {"archive": str(Path(source).resolve())}
    else:
        made = {"ref": source}
    options = {"env": asking.pairs(env, "--env"), "workdir": workdir, "user": user}
    _put(name, made, wait, json, workspace=workspace, toolkits=toolkit, **options)


@app.command("push")
def push(
    source: Annotated[
        Path,
        typer.Argument(
            metavar="DIR|ARCHIVE",
            exists=True,
            help="What the builder wrote here (image.json and its layers), or a tar of it.",
        ),
    ],
    name: Name,
    workspace: Workspace = None,
    toolkit: Toolkits = None,
    env: asking.Env = None,
    workdir: Workdir = None,
    user: User = None,
    wait: Wait = True,
    json: Json = False,
) -> None:
    """Send a built image to the service: layers that are not there yet, then the image."""
    options: dict[str, Any] = {
        "workspace": workspace,
        "toolkits": toolkit,
        "env": asking.pairs(env, "--env"),
        "workdir": workdir,
        "user": user,
        "wait": wait,
    }
    console = stderr()
    try:
        with asking.connected() as shoal:
            if json or not console.is_terminal:
                image = shoal.images.push(name, source, **options)
            else:
                columns = (
                    TextColumn("{task.description}"),
                    BarColumn(),
                    DownloadColumn(),
                    TransferSpeedColumn(),
                )
                with Progress(*columns, console=console) as progress:
                    tasks: dict[str, TaskID] = {}
                    sizes = _layer_sizes(source)

                    def sent(digest: str, count: int) -> None:
                        if digest not in tasks:
                            tasks[digest] = progress.add_task(digest[7:19], total=sizes.get(digest))
                        progress.advance(tasks[digest], count)

                    image = shoal.images.push(name, source, progress=sent, **options)
    except ValueError as error:
        raise Fail(str(error)) from error
    emit(image, f"{image.name}:{image.tag}  {image.state}  {image.digest or ''}", as_json=json)


def _layer_sizes(source: Path) -> dict[str, int]:
    """Of a directory's layers by digest; an archive's are not known before it is read."""
    try:
        manifest = ImageManifest.model_validate_json((source / "image.json").read_bytes())
    except (OSError, ValueError):
        return {}
    return {layer.digest: layer.size_bytes for layer in manifest.layers}


@app.command("list")
def list_(json: Json = False) -> None:
    """List images."""
    with asking.connected() as shoal:
        found = shoal.images.list()
    if json:
        print_json({"images": found})
        return
    rows = [
        (
            f"{i.name}:{i.tag}",
            i.state if i.state is not ImageState.BUILDING else f"{i.state} · {i.phase}",
            len(i.layers),
            size(i.size_bytes),
            (i.digest or "")[:19],
            i.error.message if i.error else "",
        )
        for i in found
    ]
    table(("IMAGE", "STATE", "LAYERS", "SIZE", "DIGEST", "ERROR"), rows)


@app.command("show")
def show(name: Name, json: Json = False) -> None:
    """Show an image."""
    with asking.connected() as shoal:
        image = shoal.images.get(name)
    emit(image, image.model_dump_json(indent=2), as_json=json)


@app.command("rm")
def rm(names: Annotated[list[str], typer.Argument(metavar="NAME:TAG...")], json: Json = False) -> None:
    """Remove tags; sessions that run from them go on."""
    with asking.connected() as shoal:
        for name in names:
            shoal.images.delete(name)
    emit({"images": names}, "\n".join(names), as_json=json)
