# Hosts as children of AWS Batch array jobs: Batch launches and ends instances, keeps the queue and takes Spot capacity;
# a job asks for a whole instance, runs the agent and ends when its host was drained or is idle.

locals {
  prefix = "${var.name}-${var.pool}"
  tags   = merge(var.tags, { "shoal:pool" = var.pool })
}

module "host" {
  source             = "../host"
  name               = var.name
  tags               = var.tags
  pool               = var.pool
  cluster            = null
  architecture       = var.architecture
  ami_id             = var.ami_id
  security_group_id  = var.security_group_id
  root_gib           = var.root_gib
  home_disk          = var.home_disk
  kms_key_arn        = var.kms_key_arn
  use_instance_store = var.use_instance_store
  ssm_access         = var.ssm_access
}

resource "aws_batch_compute_environment" "hosts" {
  compute_environment_name_prefix = "${local.prefix}-"
  type                            = "MANAGED"
  # Disabled, it launches nothing; what runs may end.
  state = var.execution_enabled ? "ENABLED" : "DISABLED"
  tags  = local.tags

  compute_resources {
    type                = var.spot ? "SPOT" : "EC2"
    allocation_strategy = var.spot ? "SPOT_PRICE_CAPACITY_OPTIMIZED" : "BEST_FIT_PROGRESSIVE"
    min_vcpus           = 0
    max_vcpus           = var.max_hosts * var.vcpus
    instance_type       = var.instance_types
    instance_role       = module.host.instance_profile_arn
    security_group_ids  = [var.security_group_id]
    subnets             = var.subnet_ids
    tags                = merge(local.tags, { Name = "${local.prefix}-host" })

    ec2_configuration {
      image_type        = "ECS_AL2023"
      image_id_override = var.ami_id
    }

    launch_template {
      launch_template_id = module.host.launch_template_id
      version            = module.host.launch_template_version
    }
  }

  lifecycle {
    create_before_destroy = true
    # Batch's own.
    ignore_changes = [compute_resources[0].desired_vcpus]

    precondition {
      condition     = alltrue([for type in var.instance_types : can(regex("^[a-z]+[0-9]+g", type)) == (var.architecture == "arm64")])
      error_message = "Instance types with a g behind the generation are arm64, all others x86_64; the pool is ${var.architecture}."
    }
  }
}

resource "aws_batch_job_queue" "hosts" {
  name     = local.prefix
  state    = var.execution_enabled ? "ENABLED" : "DISABLED"
  priority = 1
  tags     = local.tags

  compute_environment_order {
    order               = 1
    compute_environment = aws_batch_compute_environment.hosts.arn
  }
}
