"""Least privilege, over every policy that the examples make."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from provisioner.capacity.limits import BUCKETS
from scripts.infra_check import Resource

#: Calls that AWS scopes to no resource, and why each is needed. Nothing else may name `*`.
UNSCOPED = {
    "autoscaling:DescribeAutoScalingGroups": "reads what instances a group has",
    "autoscaling:DescribeScalingActivities": "reads why a group gets none",
    "batch:DescribeJobs": "reads which hosts there are",
    "batch:ListJobs": "reads which hosts there are",
    "dynamodb:ListStreams": "Lambda asks for it for a stream's mapping",
    "ec2:AssignPrivateIpAddresses": "Lambda makes a function's interfaces with its role; denied to the code",
    "ec2:CreateNetworkInterface": "Lambda makes a function's interfaces with its role; denied to the code",
    "ec2:DeleteNetworkInterface": "Lambda makes a function's interfaces with its role; denied to the code",
    "ec2:DescribeInstances": "reads which instances run",
    "ec2:DescribeNetworkInterfaces": "Lambda makes a function's interfaces with its role; denied to the code",
    "ec2:DescribeSubnets": "Lambda makes a function's interfaces with its role; denied to the code",
    "ec2:UnassignPrivateIpAddresses": "Lambda makes a function's interfaces with its role; denied to the code",
    "ecr:GetAuthorizationToken": "logs in to the registry; what may be pulled is scoped",
    "ecs:DiscoverPollEndpoint": "the ECS agent asks where to poll",
    "ecs:ListTasks": "scoped by the condition ecs:cluster",
}
ROOT = Path(__file__).resolve().parents[2]
#: Policies of AWS, with the reason that none of our own will do.
MANAGED = {"AmazonEC2ContainerServiceforEC2Role": "AWS Batch makes a cluster whose name is not known before"}

Statement = dict[str, Any]


def _policies(resources: list[Resource]) -> Iterator[tuple[str, dict[str, Any]]]:
    for resource in resources:
        if resource.type == "aws_iam_role_policy":
            yield resource.address, json.loads(resource.values["policy"])


def _statements(resources: list[Resource]) -> Iterator[tuple[str, Statement]]:
    for address, policy in _policies(resources):
        for statement in policy["Statement"]:
            yield address, statement


def _as_list(value: str | list[str]) -> list[str]:
    return [value] if isinstance(value, str) else value


@pytest.fixture(params=["minimal", "production"])
def whole(request: pytest.FixtureRequest) -> list[Resource]:
    found: list[Resource] = request.getfixturevalue(request.param)
    return found


def test_no_action_is_a_wildcard(whole: list[Resource]) -> None:
    """Every allowed action is named in full."""
    found = [
        (address, action)
        for address, statement in _statements(whole)
        for action in _as_list(statement["Action"])
        if "*" in action or "NotAction" in statement
    ]
    assert found == []


def test_no_resource_is_everything_but_where_aws_scopes_nothing(whole: list[Resource]) -> None:
    """`*` stands only beside calls that know no resource, each listed with its reason."""
    found = {
        (address, action)
        for address, statement in _statements(whole)
        if statement["Effect"] == "Allow" and "*" in _as_list(statement["Resource"])
        for action in _as_list(statement["Action"])
        if action not in UNSCOPED
    }
    assert found == set()


def test_a_list_of_tasks_is_held_to_the_cluster(whole: list[Resource]) -> None:
    """`ecs:ListTasks` on everything has the condition that names the cluster."""
    conditions = [
        statement["Condition"]["ArnEquals"]["ecs:cluster"]
        for _, statement in _statements(whole)
        if "ecs:ListTasks" in _as_list(statement["Action"])
    ]
    assert conditions
    assert all(conditions)


def test_writing_calls_name_what_they_write(whole: list[Resource]) -> None:
    """Resources of writing statements are ARNs of this account's own things, never a service's all."""
    reading = re.compile(r":(Describe|List|Get|BatchGet|Query|Discover)")
    for address, statement in _statements(whole):
        if statement["Effect"] != "Allow":
            continue
        writing = [
            action
            for action in _as_list(statement["Action"])
            if not reading.search(action) and action not in UNSCOPED
        ]
        if writing:
            for resource in _as_list(statement["Resource"]):
                assert re.fullmatch(r"arn:aws:[a-z0-9-]+:.*:.*[^*].*", resource), (address, resource)
                assert not resource.endswith(":*:*"), (address, resource)


def test_agents_can_do_nothing(whole: list[Resource]) -> None:
    """The role of the agents' task has no policy: they use presigned URLs and the API."""
    agents = {
        r.address for r in whole if r.type == "aws_iam_role" and r.address.endswith("aws_iam_role.agent")
    }
    assert agents
    scopes = {address.rpartition(".aws_iam_role.")[0] for address in agents}
    for resource in whole:
        if resource.type in ("aws_iam_role_policy", "aws_iam_role_policy_attachment"):
            scope = resource.address.rpartition(f".{resource.type}.")[0]
            name = resource.address.rpartition(".")[2].partition("[")[0]
            assert not (scope in scopes and name not in ("execution", "ecs", "batch", "ssm")), (
                resource.address
            )


