mock_provider "aws" {
  source = "../../mocks"
}

variables {
  api_function_name         = "shoal-api"
  agents_function_name      = "shoal-api-agents"
  api_id                    = "a1b2c3d4e5"
  reconciler_function_name  = "shoal-reconciler"
  reconciler_log_group_name = "/aws/lambda/shoal-reconciler"
  table_name                = "shoal"
  auto_scaling_group_names  = ["shoal-default"]
}

run "all" {
  command = plan

  variables {
    dashboard        = true
    alarm_topic_arns = ["arn:aws:sns:us-east-1:123456789012:alarms"]
  }

  assert {
    condition     = length(aws_cloudwatch_metric_alarm.this) == 9 && length(aws_cloudwatch_log_metric_filter.this) == 3
    error_message = "Nine alarms, three of them by metrics from the log."
  }

  assert {
    condition     = alltrue([for alarm in aws_cloudwatch_metric_alarm.this : alarm.alarm_actions == toset(var.alarm_topic_arns) && length(alarm.alarm_description) > 20])
    error_message = "Each tells somebody what to do."
  }

  assert {
    condition     = aws_cloudwatch_metric_alarm.this["agents_throttled"].dimensions == tomap({ FunctionName = "shoal-api-agents" }) && aws_cloudwatch_metric_alarm.this["agents_throttled"].evaluation_periods == 1
    error_message = "Refused heartbeats are told within a minute."
  }

  assert {
    condition     = aws_cloudwatch_metric_alarm.this["reconciler_silent"].treat_missing_data == "breaching"
    error_message = "Silence is what that alarm is about."
  }

  assert {
    condition     = alltrue([for name, filter in aws_cloudwatch_log_metric_filter.this : filter.metric_transformation[0].name == aws_cloudwatch_metric_alarm.this[name].metric_name && filter.metric_transformation[0].namespace == aws_cloudwatch_metric_alarm.this[name].namespace])
    error_message = "Each alarm looks at the metric that its filter makes."
  }

  assert {
    condition     = length(jsondecode(aws_cloudwatch_dashboard.this[0].dashboard_body).widgets) == 7
    error_message = "A dashboard."
  }
}

run "few" {
  command = plan

  variables {
    alarms = ["reconciler_errors"]
  }

  assert {
    condition     = keys(aws_cloudwatch_metric_alarm.this) == ["reconciler_errors"] && length(aws_cloudwatch_log_metric_filter.this) == 0 && length(aws_cloudwatch_dashboard.this) == 0
    error_message = "What is not asked for is not paid for."
  }
}

run "refused" {
  command = plan

  variables {
    alarms           = ["everything"]
    alarm_topic_arns = ["me@example.com"]
    queue_age_s      = 1
  }

  expect_failures = [var.alarms, var.alarm_topic_arns, var.queue_age_s]
}
