# What happens to hosts wakes the reconciler; what it then finds out it reads itself.

locals {
  clusters   = var.ecs_pools[*].access.cluster_arn
  groups     = var.ecs_pools[*].driver.auto_scaling_group
  job_queues = var.batch_pools[*].access.job_queue_arn

  events = merge(
    {
      spot = {
        description = "Spot instances of the account about to be taken away (an event names no group)"
        pattern = {
          source        = ["aws.ec2"]
          "detail-type" = ["EC2 Spot Instance Interruption Warning"]
        }
      }
    },
    { for name, event in {
      tasks = {
        description = "Agents that came up or stopped"
        pattern = {
          source        = ["aws.ecs"]
          "detail-type" = ["ECS Task State Change"]
          detail        = { clusterArn = local.clusters, lastStatus = ["RUNNING", "STOPPED"], group = [{ anything-but = { prefix = "service:" } }] }
        }
      }
      instances = {
        description = "Instances that joined or left a cluster"
        pattern = {
          source        = ["aws.ecs"]
          "detail-type" = ["ECS Container Instance State Change"]
          detail        = { clusterArn = local.clusters }
        }
      }
      groups = {
        description = "Launches that succeeded or failed, and terminations"
        pattern = {
          source        = ["aws.autoscaling"]
          "detail-type" = ["EC2 Instance Launch Successful", "EC2 Instance Launch Unsuccessful", "EC2 Instance Terminate Successful"]
          detail        = { AutoScalingGroupName = local.groups }
        }
      }
    } : name => event if length(local.clusters) > 0 },
    { for name, event in {
      jobs = {
        description = "Jobs that came up or ended"
        pattern = {
          source        = ["aws.batch"]
          "detail-type" = ["Batch Job State Change"]
          detail        = { jobQueue = local.job_queues, status = ["RUNNING", "SUCCEEDED", "FAILED"] }
        }
      }
    } : name => event if length(local.job_queues) > 0 },
  )
}

resource "aws_cloudwatch_event_rule" "schedule" {
  name                = "${local.function_name}-schedule"
  description         = "Looks when nothing wakes it"
  schedule_expression = var.schedule_minutes == 1 ? "rate(1 minute)" : "rate(${var.schedule_minutes} minutes)"
  tags                = var.tags
}

resource "aws_cloudwatch_event_target" "schedule" {
  rule = aws_cloudwatch_event_rule.schedule.name
  arn  = aws_lambda_function.this.arn
}

resource "aws_lambda_permission" "schedule" {
  statement_id  = "schedule"
  action        = "lambda:InvokeFunction"
  function_name = aws_lambda_function.this.function_name
  principal     = "events.amazonaws.com"
  source_arn    = aws_cloudwatch_event_rule.schedule.arn
}

resource "aws_cloudwatch_event_rule" "wake" {
  for_each      = local.events
  name          = "${local.function_name}-${each.key}"
  description   = each.value.description
  event_pattern = jsonencode(each.value.pattern)
  tags          = var.tags
}

resource "aws_cloudwatch_event_target" "wake" {
  for_each = aws_cloudwatch_event_rule.wake
  rule     = each.value.name
  arn      = aws_lambda_function.this.arn
}

resource "aws_lambda_permission" "wake" {
  for_each      = aws_cloudwatch_event_rule.wake
  statement_id  = each.key
  action        = "lambda:InvokeFunction"
  function_name = aws_lambda_function.this.function_name
  principal     = "events.amazonaws.com"
  source_arn    = each.value.arn
}
