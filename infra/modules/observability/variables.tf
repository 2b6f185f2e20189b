variable "name" {
  description = "Begins the name of everything that is made, so that several installations fit into one account."
  type        = string
  default     = "shoal"

  validation {
    condition     = can(regex("^[a-z][a-z0-9-]{0,19}$", var.name))
    error_message = "A name is 1 to 20 lower-case letters, digits and hyphens, beginning with a letter."
  }
}

variable "tags" {
  description = "Put on everything that can carry tags."
  type        = map(string)
  default     = {}
}

variable "alarm_topic_arns" {
  description = "SNS topics that alarms and recoveries are sent to; empty: they only show in the console."
  type        = list(string)
  default     = []

  validation {
    condition     = alltrue([for arn in var.alarm_topic_arns : can(regex("^arn:[a-z-]+:sns:", arn))])
    error_message = "ARNs of SNS topics."
  }
}

variable "alarms" {
  description = "Which alarms there are, 0.10 USD a month each (`queue_age`, `hosts_lost` and `no_capacity` also 0.30 USD for their metric while it has values)."
  type        = set(string)
  default     = ["agents_throttled", "api_errors", "hosts_lost", "no_capacity", "queue_age", "reconciler_errors", "reconciler_silent", "table_throttled", "throttled"]

  validation {
    condition     = length(setsubtract(var.alarms, ["agents_throttled", "api_errors", "hosts_lost", "no_capacity", "queue_age", "reconciler_errors", "reconciler_silent", "table_throttled", "throttled"])) == 0
    error_message = "Of agents_throttled, api_errors, hosts_lost, no_capacity, queue_age, reconciler_errors, reconciler_silent, table_throttled, throttled."
  }
}

variable "dashboard" {
  description = "Whether there is a dashboard: 3 USD a month beyond the account's first three."
  type        = bool
  default     = false
}

variable "api_function_name" {
  description = "Name of the API's function."
  type        = string
}

variable "agents_function_name" {
  description = "Name of the function that agents call."
  type        = string
}

variable "api_id" {
  description = "Id of the HTTP API."
  type        = string
}

variable "reconciler_function_name" {
  description = "Name of the reconciler's function."
  type        = string
}

variable "reconciler_log_group_name" {
  description = "Log group of the reconciler, whose events are counted."
  type        = string
}

variable "table_name" {
  description = "The table."
  type        = string
}

variable "auto_scaling_group_names" {
  description = "Groups of the pools, for the dashboard."
  type        = list(string)
  default     = []
}

variable "queue_age_s" {
  description = "For how long a session may wait for a place until `queue_age` alarms; above the time a host takes to start."
  type        = number
  default     = 600

  validation {
    condition     = var.queue_age_s >= 60
    error_message = "At least 60 seconds."
  }
}
