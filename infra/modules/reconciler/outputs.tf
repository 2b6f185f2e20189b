output "function_name" {
  description = "Name of the function."
  value       = aws_lambda_function.this.function_name
}

output "log_group_name" {
  description = "Log group of the function."
  value       = aws_cloudwatch_log_group.function.name
}

output "role_arn" {
  description = "Role of the function."
  value       = aws_iam_role.function.arn
}
