data "aws_caller_identity" "current" {}

data "aws_region" "current" {}

locals {
  image_pull_statements = [for repository in var.repository_arn[*] : {
    Sid      = "Image"
    Effect   = "Allow"
    Action   = ["ecr:BatchCheckLayerAvailability", "ecr:BatchGetImage", "ecr:GetDownloadUrlForLayer"]
    Resource = [repository]
  }]
  image_login_statements = [for repository in var.repository_arn[*] : {
    Sid      = "Login"
    Effect   = "Allow"
    Action   = ["ecr:GetAuthorizationToken"]
    Resource = ["*"]
  }]

  agent_environment = merge(
    { SHOAL_AGENT_LISTEN = "0.0.0.0:${var.agent_port}" },
    var.agent_environment,
    { SHOAL_AGENT_CONTROL_URL = var.control_url },
  )

  # As in module pool.
  host_paths = {
    state  = "/var/lib/shoal"
    devs   = "/dev"
    cgroup = "/sys/fs/cgroup"
  }
}

resource "aws_cloudwatch_log_group" "agents" {
  #checkov:skip=CKV_AWS_338:How long logs are kept is the operator's choice
  #checkov:skip=CKV_AWS_158:kms_key_arn sets a key; CloudWatch encrypts with its own otherwise
  name              = "/${var.name}/pools/${var.pool}"
  retention_in_days = var.log_retention_days
  kms_key_id        = var.kms_key_arn
  tags              = local.tags
}

resource "aws_batch_job_definition" "agent" {
  #checkov:skip=CKV_AWS_210:The agent starts sandboxes: it mounts, makes namespaces and cgroups
  name                  = "${local.prefix}-agent"
  type                  = "container"
  platform_capabilities = ["EC2"]
  propagate_tags        = true
  tags                  = local.tags

  # A join token is good for one host: one that died is replaced by the planner under a new name, never tried again.
  retry_strategy {
    attempts = 1
  }

  dynamic "timeout" {
    for_each = var.job_timeout_s[*]

    content {
      attempt_duration_seconds = timeout.value
    }
  }

  container_properties = jsonencode({
    image            = var.agent_image
    privileged       = true
    jobRoleArn       = aws_iam_role.agent.arn
    executionRoleArn = aws_iam_role.execution.arn
    resourceRequirements = [
      { type = "VCPU", value = tostring(var.vcpus) },
      { type = "MEMORY", value = tostring(var.memory_mib) },
    ]
    volumes     = [for name, path in local.host_paths : { name = name, host = { sourcePath = path } }]
    mountPoints = [for name, path in local.host_paths : { sourceVolume = name, containerPath = path, readOnly = false }]
    environment = [for name in sort(keys(local.agent_environment)) : { name = name, value = local.agent_environment[name] }]
    ulimits     = [{ name = "nofile", softLimit = 1048576, hardLimit = 1048576 }]
    logConfiguration = {
      logDriver = "awslogs"
      options = {
        awslogs-group         = aws_cloudwatch_log_group.agents.name
        awslogs-region        = data.aws_region.current.name
        awslogs-stream-prefix = "agent"
      }
    }
  })
}

locals {
  task_trust = jsonencode({
    Version = "2012-10-17"
    Statement = [{
      Effect    = "Allow"
      Principal = { Service = "ecs-tasks.amazonaws.com" }
      Action    = "sts:AssumeRole"
      Condition = { StringEquals = { "aws:SourceAccount" = data.aws_caller_identity.current.account_id } }
    }]
  })
}

# As in module pool: the agent itself can do nothing in AWS.
resource "aws_iam_role" "agent" {
  name               = "${local.prefix}-agent"
  description        = "Agents of pool ${var.pool}: no permission at all"
  assume_role_policy = local.task_trust
  tags               = local.tags
}

resource "aws_iam_role" "execution" {
  name               = "${local.prefix}-execution"
  assume_role_policy = local.task_trust
  tags               = local.tags
}

resource "aws_iam_role_policy" "execution" {
  #checkov:skip=CKV_AWS_355:ecr:GetAuthorizationToken knows no resource
  name = "image-and-logs"
  role = aws_iam_role.execution.id

  policy = jsonencode({
    Version = "2012-10-17"
    Statement = concat(
      local.image_pull_statements,
      local.image_login_statements,
      [{
        Sid      = "Logs"
        Effect   = "Allow"
        Action   = ["logs:CreateLogStream", "logs:PutLogEvents"]
        Resource = ["${aws_cloudwatch_log_group.agents.arn}:*"]
      }],
    )
  })
}
