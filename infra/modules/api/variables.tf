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
  description = "Memory of the function; processor time comes in proportion (1,769 MiB are one core)."
  type        = number
  default     = 1024

  validation {
    condition     = var.memory_mib >= 256 && var.memory_mib <= 10240
    error_message = "256 to 10,240 MiB."
  }
}

variable "reserved_concurrency" {
  description = "The most requests the function works on at once, taken from the account's total; -1 shares the account's. A waiting long poll occupies one."
  type        = number
  default     = -1

  validation {
    condition     = var.reserved_concurrency >= -1 && floor(var.reserved_concurrency) == var.reserved_concurrency
    error_message = "-1, or how many at once; 0 answers nothing."
  }
}

variable "agents_reserved_concurrency" {
  description = "Executions kept for what agents call (heartbeats above all), taken from the account's total; -1 shares the account's, so that long polls of trainers can use it up. 100 carry about 300 hosts; AWS leaves 100 unreserved in any case (docs/infra.md)."
  type        = number
  default     = -1

  validation {
    condition     = var.agents_reserved_concurrency == -1 || var.agents_reserved_concurrency >= 1 && floor(var.agents_reserved_concurrency) == var.agents_reserved_concurrency
    error_message = "-1, or how many at once; with 0 every host would be lost."
  }
}

variable "subnet_ids" {
  description = "Private subnets of the function (and of the VPC link)."
  type        = list(string)
}

variable "security_group_id" {
  description = "Group of the function."
  type        = string
}

variable "access_policy" {
  description = "IAM policy (JSON) to table and bucket, from module state."
  type        = string
}

variable "environment" {
  description = "Settings of the functions (`SHOAL_*`): where the state is, the pools, policy."
  type        = map(string)

  validation {
    condition     = alltrue([for name in keys(var.environment) : startswith(name, "SHOAL_")])
    error_message = "Only SHOAL_* settings; the runtime sets the rest."
  }
}

variable "execution_enabled" {
  description = "False takes no new session: spending is frozen, what runs may end."
  type        = bool
  default     = true
}

variable "throttle" {
  description = "What the HTTP API lets through: requests a second, and how many at once above that. The account's own limit is 10,000 and 5,000."
  type        = object({ rate = number, burst = number })
  default     = { rate = 2000, burst = 1000 }

  validation {
    condition     = var.throttle.rate > 0 && var.throttle.burst > 0
    error_message = "Both above zero."
  }
}

variable "agents_throttle" {
  description = "The same for what agents call, beside `throttle`: a host sends a heartbeat every `SHOAL_PROVISIONER_HEARTBEAT_S`. Both together should stay below the account's limit."
  type        = object({ rate = number, burst = number })
  default     = { rate = 2000, burst = 1000 }

  validation {
    condition     = var.agents_throttle.rate > 0 && var.agents_throttle.burst > 0
    error_message = "Both above zero."
  }
}

variable "access_logs" {
  description = "Logs one line a request, without bodies or keys. Billed by the GB: about 0.15 USD per million requests."
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
  description = "Encrypts the logs and the function's settings; null leaves it to the services' own keys. The key's policy must let CloudWatch Logs use it."
  type        = string
  default     = null
}

variable "data_plane" {
  description = "How actions reach the agents: `lambda` (the function relays), `router` (VPC link and Cloud Map, no hourly price) or `alb` (a load balancer: streams, heavy traffic)."
  type        = string
  default     = "lambda"

  validation {
    condition     = contains(["lambda", "router", "alb"], var.data_plane)
    error_message = "One of lambda, router, alb."
  }
}

variable "entrance_security_group_id" {
  description = "Group of the VPC link or the load balancer; needed unless `data_plane` is `lambda`."
  type        = string
  default     = null

  validation {
    condition     = var.data_plane == "lambda" || var.entrance_security_group_id != null
    error_message = "data_plane router and alb need entrance_security_group_id."
  }
}

variable "router_service_arn" {
  description = "Cloud Map service in which routers register; needed when `data_plane` is `router`."
  type        = string
  default     = null

  validation {
    condition     = var.data_plane != "router" || var.router_service_arn != null
    error_message = "data_plane router needs router_service_arn."
  }
}

variable "alb" {
  description = "Where the load balancer is, when `data_plane` is `alb`: its VPC, two or more public subnets, the certificate of its name, the routers' port, and where access logs go (bucket; null keeps none)."
  type = object({
    vpc_id             = string
    subnet_ids         = list(string)
    certificate_arn    = string
    domain_name        = string
    router_port        = optional(number, 8700)
    access_logs_bucket = optional(string)
  })
  default = null

  validation {
    condition     = var.data_plane != "alb" || var.alb != null
    error_message = "data_plane alb needs alb."
  }

  validation {
    condition     = var.alb == null ? true : length(var.alb.subnet_ids) >= 2 && can(regex("^arn:[a-z-]+:acm:", var.alb.certificate_arn))
    error_message = "alb needs two subnets of different zones and the ARN of an ACM certificate."
  }
}
