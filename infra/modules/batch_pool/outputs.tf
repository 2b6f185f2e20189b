output "settings" {
  description = "The pool for `SHOAL_PROVISIONER_POOLS`."
  value       = merge(var.settings, { name = var.pool, min_hosts = 0, max_hosts = var.max_hosts })
}

output "driver" {
  description = "The pool for `SHOAL_AWS_POOLS`: where its hosts come from."
  value = {
    kind           = "batch"
    pool           = var.pool
    job_queue      = aws_batch_job_queue.hosts.name
    job_definition = "${aws_batch_job_definition.agent.name}:${aws_batch_job_definition.agent.revision}"
  }
}

output "access" {
  description = "What the reconciler's policies name: ARNs of queue and job definition."
  value = {
    job_queue_arn       = aws_batch_job_queue.hosts.arn
    job_definition_arns = [aws_batch_job_definition.agent.arn_prefix, "${aws_batch_job_definition.agent.arn_prefix}:*"]
  }
}

output "log_group_name" {
  description = "Log group of the agents."
  value       = aws_cloudwatch_log_group.agents.name
}
