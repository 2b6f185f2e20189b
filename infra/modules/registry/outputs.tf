output "repository_urls" {
  description = "Where to push each image, by repository (`agent`, `router`)."
  value       = { for name, repository in aws_ecr_repository.this : name => repository.repository_url }
}

output "repository_arns" {
  description = "ARN of each repository: what may be pulled."
  value       = { for name, repository in aws_ecr_repository.this : name => repository.arn }
}
