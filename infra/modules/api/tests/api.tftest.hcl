mock_provider "aws" {
  source = "../../mocks"
}

variables {
  bundle_path       = "../../mocks/bundle.zip"
  subnet_ids        = ["subnet-1", "subnet-2"]
  security_group_id = "sg-1"
  access_policy     = "{\"Version\":\"2012-10-17\",\"Statement\":[]}"
  environment       = { SHOAL_AWS_TABLE = "shoal", SHOAL_AWS_BUCKET = "bucket" }
}

run "by_the_function" {
  command = apply

  assert {
    condition     = aws_lambda_function.this.handler == "api.lambda_handler.handler" && aws_lambda_function.this.timeout < 30
    error_message = "The handler of the bundle, which gives up before the HTTP API does."
  }

  assert {
    condition     = aws_lambda_function.this.vpc_config[0].subnet_ids == toset(["subnet-1", "subnet-2"])
    error_message = "In the VPC, where agents are."
  }

  assert {
    condition     = aws_lambda_function.this.environment[0].variables.SHOAL_AWS_EXECUTION_ENABLED == "true"
    error_message = "Execution is enabled unless said otherwise."
  }

  assert {
    condition     = aws_apigatewayv2_route.default.route_key == "$default" && aws_apigatewayv2_stage.default.default_route_settings[0].throttling_rate_limit == 2000
    error_message = "One route for trainers, throttled."
  }

  assert {
    condition     = aws_apigatewayv2_route.agents.route_key == "ANY /internal/v1/{proxy+}" && aws_apigatewayv2_route.agents.target == "integrations/${aws_apigatewayv2_integration.agents.id}" && aws_apigatewayv2_integration.agents.integration_uri == aws_lambda_function.agents.invoke_arn
    error_message = "Agents have a route and a function of their own: trainers' long polls do not hold up heartbeats."
  }

  assert {
    condition     = [for route in aws_apigatewayv2_stage.default.route_settings : [route.route_key, route.throttling_rate_limit, route.throttling_burst_limit]] == [["ANY /internal/v1/{proxy+}", 2000, 1000]]
    error_message = "Agents have a throttle of their own."
  }

  assert {
    condition     = aws_lambda_function.agents.function_name == "shoal-api-agents" && aws_lambda_function.agents.role == aws_lambda_function.this.role && aws_lambda_function.agents.handler == aws_lambda_function.this.handler && aws_lambda_function.agents.filename == aws_lambda_function.this.filename && aws_lambda_function.agents.vpc_config[0].subnet_ids == toset(["subnet-1", "subnet-2"]) && aws_lambda_function.agents.environment == aws_lambda_function.this.environment
    error_message = "The same program with the same rights and settings."
  }

  assert {
    condition     = aws_lambda_function.this.reserved_concurrent_executions == -1 && aws_lambda_function.agents.reserved_concurrent_executions == -1
    error_message = "Nothing is reserved unasked: a new account has ten executions."
  }

  assert {
    condition     = length(aws_apigatewayv2_vpc_link.routers) == 0 && length(aws_lb.this) == 0
    error_message = "Nothing else in front."
  }

  assert {
    condition     = output.endpoint == output.control_url
    error_message = "Trainers and agents use the HTTP API."
  }

  assert {
    condition     = !strcontains(aws_apigatewayv2_stage.default.access_log_settings[0].format, "header") && aws_cloudwatch_log_group.access[0].retention_in_days == 30
    error_message = "Access logs carry no header, and end."
  }

  assert {
    condition     = [for statement in jsondecode(aws_iam_role_policy.network.policy).Statement : statement.Effect] == ["Allow", "Deny"] && jsondecode(aws_iam_role_policy.network.policy).Statement[1].Condition.ArnEquals["lambda:SourceFunctionArn"] == ["arn:aws:lambda:us-east-1:123456789012:function:shoal-api", "arn:aws:lambda:us-east-1:123456789012:function:shoal-api-agents"]
    error_message = "Only Lambda itself makes network interfaces with the role."
  }
}

