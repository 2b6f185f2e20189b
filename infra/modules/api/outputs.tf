output "endpoint" {
  description = "What trainers use: the load balancer's name when `data_plane` is `alb`, else the HTTP API."
  value       = var.data_plane == "alb" ? "https://${var.alb.domain_name}" : aws_apigatewayv2_api.this.api_endpoint
}

output "control_url" {
  description = "What agents use (`SHOAL_AGENT_CONTROL_URL`): always the HTTP API."
  value       = aws_apigatewayv2_api.this.api_endpoint
}

output "api_id" {
  description = "Id of the HTTP API."
  value       = aws_apigatewayv2_api.this.id
}

output "function_name" {
  description = "Name of the function."
  value       = aws_lambda_function.this.function_name
}

output "agents_function_name" {
  description = "Name of the function that agents call."
  value       = aws_lambda_function.agents.function_name
}

output "log_group_name" {
  description = "Log group of the function."
  value       = aws_cloudwatch_log_group.function.name
}

output "role_arn" {
  description = "Role of both functions."
  value       = aws_iam_role.function.arn
}

output "alb_dns_name" {
  description = "Where the certificate's name must point (a CNAME or alias record); null without a load balancer."
  value       = one(aws_lb.this[*].dns_name)
}

output "router_target_group_arn" {
  description = "Where routers register behind the load balancer; null without one."
  value       = one(aws_lb_target_group.routers[*].arn)
  # A service may only use a target group that a listener uses.
  depends_on = [aws_lb_listener_rule.routers]
}
