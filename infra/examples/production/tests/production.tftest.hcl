# `terraform test` without AWS: the provider is mocked (infra/mocks). tests/infra looks at the whole of the runs that
# apply: unknown types of resource, policies, settings.

mock_provider "aws" {
  source = "../../mocks"
}

variables {
  agent_image_tag = "0.1.0"
  bundle_path     = "../../mocks/bundle.zip"
}

run "whole" {
  command = apply

  assert {
    condition     = [for pool in jsondecode(local.settings.SHOAL_PROVISIONER_POOLS) : pool.name] == ["default", "steady", "bulk"]
    error_message = "Three pools, the Spot one first."
  }

  assert {
    condition     = length(module.router) == 1 && module.router[0].service_discovery_arn != null && module.api.alb_dns_name == null
    error_message = "Routers, found by Cloud Map."
  }

  assert {
    condition     = strcontains(output.next_steps, "shoal admin bootstrap") && strcontains(output.next_steps, ":0.1.0 router\n") && !strcontains(output.next_steps, "\n ")
    error_message = "The next steps name the router's image, a command a line."
  }

  assert {
    condition     = aws_kms_key.this.enable_key_rotation
    error_message = "The key is rotated."
  }

  assert {
    condition     = var.agents_reserved_concurrency == 100
    error_message = "Heartbeats have executions of their own."
  }
}

run "load_balancer" {
  command = apply

  variables {
    data_plane      = "alb"
    certificate_arn = "arn:aws:acm:us-east-1:123456789012:certificate/11111111-2222-3333-4444-555555555555"
    domain_name     = "shoal.example.com"
  }

  assert {
    condition     = output.endpoint == "https://shoal.example.com" && module.router[0].service_discovery_arn == null
    error_message = "Routers behind the load balancer."
  }
}

run "baked" {
  command = apply

  variables {
    ami_id = "ami-0123456789abcdef0"
  }

  assert {
    condition     = local.home_disk == null
    error_message = "A baked image brings its disk; a blank one would hide the layers."
  }
}

run "function_alone" {
  command = plan

  variables {
    data_plane = "lambda"
  }

  assert {
    condition     = length(module.router) == 0 && output.alb_dns_name == null && length(local.router_repository) == 0
    error_message = "No routers."
  }
}

run "frozen" {
  command = plan

  variables {
    execution_enabled = false
  }

  assert {
    condition     = length(module.router) == 1
    error_message = "The installation stays, whole."
  }
}

run "half_a_load_balancer" {
  command = plan

  variables {
    data_plane = "alb"
  }

  expect_failures = [var.certificate_arn, var.domain_name]
}
