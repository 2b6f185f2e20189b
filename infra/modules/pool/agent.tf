# The agent: one task an instance, put there by StartTask with its join token, never by a service.

data "aws_caller_identity" "current" {}

data "aws_partition" "current" {}

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

  # Directories of the machine that the agent works in. /dev: loop devices that come up later are not in a container's
  # own. /sys/fs/cgroup: the whole v2 tree, where sandboxes get cgroups beside the agent's.
  host_paths = {
    state  = "/var/lib/shoal"
    devs   = "/dev"
    cgroup = "/sys/fs/cgroup"
  }

  capabilities = ["SYS_ADMIN", "NET_ADMIN", "SYS_PTRACE", "DAC_READ_SEARCH", "SYS_RESOURCE", "MKNOD"]
}

resource "aws_cloudwatch_log_group" "agents" {
  #checkov:skip=CKV_AWS_338:How long logs are kept is the operator's choice
  #checkov:skip=CKV_AWS_158:kms_key_arn sets a key; CloudWatch encrypts with its own otherwise
  name              = "/${var.name}/pools/${var.pool}"
  retention_in_days = var.log_retention_days
  kms_key_id        = var.kms_key_arn
  tags              = local.tags
}

resource "aws_ecs_task_definition" "agent" {
  #checkov:skip=CKV_AWS_97:No volume is on EFS, so there is none to encrypt
  #checkov:skip=CKV_AWS_249:Execution role and task role are two
  #checkov:skip=CKV_AWS_335:Process ids are not shared with the host
  #checkov:skip=CKV_AWS_336:The agent mounts and unpacks in its root; sandboxes' roots are read-only and their own
  family                   = "${local.prefix}-agent"
  requires_compatibilities = ["EC2"]
  network_mode             = "host"
  task_role_arn            = aws_iam_role.agent.arn
  execution_role_arn       = aws_iam_role.execution.arn
  tags                     = local.tags

  dynamic "volume" {
    for_each = local.host_paths

    content {
      name      = volume.key
      host_path = volume.value
    }
  }

  container_definitions = jsonencode([
    {
      name      = "agent"
      image     = var.agent_image
      essential = true
      # ECS itself refuses a second agent on an instance: the port is taken.
      portMappings = [{ containerPort = var.agent_port, hostPort = var.agent_port, protocol = "tcp" }]
      # Without a hard limit: sandboxes have limits of their own, and the agent keeps a reserve of the host.
      memoryReservation = 256
      privileged        = var.agent_privileged
      linuxParameters = {
        initProcessEnabled = false
        capabilities       = { add = var.agent_privileged ? [] : local.capabilities }
      }
      mountPoints = [for name, path in local.host_paths : { sourceVolume = name, containerPath = path, readOnly = false }]
      environment = [for name in sort(keys(local.agent_environment)) : { name = name, value = local.agent_environment[name] }]
      ulimits     = [{ name = "nofile", softLimit = 1048576, hardLimit = 1048576 }]
      # Snapshots of dirty sessions and the flush of the journals. 120 s is the most that ECS grants.
      stopTimeout = 120
      logConfiguration = {
        logDriver = "awslogs"
        options = {
          awslogs-group         = aws_cloudwatch_log_group.agents.name
          awslogs-region        = data.aws_region.current.name
          awslogs-stream-prefix = "agent"
          mode                  = "non-blocking"
        }
      }
    },
  ])
}

# What a task of this cluster can be started for.
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

# The agent itself can do nothing in AWS: objects come and go by presigned URLs, everything else by the API. The role is
# there so that no other one is lent to it.
resource "aws_iam_role" "agent" {
  name               = "${local.prefix}-agent"
  description        = "Agents of pool ${var.pool}: no permission at all"
  assume_role_policy = local.task_trust
  tags               = local.tags
}

# ECS pulls the image and opens the log stream with this one; containers cannot use it.
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
