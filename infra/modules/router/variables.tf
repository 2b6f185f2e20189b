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

variable "cluster" {
  description = "Cluster on whose instances routers run, one each: name and ARN (output `cluster` of module pool)."
  type        = object({ name = string, arn = string })
}

variable "vpc_id" {
  description = "VPC in which the routers' names are known."
  type        = string
}

variable "router_image" {
  description = "The router's image with a tag of its own or a digest; never `latest`."
  type        = string

  validation {
    condition     = can(regex("(@sha256:[0-9a-f]{64}|:[A-Za-z0-9_][A-Za-z0-9._-]*)$", var.router_image)) && !endswith(var.router_image, ":latest")
    error_message = "Name an image by tag or digest, not by latest."
  }
}

variable "repository_arn" {
  description = "ECR repository of that image; null where the image is public."
  type        = string
  default     = null
}

variable "router_port" {
  description = "TCP port on which routers listen."
  type        = number
  default     = 8700
}

variable "memory_mib" {
  description = "Hard memory limit of a router; the pool's `SHOAL_AGENT_MEMORY_RESERVE_MIB` must leave room for it."
  type        = number
  default     = 512

  validation {
    condition     = var.memory_mib >= 256
    error_message = "At least 256 MiB."
  }
}

variable "environment" {
  description = "Settings of routers (`SHOAL_*`): those of the API."
  type        = map(string)
}

variable "access_policy" {
  description = "IAM policy (JSON) to table and bucket, from module state."
  type        = string
}

variable "execution_enabled" {
  description = "False takes no new session."
  type        = bool
  default     = true
}

variable "discovery" {
  description = "How requests find routers: `cloud_map` (by module api's VPC link) or `alb` (by its target group)."
  type        = string
  default     = "cloud_map"

  validation {
    condition     = contains(["cloud_map", "alb"], var.discovery)
    error_message = "One of cloud_map, alb."
  }
}

variable "target_group_arn" {
  description = "Target group of the load balancer; needed when `discovery` is `alb`."
  type        = string
  default     = null

  validation {
    condition     = var.discovery != "alb" || var.target_group_arn != null
    error_message = "discovery alb needs target_group_arn."
  }
}

variable "kms_key_arn" {
  description = "Encrypts the logs; null leaves it to the service's own key."
  type        = string
  default     = null
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
