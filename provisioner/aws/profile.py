"""The `aws` and `localstack` profiles, wired: DynamoDB, S3, and hosts by ECS or Batch. They differ by the SDK's own
endpoint (`AWS_ENDPOINT_URL`) and by nothing here.

Three roles share one table and one bucket, any number of processes each:

    api         a Lambda function behind the HTTP API: runs only while it answers (`provisioner.turns`)
    router      a task that serves the same routes without limits of size and time (`python -m api serve`)
    reconciler  a Lambda function outside the network of the hosts: starts and ends them, reaches none
                (`provisioner.shift`, `provisioner.handlers`)

The SDK and everything that needs it is imported when services are opened, not with this module.
"""

from __future__ import annotations

import random
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Literal

from provisioner.aws.settings import AwsSettings, BatchPool, EcsPool
from provisioner.clock import Clock, SystemClock
from provisioner.route_tokens import RouteSigner
from provisioner.services import Services, build_services
from provisioner.settings import ProvisionerSettings
from provisioner.store.steady import SteadyStore
from shoal.contract.base import new_id

if TYPE_CHECKING:
    from provisioner.agents.port import AgentClient
    from provisioner.aws.clients import AwsClients
    from provisioner.blobs.port import Blobs
    from provisioner.capacity.port import Capacity
    from provisioner.store.port import Store

Role = Literal["api", "router", "reconciler"]

#: Seconds between two invocations of the reconciler by its schedule (infra/modules/reconciler).
_SCHEDULE_S = 60.0


@asynccontextmanager
async def open_services(
    aws: AwsSettings,
    settings: ProvisionerSettings,
    *,
    role: Role,
    clients: AwsClients | None = None,
    store: Store | None = None,
    blobs: Blobs | None = None,
    capacity: Capacity | None = None,
    agents: AgentClient | None = None,
    clock: Clock | None = None,
) -> AsyncIterator[Services]:
    """The services of one process. Nothing is asked of AWS until a use case does; closing leaves hosts alone.

    Args:
        role: What the process is for: only `reconciler` starts hosts, and only the others reach them.
        clients: Whose clients are used; None makes some, and closes them.
        store, blobs, capacity, agents, clock: Instead of the profile's own, for tests; theirs to close.

    Raises:
        ValueError: A pool has no driver, in a process that starts hosts.
    """
    if role == "reconciler" and settings.look_s is None:
        settings = settings.model_copy(update={"look_s": _SCHEDULE_S})
    async with AsyncExitStack() as stack:
        if clients is None:
            from provisioner.aws.clients import AwsClients

            clients = AwsClients()
            stack.push_async_callback(clients.close)
        clock = clock or SystemClock()
        if store is None:
            from provisioner.store.dynamodb import DynamoStore

            store = DynamoStore(clients, aws.table, clock=clock)
            stack.push_async_callback(store.close)
        if blobs is None:
            from provisioner.blobs.s3 import S3Blobs

            blobs = S3Blobs(
                clients,
                aws.bucket,
                prefix=aws.blob_prefix,
                kms_key_id=aws.kms_key_id,
                audit_retention=timedelta(days=aws.audit_lock_days) if aws.audit_lock_days else None,
                clock=clock,
            )
            stack.push_async_callback(blobs.close)
        if capacity is None:
            capacity = _capacity(aws, settings, role, clients, clock)
            stack.push_async_callback(capacity.close)
        steady = SteadyStore(store, clock, random.Random())
        signer = RouteSigner(steady, clock, key_life_s=settings.signing_key_s)
        if agents is None:
            agents = _agents(role, signer)
            stack.push_async_callback(agents.close)
        yield build_services(
            store=store,
            blobs=blobs,
            agents=agents,
            capacity=capacity,
            clock=clock,
            signer=signer,
            settings=settings,
            replica=new_id(role),
            reconciler_elsewhere=role != "reconciler",
            execution_enabled=aws.execution_enabled,
        )


def _agents(role: Role, signer: RouteSigner) -> AgentClient:
    if role == "reconciler":
        from provisioner.agents.none import NoAgents

        return NoAgents()
    from provisioner.agents.http import HttpAgents

    return HttpAgents(signer)


def _capacity(
    aws: AwsSettings, settings: ProvisionerSettings, role: Role, clients: AwsClients, clock: Clock
) -> Capacity:
    from provisioner.capacity.by_pool import ByPool, FrozenCapacity, NoCapacity

    if role != "reconciler":
        return NoCapacity()
    without = {pool.name for pool in settings.pools} - {pool.pool for pool in aws.pools}
    if without:
        raise ValueError(f"SHOAL_AWS_POOLS says nothing of the pools {', '.join(sorted(without))}")
    drivers: dict[str, Capacity] = {}
    ecs = [pool for pool in aws.pools if isinstance(pool, EcsPool)]
    if ecs:
        from provisioner.capacity.ecs import EcsCapacity

        drivers |= dict.fromkeys((pool.pool for pool in ecs), EcsCapacity(clients, ecs, clock=clock))
    batch = [pool for pool in aws.pools if isinstance(pool, BatchPool)]
    if batch:
        from provisioner.capacity.batch import BatchCapacity

        drivers |= dict.fromkeys((pool.pool for pool in batch), BatchCapacity(clients, batch, clock=clock))
    by_pool = ByPool(drivers)
    return by_pool if aws.execution_enabled else FrozenCapacity(by_pool)
