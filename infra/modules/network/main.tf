# Hosts have a public address each, so that they reach the API, S3 and the registry without a NAT gateway (0.045 USD an
# hour each, run or no run); nothing from outside reaches them: the security group lets in the API and routers only.
# What runs in the private subnets (the API's function) reaches DynamoDB and S3 by gateway endpoints, which are free,
# and agents by their private addresses; it has no way out to the internet.

data "aws_availability_zones" "available" {
  count = var.availability_zones == null ? 1 : 0
  state = "available"

  filter {
    name   = "opt-in-status"
    values = ["opt-in-not-required"]
  }
}

data "aws_region" "current" {}

locals {
  found_zones = [for names in data.aws_availability_zones.available[*].names : slice(names, 0, min(3, length(names)))]
  zones       = var.availability_zones == null ? one(local.found_zones) : var.availability_zones
  # Public: sixteenths of the range, the first eight at the most. Private: sixty-fourths, from the last quarter.
  public  = { for index, zone in local.zones : zone => cidrsubnet(var.cidr, 4, index) }
  private = { for index, zone in local.zones : zone => cidrsubnet(var.cidr, 6, 48 + index) }
}

resource "aws_vpc" "this" {
  #checkov:skip=CKV2_AWS_11:Flow logs are billed by the GB; flow_logs_retention_days turns them on
  cidr_block           = var.cidr
  enable_dns_support   = true
  enable_dns_hostnames = true
  tags                 = merge(var.tags, { Name = var.name })
}

# The default group of a VPC lets its members talk; nothing of ours is in it, and it allows nothing.
resource "aws_default_security_group" "none" {
  vpc_id = aws_vpc.this.id
  tags   = merge(var.tags, { Name = "${var.name}-unused" })
}

resource "aws_internet_gateway" "this" {
  vpc_id = aws_vpc.this.id
  tags   = merge(var.tags, { Name = var.name })
}

resource "aws_subnet" "public" {
  #checkov:skip=CKV_AWS_130:Hosts reach the internet by an address of their own instead of a NAT gateway
  for_each                = local.public
  vpc_id                  = aws_vpc.this.id
  availability_zone       = each.key
  cidr_block              = each.value
  map_public_ip_on_launch = true
  tags                    = merge(var.tags, { Name = "${var.name}-public-${each.key}" })
}

resource "aws_subnet" "private" {
  for_each          = local.private
  vpc_id            = aws_vpc.this.id
  availability_zone = each.key
  cidr_block        = each.value
  tags              = merge(var.tags, { Name = "${var.name}-private-${each.key}" })
}

resource "aws_route_table" "public" {
  vpc_id = aws_vpc.this.id
  tags   = merge(var.tags, { Name = "${var.name}-public" })
}

resource "aws_route" "internet" {
  route_table_id         = aws_route_table.public.id
  destination_cidr_block = "0.0.0.0/0"
  gateway_id             = aws_internet_gateway.this.id
}

resource "aws_route_table" "private" {
  vpc_id = aws_vpc.this.id
  tags   = merge(var.tags, { Name = "${var.name}-private" })
}

resource "aws_route_table_association" "public" {
  for_each       = aws_subnet.public
  subnet_id      = each.value.id
  route_table_id = aws_route_table.public.id
}

resource "aws_route_table_association" "private" {
  for_each       = aws_subnet.private
  subnet_id      = each.value.id
  route_table_id = aws_route_table.private.id
}

resource "aws_vpc_endpoint" "gateway" {
  for_each          = toset(["dynamodb", "s3"])
  vpc_id            = aws_vpc.this.id
  service_name      = "com.amazonaws.${data.aws_region.current.name}.${each.key}"
  vpc_endpoint_type = "Gateway"
  route_table_ids   = [aws_route_table.public.id, aws_route_table.private.id]
  tags              = merge(var.tags, { Name = "${var.name}-${each.key}" })
}
