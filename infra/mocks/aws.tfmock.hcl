# What AWS would answer, for `terraform test` without AWS: ids and ARNs in the form that the provider's own checks and
# our policies expect.

mock_data "aws_caller_identity" {
  defaults = { account_id = "123456789012" }
}

mock_data "aws_partition" {
  defaults = { partition = "aws", dns_suffix = "amazonaws.com" }
}

mock_data "aws_region" {
  defaults = { name = "us-east-1" }
}

mock_data "aws_availability_zones" {
  defaults = { names = ["us-east-1a", "us-east-1b", "us-east-1c", "us-east-1d"] }
}

mock_resource "aws_apigatewayv2_api" {
  defaults = {
    id            = "a1b2c3d4e5"
    api_endpoint  = "https://a1b2c3d4e5.execute-api.us-east-1.amazonaws.com"
    execution_arn = "arn:aws:execute-api:us-east-1:123456789012:a1b2c3d4e5"
  }
}

mock_resource "aws_autoscaling_group" {
  defaults = { arn = "arn:aws:autoscaling:us-east-1:123456789012:autoScalingGroup:11111111-2222-3333-4444-555555555555:autoScalingGroupName/shoal-default" }
}

mock_resource "aws_batch_compute_environment" {
  defaults = { arn = "arn:aws:batch:us-east-1:123456789012:compute-environment/shoal-batch-1" }
}

mock_resource "aws_batch_job_definition" {
  defaults = {
    arn        = "arn:aws:batch:us-east-1:123456789012:job-definition/shoal-batch-agent:1"
    arn_prefix = "arn:aws:batch:us-east-1:123456789012:job-definition/shoal-batch-agent"
    revision   = 1
  }
}

mock_resource "aws_batch_job_queue" {
  defaults = { arn = "arn:aws:batch:us-east-1:123456789012:job-queue/shoal-batch" }
}

mock_resource "aws_cloudwatch_event_rule" {
  defaults = { arn = "arn:aws:events:us-east-1:123456789012:rule/shoal" }
}

mock_resource "aws_cloudwatch_log_group" {
  defaults = { arn = "arn:aws:logs:us-east-1:123456789012:log-group:shoal" }
}

mock_resource "aws_dynamodb_table" {
  defaults = {
    arn        = "arn:aws:dynamodb:us-east-1:123456789012:table/shoal"
    stream_arn = "arn:aws:dynamodb:us-east-1:123456789012:table/shoal/stream/2026-11-01T00:00:00.000"
  }
}

mock_resource "aws_ecr_repository" {
  defaults = {
    arn            = "arn:aws:ecr:us-east-1:123456789012:repository/shoal/agent"
    repository_url = "123456789012.dkr.ecr.us-east-1.amazonaws.com/shoal/agent"
  }
}

mock_resource "aws_ecs_cluster" {
  defaults = { arn = "arn:aws:ecs:us-east-1:123456789012:cluster/shoal-default" }
}

mock_resource "aws_ecs_task_definition" {
  defaults = {
    arn                  = "arn:aws:ecs:us-east-1:123456789012:task-definition/shoal-default-agent:1"
    arn_without_revision = "arn:aws:ecs:us-east-1:123456789012:task-definition/shoal-default-agent"
    revision             = 1
  }
}

mock_resource "aws_iam_instance_profile" {
  defaults = { arn = "arn:aws:iam::123456789012:instance-profile/shoal" }
}

mock_resource "aws_iam_role" {
  defaults = { arn = "arn:aws:iam::123456789012:role/shoal" }
}

mock_resource "aws_kms_key" {
  defaults = { arn = "arn:aws:kms:us-east-1:123456789012:key/11111111-2222-3333-4444-555555555555" }
}

mock_resource "aws_lambda_function" {
  defaults = {
    arn        = "arn:aws:lambda:us-east-1:123456789012:function:shoal"
    invoke_arn = "arn:aws:apigateway:us-east-1:lambda:path/2015-03-31/functions/arn:aws:lambda:us-east-1:123456789012:function:shoal/invocations"
  }
}

mock_resource "aws_launch_template" {
  defaults = { id = "lt-0123456789abcdef0", latest_version = 1 }
}

mock_resource "aws_lb" {
  defaults = { arn = "arn:aws:elasticloadbalancing:us-east-1:123456789012:loadbalancer/app/shoal/0123456789abcdef" }
}

mock_resource "aws_lb_listener" {
  defaults = { arn = "arn:aws:elasticloadbalancing:us-east-1:123456789012:listener/app/shoal/0123456789abcdef/0123456789abcdef" }
}

mock_resource "aws_lb_target_group" {
  defaults = { arn = "arn:aws:elasticloadbalancing:us-east-1:123456789012:targetgroup/shoal/0123456789abcdef" }
}

mock_resource "aws_s3_bucket" {
  defaults = {
    id  = "shoal-123456789012-us-east-1"
    arn = "arn:aws:s3:::shoal-123456789012-us-east-1"
  }
}

mock_resource "aws_service_discovery_service" {
  defaults = { arn = "arn:aws:servicediscovery:us-east-1:123456789012:service/srv-0123456789abcdef" }
}

mock_resource "aws_sns_topic" {
  defaults = { arn = "arn:aws:sns:us-east-1:123456789012:shoal" }
}
