# Everything at once: Spot beside on-demand hosts, AWS Batch as a second source, routers or a load balancer for the data
# path, a key of your own, flow logs, alarms and a dashboard. Pools still go down to zero; docs/infra.md says what stays.

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

  routed = var.data_plane != "lambda"

  # A baked image brings the disk of sandboxes, layers and all, in the size it was baked with (infra/ami).
  home_disk = var.ami_id == null ? { gib = 500, iops = 6000, throughput_mibps = 500 } : null

  # The policy of sessions and hosts, the same for all who read it. The first pool is where sessions go that name none.
  settings = merge(
    module.state.environment,
    {
      SHOAL_PROVISIONER_POOLS         = jsonencode([module.pool.settings, module.steady.settings, module.batch.settings])
      SHOAL_PROVISIONER_HEARTBEAT_S   = "5"
      SHOAL_PROVISIONER_LEASE_S       = "45"
      SHOAL_PROVISIONER_LOST_MARGIN_S = "15"
      SHOAL_PROVISIONER_HOST_START_S  = "600"
    },
  )
}

module "network" {
  source                   = "../../modules/network"
  name                     = var.name
  tags                     = local.tags
  cidr                     = var.cidr
  availability_zones       = var.availability_zones
  data_plane               = var.data_plane
  trainer_cidrs            = var.trainer_cidrs
  flow_logs_retention_days = 30
  kms_key_arn              = aws_kms_key.this.arn
}

module "state" {
  source              = "../../modules/state"
  name                = var.name
  tags                = local.tags
  kms_key_arn         = aws_kms_key.this.arn
  deletion_protection = var.deletion_protection
}

module "registry" {
  source       = "../../modules/registry"
  name         = var.name
  tags         = local.tags
  repositories = local.routed ? ["agent", "router"] : ["agent"]
  kms_key_arn  = aws_kms_key.this.arn
  force_delete = !var.deletion_protection
}

module "api" {
  source            = "../../modules/api"
  name              = var.name
  tags              = local.tags
  bundle_path       = var.bundle_path
  architecture      = var.bundle_architecture
  memory_mib        = 1769
  subnet_ids        = module.network.private_subnet_ids
  security_group_id = module.network.api_security_group_id
  access_policy     = module.state.access_policy
  environment       = local.settings
  execution_enabled = var.execution_enabled
  # Together what the account lets through.
  throttle                    = { rate = 8000, burst = 4000 }
  agents_throttle             = { rate = 2000, burst = 1000 }
  agents_reserved_concurrency = var.agents_reserved_concurrency
  data_plane                  = var.data_plane
  entrance_security_group_id  = module.network.entrance_security_group_id
  router_service_arn          = one(module.router[*].service_discovery_arn)
  kms_key_arn                 = aws_kms_key.this.arn

  alb = var.data_plane != "alb" ? null : {
    vpc_id          = module.network.vpc_id
    subnet_ids      = module.network.public_subnet_ids
    certificate_arn = var.certificate_arn
    domain_name     = var.domain_name
    router_port     = module.network.router_port
  }
}

# Spot hosts, behind two on-demand ones.
module "pool" {
  source         = "../../modules/pool"
  name           = var.name
  tags           = local.tags
  pool           = "default"
  max_hosts      = var.max_hosts
  instance_types = ["m7i.8xlarge", "m7a.8xlarge", "m6i.8xlarge", "m6a.8xlarge", "m5.8xlarge", "m5a.8xlarge"]
  spot           = { on_demand_base = 2, on_demand_percent_above = 0 }
  home_disk      = local.home_disk
  settings       = { headroom_share = 0.1 }
  ami_id         = var.ami_id
  # Baked layers are on the image's own volume.
  use_instance_store = var.ami_id == null
  execution_enabled  = var.execution_enabled
  subnet_ids         = module.network.public_subnet_ids
  security_group_id  = module.network.hosts_security_group_id
  agent_image        = "${module.registry.repository_urls["agent"]}:${var.agent_image_tag}"
  repository_arn     = module.registry.repository_arns["agent"]
  control_url        = module.api.control_url
  agent_port         = module.network.agent_port
  agent_environment  = { SHOAL_AGENT_MEMORY_RESERVE_MIB = "2048" }
  kms_key_arn        = null
}