def test_hosts_cannot_reach_the_state(whole: list[Resource]) -> None:
    """Instances and agents have no permission on DynamoDB, S3, EC2 or IAM."""
    for address, statement in _statements(whole):
        if ".module.host." in address or address.startswith(
            ("module.pool.", "module.steady.", "module.batch.")
        ):
            services = {action.partition(":")[0] for action in _as_list(statement["Action"])}
            assert services <= {"ecs", "ecr", "logs"}, address


def test_managed_policies_are_listed(whole: list[Resource]) -> None:
    """A policy that AWS keeps is used for a stated reason alone."""
    used = {
        resource.values["policy_arn"].rpartition("/")[2]
        for resource in whole
        if resource.type == "aws_iam_role_policy_attachment"
    }
    assert used <= set(MANAGED)


def test_the_reconciler_may_call_exactly_what_its_drivers_call(production: list[Resource]) -> None:
    """Its policy for capacity is the drivers' own list of calls, and what AWS asks for beside them."""
    implied = {
        "iam:PassRole",  # StartTask lends the task its two roles
        "ecs:TagResource",  # StartTask and SubmitJob tag what they make
        "batch:TagResource",
    }
    called = {
        f"{service}:{''.join(word.capitalize() for word in operation.split('_'))}"
        for service, operation in BUCKETS
    }
    allowed = {
        action
        for address, statement in _statements(production)
        if address == "module.reconciler.aws_iam_role_policy.capacity"
        for action in _as_list(statement["Action"])
    }
    assert allowed == called | implied


#: Actions that an operation needs, where they are not its own name (AWS service authorization reference, read 2026-11).
#: A transaction's writes are authorized one by one.
ACTIONS = {
    "batch_get_item": {"dynamodb:BatchGetItem"},
    "get_item": {"dynamodb:GetItem"},
    "query": {"dynamodb:Query"},
    "transact_write_items": {
        "dynamodb:PutItem",
        "dynamodb:UpdateItem",
        "dynamodb:DeleteItem",
        "dynamodb:ConditionCheckItem",
    },
    "abort_multipart_upload": {"s3:AbortMultipartUpload"},
    "complete_multipart_upload": {"s3:PutObject"},
    "create_multipart_upload": {"s3:PutObject"},
    "delete_object": {"s3:DeleteObject"},
    "get_object": {"s3:GetObject"},
    "head_object": {"s3:GetObject"},
    "list_objects_v2": {"s3:ListBucket"},
    "put_object": {"s3:PutObject"},
    "upload_part": {"s3:PutObject"},
}


def _operations(pattern: str) -> set[str]:
    """Operations that sources name as the first argument of a call: `self._calls.call("put_object", ...)`."""
    found = set()
    for source in sorted((ROOT / "provisioner").glob(pattern)):
        for node in ast.walk(ast.parse(source.read_text())):
            if (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Attribute)
                and node.func.attr in ("call", "_call", "_part")
                and node.args
                and isinstance(node.args[0], ast.Constant)
            ):
                found.add(str(node.args[0].value))
    return found


def test_the_state_is_used_as_the_code_uses_it(whole: list[Resource]) -> None:
    """Table and bucket may be asked exactly what the adapters ask: no call is missing, none is left over."""
    store, blobs = _operations("store/dynamodb*.py"), _operations("blobs/s3*.py")
    assert {"get_item", "transact_write_items"} <= store
    assert {"put_object", "get_object", "upload_part"} <= blobs
    called = set().union(*(ACTIONS[operation] for operation in store | blobs))
    policies = [
        policy for address, policy in _policies(whole) if address.endswith(".aws_iam_role_policy.state")
    ]
    assert policies
    for policy in policies:
        allowed = {
            action
            for statement in policy["Statement"]
            for action in _as_list(statement["Action"])
            if not action.startswith("kms:")
        }
        assert allowed == called


def test_transactions_write_in_the_ways_that_are_allowed() -> None:
    """Items of a transaction are of the four kinds that its actions stand for."""
    source = (ROOT / "provisioner/store/dynamodb_items.py").read_text()
    kinds = set(re.findall(r'kind = "(\w+)"', source))
    needed = {f"dynamodb:{kind.removesuffix('Item')}Item" for kind in kinds}
    assert needed == ACTIONS["transact_write_items"]


def test_roles_are_lent_to_tasks_alone(production: list[Resource]) -> None:
    """`iam:PassRole` names roles and the one service that may be lent them."""
    found = [s for _, s in _statements(production) if "iam:PassRole" in _as_list(s["Action"])]
    assert found
    for statement in found:
        assert statement["Condition"]["StringEquals"]["iam:PassedToService"] == "ecs-tasks.amazonaws.com"
        assert "*" not in "".join(_as_list(statement["Resource"]))


def test_the_bucket_takes_tls_alone(whole: list[Resource]) -> None:
    """Its policy only denies."""
    policies = [json.loads(r.values["policy"]) for r in whole if r.type == "aws_s3_bucket_policy"]
    assert [[s["Effect"] for s in policy["Statement"]] for policy in policies] == [["Deny"]]
