# Hosts of one shape: an Auto Scaling group whose instances join a cluster of their own. Who runs how many is decided by
# the planner alone: it sets the desired capacity, puts one agent on each instance (StartTask) and ends exactly the
# instance it drained. ECS managed scaling would take instances for empty on which only its own kind of task is absent.

locals {
  prefix = "${var.name}-${var.pool}"
  tags   = merge(var.tags, { "shoal:pool" = var.pool })
  spot   = var.spot == null ? { on_demand_base = 0, on_demand_percent_above = 100 } : var.spot
}

resource "aws_ecs_cluster" "this" {
  #checkov:skip=CKV_AWS_65:Container Insights bills metrics by the task; agents meter what is needed themselves
  name = local.prefix
  tags = local.tags

  setting {
    name  = "containerInsights"
    value = "disabled"
  }
}

module "host" {
  source             = "../host"
  name               = var.name
  tags               = var.tags
  pool               = var.pool
  cluster            = { name = aws_ecs_cluster.this.name, arn = aws_ecs_cluster.this.arn }
  architecture       = var.architecture
  instance_type      = var.warm_pool == null ? null : var.instance_types[0]
  ami_id             = var.ami_id
  security_group_id  = var.security_group_id
  root_gib           = var.root_gib
  home_disk          = var.home_disk
  kms_key_arn        = var.kms_key_arn
  use_instance_store = var.use_instance_store
  ssm_access         = var.ssm_access
}

resource "aws_autoscaling_group" "hosts" {
  name                      = local.prefix
  min_size                  = 0
  max_size                  = var.max_hosts
  vpc_zone_identifier       = var.subnet_ids
  health_check_type         = "EC2"
  health_check_grace_period = 120
  default_cooldown          = 0
  wait_for_capacity_timeout = "0"
  # Hosts are never chosen by the group. The planner ends the one it drained by name, which protection does not hinder,
  # so that it is never lifted.
  protect_from_scale_in = true
  # Replacements for Spot instances at risk would come and go behind the planner's back, and ECS is not told. An
  # interruption is a lost host: lost capacity is demand, and demand starts hosts.
  capacity_rebalance    = false
  max_instance_lifetime = var.max_instance_lifetime_days == null ? null : var.max_instance_lifetime_days * 86400
  termination_policies  = ["NewestInstance"]
  # AZRebalance ends instances to even out zones. Launch stopped: no instance starts, whoever raises the desired
  # capacity, while what runs may end by itself; a maximum of zero would end it at once.
  suspended_processes = concat(["AZRebalance"], var.execution_enabled ? [] : ["Launch"])
  force_delete        = true
  enabled_metrics     = ["GroupDesiredCapacity", "GroupInServiceInstances"]

  dynamic "mixed_instances_policy" {
    for_each = var.warm_pool == null ? [1] : []

    content {
      instances_distribution {
        on_demand_allocation_strategy            = "prioritized"
        on_demand_base_capacity                  = local.spot.on_demand_base
        on_demand_percentage_above_base_capacity = local.spot.on_demand_percent_above
        spot_allocation_strategy                 = "price-capacity-optimized"
      }

      launch_template {
        launch_template_specification {
          launch_template_id = module.host.launch_template_id
          version            = module.host.launch_template_version
        }

        dynamic "override" {
          for_each = var.instance_types

          content {
            instance_type = override.value
          }
        }
      }
    }
  }

  # A warm pool wants a group of one type.
  dynamic "launch_template" {
    for_each = var.warm_pool[*]

    content {
      id      = module.host.launch_template_id
      version = module.host.launch_template_version
    }
  }

  dynamic "warm_pool" {
    for_each = var.warm_pool[*]

    content {
      pool_state                  = "Stopped"
      min_size                    = warm_pool.value.min_size
      max_group_prepared_capacity = warm_pool.value.max_prepared

      # An instance that served sandboxes never serves again.
      instance_reuse_policy {
        reuse_on_scale_in = false
      }
    }
  }

  dynamic "tag" {
    for_each = merge(local.tags, { Name = "${local.prefix}-host" })

    content {
      key                 = tag.key
      value               = tag.value
      propagate_at_launch = true
    }
  }

  lifecycle {
    # The planner's.
    ignore_changes = [desired_capacity]

    precondition {
      condition     = alltrue([for type in var.instance_types : can(regex("^[a-z]+[0-9]+g", type)) == (var.architecture == "arm64")])
      error_message = "Instance types with a g behind the generation are arm64, all others x86_64; the pool is ${var.architecture}."
    }
  }
}
