output "endpoint" {
  description = "What trainers use (`SHOAL_URL`)."
  value       = module.api.endpoint
}

output "table" {
  description = "The table."
  value       = module.state.table_name
}

output "bucket" {
  description = "The bucket."
  value       = module.state.bucket_name
}

output "agent_repository" {
  description = "Where the agent's image is pushed."
  value       = module.registry.repository_urls["agent"]
}

output "alarm_topic" {
  description = "SNS topic of the alarms: subscribe to it."
  value       = aws_sns_topic.alarms.arn
}

output "alb_dns_name" {
  description = "Where `domain_name` must point; null unless `data_plane` is `alb`."
  value       = module.api.alb_dns_name
}

output "next_steps" {
  description = "From here to the first command in a sandbox."
  value       = join("\n", concat(local.agent_steps, local.routed ? local.router_steps : [], local.other_steps))
}

# Lines, not one text with a directive in it: that would lose its indentation.
locals {
  agent_repository  = module.registry.repository_urls["agent"]
  router_repository = lookup(module.registry.repository_urls, "router", "")

  agent_steps = [
    "# 1. The agent's image, once for each version (in the source tree)",
    "scripts/agent_image ${local.agent_repository}:${var.agent_image_tag}",
    "aws ecr get-login-password --region ${var.region} | docker login --username AWS --password-stdin ${split("/", local.agent_repository)[0]}",
    "docker push ${local.agent_repository}:${var.agent_image_tag}",
  ]

  router_steps = [
    "",
    "# The router's image likewise",
    "scripts/agent_image ${local.router_repository}:${var.agent_image_tag} router",
    "docker push ${local.router_repository}:${var.agent_image_tag}",
  ]

  other_steps = [
    "",
    "# 2. The first tenant and its key, printed once",
    "shoal admin bootstrap --region ${var.region} --table ${module.state.table_name}",
    "",
    "# 3. The first sandbox image",
    "export SHOAL_URL=${module.api.endpoint} SHOAL_API_KEY=...",
    "shoal image push ~/.cache/shoal/images/code code:1.0.0",
    "",
    "# 4. The first command; a host starts for it, which takes about a minute",
    "shoal run code:1.0.0 -- python3 -c 'print(\"hello from the sandbank\")'",
    "",
    "# Before large bursts: a new table takes 4,000 write units a second, and a create is several (docs/dynamodb.md)",
    "aws dynamodb update-table --region ${var.region} --table-name ${module.state.table_name} --warm-throughput ReadUnitsPerSecond=40000,WriteUnitsPerSecond=40000",
    "",
  ]
}
