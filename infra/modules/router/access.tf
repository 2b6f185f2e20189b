# On a host that an agent has, whoever takes the agent over can reach the router's credentials. Where that is not
# acceptable, give routers a pool of their own (another module pool, whose cluster is named here) or use the function.

locals {
  task_trust = jsonencode({
    Version = "2012-10-17"
    Statement = [{
      Effect    = "Allow"
      Principal = { Service = "ecs-tasks.amazonaws.com" }
      Action    = "sts:AssumeRole"
      Condition = {
        StringEquals = { "aws:SourceAccount" = data.aws_caller_identity.current.account_id }
        ArnLike      = { "aws:SourceArn" = "arn:${data.aws_partition.current.partition}:ecs:${data.aws_region.current.name}:${data.aws_caller_identity.current.account_id}:*" }
      }
    }]
  })
}

resource "aws_iam_role" "task" {
  name               = local.prefix
  assume_role_policy = local.task_trust
  tags               = var.tags
}

resource "aws_iam_role_policy" "state" {
  name   = "state"
  role   = aws_iam_role.task.id
  policy = var.access_policy
}

resource "aws_iam_role" "execution" {
  name               = "${local.prefix}-execution"
  assume_role_policy = local.task_trust
  tags               = var.tags
}

resource "aws_iam_role_policy" "execution" {
  #checkov:skip=CKV_AWS_355:ecr:GetAuthorizationToken knows no resource
  name = "image-and-logs"
  role = aws_iam_role.execution.id

  policy = jsonencode({
    Version = "2012-10-17"
    Statement = concat(
      local.image_statements,
      local.login_statements,
      [{
        Sid      = "Logs"
        Effect   = "Allow"
        Action   = ["logs:CreateLogStream", "logs:PutLogEvents"]
        Resource = ["${aws_cloudwatch_log_group.this.arn}:*"]
      }],
    )
  })
}
