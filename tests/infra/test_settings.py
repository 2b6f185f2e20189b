"""What Terraform tells the processes is what they take; table and bucket are as the code wants them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from api.options import ServeOptions, parse
from api.routes import internal
from api.settings import ApiSettings
from provisioner.aws.settings import AwsSettings, BatchPool, EcsPool
from provisioner.blobs.s3_lifecycle import LIFECYCLE
from provisioner.settings import ProvisionerSettings
from provisioner.store import table
from runtime_image.agent.settings import AgentSettings
from runtime_image.image import entrypoint
from scripts import bundle
from scripts.infra_check import Resource
from tests.infra.conftest import States

ROOT = Path(__file__).resolve().parents[2]
RECONCILER = "reconciler.aws_lambda_function.this"


@pytest.fixture(params=["minimal", "production"])
def whole(request: pytest.FixtureRequest) -> list[Resource]:
    found: list[Resource] = request.getfixturevalue(request.param)
    return found


def _only(resources: list[Resource], address: str) -> Mapping[str, Any]:
    (found,) = [resource.values for resource in resources if resource.address == address]
    return found


def _told(function: Mapping[str, Any]) -> dict[str, str]:
    (environment,) = function["environment"]
    return dict(environment["variables"])


def _take(
    monkeypatch: pytest.MonkeyPatch, told: Mapping[str, str]
) -> tuple[AwsSettings, ProvisionerSettings]:
    for name, value in told.items():
        monkeypatch.setenv(name, value)
    ApiSettings()
    return AwsSettings(), ProvisionerSettings()


def test_functions_take_their_settings(whole: list[Resource], monkeypatch: pytest.MonkeyPatch) -> None:
    """Each function starts with what it is told: names, types and pools fit."""
    for name in ("api.aws_lambda_function.this", "api.aws_lambda_function.agents", RECONCILER):
        told = _told(_only(whole, f"module.{name}"))
        aws, provisioner = _take(monkeypatch, told)
        assert aws.table == "shoal"
        assert aws.execution_enabled
        assert provisioner.lost_margin_s > provisioner.heartbeat_s
        assert provisioner.lease_s > 3 * provisioner.heartbeat_s
        # Every setting is known: a typing error in a name would be ignored by the settings themselves.
        fields = {f"SHOAL_AWS_{field.upper()}" for field in AwsSettings.model_fields}
        fields |= {f"SHOAL_PROVISIONER_{field.upper()}" for field in ProvisionerSettings.model_fields}
        fields |= {f"SHOAL_API_{field.upper()}" for field in ApiSettings.model_fields}
        assert set(told) <= fields


def test_every_pool_has_a_driver(whole: list[Resource], monkeypatch: pytest.MonkeyPatch) -> None:
    """The reconciler knows where the hosts of each pool come from, by names of things that are made here."""
    told = _told(_only(whole, "module.reconciler.aws_lambda_function.this"))
    aws, provisioner = _take(monkeypatch, told)
    assert {pool.pool for pool in aws.pools} == {pool.name for pool in provisioner.pools}
    groups = {r.values["name"] for r in whole if r.type == "aws_autoscaling_group"}
    clusters = {r.values["name"] for r in whole if r.type == "aws_ecs_cluster"}
    queues = {r.values["name"] for r in whole if r.type == "aws_batch_job_queue"}
    for pool in aws.pools:
        if isinstance(pool, EcsPool):
            assert pool.auto_scaling_group in groups
            assert pool.cluster in clusters
        else:
            assert isinstance(pool, BatchPool)
            assert pool.job_queue in queues


def test_group_and_planner_have_one_ceiling(whole: list[Resource], monkeypatch: pytest.MonkeyPatch) -> None:
    """The Auto Scaling group's maximum is the pool's, so that a bug cannot spend more than was allowed."""
    _, provisioner = _take(monkeypatch, _told(_only(whole, "module.reconciler.aws_lambda_function.this")))
    ceilings = {pool.name: pool.max_hosts for pool in provisioner.pools}
    for resource in whole:
        if resource.type == "aws_autoscaling_group":
            tags = {tag["key"]: tag["value"] for tag in resource.values["tag"]}
            assert resource.values["max_size"] == ceilings[tags["shoal:pool"]]
            assert resource.values["min_size"] == 0


def test_agents_take_their_settings(whole: list[Resource], monkeypatch: pytest.MonkeyPatch) -> None:
    """Agents of ECS and Batch are told what the image's entrance does not work out by itself."""
    seen = 0
    for resource in whole:
        if resource.address.endswith("aws_ecs_task_definition.agent"):
            (container,) = json.loads(resource.values["container_definitions"])
            assert container["name"] == "agent"
        elif resource.address.endswith("aws_batch_job_definition.agent"):
            container = json.loads(resource.values["container_properties"])
        else:
            continue
        seen += 1
        told = {pair["name"]: pair["value"] for pair in container["environment"]}
        assert set(told) <= {f"SHOAL_AGENT_{field.upper()}" for field in AgentSettings.model_fields}
        told = entrypoint.agent_environment(
            told | {"SHOAL_AGENT_JOIN_TOKEN": "host.secret"}, address=lambda: "10.71.0.9"
        )
        for name, value in told.items():
            monkeypatch.setenv(name, value)
        settings = AgentSettings(_cli_parse_args=[])
        assert settings.control_url.startswith("https://")
        assert settings.advertise == "http://10.71.0.9:8701"
        assert settings.home.is_relative_to(entrypoint.STATE)
        assert str(entrypoint.STATE) in {mount["containerPath"] for mount in container["mountPoints"]}
    assert seen