run "by_routers" {
  command = apply

  variables {
    data_plane                 = "router"
    entrance_security_group_id = "sg-2"
    router_service_arn         = "arn:aws:servicediscovery:us-east-1:123456789012:service/srv-1"
  }

  assert {
    condition     = length(aws_apigatewayv2_vpc_link.routers) == 1 && aws_apigatewayv2_integration.routers[0].connection_type == "VPC_LINK" && aws_apigatewayv2_integration.routers[0].integration_uri == var.router_service_arn
    error_message = "A VPC link to Cloud Map."
  }

  assert {
    condition     = contains(keys(aws_apigatewayv2_route.routers), "ANY /v1/sessions/{session}/actions") && !contains(keys(aws_apigatewayv2_route.routers), "ANY /v1/sessions")
    error_message = "Actions go to routers; creating sessions does not: it must work while there is no host."
  }

  assert {
    condition     = length(aws_lb.this) == 0
    error_message = "No load balancer."
  }
}

run "by_a_load_balancer" {
  command = apply

  variables {
    data_plane                 = "alb"
    entrance_security_group_id = "sg-2"
    alb = {
      vpc_id          = "vpc-1"
      subnet_ids      = ["subnet-3", "subnet-4"]
      certificate_arn = "arn:aws:acm:us-east-1:123456789012:certificate/1"
      domain_name     = "shoal.example.com"
    }
  }

  assert {
    condition     = aws_lb_listener.https[0].protocol == "HTTPS" && aws_lb_listener.https[0].default_action[0].target_group_arn == aws_lb_target_group.function[0].arn
    error_message = "TLS; what is not about agents goes to the function."
  }

  assert {
    condition     = contains(flatten([for condition in aws_lb_listener_rule.routers[0].condition : [for pattern in condition.path_pattern : tolist(pattern.values)]]), "/v1/sessions/*/actions*")
    error_message = "Actions go to routers."
  }

  assert {
    condition     = output.endpoint == "https://shoal.example.com" && output.control_url == "https://a1b2c3d4e5.execute-api.us-east-1.amazonaws.com"
    error_message = "Trainers use the load balancer, agents the HTTP API."
  }

  assert {
    condition     = aws_lambda_function.this.environment[0].variables.SHOAL_API_ANSWER_LIMIT_BYTES == "700000" && !contains(keys(aws_lambda_function.agents.environment[0].variables), "SHOAL_API_ANSWER_LIMIT_BYTES")
    error_message = "A load balancer carries 1 MB to a function and back, the HTTP API of agents more."
  }

  assert {
    condition     = length(aws_apigatewayv2_vpc_link.routers) == 0
    error_message = "No VPC link."
  }
}

run "frozen" {
  command = plan

  variables {
    execution_enabled = false
  }

  assert {
    condition     = aws_lambda_function.this.environment[0].variables.SHOAL_AWS_EXECUTION_ENABLED == "false"
    error_message = "No new session is taken."
  }
}

run "kept_for_agents" {
  command = plan

  variables {
    reserved_concurrency        = 400
    agents_reserved_concurrency = 100
    agents_throttle             = { rate = 500, burst = 250 }
  }

  assert {
    condition     = aws_lambda_function.this.reserved_concurrent_executions == 400 && aws_lambda_function.agents.reserved_concurrent_executions == 100
    error_message = "Each has its own."
  }

  assert {
    condition     = one(aws_apigatewayv2_stage.default.route_settings).throttling_rate_limit == 500
    error_message = "As it was told."
  }
}

run "no_bundle" {
  command = plan

  variables {
    bundle_path = "nowhere.zip"
  }

  expect_failures = [aws_lambda_function.this]
}

run "refused" {
  command = plan

  variables {
    architecture         = "mips"
    runtime              = "nodejs22.x"
    memory_mib           = 64
    environment          = { AWS_REGION = "us-east-1" }
    throttle             = { rate = 0, burst = 1 }
    agents_throttle      = { rate = 1, burst = 0 }
    log_retention_days   = 8
    reserved_concurrency = -2

    agents_reserved_concurrency = 0
  }

  expect_failures = [var.architecture, var.runtime, var.memory_mib, var.environment, var.throttle, var.log_retention_days, var.reserved_concurrency, var.agents_throttle, var.agents_reserved_concurrency]
}

run "half_a_data_plane" {
  command = plan

  variables {
    data_plane = "router"
  }

  expect_failures = [var.entrance_security_group_id, var.router_service_arn]
}

run "half_a_load_balancer" {
  command = plan

  variables {
    data_plane                 = "alb"
    entrance_security_group_id = "sg-2"
  }

  expect_failures = [var.alb]
}
