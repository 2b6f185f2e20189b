output "alarm_names" {
  description = "Names of the alarms."
  value       = [for name in sort(keys(aws_cloudwatch_metric_alarm.this)) : aws_cloudwatch_metric_alarm.this[name].alarm_name]
}

output "dashboard_name" {
  description = "The dashboard; null without one."
  value       = one(aws_cloudwatch_dashboard.this[*].dashboard_name)
}
