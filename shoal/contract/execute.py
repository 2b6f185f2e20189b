"""`POST /v1/execute`: one call, no session to manage."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from shoal.contract.actions import (
    DEFAULT_OUTPUT_LIMIT_BYTES,
    Argument,
    Encoding,
    File,
    OutputLimit,
    RunCodeObservation,
    Timeout,
)
from shoal.contract.base import ActionId, Answer, Name, Time, WaitSeconds, Wire
from shoal.contract.errors import ErrorDetail
from shoal.contract.sessions import EnvName, EnvValue, Network, ResourcesAsked
from shoal.contract.states import ActionStatus, Substrate


class Execute(Wire):
    """One stateless call: either `argv`, or `language` with `code`. `id` makes it run once: repeat the call with the
    same id to join it or to read its result."""

    id: ActionId | None = None
    image: str
    language: Literal["python", "bash", "sh", "c", "c++"] | None = None
    code: str | None = None
    argv: list[Argument] | None = Field(default=None, min_length=1)
    files: list[File] = Field(default_factory=list, max_length=1000)
    args: list[Argument] = Field(default_factory=list)
    stdin: str | None = None
    stdin_encoding: Encoding = "utf-8"
    env: dict[EnvName, EnvValue] = Field(default_factory=dict)
    resources: ResourcesAsked = Field(default_factory=ResourcesAsked)
    network: Network = Field(default_factory=Network)
    substrate: Substrate = Substrate.CONTAINER
    pool: Name | None = None
    run: Name | None = None
    timeout_s: Timeout = 60.0
    output_limit_bytes: OutputLimit = DEFAULT_OUTPUT_LIMIT_BYTES
    encoding: Encoding = "utf-8"
    output_files: list[str] = Field(default_factory=list, max_length=100)
    wait_s: WaitSeconds = 25.0

    @model_validator(mode="after")
    def _one_program(self) -> Execute:
        if (self.argv is None) == (self.code is None):
            raise ValueError("give exactly one of `argv` and `code`")
        if self.code is not None and self.language is None:
            raise ValueError("`code` needs its `language`")
        return self


class OutputFile(Answer):
    """A file the call left, in base64; `content` None when it does not exist."""

    path: str
    content: str | None
    size_bytes: int


class Executed(Answer):
    """The call: `status` is `done` with an observation, or `running` (202): ask again with the same id."""

    id: str
    status: ActionStatus
    session: str | None = None
    observation: RunCodeObservation | None = None
    files: list[OutputFile] = Field(default_factory=list)
    error: ErrorDetail | None = None
    started_at: Time | None = None
    finished_at: Time | None = None
    replayed: bool = False
