# The smallest installation that is whole: one pool from zero to a few Spot hosts, everything through one function, keys
# of AWS's own, and nothing that is billed by the hour while no sandbox runs. docs/infra.md has its cost at rest.

terraform {
  required_version = ">= 1.9"

  required_providers {
    aws = {
      source  = "hashicorp/aws"
      version = "~> 5.100"
    }
  }
}

provider "aws" {
  region = var.region
}

locals {
  # The one place that tags come from; cost allocation tags are activated in the billing console. A pool adds its name.
  # Sandboxes of many tenants share a host: their shares come from metering, not from tags.
  tags = merge(
    {
      "shoal:project"     = var.name
      "shoal:environment" = var.environment
      "shoal:tenant"      = var.tenant
      "shoal:run"         = "shared"
    },
    var.tags,
  )

  # The policy of sessions and hosts, the same for all who read it. Heartbeats pass the HTTP API, which is billed by the
  # request, so that they are rarer than on one machine; an instance that has not registered after 10 minutes is replaced.
  settings = merge(
    module.state.environment,
    {
      SHOAL_PROVISIONER_POOLS         = jsonencode([module.pool.settings])
      SHOAL_PROVISIONER_HEARTBEAT_S   = "5"
      SHOAL_PROVISIONER_LEASE_S       = "45"
      SHOAL_PROVISIONER_LOST_MARGIN_S = "15"
      SHOAL_PROVISIONER_HOST_START_S  = "600"
    },
  )
}

module "network" {
  source        = "../../modules/network"
  name          = var.name
  tags          = local.tags
  trainer_cidrs = var.trainer_cidrs
}

module "state" {
  source              = "../../modules/state"
  name                = var.name
  tags                = local.tags
  deletion_protection = var.deletion_protection
}

module "registry" {
  source       = "../../modules/registry"
  name         = var.name
  tags         = local.tags
  keep_images  = 3
  force_delete = !var.deletion_protection
}

module "api" {
  source             = "../../modules/api"
  name               = var.name
  tags               = local.tags
  bundle_path        = var.bundle_path
  architecture       = var.bundle_architecture
  subnet_ids         = module.network.private_subnet_ids
  security_group_id  = module.network.api_security_group_id
  access_policy      = module.state.access_policy
  environment        = local.settings
  execution_enabled  = var.execution_enabled
  access_logs        = false
  log_retention_days = 14
}

module "pool" {
  source             = "../../modules/pool"
  name               = var.name
  tags               = local.tags
  max_hosts          = var.max_hosts
  instance_types     = var.instance_types
  execution_enabled  = var.execution_enabled
  subnet_ids         = module.network.public_subnet_ids
  security_group_id  = module.network.hosts_security_group_id
  agent_image        = "${module.registry.repository_urls["agent"]}:${var.agent_image_tag}"
  repository_arn     = module.registry.repository_arns["agent"]
  control_url        = module.api.control_url
  agent_port         = module.network.agent_port
  log_retention_days = 14
}

module "reconciler" {
  source             = "../../modules/reconciler"
  name               = var.name
  tags               = local.tags
  bundle_path        = var.bundle_path
  architecture       = var.bundle_architecture
  access_policy      = module.state.access_policy
  stream_arn         = module.state.stream_arn
  ecs_pools          = [{ driver = module.pool.driver, access = module.pool.access }]
  environment        = local.settings
  execution_enabled  = var.execution_enabled
  log_retention_days = 14
}

module "observability" {
  source                    = "../../modules/observability"
  name                      = var.name
  tags                      = local.tags
  alarms                    = ["reconciler_errors", "reconciler_silent"]
  alarm_topic_arns          = var.alarm_topic_arns
  api_function_name         = module.api.function_name
  agents_function_name      = module.api.agents_function_name
  api_id                    = module.api.api_id
  reconciler_function_name  = module.reconciler.function_name
  reconciler_log_group_name = module.reconciler.log_group_name
  table_name                = module.state.table_name
  auto_scaling_group_names  = [module.pool.auto_scaling_group_name]
}
