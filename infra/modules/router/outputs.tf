output "service_discovery_arn" {
  description = "Cloud Map service of the routers, for module api; null with a load balancer."
  value       = one(aws_service_discovery_service.this[*].arn)
}

output "service_name" {
  description = "The ECS service."
  value       = aws_ecs_service.this.name
}

output "log_group_name" {
  description = "Log group of the routers."
  value       = aws_cloudwatch_log_group.this.name
}

output "role_arn" {
  description = "Role of the routers."
  value       = aws_iam_role.task.arn
}
