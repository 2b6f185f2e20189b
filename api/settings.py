"""Settings of the HTTP surface, read once at the start; unknown keys are refused."""

from __future__ import annotations

from pydantic import Field
from pydantic_settings import BaseSettings, SettingsConfigDict

from shoal.contract.actions import MAX_ACTION_BYTES


class ApiSettings(BaseSettings):
    """How the API answers and relays. From the environment as `SHOAL_API_<NAME>`.

    Attributes:
        max_body_bytes: The largest JSON body of a route that is not relayed.
        max_action_bytes: The largest body of an action; larger content goes by the files routes.
        buffer_body_bytes: Relayed bodies up to this size are held in memory, so that they can be sent again after a
            change of route; larger ones are streamed and sent once.
        key_cache_s: How long a verified API key is believed without asking the store; a revoked one works so long.
        route_cache_s: How long a session's route is believed; agents refuse a stale one, which renews it at once.
        connect_timeout_s: How long connecting to an agent may take.
        agent_silence_s: How long an agent may send nothing; longer than the longest poll and the streams' heartbeat.
        answer_limit_bytes: The largest body that this entrance carries in either direction, where it buffers them
            (Lambda, an HTTP API); larger files go by the blob store (`POST /v1/transfers`). None carries any size.
        fan_out: How many requests one `actions:wait` has in flight at the agents.
    """

    model_config = SettingsConfigDict(env_prefix="SHOAL_API_", extra="forbid", frozen=True)

    max_body_bytes: int = Field(default=MAX_ACTION_BYTES, ge=1024)
    max_action_bytes: int = Field(default=MAX_ACTION_BYTES + 65_536, ge=1024)
    buffer_body_bytes: int = Field(default=1_048_576, ge=0)
    key_cache_s: float = Field(default=5.0, ge=0)
    route_cache_s: float = Field(default=15.0, ge=0)
    connect_timeout_s: float = Field(default=3.0, gt=0)
    agent_silence_s: float = Field(default=45.0, gt=0)
    answer_limit_bytes: int | None = Field(default=None, ge=1024)
    fan_out: int = Field(default=64, ge=1)
