# Routers: the API again, as a process on the pool's hosts, for what talks to agents. A daemon service puts one on every
# instance and none where there is no instance: it comes and goes with the pool, and nobody has to scale it.

data "aws_caller_identity" "current" {}

data "aws_partition" "current" {}

data "aws_region" "current" {}

locals {
  prefix    = "${var.name}-router"
  cloud_map = var.discovery == "cloud_map"
  # An HTTP API carries 10 MB in either direction; what is larger goes by the blob store. A load balancer has no limit.
  carried = local.cloud_map ? { SHOAL_API_ANSWER_LIMIT_BYTES = "10000000" } : {}
  environment = merge(
    local.carried,
    var.environment,
    { SHOAL_AWS_EXECUTION_ENABLED = tostring(var.execution_enabled) },
  )
  image_statements = [for repository in var.repository_arn[*] : {
    Sid      = "Image"
    Effect   = "Allow"
    Action   = ["ecr:BatchCheckLayerAvailability", "ecr:BatchGetImage", "ecr:GetDownloadUrlForLayer"]
    Resource = [repository]
  }]
  login_statements = [for repository in var.repository_arn[*] : {
    Sid      = "Login"
    Effect   = "Allow"
    Action   = ["ecr:GetAuthorizationToken"]
    Resource = ["*"]
  }]
}

resource "aws_cloudwatch_log_group" "this" {
  #checkov:skip=CKV_AWS_338:How long logs are kept is the operator's choice
  #checkov:skip=CKV_AWS_158:kms_key_arn sets a key; CloudWatch encrypts with its own otherwise
  name              = "/${var.name}/router"
  retention_in_days = var.log_retention_days
  kms_key_id        = var.kms_key_arn
  tags              = var.tags
}

resource "aws_ecs_task_definition" "this" {
  #checkov:skip=CKV_AWS_97:No volume is on EFS, so there is none to encrypt
  #checkov:skip=CKV_AWS_249:Execution role and task role are two
  family                   = local.prefix
  requires_compatibilities = ["EC2"]
  network_mode             = "host"
  task_role_arn            = aws_iam_role.task.arn
  execution_role_arn       = aws_iam_role.execution.arn
  tags                     = var.tags

  container_definitions = jsonencode([
    {
      name                   = "router"
      image                  = var.router_image
      essential              = true
      entryPoint             = ["python3", "-m", "api"]
      command                = ["serve", "--profile", "aws", "--host", "0.0.0.0", "--port", tostring(var.router_port)]
      memory                 = var.memory_mib
      memoryReservation      = min(256, var.memory_mib)
      readonlyRootFilesystem = true
      user                   = "65534:65534"
      linuxParameters = {
        initProcessEnabled = true
        capabilities       = { drop = ["ALL"] }
        tmpfs              = [{ containerPath = "/tmp", size = 64, mountOptions = ["noexec", "nosuid", "nodev"] }]
      }
      portMappings = [{ containerPort = var.router_port, hostPort = var.router_port, protocol = "tcp" }]
      environment = concat(
        [{ name = "AWS_REGION", value = data.aws_region.current.name }],
        [for name in sort(keys(local.environment)) : { name = name, value = local.environment[name] }],
      )
      ulimits     = [{ name = "nofile", softLimit = 65536, hardLimit = 65536 }]
      stopTimeout = 60
      logConfiguration = {
        logDriver = "awslogs"
        options = {
          awslogs-group         = aws_cloudwatch_log_group.this.name
          awslogs-region        = data.aws_region.current.name
          awslogs-stream-prefix = "router"
          mode                  = "non-blocking"
        }
      }
    },
  ])
}

resource "aws_ecs_service" "this" {
  name                               = "router"
  cluster                            = var.cluster.arn
  task_definition                    = aws_ecs_task_definition.this.arn
  launch_type                        = "EC2"
  scheduling_strategy                = "DAEMON"
  deployment_minimum_healthy_percent = 0
  deployment_maximum_percent         = 100
  propagate_tags                     = "SERVICE"
  enable_execute_command             = false
  wait_for_steady_state              = false
  tags                               = var.tags

  dynamic "service_registries" {
    for_each = aws_service_discovery_service.this

    content {
      registry_arn   = service_registries.value.arn
      container_name = "router"
      container_port = var.router_port
    }
  }

  dynamic "load_balancer" {
    for_each = local.cloud_map ? [] : [var.target_group_arn]

    content {
      target_group_arn = load_balancer.value
      container_name   = "router"
      container_port   = var.router_port
    }
  }
}

# Tasks on the host's network register by SRV records, for which ECS wants a DNS namespace: a private hosted zone, the
# one thing of this way with a monthly price.
resource "aws_service_discovery_private_dns_namespace" "this" {
  count       = local.cloud_map ? 1 : 0
  name        = "${var.name}.internal"
  description = "Shoal's routers"
  vpc         = var.vpc_id
  tags        = var.tags
}

resource "aws_service_discovery_service" "this" {
  count         = local.cloud_map ? 1 : 0
  name          = "router"
  description   = "One instance a host"
  force_destroy = true
  tags          = var.tags

  dns_config {
    namespace_id   = aws_service_discovery_private_dns_namespace.this[0].id
    routing_policy = "MULTIVALUE"

    dns_records {
      type = "SRV"
      ttl  = 10
    }
  }

  health_check_custom_config {
    failure_threshold = 1
  }
}
