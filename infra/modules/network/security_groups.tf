# Who may talk to whom, complete: the API's function and the routers to agents; the VPC link or the load balancer to
# routers; trainers to agents where allowed. Groups are referred to by each other, never by addresses.

locals {
  routed = var.data_plane != "lambda"
}

resource "aws_security_group" "api" {
  #checkov:skip=CKV2_AWS_5:Attached to the API's function by module api
  name        = "${var.name}-api"
  description = "The API's function: out to agents, DynamoDB and S3"
  vpc_id      = aws_vpc.this.id
  tags        = merge(var.tags, { Name = "${var.name}-api" })
}

resource "aws_security_group" "hosts" {
  #checkov:skip=CKV2_AWS_5:Attached to the hosts by module pool
  name        = "${var.name}-hosts"
  description = "Hosts: agents, and routers where there are any"
  vpc_id      = aws_vpc.this.id
  tags        = merge(var.tags, { Name = "${var.name}-hosts" })
}

resource "aws_security_group" "entrance" {
  #checkov:skip=CKV2_AWS_5:Attached to the VPC link or the load balancer by module api
  count       = local.routed ? 1 : 0
  name        = "${var.name}-entrance"
  description = "VPC link or load balancer: out to routers"
  vpc_id      = aws_vpc.this.id
  tags        = merge(var.tags, { Name = "${var.name}-entrance" })
}

resource "aws_vpc_security_group_egress_rule" "api_to_agents" {
  security_group_id            = aws_security_group.api.id
  description                  = "Agents"
  ip_protocol                  = "tcp"
  from_port                    = var.agent_port
  to_port                      = var.agent_port
  referenced_security_group_id = aws_security_group.hosts.id
  tags                         = var.tags
}

resource "aws_vpc_security_group_egress_rule" "api_to_endpoints" {
  for_each          = aws_vpc_endpoint.gateway
  security_group_id = aws_security_group.api.id
  description       = "Gateway endpoint of ${each.key}"
  ip_protocol       = "tcp"
  from_port         = 443
  to_port           = 443
  prefix_list_id    = each.value.prefix_list_id
  tags              = var.tags
}

resource "aws_vpc_security_group_ingress_rule" "agents_from_api" {
  security_group_id            = aws_security_group.hosts.id
  description                  = "The API's function to agents"
  ip_protocol                  = "tcp"
  from_port                    = var.agent_port
  to_port                      = var.agent_port
  referenced_security_group_id = aws_security_group.api.id
  tags                         = var.tags
}

resource "aws_vpc_security_group_ingress_rule" "agents_from_routers" {
  count                        = local.routed ? 1 : 0
  security_group_id            = aws_security_group.hosts.id
  description                  = "Routers to the agents of other hosts"
  ip_protocol                  = "tcp"
  from_port                    = var.agent_port
  to_port                      = var.agent_port
  referenced_security_group_id = aws_security_group.hosts.id
  tags                         = var.tags
}

resource "aws_vpc_security_group_ingress_rule" "agents_from_trainers" {
  for_each          = toset(var.trainer_cidrs)
  security_group_id = aws_security_group.hosts.id
  description       = "Trainers to agents, with a route token"
  ip_protocol       = "tcp"
  from_port         = var.agent_port
  to_port           = var.agent_port
  cidr_ipv4         = each.value
  tags              = var.tags
}

resource "aws_vpc_security_group_ingress_rule" "routers_from_entrance" {
  count                        = local.routed ? 1 : 0
  security_group_id            = aws_security_group.hosts.id
  description                  = "VPC link or load balancer to routers"
  ip_protocol                  = "tcp"
  from_port                    = var.router_port
  to_port                      = var.router_port
  referenced_security_group_id = aws_security_group.entrance[0].id
  tags                         = var.tags
}

# Hosts fetch images, objects and, for sandboxes whose session allows it, what the egress proxy of the agent lets
# through by name; addresses cannot be listed here. Sandboxes themselves have no network but that proxy.
resource "aws_vpc_security_group_egress_rule" "hosts_to_anywhere" {
  #checkov:skip=CKV_AWS_382:The agent's egress proxy decides by name and port; private ranges are refused there
  security_group_id = aws_security_group.hosts.id
  description       = "AWS endpoints, and what the egress proxy allows"
  ip_protocol       = "-1"
  cidr_ipv4         = "0.0.0.0/0"
  tags              = var.tags
}

resource "aws_vpc_security_group_egress_rule" "entrance_to_routers" {
  count                        = local.routed ? 1 : 0
  security_group_id            = aws_security_group.entrance[0].id
  description                  = "Routers"
  ip_protocol                  = "tcp"
  from_port                    = var.router_port
  to_port                      = var.router_port
  referenced_security_group_id = aws_security_group.hosts.id
  tags                         = var.tags
}

resource "aws_vpc_security_group_ingress_rule" "entrance_from_clients" {
  for_each          = var.data_plane == "alb" ? toset(var.alb_ingress_cidrs) : toset([])
  security_group_id = aws_security_group.entrance[0].id
  description       = "Clients of the load balancer"
  ip_protocol       = "tcp"
  from_port         = 443
  to_port           = 443
  cidr_ipv4         = each.value
  tags              = var.tags
}
