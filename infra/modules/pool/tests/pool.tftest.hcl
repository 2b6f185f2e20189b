mock_provider "aws" {
  source = "../../mocks"
}

variables {
  max_hosts         = 10
  subnet_ids        = ["subnet-1", "subnet-2"]
  security_group_id = "sg-1"
  agent_image       = "123456789012.dkr.ecr.us-east-1.amazonaws.com/shoal/agent:0.1.0"
  repository_arn    = "arn:aws:ecr:us-east-1:123456789012:repository/shoal/agent"
  control_url       = "https://a1b2c3d4e5.execute-api.us-east-1.amazonaws.com"
}

run "from_zero" {
  command = apply

  assert {
    condition     = aws_autoscaling_group.hosts.min_size == 0 && aws_autoscaling_group.hosts.max_size == 10 && aws_autoscaling_group.hosts.protect_from_scale_in
    error_message = "Nothing at rest; the group itself never ends a host."
  }

  assert {
    condition     = toset(aws_autoscaling_group.hosts.suspended_processes) == toset(["AZRebalance"]) && aws_autoscaling_group.hosts.capacity_rebalance == false
    error_message = "Nothing ends or replaces hosts behind the planner's back."
  }

  assert {
    condition     = aws_autoscaling_group.hosts.mixed_instances_policy[0].instances_distribution[0].spot_allocation_strategy == "price-capacity-optimized" && aws_autoscaling_group.hosts.mixed_instances_policy[0].instances_distribution[0].on_demand_percentage_above_base_capacity == 0
    error_message = "Spot by price and capacity."
  }

  assert {
    condition     = length(aws_autoscaling_group.hosts.warm_pool) == 0
    error_message = "No warm pool beside Spot."
  }

  assert {
    condition     = aws_ecs_task_definition.agent.network_mode == "host" && jsondecode(aws_ecs_task_definition.agent.container_definitions)[0].name == "agent" && jsondecode(aws_ecs_task_definition.agent.container_definitions)[0].privileged && jsondecode(aws_ecs_task_definition.agent.container_definitions)[0].stopTimeout == 120
    error_message = "The agent: on the host's network, privileged, with two minutes to stop."
  }

  assert {
    condition     = toset([for mount in jsondecode(aws_ecs_task_definition.agent.container_definitions)[0].mountPoints : mount.containerPath]) == toset(["/var/lib/shoal", "/dev", "/sys/fs/cgroup"]) && { for volume in aws_ecs_task_definition.agent.volume : volume.name => volume.host_path } == { state = "/var/lib/shoal", devs = "/dev", cgroup = "/sys/fs/cgroup" }
    error_message = "What of the host the agent works in is spelled out."
  }

  assert {
    condition     = { for pair in jsondecode(aws_ecs_task_definition.agent.container_definitions)[0].environment : pair.name => pair.value } == { SHOAL_AGENT_CONTROL_URL = "https://a1b2c3d4e5.execute-api.us-east-1.amazonaws.com", SHOAL_AGENT_LISTEN = "0.0.0.0:8701" }
    error_message = "The agent is told where to report; its join token comes with StartTask."
  }

  assert {
    condition     = jsondecode(aws_ecs_task_definition.agent.container_definitions)[0].portMappings[0].hostPort == 8701
    error_message = "The agent's port is its own: ECS starts no second one on an instance."
  }

  assert {
    condition     = one([for statement in jsondecode(aws_iam_role_policy.execution.policy).Statement : statement.Resource if statement.Sid == "Image"]) == ["arn:aws:ecr:us-east-1:123456789012:repository/shoal/agent"]
    error_message = "One repository may be pulled from."
  }

  assert {
    condition     = output.settings == { name = "default", min_hosts = 0, max_hosts = 10 } && output.driver.container == "agent" && output.driver.task_definition == "shoal-default-agent:1"
    error_message = "What the control plane is told."
  }
}

run "frozen" {
  command = plan

  variables {
    execution_enabled = false
  }

  assert {
    condition     = toset(aws_autoscaling_group.hosts.suspended_processes) == toset(["AZRebalance", "Launch"]) && aws_autoscaling_group.hosts.max_size == 10
    error_message = "No launch, whoever asks; what runs may end by itself."
  }
}

run "on_demand_with_a_warm_pool" {
  command = plan

  variables {
    spot           = null
    instance_types = ["m7i.4xlarge"]
    warm_pool      = { max_prepared = 2 }
  }

  assert {
    condition     = aws_autoscaling_group.hosts.warm_pool[0].pool_state == "Stopped" && !aws_autoscaling_group.hosts.warm_pool[0].instance_reuse_policy[0].reuse_on_scale_in
    error_message = "Stopped instances, none used twice."
  }

  assert {
    condition     = length(aws_autoscaling_group.hosts.mixed_instances_policy) == 0 && length(aws_autoscaling_group.hosts.launch_template) == 1
    error_message = "A group of one type."
  }
}

run "on_demand" {
  command = plan

  variables {
    spot = null
  }

  assert {
    condition     = aws_autoscaling_group.hosts.mixed_instances_policy[0].instances_distribution[0].on_demand_percentage_above_base_capacity == 100
    error_message = "No Spot."
  }
}

run "unprivileged" {
  command = plan

  variables {
    agent_privileged = false
    settings         = { warm_default = 0, idle_to_zero_s = 20 }
  }

  assert {
    condition     = contains(jsondecode(aws_ecs_task_definition.agent.container_definitions)[0].linuxParameters.capabilities.add, "SYS_ADMIN") && !jsondecode(aws_ecs_task_definition.agent.container_definitions)[0].privileged
    error_message = "Capabilities by name."
  }

  assert {
    condition     = output.settings.warm_default == 0 && output.settings.max_hosts == 10
    error_message = "Settings of the pool are passed on."
  }
}

run "refused" {
  command = plan

  variables {
    pool              = "Default"
    max_hosts         = 0
    instance_types    = ["m7i.large", "m7i.xlarge"]
    agent_image       = "shoal/agent:latest"
    control_url       = "shoal.example.com"
    agent_environment = { SHOAL_AGENT_JOIN_TOKEN = "x" }
    settings          = { max_hosts = 3 }
    subnet_ids        = []
  }

  expect_failures = [var.pool, var.max_hosts, var.instance_types, var.agent_image, var.control_url, var.agent_environment, var.settings, var.subnet_ids]
}

run "no_warm_pool_of_spot" {
  command = plan

  variables {
    warm_pool = { max_prepared = 2 }
  }

  expect_failures = [var.warm_pool]
}

run "wrong_processor" {
  command = plan

  variables {
    architecture = "arm64"
  }

  expect_failures = [aws_autoscaling_group.hosts]
}
