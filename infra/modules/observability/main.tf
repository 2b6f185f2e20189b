# What somebody should be told, and a page to look at. Metrics that AWS keeps anyway are free; three are made from the
# reconciler's log.

data "aws_region" "current" {}

locals {
  namespace = "Shoal/${var.name}"

  # Made from log events, by alarm: event, metric, its value.
  from_log = {
    for alarm, filter in {
      hosts_lost  = { pattern = "{ $.event = \"host.lost\" }", metric = "HostsLost", value = "1", unit = "Count" }
      no_capacity = { pattern = "{ $.event = \"plan.step_failed\" }", metric = "NoCapacity", value = "1", unit = "Count" }
      queue_age   = { pattern = "{ $.queue_age_s = * }", metric = "QueueAge", value = "$.queue_age_s", unit = "Seconds" }
    } : alarm => filter if contains(var.alarms, alarm)
  }

  every = {
    reconciler_errors = {
      description = "The reconciler fails: hosts neither start nor go. See its log for reconcile.failed."
      namespace   = "AWS/Lambda", metric = "Errors", statistic = "Sum", dimensions = { FunctionName = var.reconciler_function_name }
      period_s    = 300, periods = 1, comparison = "GreaterThanOrEqualToThreshold", threshold = 3, missing = "notBreaching"
    }
    reconciler_silent = {
      description = "Nothing looked for 15 minutes: hosts that nobody needs stay and cost. Is its schedule enabled?"
      namespace   = "AWS/Lambda", metric = "Invocations", statistic = "Sum", dimensions = { FunctionName = var.reconciler_function_name }
      period_s    = 900, periods = 1, comparison = "LessThanThreshold", threshold = 1, missing = "breaching"
    }
    api_errors = {
      description = "The API answers 5xx. Its log has one event for each, with the request's id."
      namespace   = "AWS/ApiGateway", metric = "5xx", statistic = "Sum", dimensions = { ApiId = var.api_id }
      period_s    = 60, periods = 3, comparison = "GreaterThanOrEqualToThreshold", threshold = 10, missing = "notBreaching"
    }
    throttled = {
      description = "Lambda refuses requests of the API: its concurrency is used up. Raise the quota, or take another data plane."
      namespace   = "AWS/Lambda", metric = "Throttles", statistic = "Sum", dimensions = { FunctionName = var.api_function_name }
      period_s    = 60, periods = 3, comparison = "GreaterThanOrEqualToThreshold", threshold = 10, missing = "notBreaching"
    }
    agents_throttled = {
      description = "Lambda refuses heartbeats: hosts freeze and are lost. Keep executions for agents (agents_reserved_concurrency), or raise the quota."
      namespace   = "AWS/Lambda", metric = "Throttles", statistic = "Sum", dimensions = { FunctionName = var.agents_function_name }
      period_s    = 60, periods = 1, comparison = "GreaterThanOrEqualToThreshold", threshold = 10, missing = "notBreaching"
    }
    table_throttled = {
      description = "DynamoDB throttles writes of the table: a burst beyond its warm throughput, or a hot partition."
      namespace   = "AWS/DynamoDB", metric = "WriteThrottleEvents", statistic = "Sum", dimensions = { TableName = var.table_name }
      period_s    = 60, periods = 3, comparison = "GreaterThanOrEqualToThreshold", threshold = 100, missing = "notBreaching"
    }
    hosts_lost = {
      description = "Hosts stopped reporting. Single ones are Spot; several at once are a zone, a bad image or the network."
      namespace   = local.namespace, metric = "HostsLost", statistic = "Sum", dimensions = {}
      period_s    = 300, periods = 1, comparison = "GreaterThanOrEqualToThreshold", threshold = 3, missing = "notBreaching"
    }
    no_capacity = {
      description = "Steps of the plan fail: no Spot capacity, a service quota, a missing permission. The log says which."
      namespace   = local.namespace, metric = "NoCapacity", statistic = "Sum", dimensions = {}
      period_s    = 300, periods = 2, comparison = "GreaterThanOrEqualToThreshold", threshold = 1, missing = "notBreaching"
    }
    queue_age = {
      description = "A session has waited for a place for too long."
      namespace   = local.namespace, metric = "QueueAge", statistic = "Maximum", dimensions = {}
      period_s    = 60, periods = 2, comparison = "GreaterThanOrEqualToThreshold", threshold = var.queue_age_s, missing = "notBreaching"
    }
  }
}

