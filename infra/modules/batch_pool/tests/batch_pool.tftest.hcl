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
    condition     = aws_batch_compute_environment.hosts.compute_resources[0].min_vcpus == 0 && aws_batch_compute_environment.hosts.compute_resources[0].max_vcpus == 160
    error_message = "Nothing at rest, ten hosts at the most."
  }

  assert {
    condition     = aws_batch_compute_environment.hosts.compute_resources[0].type == "SPOT" && aws_batch_compute_environment.hosts.compute_resources[0].allocation_strategy == "SPOT_PRICE_CAPACITY_OPTIMIZED"
    error_message = "Spot by price and capacity."
  }

  assert {
    condition     = aws_batch_job_definition.agent.retry_strategy[0].attempts == 1 && length(aws_batch_job_definition.agent.timeout) == 0
    error_message = "A host is never tried again under the same name, and not cut off."
  }

  assert {
    condition     = jsondecode(aws_batch_job_definition.agent.container_properties).privileged && { for need in jsondecode(aws_batch_job_definition.agent.container_properties).resourceRequirements : need.type => need.value } == { VCPU = "16", MEMORY = "60000" }
    error_message = "One agent a host: it asks for all of it."
  }

  assert {
    condition     = toset([for mount in jsondecode(aws_batch_job_definition.agent.container_properties).mountPoints : mount.containerPath]) == toset(["/var/lib/shoal", "/dev", "/sys/fs/cgroup"])
    error_message = "What of the host the agent works in is spelled out."
  }

  assert {
    condition     = output.driver == { kind = "batch", pool = "batch", job_queue = "shoal-batch", job_definition = "shoal-batch-agent:1" } && output.settings.min_hosts == 0
    error_message = "What the control plane is told."
  }
}

run "frozen" {
  command = plan

  variables {
    execution_enabled = false
  }

  assert {
    condition     = aws_batch_compute_environment.hosts.state == "DISABLED" && aws_batch_job_queue.hosts.state == "DISABLED"
    error_message = "No job is taken and no instance launched."
  }
}

run "on_demand" {
  command = plan

  variables {
    spot          = false
    job_timeout_s = 86400
  }

  assert {
    condition     = aws_batch_compute_environment.hosts.compute_resources[0].type == "EC2" && aws_batch_job_definition.agent.timeout[0].attempt_duration_seconds == 86400
    error_message = "On-demand instances, and an end to everything."
  }
}

run "refused" {
  command = plan

  variables {
    max_hosts     = 6000
    vcpus         = 1
    memory_mib    = 512
    job_timeout_s = 60
  }

  expect_failures = [var.max_hosts, var.vcpus, var.memory_mib, var.job_timeout_s]
}

run "wrong_processor" {
  command = plan

  variables {
    instance_types = ["m7g.4xlarge"]
  }

  expect_failures = [aws_batch_compute_environment.hosts]
}
