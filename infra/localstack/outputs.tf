output "url" {
  description = "The API, for `SHOAL_URL`."
  value       = local.control_url
}

output "table_name" {
  description = "The table."
  value       = module.state.table_name
}

output "bucket_name" {
  description = "The bucket."
  value       = module.state.bucket_name
}

output "cluster" {
  description = "Name of the pool's ECS cluster."
  value       = module.pool.cluster.name
}

output "auto_scaling_group" {
  description = "The pool's Auto Scaling group."
  value       = module.pool.auto_scaling_group_name
}

output "reconciler" {
  description = "Name of the reconciler's function."
  value       = module.reconciler.function_name
}

output "environment" {
  description = "Settings for programs that speak to the state directly, such as `shoal admin`."
  value       = module.state.environment
}
