mock_provider "aws" {
  source = "../../mocks"
}

variables {
  bundle_path   = "../../mocks/bundle.zip"
  access_policy = "{\"Version\":\"2012-10-17\",\"Statement\":[]}"
  stream_arn    = "arn:aws:dynamodb:us-east-1:123456789012:table/shoal/stream/1"
  environment   = { SHOAL_AWS_TABLE = "shoal", SHOAL_AWS_BUCKET = "bucket" }
  ecs_pools = [{
    driver = {
      kind               = "ecs"
      pool               = "default"
      cluster            = "shoal-default"
      auto_scaling_group = "shoal-default"
      task_definition    = "shoal-default-agent:1"
      container          = "agent"
    }
    access = {
      cluster_arn            = "arn:aws:ecs:us-east-1:123456789012:cluster/shoal-default"
      auto_scaling_group_arn = "arn:aws:autoscaling:us-east-1:123456789012:autoScalingGroup:1:autoScalingGroupName/shoal-default"
      task_definition_arn    = "arn:aws:ecs:us-east-1:123456789012:task-definition/shoal-default-agent:*"
      role_arns              = ["arn:aws:iam::123456789012:role/shoal-default-agent", "arn:aws:iam::123456789012:role/shoal-default-execution"]
    }
  }]
}

run "of_ecs" {
  command = apply

  assert {
    condition     = aws_lambda_function.this.handler == "provisioner.handlers.reconcile" && length(aws_lambda_function.this.vpc_config) == 0
    error_message = "The handler of the bundle, outside the VPC."
  }

  assert {
    condition     = aws_cloudwatch_event_rule.schedule.schedule_expression == "rate(1 minute)" && coalesce(aws_cloudwatch_event_rule.schedule.state, "ENABLED") == "ENABLED"
    error_message = "It looks every minute."
  }

  assert {
    condition     = jsondecode(one(one(aws_lambda_event_source_mapping.wake.filter_criteria).filter).pattern).dynamodb.Keys.pk.S == ["WAKE"]
    error_message = "Of the table's stream only wakes reach it."
  }

  assert {
    condition     = toset(keys(aws_cloudwatch_event_rule.wake)) == toset(["groups", "instances", "spot", "tasks"]) && toset(keys(aws_lambda_permission.wake)) == toset(keys(aws_cloudwatch_event_rule.wake))
    error_message = "What happens to its hosts wakes it."
  }

  assert {
    condition     = jsondecode(aws_cloudwatch_event_rule.wake["groups"].event_pattern).detail.AutoScalingGroupName == ["shoal-default"] && jsondecode(aws_cloudwatch_event_rule.wake["tasks"].event_pattern).detail.clusterArn == ["arn:aws:ecs:us-east-1:123456789012:cluster/shoal-default"]
    error_message = "Other groups and clusters do not."
  }

  assert {
    condition     = jsondecode(aws_lambda_function.this.environment[0].variables.SHOAL_AWS_POOLS)[0].auto_scaling_group == "shoal-default" && aws_lambda_function.this.environment[0].variables.SHOAL_AWS_EXECUTION_ENABLED == "true"
    error_message = "It knows where hosts come from."
  }

  assert {
    condition     = one([for statement in jsondecode(aws_iam_role_policy.capacity.policy).Statement : statement.Resource if statement.Sid == "Groups"]) == [var.ecs_pools[0].access.auto_scaling_group_arn]
    error_message = "It changes no other group."
  }

  assert {
    condition     = !anytrue([for statement in jsondecode(aws_iam_role_policy.capacity.policy).Statement : anytrue([for action in statement.Action : startswith(action, "batch:")])])
    error_message = "Nothing of Batch without a pool there."
  }
}

run "of_batch" {
  command = apply

  variables {
    ecs_pools = []
    batch_pools = [{
      driver = { kind = "batch", pool = "bulk", job_queue = "shoal-bulk", job_definition = "shoal-bulk-agent:1" }
      access = {
        job_queue_arn       = "arn:aws:batch:us-east-1:123456789012:job-queue/shoal-bulk"
        job_definition_arns = ["arn:aws:batch:us-east-1:123456789012:job-definition/shoal-bulk-agent", "arn:aws:batch:us-east-1:123456789012:job-definition/shoal-bulk-agent:*"]
      }
    }]
  }

  assert {
    condition     = toset(keys(aws_cloudwatch_event_rule.wake)) == toset(["jobs", "spot"])
    error_message = "Jobs wake it."
  }

  assert {
    condition     = !anytrue([for statement in jsondecode(aws_iam_role_policy.capacity.policy).Statement : anytrue([for action in statement.Action : startswith(action, "ecs:") || startswith(action, "autoscaling:") || startswith(action, "iam:")])])
    error_message = "Nothing of ECS, Auto Scaling or IAM without a pool there."
  }
}

run "frozen" {
  command = plan

  variables {
    execution_enabled = false
  }

  assert {
    condition     = aws_lambda_function.this.environment[0].variables.SHOAL_AWS_EXECUTION_ENABLED == "false" && aws_cloudwatch_event_rule.schedule.schedule_expression == "rate(1 minute)"
    error_message = "It starts no host, and goes on looking: hosts have to go."
  }
}

run "seldom" {
  command = plan

  variables {
    schedule_minutes = 5
  }

  assert {
    condition     = aws_cloudwatch_event_rule.schedule.schedule_expression == "rate(5 minutes)"
    error_message = "A plural that EventBridge takes."
  }
}

run "refused" {
  command = plan

  variables {
    ecs_pools        = []
    timeout_s        = 1000
    schedule_minutes = 60
    memory_mib       = 1
    environment      = { PATH = "/" }
  }

  expect_failures = [var.batch_pools, var.timeout_s, var.schedule_minutes, var.memory_mib, var.environment]
}
