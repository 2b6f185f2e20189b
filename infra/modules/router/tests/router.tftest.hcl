mock_provider "aws" {
  source = "../../mocks"
}

variables {
  cluster       = { name = "shoal-default", arn = "arn:aws:ecs:us-east-1:123456789012:cluster/shoal-default" }
  vpc_id        = "vpc-1"
  router_image  = "123456789012.dkr.ecr.us-east-1.amazonaws.com/shoal/router:0.1.0"
  access_policy = "{\"Version\":\"2012-10-17\",\"Statement\":[]}"
  environment   = { SHOAL_AWS_TABLE = "shoal", SHOAL_AWS_BUCKET = "bucket" }
}

run "with_the_pool" {
  command = apply

  assert {
    condition     = aws_ecs_service.this.scheduling_strategy == "DAEMON" && aws_ecs_service.this.launch_type == "EC2"
    error_message = "One a host, none without hosts."
  }

  assert {
    condition     = one(aws_ecs_service.this.service_registries).container_port == 8700 && aws_service_discovery_service.this[0].dns_config[0].dns_records[0].type == "SRV"
    error_message = "Found by address and port."
  }

  assert {
    condition     = jsondecode(aws_ecs_task_definition.this.container_definitions)[0].readonlyRootFilesystem && jsondecode(aws_ecs_task_definition.this.container_definitions)[0].user == "65534:65534" && jsondecode(aws_ecs_task_definition.this.container_definitions)[0].linuxParameters.capabilities.drop == ["ALL"]
    error_message = "No root, no capability, nothing to write to."
  }

  assert {
    condition     = length(aws_ecs_service.this.load_balancer) == 0
    error_message = "No load balancer."
  }
}

run "behind_a_load_balancer" {
  command = apply

  variables {
    discovery        = "alb"
    target_group_arn = "arn:aws:elasticloadbalancing:us-east-1:123456789012:targetgroup/shoal-routers/1"
  }

  assert {
    condition     = one(aws_ecs_service.this.load_balancer).target_group_arn == var.target_group_arn && length(aws_service_discovery_private_dns_namespace.this) == 0
    error_message = "The load balancer finds them; no zone is paid for."
  }
}

run "frozen" {
  command = plan

  variables {
    execution_enabled = false
  }

  assert {
    condition     = contains([for pair in local.environment : pair], "false")
    error_message = "Routers take no new session either."
  }
}

run "refused" {
  command = plan

  variables {
    router_image = "shoal/router"
    memory_mib   = 64
    discovery    = "dns"
  }

  expect_failures = [var.router_image, var.memory_mib, var.discovery]
}

run "half_a_load_balancer" {
  command = plan

  variables {
    discovery = "alb"
  }

  expect_failures = [var.target_group_arn]
}