def test_ports_are_those_of_the_image(whole: list[Resource]) -> None:
    """The security group opens the port on which agents listen."""
    rule = _only(whole, "module.network.aws_vpc_security_group_ingress_rule.agents_from_api")
    assert (rule["from_port"], rule["to_port"]) == (entrypoint.PORT, entrypoint.PORT)


def test_routers_serve_as_they_are_told(production: list[Resource], monkeypatch: pytest.MonkeyPatch) -> None:
    """Their command line is one of the API's, and listens where the VPC link looks."""
    definition = _only(production, "module.router[0].aws_ecs_task_definition.this")
    (container,) = json.loads(definition["container_definitions"])
    options = parse(container["command"])
    assert isinstance(options, ServeOptions)
    (mapping,) = container["portMappings"]
    assert options.port == mapping["containerPort"] == mapping["hostPort"]
    assert container["entryPoint"] == ["python3", "-m", "api"]
    told = {pair["name"]: pair["value"] for pair in container["environment"]}
    _take(monkeypatch, told)
    # What this entrance carries: an HTTP API takes 10 MB.
    assert ApiSettings().answer_limit_bytes == 10_000_000


def test_agents_call_a_function_of_their_own(whole: list[Resource]) -> None:
    """Every path of agents goes by its own route, throttle and function, so that long polls hold up no heartbeat."""
    route = _only(whole, "module.api.aws_apigatewayv2_route.agents")
    assert route["route_key"] == f"ANY {internal.router.prefix}/{{proxy+}}"
    (stage,) = [r.values for r in whole if r.type == "aws_apigatewayv2_stage"]
    assert [each["route_key"] for each in stage["route_settings"]] == [route["route_key"]]
    trainers, agents = (_only(whole, f"module.api.aws_lambda_function.{name}") for name in ("this", "agents"))
    assert trainers["function_name"] != agents["function_name"]
    # The account lets 10,000 a second and 5,000 at once through, for both together.
    (default,) = stage["default_route_settings"]
    (own,) = stage["route_settings"]
    assert default["throttling_rate_limit"] + own["throttling_rate_limit"] <= 10_000
    assert default["throttling_burst_limit"] + own["throttling_burst_limit"] <= 5_000


def test_heartbeats_have_executions_of_their_own(production: list[Resource]) -> None:
    """In production some are kept for agents; the smallest installation fits into an account with ten."""
    agents = _only(production, "module.api.aws_lambda_function.agents")
    assert agents["reserved_concurrent_executions"] >= 50


