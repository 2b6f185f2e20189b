"""What the `aws` and `localstack` profiles are told, by the environment; unknown keys are refused."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field
from pydantic_settings import BaseSettings, SettingsConfigDict


class EcsPool(BaseModel):
    """Hosts of a pool as ECS tasks on the instances of an Auto Scaling group.

    Attributes:
        pool: The pool's name, as in `PoolSettings`.
        cluster: ECS cluster, name or ARN.
        auto_scaling_group: Name of the group whose instances join that cluster.
        task_definition: Family, `family:revision` or ARN of the agent's task.
        container: The agent's container in that task.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    kind: Literal["ecs"] = "ecs"
    pool: str
    cluster: str
    auto_scaling_group: str
    task_definition: str
    container: str = "agent"


class BatchPool(BaseModel):
    """Hosts of a pool as children of AWS Batch array jobs.

    Attributes:
        pool: The pool's name, as in `PoolSettings`.
        job_queue: Name or ARN.
        job_definition: Name, `name:revision` or ARN of the agent's job.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    kind: Literal["batch"] = "batch"
    pool: str
    job_queue: str
    job_definition: str


PoolDriver = Annotated[EcsPool | BatchPool, Field(discriminator="kind")]


class AwsSettings(BaseSettings):
    """Where state, blobs and hosts are. From the environment as `SHOAL_AWS_<NAME>`; credentials, Region and endpoint
    are the SDK's own (`AWS_REGION`, `AWS_ENDPOINT_URL`, ...).

    Attributes:
        table: The DynamoDB table.
        bucket: The S3 bucket of snapshots, images and journals.
        blob_prefix: Put before every object's name; empty, or ending in `/`.
        kms_key_id: Encrypts objects with this key; None leaves it to the bucket's default.
        audit_lock_days: Objects below `audit/` cannot be deleted for so many days (Object Lock, governance mode; the
            bucket must have been made with it). None sets no lock. Nothing else is ever locked: see docs/s3.md.
        pools: How each pool gets its hosts, as JSON. A process that starts none (API, router) needs none.
        execution_enabled: False starts no host and takes no new session: spending is frozen, what runs may end.
    """

    model_config = SettingsConfigDict(env_prefix="SHOAL_AWS_", extra="forbid", frozen=True)

    table: str
    bucket: str
    blob_prefix: str = Field(default="", pattern=r"^([A-Za-z0-9._=-]+/)*$")
    kms_key_id: str | None = None
    audit_lock_days: int | None = Field(default=None, ge=1)
    pools: tuple[PoolDriver, ...] = ()
    execution_enabled: bool = True
