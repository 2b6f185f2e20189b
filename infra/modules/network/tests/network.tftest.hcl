mock_provider "aws" {
  source = "../../mocks"
}

run "at_rest" {
  command = apply

  assert {
    condition     = length(aws_subnet.public) == 3 && length(aws_subnet.private) == 3
    error_message = "Three zones by default, a public and a private subnet each."
  }

  assert {
    condition     = alltrue([for subnet in aws_subnet.public : subnet.map_public_ip_on_launch]) && !anytrue([for subnet in aws_subnet.private : coalesce(subnet.map_public_ip_on_launch, false)])
    error_message = "Hosts have public addresses, functions have none."
  }

  assert {
    condition     = length(distinct(concat(values(local.public), values(local.private)))) == 6
    error_message = "No two subnets share a range."
  }

  assert {
    condition     = toset(keys(aws_vpc_endpoint.gateway)) == toset(["dynamodb", "s3"]) && alltrue([for endpoint in aws_vpc_endpoint.gateway : endpoint.vpc_endpoint_type == "Gateway"])
    error_message = "Gateway endpoints for DynamoDB and S3, no interface endpoint."
  }

  assert {
    condition     = length(aws_route.internet.gateway_id) > 0 && aws_route.internet.route_table_id == aws_route_table.public.id
    error_message = "Only the public subnets have a way to the internet."
  }

  assert {
    condition     = length(aws_security_group.entrance) == 0 && length(aws_vpc_security_group_ingress_rule.routers_from_entrance) == 0 && length(aws_vpc_security_group_ingress_rule.agents_from_trainers) == 0
    error_message = "Nobody but the API reaches hosts."
  }

  assert {
    condition     = length(aws_default_security_group.none.ingress) == 0 && length(aws_default_security_group.none.egress) == 0
    error_message = "The default group allows nothing."
  }

  assert {
    condition     = length(aws_flow_log.this) == 0
    error_message = "No flow logs unless asked for."
  }
}

run "agents_take_traffic_from_the_api_alone" {
  command = plan

  assert {
    condition     = aws_vpc_security_group_ingress_rule.agents_from_api.from_port == 8701 && aws_vpc_security_group_ingress_rule.agents_from_api.to_port == 8701
    error_message = "One port."
  }

  assert {
    condition     = aws_vpc_security_group_ingress_rule.agents_from_api.cidr_ipv4 == null
    error_message = "By group, not by address."
  }
}

run "router" {
  command = plan

  variables {
    data_plane = "router"
  }

  assert {
    condition     = length(aws_security_group.entrance) == 1 && length(aws_vpc_security_group_ingress_rule.routers_from_entrance) == 1 && length(aws_vpc_security_group_ingress_rule.agents_from_routers) == 1
    error_message = "The VPC link reaches routers, and routers reach agents."
  }

  assert {
    condition     = length(aws_vpc_security_group_ingress_rule.entrance_from_clients) == 0
    error_message = "Nobody reaches the VPC link itself."
  }
}

run "alb" {
  command = plan

  variables {
    data_plane        = "alb"
    alb_ingress_cidrs = ["203.0.113.0/24"]
  }

  assert {
    condition     = [for rule in aws_vpc_security_group_ingress_rule.entrance_from_clients : "${rule.cidr_ipv4}:${rule.from_port}"] == ["203.0.113.0/24:443"]
    error_message = "Clients reach the load balancer by TLS, from where they may."
  }
}

run "trainers" {
  command = plan

  variables {
    trainer_cidrs = ["10.0.0.0/16"]
  }

  assert {
    condition     = [for rule in aws_vpc_security_group_ingress_rule.agents_from_trainers : rule.cidr_ipv4] == ["10.0.0.0/16"]
    error_message = "Trainers reach agents from where they may."
  }
}

run "flow_logs" {
  command = apply

  variables {
    flow_logs_retention_days = 30
  }

  assert {
    condition     = length(aws_flow_log.this) == 1 && aws_cloudwatch_log_group.flow[0].retention_in_days == 30
    error_message = "Flow logs are kept for as long as was said."
  }
}

run "six_zones_fit" {
  command = plan

  variables {
    cidr               = "10.0.0.0/20"
    availability_zones = ["us-east-1a", "us-east-1b", "us-east-1c", "us-east-1d", "us-east-1e", "us-east-1f"]
  }

  assert {
    condition     = length(distinct(concat(values(local.public), values(local.private)))) == 12
    error_message = "Twelve subnets in the smallest range."
  }
}

run "refused" {
  command = plan

  variables {
    name               = "Shoal!"
    cidr               = "10.0.0.0/28"
    availability_zones = ["us-east-1a"]
    data_plane         = "nat"
    agent_port         = 80
    trainer_cidrs      = ["0.0.0.0/0"]
  }

  expect_failures = [var.name, var.cidr, var.availability_zones, var.data_plane, var.agent_port, var.trainer_cidrs]
}
