"""Recipes: an image as a TOML file of a few lines.

name = "code"
tag = "1.0.0"
suite = "bookworm"           the Debian release, from the machine's own mirrors
variant = "minbase"          as mmdebstrap names them; "extract" unpacks the packages and no more
packages = ["python3"]
directories = ["/workspace"]
commands = ["...", ["argv", "too"]]    run in the new root once the packages are there
role = "base"                or workspace, toolkit
user, workdir                defaults of the sandboxes
[env]                        their variables
[files]                      "/etc/motd" = "text", or {source = "relative/to/recipe", mode = "0755"}
"""

from __future__ import annotations

import hashlib
import tomllib
from pathlib import Path
from typing import Annotated, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError, field_validator

from runtime_image.builder.errors import BuildError, BuildReason
from runtime_image.builder.manifest import LayerRole, canonical_json, machine_architecture

# Counts up whenever the same recipe would come out differently.
BUILDER_VERSION = 1

_AbsolutePath = Annotated[str, StringConstraints(pattern=r"^/[^\x00]*$")]


class RecipeFile(BaseModel):
    """A file to put into the image. Exactly one of `content` and `source`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    content: str | None = None
    source: str | None = None
    mode: str = Field(default="0644", pattern=r"^0?[0-7]{3,4}$")


_Paths = TypeVar("_Paths", dict[str, RecipeFile], tuple[str, ...])


class Recipe(BaseModel):
    """A recipe as its file says it. Unknown fields are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str = Field(pattern=r"^[a-z0-9][a-z0-9._-]{0,62}$")
    tag: str = Field(pattern=r"^[A-Za-z0-9_][A-Za-z0-9._-]{0,62}$")
    suite: str = Field(default="bookworm", pattern=r"^[a-z][a-z0-9-]*$")
    variant: Literal["extract", "custom", "essential", "apt", "minbase", "required", "important"] = "minbase"
    packages: tuple[Annotated[str, StringConstraints(pattern=r"^[a-z0-9][a-z0-9+.:=~-]*$")], ...] = ()
    directories: tuple[_AbsolutePath, ...] = ()
    files: dict[_AbsolutePath, RecipeFile] = Field(default_factory=dict)
    commands: tuple[str | tuple[str, ...], ...] = ()
    exclude: tuple[_AbsolutePath, ...] = ()
    env: dict[str, str] = Field(default_factory=dict)
    workdir: _AbsolutePath | None = None
    user: str | None = None
    role: LayerRole = LayerRole.BASE

    @field_validator("files", mode="before")
    @classmethod
    def _short_form(cls, value: object) -> object:
        if isinstance(value, dict):
            return {
                path: {"content": said} if isinstance(said, str) else said for path, said in value.items()
            }
        return value

    @field_validator("files", "directories")
    @classmethod
    def _straight_down(cls, value: _Paths) -> _Paths:
        for path in value:
            if ".." in path.split("/"):
                raise ValueError(f"{path!r} climbs")
        return value


class LoadedRecipe(BaseModel):
    """A recipe with the bytes of its files.

    Attributes:
        contents: By path in the image: (bytes, mode).
    """

    model_config = ConfigDict(frozen=True)

    recipe: Recipe
    contents: dict[str, tuple[bytes, int]]

    def with_suite(self, suite: str) -> LoadedRecipe:
        """The same recipe from another release."""
        return self.model_copy(update={"recipe": self.recipe.model_copy(update={"suite": suite})})

    @property
    def digest(self) -> str:
        """Names what the image is made from; equal digests share a cached build."""
        said = {
            "builder": BUILDER_VERSION,
            "architecture": machine_architecture(),
            "recipe": self.recipe.model_dump(mode="json", exclude={"files"}),
            "files": {
                path: [hashlib.sha256(data).hexdigest(), mode] for path, (data, mode) in self.contents.items()
            },
        }
        return "sha256:" + hashlib.sha256(canonical_json(said)).hexdigest()


def load_recipe(path: Path) -> LoadedRecipe:
    """Reads a recipe and the files it names.

    Raises:
        BuildError: `bad_recipe`, naming what is wrong.
    """
    try:
        recipe = Recipe.model_validate(tomllib.loads(path.read_text()))
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise BuildError(BuildReason.BAD_RECIPE, f"{path}: {where}: {first['msg']}") from error
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise BuildError(BuildReason.BAD_RECIPE, f"{path}: {error}") from error
    contents: dict[str, tuple[bytes, int]] = {}
    for where, file in recipe.files.items():
        if (file.content is None) == (file.source is None):
            raise BuildError(BuildReason.BAD_RECIPE, f"{path}: files.{where}: content or source, not both")
        if file.source is not None:
            try:
                data = (path.parent / file.source).read_bytes()
            except OSError as error:
                raise BuildError(BuildReason.BAD_RECIPE, f"{path}: files.{where}: {error}") from error
        else:
            data = (file.content or "").encode()
        contents[where] = (data, int(file.mode, 8))
    return LoadedRecipe(recipe=recipe, contents=contents)
