# Least privilege: state as everyone has it, and of ECS, Auto Scaling and Batch only these pools. Calls that only read
# and that AWS cannot scope to a resource are kept apart (sid Lists).

locals {
  ecs   = var.ecs_pools[*].access
  batch = var.batch_pools[*].access

  ecs_statements = [for statement in [
    {
      Sid       = "StartAgents"
      Effect    = "Allow"
      Action    = ["ecs:StartTask"]
      Resource  = [for pool in local.ecs : pool.task_definition_arn]
      Condition = { ArnEquals = { "ecs:cluster" = [for pool in local.ecs : pool.cluster_arn] } }
    },
    {
      Sid      = "LendTheirRoles"
      Effect   = "Allow"
      Action   = ["iam:PassRole"]
      Resource = flatten([for pool in local.ecs : pool.role_arns])
      Condition = {
        StringEquals = { "iam:PassedToService" = "ecs-tasks.amazonaws.com" }
      }
    },
    {
      Sid      = "Agents"
      Effect   = "Allow"
      Action   = ["ecs:DescribeTasks", "ecs:StopTask", "ecs:TagResource"]
      Resource = [for pool in local.ecs : "${replace(pool.cluster_arn, ":cluster/", ":task/")}/*"]
    },
    {
      Sid      = "Instances"
      Effect   = "Allow"
      Action   = ["ecs:DescribeContainerInstances"]
      Resource = [for pool in local.ecs : "${replace(pool.cluster_arn, ":cluster/", ":container-instance/")}/*"]
    },
    {
      Sid      = "Cluster"
      Effect   = "Allow"
      Action   = ["ecs:ListContainerInstances"]
      Resource = [for pool in local.ecs : pool.cluster_arn]
    },
    {
      # A list of tasks names a container instance or none; the cluster is a condition.
      Sid       = "TasksOfTheCluster"
      Effect    = "Allow"
      Action    = ["ecs:ListTasks"]
      Resource  = ["*"]
      Condition = { ArnEquals = { "ecs:cluster" = [for pool in local.ecs : pool.cluster_arn] } }
    },
    {
      Sid    = "Groups"
      Effect = "Allow"
      Action = [
        "autoscaling:SetDesiredCapacity",
        "autoscaling:SetInstanceProtection",
        "autoscaling:TerminateInstanceInAutoScalingGroup",
      ]
      Resource = [for pool in local.ecs : pool.auto_scaling_group_arn]
    },
    {
      Sid    = "Lists"
      Effect = "Allow"
      Action = [
        "autoscaling:DescribeAutoScalingGroups",
        "autoscaling:DescribeScalingActivities",
        "ec2:DescribeInstances",
      ]
      Resource = ["*"]
    },
  ] : statement if length(local.ecs) > 0]

  batch_statements = [for statement in [
    {
      Sid      = "SubmitJobs"
      Effect   = "Allow"
      Action   = ["batch:SubmitJob"]
      Resource = concat([for pool in local.batch : pool.job_queue_arn], flatten([for pool in local.batch : pool.job_definition_arns]))
    },
    {
      # A job's id is not known before there is one.
      Sid      = "Jobs"
      Effect   = "Allow"
      Action   = ["batch:TagResource", "batch:TerminateJob"]
      Resource = ["arn:${data.aws_partition.current.partition}:batch:${data.aws_region.current.name}:${data.aws_caller_identity.current.account_id}:job/*"]
    },
    {
      Sid      = "ListJobs"
      Effect   = "Allow"
      Action   = ["batch:DescribeJobs", "batch:ListJobs"]
      Resource = ["*"]
    },
  ] : statement if length(local.batch) > 0]
}

locals {
  # Lambda decrypts the function's settings with its role.
  key_statements = [for key in var.kms_key_arn[*] : {
    Sid      = "Settings"
    Effect   = "Allow"
    Action   = ["kms:Decrypt"]
    Resource = [key]
  }]
}

data "aws_caller_identity" "current" {}

data "aws_partition" "current" {}

data "aws_region" "current" {}

resource "aws_iam_role" "function" {
  name = local.function_name
  tags = var.tags

  assume_role_policy = jsonencode({
    Version = "2012-10-17"
    Statement = [{
      Effect    = "Allow"
      Principal = { Service = "lambda.amazonaws.com" }
      Action    = "sts:AssumeRole"
    }]
  })
}

resource "aws_iam_role_policy" "state" {
  name   = "state"
  role   = aws_iam_role.function.id
  policy = var.access_policy
}

resource "aws_iam_role_policy" "capacity" {
  #checkov:skip=CKV_AWS_355:Read-only calls that AWS does not scope, in statements of their own
  #checkov:skip=CKV_AWS_290:Every writing call names its cluster, group, queue or roles
  name = "capacity"
  role = aws_iam_role.function.id

  policy = jsonencode({
    Version   = "2012-10-17"
    Statement = concat(local.ecs_statements, local.batch_statements)
  })
}

resource "aws_iam_role_policy" "events" {
  #checkov:skip=CKV_AWS_355:dynamodb:ListStreams knows no resource
  name = "stream-and-logs"
  role = aws_iam_role.function.id

  policy = jsonencode({
    Version = "2012-10-17"
    Statement = concat(local.key_statements, [
      {
        Sid      = "Stream"
        Effect   = "Allow"
        Action   = ["dynamodb:DescribeStream", "dynamodb:GetRecords", "dynamodb:GetShardIterator"]
        Resource = [var.stream_arn]
      },
      {
        Sid      = "Streams"
        Effect   = "Allow"
        Action   = ["dynamodb:ListStreams"]
        Resource = ["*"]
      },
      {
        Sid      = "Logs"
        Effect   = "Allow"
        Action   = ["logs:CreateLogStream", "logs:PutLogEvents"]
        Resource = ["${aws_cloudwatch_log_group.function.arn}:*"]
      },
    ])
  })
}
