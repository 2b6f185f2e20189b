"""What an installation costs in a month in which nobody runs anything: from its planned resources and the price table.

Every type of resource is either priced here or listed as free with the reason; one that is neither raises. Pure.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any

from costs.prices import HOURS_A_MONTH, Prices


class UnpricedResource(LookupError):
    """A type of resource of which nothing here knows what it costs."""


@dataclass(frozen=True, kw_only=True)
class Resource:
    """A resource as Terraform planned it: `values` are its attributes."""

    address: str
    type: str
    values: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Rest:
    """What is assumed of a month at rest.

    Attributes:
        look_s: How long one look of the reconciler takes, seconds billed.
        look_reads, look_writes: Request units of a look: the lease, the queue, hosts, pools.
        look_log_bytes: What a look writes to its log, with the lines of Lambda itself.
        table_gb, bucket_gb, images_gb, logs_gb: What is stored while nothing runs: ended sessions, one sandbox image
            with its layers, three agent images (they share layers), logs of two weeks.
    """

    look_s: Decimal = Decimal("0.4")
    look_reads: int = 25
    look_writes: int = 4
    look_log_bytes: int = 600
    table_gb: Decimal = Decimal("0.2")
    bucket_gb: Decimal = Decimal(5)
    images_gb: Decimal = Decimal("0.5")
    logs_gb: Decimal = Decimal("0.5")


@dataclass(frozen=True, kw_only=True)
class Line:
    """One cost: so many units of a price."""

    address: str
    what: str
    units: Decimal
    price: str
    usd: Decimal


@dataclass(frozen=True, kw_only=True)
class _Plan:
    """The whole, for rules that look beyond one resource."""

    resources: Sequence[Resource]
    rest: Rest
    prices: Prices
    hosts_kept: Mapping[str, int] = field(default_factory=dict)

    def line(self, resource: Resource, what: str, units: Decimal | int, price: str) -> Line:
        units = Decimal(units)
        return Line(
            address=resource.address, what=what, units=units, price=price, usd=self.prices[price].of(units)
        )


def at_rest(resources: Iterable[Resource], prices: Prices, rest: Rest | None = None) -> list[Line]:
    """The lines of a month's bill, in order of the resources; those that cost nothing have none.

    Raises:
        UnpricedResource: A resource's type is neither priced nor known to be free.
        PriceError: A price is missing from the table.
    """
    found = list(resources)
    plan = _Plan(resources=found, rest=rest or Rest(), prices=prices, hosts_kept=_hosts_kept(found))
    lines: list[Line] = []
    for resource in found:
        if resource.type in FREE:
            continue
        if resource.type not in _RULES:
            raise UnpricedResource(f"{resource.address}: what does a {resource.type} cost at rest?")
        lines += _RULES[resource.type](plan, resource)
    return [line for line in lines if line.usd]


def total(lines: Iterable[Line]) -> Decimal:
    """The sum, USD, not rounded."""
    return sum((line.usd for line in lines), Decimal(0))


def _hosts_kept(resources: Iterable[Resource]) -> dict[str, int]:
    """Hosts that each pool keeps without demand, from the settings that the reconciler gets."""
    kept: dict[str, int] = {}
    for resource in resources:
        pools = _environment(resource).get("SHOAL_PROVISIONER_POOLS")
        for pool in json.loads(pools) if pools else ():
            kept[pool["name"]] = int(pool.get("min_hosts", 0))
    return kept


def _environment(resource: Resource) -> Mapping[str, str]:
    told = resource.values.get("environment") or ()
    return dict(told[0].get("variables") or {}) if isinstance(told, list) and told else {}


def _table(plan: _Plan, table: Resource) -> list[Line]:
    lines = [plan.line(table, "table: ended sessions", plan.rest.table_gb, "dynamodb.storage")]
    if any(entry.get("enabled") for entry in table.values.get("point_in_time_recovery") or ()):
        lines.append(plan.line(table, "table: 35 days of its past", plan.rest.table_gb, "dynamodb.recovery"))
    return lines


def _bucket(plan: _Plan, bucket: Resource) -> list[Line]:
    return [plan.line(bucket, "bucket: a sandbox image", plan.rest.bucket_gb, "s3.storage")]


def _repository(plan: _Plan, repository: Resource) -> list[Line]:
    return [plan.line(repository, "images of the agent or router", plan.rest.images_gb, "ecr.storage")]


def _schedule(plan: _Plan, rule: Resource) -> list[Line]:
    """A rule with a schedule makes the reconciler look so often; rules that wait for events do nothing at rest."""
    if not rule.values.get("schedule_expression"):
        return []
    every = str(rule.values["schedule_expression"]).removeprefix("rate(").split()[0]
    looks = HOURS_A_MONTH * 60 / Decimal(every)
    function = next(
        resource
        for resource in plan.resources
        if resource.type == "aws_lambda_function"
        and str(resource.values.get("handler")).startswith("provisioner.")
    )
    memory_gb = Decimal(function.values["memory_size"]) / 1024
    architecture = function.values["architectures"][0]
    rest = plan.rest
    return [
        plan.line(function, "reconciler: looks", looks, "lambda.request"),
        plan.line(function, "reconciler: time", looks * rest.look_s * memory_gb, f"lambda.{architecture}"),
        plan.line(function, "reconciler: reads", looks * rest.look_reads, "dynamodb.read"),
        plan.line(function, "reconciler: writes", looks * rest.look_writes, "dynamodb.write"),
        plan.line(function, "reconciler: log", looks * rest.look_log_bytes / 10**9, "logs.ingested"),
        plan.line(function, "logs kept", rest.logs_gb, "logs.storage"),
    ]


def _group(plan: _Plan, group: Resource) -> list[Line]:
    """Hosts that stay, and the disks of stopped ones in a warm pool."""
    tags = {tag["key"]: tag["value"] for tag in group.values.get("tag") or ()}
    pool = tags.get("shoal:pool", "")
    hosts = max(plan.hosts_kept.get(pool, 0), int(group.values.get("min_size") or 0))
    stopped = max((int(warm.get("min_size") or 0) for warm in group.values.get("warm_pool") or ()), default=0)
    template = next(
        (
            resource
            for resource in plan.resources
            if resource.type == "aws_launch_template"
            and (resource.values.get("tags") or {}).get("shoal:pool") == pool
        ),
        None,
    )
    lines: list[Line] = []
    if hosts:
        hours = hosts * HOURS_A_MONTH
        instance = plan.prices.instance(_instance_type(group, template))
        lines.append(
            Line(
                address=group.address,
                what=f"{hosts} hosts that stay",
                units=hours,
                price=instance.type,
                usd=hours * instance.on_demand_usd_h,
            )
        )
        lines.append(plan.line(group, "their addresses", hours, "ipv4.hour"))
    if (hosts or stopped) and template is not None:
        disks = [
            Decimal(ebs["volume_size"])
            for mapping in template.values.get("block_device_mappings") or ()
            for ebs in mapping.get("ebs") or ()
        ]
        lines.append(plan.line(group, "disks of hosts", (hosts + stopped) * sum(disks), "ebs.gp3"))
    return lines


def _instance_type(group: Resource, template: Resource | None) -> str:
    """The type that a group prefers."""
    for policy in group.values.get("mixed_instances_policy") or ():
        for launch in policy.get("launch_template") or ():
            for override in launch.get("override") or ():
                return str(override["instance_type"])
    return str(template.values["instance_type"]) if template is not None else ""


def _a_month(price: str, what: str) -> Callable[[_Plan, Resource], list[Line]]:
    return lambda plan, resource: [plan.line(resource, what, 1, price)]


def _an_hour(price: str, what: str) -> Callable[[_Plan, Resource], list[Line]]:
    return lambda plan, resource: [plan.line(resource, what, HOURS_A_MONTH, price)]


def _endpoint(plan: _Plan, endpoint: Resource) -> list[Line]:
    """Gateway endpoints are free; interface endpoints are billed by the hour and zone."""
    if endpoint.values.get("vpc_endpoint_type") == "Gateway":
        return []
    zones = max(1, len(endpoint.values.get("subnet_ids") or ()))
    return [plan.line(endpoint, "interface endpoint", zones * HOURS_A_MONTH, "endpoint.hour")]


def _filter(plan: _Plan, filter: Resource) -> list[Line]:
    """Its metric has values, and a price, when the event happens: at rest it does not, but for the queue's age, which
    would be the age of nothing. Priced all the same, as the most it can be."""
    return [plan.line(filter, "metric from the log", 1, "cloudwatch.metric")]


def _compute_environment(plan: _Plan, environment: Resource) -> list[Line]:
    """Batch launches nothing without jobs; cores that it keeps would have a price."""
    for resources in environment.values.get("compute_resources") or ():
        if resources.get("min_vcpus"):
            raise UnpricedResource(f"{environment.address} keeps {resources['min_vcpus']} cores")
    return []


def _load_balancer(plan: _Plan, balancer: Resource) -> list[Line]:
    addresses = max(2, len(balancer.values.get("subnets") or ()))
    return [
        plan.line(balancer, "load balancer", HOURS_A_MONTH, "alb.hour"),
        plan.line(balancer, "its addresses", addresses * HOURS_A_MONTH, "ipv4.hour"),
    ]


_RULES: Mapping[str, Callable[[_Plan, Resource], list[Line]]] = {
    "aws_autoscaling_group": _group,
    "aws_batch_compute_environment": _compute_environment,
    "aws_cloudwatch_dashboard": _a_month("cloudwatch.dashboard", "dashboard"),
    "aws_cloudwatch_event_rule": _schedule,
    "aws_cloudwatch_log_metric_filter": _filter,
    "aws_cloudwatch_metric_alarm": _a_month("cloudwatch.alarm", "alarm"),
    "aws_dynamodb_table": _table,
    "aws_ecr_repository": _repository,
    "aws_kms_key": _a_month("kms.key", "key"),
    "aws_lb": _load_balancer,
    "aws_nat_gateway": _an_hour("nat.hour", "NAT gateway"),
    "aws_s3_bucket": _bucket,
    "aws_service_discovery_private_dns_namespace": _a_month("route53.zone", "private zone of the routers"),
    "aws_vpc_endpoint": _endpoint,
}

#: What costs nothing by being there, and why.
FREE: Mapping[str, str] = {
    "aws_apigatewayv2_api": "billed by the request",
    "aws_apigatewayv2_integration": "part of the API",
    "aws_apigatewayv2_route": "part of the API",
    "aws_apigatewayv2_stage": "part of the API",
    "aws_apigatewayv2_vpc_link": "an HTTP API's VPC link has no price of its own",
    "aws_batch_job_definition": "Batch has no price; its instances have",
    "aws_batch_job_queue": "Batch has no price; its instances have",
    "aws_cloudwatch_event_target": "part of a rule",
    "aws_cloudwatch_log_group": "billed by the GB written and kept; what the reconciler writes is in its lines",
    "aws_default_security_group": "security groups have no price",
    "aws_ecr_lifecycle_policy": "part of the repository",
    "aws_ecs_cluster": "ECS on EC2 has no price; its instances have",
    "aws_ecs_service": "ECS on EC2 has no price; its instances have",
    "aws_ecs_task_definition": "ECS on EC2 has no price; its instances have",
    "aws_flow_log": "billed by the GB of traffic; at rest there is none",
    "aws_iam_instance_profile": "IAM has no price",
    "aws_iam_role": "IAM has no price",
    "aws_iam_role_policy": "IAM has no price",
    "aws_iam_role_policy_attachment": "IAM has no price",
    "aws_internet_gateway": "billed by the GB of traffic",
    "aws_kms_alias": "part of the key",
    "aws_lambda_event_source_mapping": "Lambda reads streams at no price; what is filtered out invokes nothing",
    "aws_lambda_function": "billed by the request and its time; the reconciler's are in the lines of its schedule",
    "aws_lambda_function_event_invoke_config": "part of the function",
    "aws_lambda_permission": "part of the function",
    "aws_launch_template": "a text; instances made from it have a price",
    "aws_lb_listener": "part of the load balancer",
    "aws_lb_listener_rule": "part of the load balancer, within the rules that are free",
    "aws_lb_target_group": "part of the load balancer",
    "aws_lb_target_group_attachment": "part of the load balancer",
    "aws_route": "part of the VPC",
    "aws_route_table": "part of the VPC",
    "aws_route_table_association": "part of the VPC",
    "aws_s3_bucket_lifecycle_configuration": "expirations have no price",
    "aws_s3_bucket_ownership_controls": "part of the bucket",
    "aws_s3_bucket_policy": "part of the bucket",
    "aws_s3_bucket_public_access_block": "part of the bucket",
    "aws_s3_bucket_server_side_encryption_configuration": "part of the bucket",
    "aws_s3_bucket_versioning": "old versions are counted with the bucket's size",
    "aws_security_group": "security groups have no price",
    "aws_service_discovery_service": "what ECS registers in Cloud Map has no price",
    "aws_sns_topic": "billed by the message",
    "aws_subnet": "part of the VPC",
    "aws_vpc": "a VPC has no price",
    "aws_vpc_security_group_egress_rule": "security groups have no price",
    "aws_vpc_security_group_ingress_rule": "security groups have no price",
}


def table(lines: Iterable[Line]) -> str:
    """The lines as a table in Markdown, with the sum; alike lines are one row."""
    rows: dict[tuple[str, str], tuple[Decimal, Decimal]] = {}
    for line in lines:
        units, usd = rows.get((line.what, line.price), (Decimal(0), Decimal(0)))
        rows[line.what, line.price] = (units + line.units, usd + line.usd)
    text = ["| what | units | price | USD a month |", "|---|---:|---|---:|"]
    text += [
        f"| {what} | {_amount(units)} | `{price}` | {usd:.3f} |"
        for (what, price), (units, usd) in rows.items()
    ]
    whole = sum((usd for _, usd in rows.values()), Decimal(0))
    return "\n".join([*text, f"| **together** | | | **{whole:.2f}** |"])


def _amount(units: Decimal) -> str:
    return f"{units:,.0f}" if units >= 100 or units == units.to_integral_value() else f"{units.normalize():f}"