def test_a_load_balancer_is_told_what_it_carries(states: States, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between it and a function pass 1 MB each way, base64 included; what is larger is refused by name before."""
    known = states("production")["load_balancer"]
    told = _told(_only(known, "module.api.aws_lambda_function.this"))
    _take(monkeypatch, told)
    limit = ApiSettings().answer_limit_bytes
    assert limit is not None
    assert limit * 4 / 3 + 50_000 < 1_000_000
    # Agents use the HTTP API all the same.
    agents = _told(_only(known, "module.api.aws_lambda_function.agents"))
    assert "SHOAL_API_ANSWER_LIMIT_BYTES" not in agents
    assert "SHOAL_API_ANSWER_LIMIT_BYTES" not in _told(
        _only(states("production")["whole"], "module.api.aws_lambda_function.this")
    )


def test_functions_run_the_bundle(whole: list[Resource]) -> None:
    """Runtime and handlers are those that `make bundle` builds for."""
    for name, module, attribute in (
        ("api.aws_lambda_function.this", "api.lambda_handler", "handler"),
        ("api.aws_lambda_function.agents", "api.lambda_handler", "handler"),
        (RECONCILER, "provisioner.handlers", "reconcile"),
    ):
        function = _only(whole, f"module.{name}")
        assert function["runtime"] == f"python{bundle.PYTHON}"
        assert function["handler"] == f"{module}.{attribute}"
        source = (ROOT / f"{module.replace('.', '/')}.py").read_text()
        assert f"\ndef {attribute}(" in source


def test_the_table_is_the_stores(whole: list[Resource]) -> None:
    """Terraform makes the table that `shoal admin table create` makes."""
    found = _only(whole, "module.state.aws_dynamodb_table.this")
    wanted = table.create_request("shoal", table.TableOptions(stream=True))
    assert {"HASH": found["hash_key"], "RANGE": found["range_key"]} == {
        each["KeyType"]: each["AttributeName"] for each in wanted["KeySchema"]
    }
    assert {each["name"]: each["type"] for each in found["attribute"]} == {
        each["AttributeName"]: each["AttributeType"] for each in wanted["AttributeDefinitions"]
    }
    assert found["billing_mode"] == wanted["BillingMode"]
    assert found["stream_view_type"] == wanted["StreamSpecification"]["StreamViewType"]
    assert [(ttl["attribute_name"], ttl["enabled"]) for ttl in found["ttl"]] == [(table.TTL_ATTRIBUTE, True)]
    assert not found["global_secondary_index"]
    assert not found["local_secondary_index"]


def test_the_buckets_lifecycle_is_the_stores(whole: list[Resource]) -> None:
    """Every rule that the blob store counts on is there with its prefix and days, and no other."""
    rules = {
        rule["id"]: rule
        for rule in _only(whole, "module.state.aws_s3_bucket_lifecycle_configuration.this")["rule"]
    }
    versions = any(resource.type == "aws_s3_bucket_versioning" for resource in whole)
    wanted = {rule.id: rule for rule in LIFECYCLE if versions or rule.noncurrent_days is None}
    assert set(rules) == set(wanted)
    for id, rule in wanted.items():
        found = rules[id]
        prefixes = [each.get("prefix") or "" for each in found["filter"]]
        assert prefixes == [rule.prefix]
        assert _days(found["expiration"], "days") == rule.expire_days
        assert (
            _days(found["abort_incomplete_multipart_upload"], "days_after_initiation")
            == rule.abort_multipart_days
        )
        assert _days(found["noncurrent_version_expiration"], "noncurrent_days") == rule.noncurrent_days


def _days(blocks: list[Mapping[str, Any]], name: str) -> int | None:
    return next((each[name] for each in blocks if each.get(name)), None)


def test_everything_that_can_carries_the_tags(whole: list[Resource]) -> None:
    """Cost allocation tags come from one place and are on whatever takes tags; hosts carry their pool's as well."""
    for resource in whole:
        tags = resource.values.get("tags")
        if "tags" in resource.values:
            assert {"shoal:project", "shoal:tenant", "shoal:environment"} <= set(tags or ()), resource.address
        if resource.type == "aws_launch_template":
            for specification in resource.values["tag_specifications"]:
                assert {"shoal:pool", "shoal:tenant"} <= set(specification["tags"])
