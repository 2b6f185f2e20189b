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

output "next_steps" {
  description = "From here to the first command in a sandbox."
  value       = <<-EOT
    # 1. The agent's image, once for each version (in the source tree)
    scripts/agent_image ${module.registry.repository_urls["agent"]}:${var.agent_image_tag}
    aws ecr get-login-password --region ${var.region} | docker login --username AWS --password-stdin ${split("/", module.registry.repository_urls["agent"])[0]}
    docker push ${module.registry.repository_urls["agent"]}:${var.agent_image_tag}

    # 2. The first tenant and its key, printed once
    shoal admin bootstrap --region ${var.region} --table ${module.state.table_name}

    # 3. The first sandbox image
    export SHOAL_URL=${module.api.endpoint} SHOAL_API_KEY=...
    shoal image push ~/.cache/shoal/images/code code:1.0.0

    # 4. The first command; a host starts for it, which takes about a minute
    shoal run code:1.0.0 -- python3 -c 'print("hello from the sandbank")'
  EOT
}
