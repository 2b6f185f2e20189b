output "settings" {
  description = "The pool for `SHOAL_PROVISIONER_POOLS`."
  value       = merge(var.settings, { name = var.pool, min_hosts = var.min_hosts, max_hosts = var.max_hosts })
}

output "driver" {
  description = "The pool for `SHOAL_AWS_POOLS`: where its hosts come from."
  value = {
    kind               = "ecs"
    pool               = var.pool
    cluster            = aws_ecs_cluster.this.name
    auto_scaling_group = aws_autoscaling_group.hosts.name
    task_definition    = "${aws_ecs_task_definition.agent.family}:${aws_ecs_task_definition.agent.revision}"
    container          = "agent"
  }
}

output "access" {
  description = "What the reconciler's policies name: ARNs of cluster, group, task definition family and the roles that tasks get."
  value = {
    cluster_arn            = aws_ecs_cluster.this.arn
    auto_scaling_group_arn = aws_autoscaling_group.hosts.arn
    task_definition_arn    = "${aws_ecs_task_definition.agent.arn_without_revision}:*"
    role_arns              = [aws_iam_role.agent.arn, aws_iam_role.execution.arn]
  }
}

output "cluster" {
  description = "The ECS cluster: name and ARN."
  value       = { name = aws_ecs_cluster.this.name, arn = aws_ecs_cluster.this.arn }
}

output "auto_scaling_group_name" {
  description = "The Auto Scaling group."
  value       = aws_autoscaling_group.hosts.name
}

output "log_group_name" {
  description = "Log group of the agents."
  value       = aws_cloudwatch_log_group.agents.name
}
