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

variable "bundle_path" {
  description = "The zip that `make bundle` built for `architecture`."
  type        = string
}

variable "architecture" {
  description = "Processor of the function: `arm64` (a fifth cheaper) or `x86_64`."
  type        = string
  default     = "arm64"

  validation {
    condition     = contains(["arm64", "x86_64"], var.architecture)
    error_message = "One of arm64, x86_64."
  }
}

variable "runtime" {
  description = "Lambda runtime; the bundle's wheels are of this Python."
  type        = string
  default     = "python3.13"

  validation {
    condition     = can(regex("^python3\\.1[1-9]$", var.runtime))
    error_message = "A Python runtime from python3.11 on."
  }
}

variable "memory_mib" {
  description = "Memory of the function; processor time comes in proportion (1,769 MiB are one core). At rest it runs once a minute."
  type        = number
  default     = 512

  validation {
    condition     = var.memory_mib >= 256 && var.memory_mib <= 10240
    error_message = "256 to 10,240 MiB."
  }
}

variable "timeout_s" {
  description = "How long it may work on before the next one takes over; it ends sooner when there is nothing to do."
  type        = number
  default     = 300

  validation {
    condition     = var.timeout_s >= 30 && var.timeout_s <= 900
    error_message = "30 to 900 seconds."
  }
}

variable "schedule_minutes" {
  description = "How often it looks when nothing wakes it. It goes on looking while execution is not enabled: hosts have to go, too."
  type        = number
  default     = 1

  validation {
    condition     = var.schedule_minutes >= 1 && var.schedule_minutes <= 15 && floor(var.schedule_minutes) == var.schedule_minutes
    error_message = "1 to 15 minutes."
  }
}

variable "access_policy" {
  description = "IAM policy (JSON) to table and bucket, from module state."
  type        = string
}

variable "stream_arn" {
  description = "Stream of the table, from module state."
  type        = string
}

variable "ecs_pools" {
  description = "Outputs `driver` and `access` of each module pool."
  type = list(object({
    driver = object({
      kind               = string
      pool               = string
      cluster            = string
      auto_scaling_group = string
      task_definition    = string
      container          = string
    })
    access = object({
      cluster_arn            = string
      auto_scaling_group_arn = string
      task_definition_arn    = string
      role_arns              = list(string)
    })
  }))
  default = []
}

variable "batch_pools" {
  description = "Outputs `driver` and `access` of each module batch_pool."
  type = list(object({
    driver = object({
      kind           = string
      pool           = string
      job_queue      = string
      job_definition = string
    })
    access = object({
      job_queue_arn       = string
      job_definition_arns = list(string)
    })
  }))
  default = []

  validation {
    condition     = length(var.ecs_pools) + length(var.batch_pools) >= 1
    error_message = "At least one pool, of either kind."
  }
}

variable "environment" {
  description = "Settings of the function (`SHOAL_*`): where the state is, the pools, policy."
  type        = map(string)

  validation {
    condition     = alltrue([for name in keys(var.environment) : startswith(name, "SHOAL_")])
    error_message = "Only SHOAL_* settings; the runtime sets the rest."
  }
}

variable "execution_enabled" {
  description = "False starts no host: spending is frozen, what runs may end and is taken away."
  type        = bool
  default     = true
}

variable "log_retention_days" {
  description = "How long logs are kept."
  type        = number
  default     = 30

  validation {
    condition     = contains([1, 3, 5, 7, 14, 30, 60, 90, 120, 150, 180, 365, 400, 545, 731], var.log_retention_days)
    error_message = "A retention that CloudWatch Logs knows, in days (1, 3, 5, 7, 14, 30, 60, 90, ...)."
  }
}

variable "kms_key_arn" {
  description = "Encrypts the logs and the function's settings; null leaves it to the services' own keys."
  type        = string
  default     = null
}