resource "aws_cloudwatch_log_metric_filter" "this" {
  for_each       = local.from_log
  name           = "${var.name}-${replace(each.key, "_", "-")}"
  log_group_name = var.reconciler_log_group_name
  pattern        = each.value.pattern

  metric_transformation {
    namespace = local.namespace
    name      = each.value.metric
    value     = each.value.value
    unit      = each.value.unit
  }
}

resource "aws_cloudwatch_metric_alarm" "this" {
  #checkov:skip=CKV_AWS_319:Actions are enabled; where they go is the operator's choice
  for_each            = { for name, alarm in local.every : name => alarm if contains(var.alarms, name) }
  alarm_name          = "${var.name}-${replace(each.key, "_", "-")}"
  alarm_description   = each.value.description
  namespace           = each.value.namespace
  metric_name         = each.value.metric
  statistic           = each.value.statistic
  dimensions          = each.value.dimensions
  period              = each.value.period_s
  evaluation_periods  = each.value.periods
  comparison_operator = each.value.comparison
  threshold           = each.value.threshold
  treat_missing_data  = each.value.missing
  actions_enabled     = true
  alarm_actions       = var.alarm_topic_arns
  ok_actions          = var.alarm_topic_arns
  tags                = var.tags
}

resource "aws_cloudwatch_dashboard" "this" {
  count          = var.dashboard ? 1 : 0
  dashboard_name = var.name

  dashboard_body = jsonencode({
    widgets = [for index, widget in local.widgets : {
      type   = "metric"
      x      = index % 2 * 12
      y      = floor(index / 2) * 6
      width  = 12
      height = 6
      properties = {
        title   = widget.title
        region  = data.aws_region.current.name
        stat    = widget.stat
        period  = 60
        view    = "timeSeries"
        metrics = widget.metrics
      }
    }]
  })
}

locals {
  widgets = [
    {
      title   = "Hosts in service"
      stat    = "Maximum"
      metrics = [for group in var.auto_scaling_group_names : ["AWS/AutoScaling", "GroupInServiceInstances", "AutoScalingGroupName", group]]
    },
    {
      title = "Requests"
      stat  = "Sum"
      metrics = [
        ["AWS/ApiGateway", "Count", "ApiId", var.api_id],
        ["AWS/ApiGateway", "4xx", "ApiId", var.api_id],
        ["AWS/ApiGateway", "5xx", "ApiId", var.api_id],
      ]
    },
    {
      title = "Latency of requests, long polls included (p50, p99), ms"
      stat  = "p99"
      metrics = [
        ["AWS/ApiGateway", "Latency", "ApiId", var.api_id, { stat = "p50" }],
        ["AWS/ApiGateway", "Latency", "ApiId", var.api_id, { stat = "p99" }],
      ]
    },
    {
      title = "Functions at once"
      stat  = "Maximum"
      metrics = [
        ["AWS/Lambda", "ConcurrentExecutions", "FunctionName", var.api_function_name],
        ["AWS/Lambda", "ConcurrentExecutions", "FunctionName", var.reconciler_function_name],
        ["AWS/Lambda", "Throttles", "FunctionName", var.api_function_name, { stat = "Sum" }],
        ["AWS/Lambda", "ConcurrentExecutions", "FunctionName", var.agents_function_name],
        ["AWS/Lambda", "Throttles", "FunctionName", var.agents_function_name, { stat = "Sum" }],
      ]
    },
    {
      title = "Reconciler: looks and failures"
      stat  = "Sum"
      metrics = [
        ["AWS/Lambda", "Invocations", "FunctionName", var.reconciler_function_name],
        ["AWS/Lambda", "Errors", "FunctionName", var.reconciler_function_name],
        [local.namespace, "HostsLost"],
        [local.namespace, "NoCapacity"],
      ]
    },
    {
      title = "Table: request units a minute, and throttled writes"
      stat  = "Sum"
      metrics = [
        ["AWS/DynamoDB", "ConsumedReadCapacityUnits", "TableName", var.table_name],
        ["AWS/DynamoDB", "ConsumedWriteCapacityUnits", "TableName", var.table_name],
        ["AWS/DynamoDB", "WriteThrottleEvents", "TableName", var.table_name],
      ]
    },
    {
      title   = "Longest wait for a place, s"
      stat    = "Maximum"
      metrics = [[local.namespace, "QueueAge"]]
    },
  ]
}
