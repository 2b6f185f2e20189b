# The same modules as on AWS, smaller: one pool of at most three hosts, no alarms, no registry.

locals {
  name = "shoal"
  # Names below `execute-api.localhost` are not resolved everywhere; the emulator takes the API's id in the path as well.
  control_url = "${var.ministack_url}/_aws/execute-api/${module.api.api_id}/$default"
  policy = {
    SHOAL_PROVISIONER_POOLS = jsonencode([module.pool.settings])
    # As on AWS: a cold start of a function takes seconds on a small machine, and a heartbeat may meet one.
    SHOAL_PROVISIONER_HEARTBEAT_S   = "5"
    SHOAL_PROVISIONER_LEASE_S       = "60"
    SHOAL_PROVISIONER_LOST_MARGIN_S = "15"
  }
}

module "state" {
  source              = "../modules/state"
  name                = local.name
  bucket_name         = "${local.name}-localstack"
  deletion_protection = false
}

module "network" {
  source             = "../modules/network"
  name               = local.name
  availability_zones = ["us-east-1a", "us-east-1b"]
}

module "api" {
  source            = "../modules/api"
  name              = local.name
  bundle_path       = var.bundle_path
  architecture      = "x86_64"
  runtime           = var.runtime
  subnet_ids        = module.network.private_subnet_ids
  security_group_id = module.network.api_security_group_id
  access_policy     = module.state.access_policy
  environment       = merge(module.state.environment, local.policy)
}

module "pool" {
  source            = "../modules/pool"
  name              = local.name
  pool              = "default"
  max_hosts         = 3
  instance_types    = ["m7i.large"]
  subnet_ids        = module.network.public_subnet_ids
  security_group_id = module.network.hosts_security_group_id
  agent_image       = var.agent_image
  agent_port        = module.network.agent_port
  control_url       = local.control_url
  ami_id            = var.ami_id
  # Root that lacks CAP_SYS_RESOURCE cannot run privileged containers; machines.py lifts the two filters that ECS cannot
  # name.
  agent_privileged = false
  settings = {
    idle_to_zero_s = 20
    warm_default   = 0
  }
}

module "reconciler" {
  source        = "../modules/reconciler"
  name          = local.name
  bundle_path   = var.bundle_path
  architecture  = "x86_64"
  runtime       = var.runtime
  access_policy = module.state.access_policy
  stream_arn    = module.state.stream_arn
  ecs_pools     = [{ driver = module.pool.driver, access = module.pool.access }]
  environment   = merge(module.state.environment, local.policy)
}
