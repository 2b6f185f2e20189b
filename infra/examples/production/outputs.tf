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
  value       = <<-EOT
    # 1. The agent's image, once for each version (in the source tree)
    scripts/agent_image ${module.registry.repository_urls["agent"]}:${var.agent_image_tag}
    aws ecr get-login-password --region ${var.region} | docker login --username AWS --password-stdin ${split("/", module.registry.repository_urls["agent"])[0]}
    docker push ${module.registry.repository_urls["agent"]}:${var.agent_image_tag}
    %{~if local.routed~}

    # The router's image likewise
    scripts/agent_image ${module.registry.repository_urls["router"]}:${var.agent_image_tag} router
    docker push ${module.registry.repository_urls["router"]}:${var.agent_image_tag}
    %{~endif~}

    # Before large bursts: a new table takes 4,000 write units a second, and a create is several (docs/dynamodb.md); billed once
    aws dynamodb update-table --region ${var.region} --table-name ${module.state.table_name} --warm-throughput ReadUnitsPerSecond=40000,WriteUnitsPerSecond=40000

    # 2. The first tenant and its key, printed once
    shoal admin bootstrap --region ${var.region} --table ${module.state.table_name}

    # 3. The first sandbox image
    export SHOAL_URL=${module.api.endpoint} SHOAL_API_KEY=...
    shoal image push ~/.cache/shoal/images/code code:1.0.0

    # 4. The first command; a host starts for it, which takes about a minute
    shoal run code:1.0.0 -- python3 -c 'print("hello from the sandbank")'
  EOT
}
