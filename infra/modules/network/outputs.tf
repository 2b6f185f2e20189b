output "vpc_id" {
  description = "The VPC."
  value       = aws_vpc.this.id
}

output "public_subnet_ids" {
  description = "Subnets of the hosts, one a zone, in order of zone."
  value       = [for zone in sort(keys(aws_subnet.public)) : aws_subnet.public[zone].id]
}

output "private_subnet_ids" {
  description = "Subnets of the API's function and the VPC link, one a zone, in order of zone."
  value       = [for zone in sort(keys(aws_subnet.private)) : aws_subnet.private[zone].id]
}

output "api_security_group_id" {
  description = "Group of the API's function."
  value       = aws_security_group.api.id
}

output "hosts_security_group_id" {
  description = "Group of the hosts."
  value       = aws_security_group.hosts.id
}

output "entrance_security_group_id" {
  description = "Group of the VPC link or the load balancer; null when `data_plane` is `lambda`."
  value       = one(aws_security_group.entrance[*].id)
}

output "agent_port" {
  description = "TCP port of the agents."
  value       = var.agent_port
}

output "router_port" {
  description = "TCP port of the routers."
  value       = var.router_port
}
