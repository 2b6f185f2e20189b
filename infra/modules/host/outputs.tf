output "launch_template_id" {
  description = "The launch template."
  value       = aws_launch_template.this.id
}

output "launch_template_version" {
  description = "Its newest version."
  value       = aws_launch_template.this.latest_version
}

output "instance_profile_arn" {
  description = "Instance profile of the hosts."
  value       = aws_iam_instance_profile.this.arn
}

output "instance_role_arn" {
  description = "Role of the hosts."
  value       = aws_iam_role.instance.arn
}

output "instance_role_name" {
  description = "Name of that role."
  value       = aws_iam_role.instance.name
}

output "user_data" {
  description = "What a host does at its first boot (MIME multipart)."
  value       = local.user_data
}