# On-demand hosts for long sessions, with stopped instances that start sooner.
module "steady" {
  source         = "../../modules/pool"
  name           = var.name
  tags           = local.tags
  pool           = "steady"
  max_hosts      = 20
  instance_types = ["m7i.8xlarge"]
  spot           = null
  warm_pool      = { max_prepared = 2 }
  home_disk      = local.home_disk
  ami_id         = var.ami_id
  # Baked layers are on the image's own volume.
  use_instance_store = var.ami_id == null
  execution_enabled  = var.execution_enabled
  subnet_ids         = module.network.public_subnet_ids
  security_group_id  = module.network.hosts_security_group_id
  agent_image        = "${module.registry.repository_urls["agent"]}:${var.agent_image_tag}"
  repository_arn     = module.registry.repository_arns["agent"]
  control_url        = module.api.control_url
  agent_port         = module.network.agent_port
  agent_environment  = { SHOAL_AGENT_MEMORY_RESERVE_MIB = "2048" }
}

# Bulk work that may wait in Batch's own queue.
module "batch" {
  source            = "../../modules/batch_pool"
  name              = var.name
  tags              = local.tags
  pool              = "bulk"
  max_hosts         = 100
  instance_types    = ["m7i.4xlarge", "m7a.4xlarge", "m6i.4xlarge", "m6a.4xlarge"]
  vcpus             = 16
  memory_mib        = 60000
  execution_enabled = var.execution_enabled
  subnet_ids        = module.network.public_subnet_ids
  security_group_id = module.network.hosts_security_group_id
  agent_image       = "${module.registry.repository_urls["agent"]}:${var.agent_image_tag}"
  repository_arn    = module.registry.repository_arns["agent"]
  control_url       = module.api.control_url
  agent_port        = module.network.agent_port
}

module "router" {
  count             = local.routed ? 1 : 0
  source            = "../../modules/router"
  name              = var.name
  tags              = local.tags
  cluster           = module.pool.cluster
  vpc_id            = module.network.vpc_id
  router_image      = "${module.registry.repository_urls["router"]}:${var.agent_image_tag}"
  repository_arn    = module.registry.repository_arns["router"]
  router_port       = module.network.router_port
  environment       = local.settings
  access_policy     = module.state.access_policy
  execution_enabled = var.execution_enabled
  discovery         = var.data_plane == "alb" ? "alb" : "cloud_map"
  target_group_arn  = module.api.router_target_group_arn
  kms_key_arn       = aws_kms_key.this.arn
}

module "reconciler" {
  source            = "../../modules/reconciler"
  name              = var.name
  tags              = local.tags
  bundle_path       = var.bundle_path
  architecture      = var.bundle_architecture
  memory_mib        = 1769
  access_policy     = module.state.access_policy
  stream_arn        = module.state.stream_arn
  ecs_pools         = [for pool in [module.pool, module.steady] : { driver = pool.driver, access = pool.access }]
  batch_pools       = [{ driver = module.batch.driver, access = module.batch.access }]
  environment       = local.settings
  execution_enabled = var.execution_enabled
  kms_key_arn       = aws_kms_key.this.arn
}

module "observability" {
  source                    = "../../modules/observability"
  name                      = var.name
  tags                      = local.tags
  dashboard                 = true
  alarm_topic_arns          = concat([aws_sns_topic.alarms.arn], var.alarm_topic_arns)
  api_function_name         = module.api.function_name
  agents_function_name      = module.api.agents_function_name
  api_id                    = module.api.api_id
  reconciler_function_name  = module.reconciler.function_name
  reconciler_log_group_name = module.reconciler.log_group_name
  table_name                = module.state.table_name
  auto_scaling_group_names  = [module.pool.auto_scaling_group_name, module.steady.auto_scaling_group_name]
}

resource "aws_sns_topic" "alarms" {
  name              = "${var.name}-alarms"
  kms_master_key_id = aws_kms_key.this.arn
  tags              = local.tags
}
