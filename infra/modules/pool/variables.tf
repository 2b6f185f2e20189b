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

variable "pool" {
  description = "How sessions ask for it; part of every name."
  type        = string
  default     = "default"

  validation {
    condition     = can(regex("^[a-z][a-z0-9-]{0,19}$", var.pool))
    error_message = "A pool's name here is 1 to 20 lower-case letters, digits and hyphens, beginning with a letter."
  }
}

variable "min_hosts" {
  description = "Hosts that stay when nobody asks for any: each is paid for day and night."
  type        = number
  default     = 0

  validation {
    condition     = var.min_hosts >= 0 && floor(var.min_hosts) == var.min_hosts
    error_message = "0 or more."
  }
}

variable "max_hosts" {
  description = "The most hosts at once, also for the Auto Scaling group: the ceiling of what the pool can cost."
  type        = number

  validation {
    condition     = var.max_hosts >= 1 && var.max_hosts <= 5000 && floor(var.max_hosts) == var.max_hosts
    error_message = "1 to 5,000 (container instances of a cluster)."
  }

  validation {
    condition     = var.max_hosts >= var.min_hosts
    error_message = "max_hosts is at least min_hosts."
  }
}

variable "instance_types" {
  description = "Types that hosts may be, in order of preference; all of one shape, since the planner packs hosts of one shape. More types mean more Spot pools."
  type        = list(string)
  default     = ["m7i.4xlarge", "m7a.4xlarge", "m6i.4xlarge", "m6a.4xlarge"]

  validation {
    condition     = length(var.instance_types) >= 1 && length(var.instance_types) <= 40 && length(distinct(var.instance_types)) == length(var.instance_types)
    error_message = "1 to 40 different types."
  }

  validation {
    condition     = length(distinct([for type in var.instance_types : element(split(".", type), 1)])) == 1
    error_message = "All types of a pool are of one size (such as 4xlarge)."
  }
}

variable "spot" {
  description = "Spot beside on-demand: the first `on_demand_base` hosts are on-demand, and so many percent of those above it. Null: on-demand only."
  type = object({
    on_demand_base          = optional(number, 0)
    on_demand_percent_above = optional(number, 0)
  })
  default = {}

  validation {
    condition     = var.spot == null ? true : var.spot.on_demand_base >= 0 && var.spot.on_demand_percent_above >= 0 && var.spot.on_demand_percent_above <= 100
    error_message = "on_demand_base from 0; on_demand_percent_above 0 to 100."
  }
}

variable "warm_pool" {
  description = "Stopped instances that start a few seconds sooner; their disks are paid for. On-demand pools only. Null: none."
  type        = object({ min_size = optional(number, 0), max_prepared = number })
  default     = null

  validation {
    condition     = var.warm_pool == null || var.spot == null
    error_message = "A warm pool cannot hold Spot instances: set spot to null."
  }

  validation {
    condition     = var.warm_pool == null || length(var.instance_types) == 1
    error_message = "A warm pool holds one type of instance: name one in instance_types."
  }

  validation {
    condition     = var.warm_pool == null ? true : var.warm_pool.max_prepared >= var.warm_pool.min_size && var.warm_pool.max_prepared <= var.max_hosts
    error_message = "max_prepared lies between min_size and max_hosts."
  }
}

variable "max_instance_lifetime_days" {
  description = "Replaces hosts that are older, whatever runs on them. Null: never; a pool that goes down to zero renews itself. Not below the length of your longest run."
  type        = number
  default     = null

  validation {
    condition     = var.max_instance_lifetime_days == null ? true : var.max_instance_lifetime_days >= 1 && var.max_instance_lifetime_days <= 365
    error_message = "1 to 365 days."
  }
}

variable "settings" {
  description = "Further settings of the pool as in `SHOAL_PROVISIONER_POOLS` (docs/settings.md), such as `idle_to_zero_s` or `warm_default`."
  type        = any
  default     = {}

  validation {
    condition     = can(keys(var.settings)) && length(setintersection(try(keys(var.settings), []), ["name", "min_hosts", "max_hosts"])) == 0
    error_message = "An object; name, min_hosts and max_hosts are variables of their own."
  }
}

variable "execution_enabled" {
  description = "False freezes spending: no instance is launched any more, whoever asks; what runs may end."
  type        = bool
  default     = true
}

variable "subnet_ids" {
  description = "Public subnets of the hosts, one a zone."
  type        = list(string)

  validation {
    condition     = length(var.subnet_ids) >= 1
    error_message = "At least one subnet."
  }
}

variable "security_group_id" {
  description = "Group of the hosts."
  type        = string
}

variable "agent_image" {
  description = "The agent's image with a tag of its own or a digest; never `latest`."
  type        = string

  validation {
    condition     = can(regex("(@sha256:[0-9a-f]{64}|:[A-Za-z0-9_][A-Za-z0-9._-]*)$", var.agent_image)) && !endswith(var.agent_image, ":latest")
    error_message = "Name an image by tag or digest, not by latest: hosts of one pool run one version."
  }
}

variable "repository_arn" {
  description = "ECR repository of that image; null where the image is public."
  type        = string
  default     = null
}

variable "control_url" {
  description = "Where agents report (`SHOAL_AGENT_CONTROL_URL`)."
  type        = string

  validation {
    condition     = can(regex("^https?://", var.control_url))
    error_message = "An http or https URL."
  }
}

variable "agent_port" {
  description = "TCP port on which agents listen."
  type        = number
  default     = 8701
}

variable "agent_environment" {
  description = "Further settings of agents (`SHOAL_AGENT_*`), such as overcommit."
  type        = map(string)
  default     = {}

  validation {
    condition     = alltrue([for name in keys(var.agent_environment) : startswith(name, "SHOAL_AGENT_")])
    error_message = "Only SHOAL_AGENT_* settings."
  }

  validation {
    condition     = length(setintersection(keys(var.agent_environment), ["SHOAL_AGENT_CONTROL_URL", "SHOAL_AGENT_JOIN_TOKEN", "SHOAL_AGENT_LISTEN"])) == 0
    error_message = "Control URL, join token and port are not set here."
  }
}

variable "agent_privileged" {
  description = "Runs the agent's container privileged, which ECS needs: it knows no other way to lift seccomp and the masks on /proc and /sys. False names the capabilities instead, for machines that lift those two by themselves."
  type        = bool
  default     = true
}

variable "architecture" {
  description = "Processor of the hosts: `x86_64` or `arm64`; instance types and agent image must match."
  type        = string
  default     = "x86_64"

  validation {
    condition     = contains(["arm64", "x86_64"], var.architecture)
    error_message = "One of arm64, x86_64."
  }
}

variable "ami_id" {
  description = "Image of the hosts, such as one baked with sandbox images. Null takes the newest ECS-optimised Amazon Linux 2023 at every start."
  type        = string
  default     = null
}

variable "root_gib" {
  description = "Root disk: the system and the agent's image."
  type        = number
  default     = 30
}

variable "home_disk" {
  description = "The disk of sandboxes, layers and journals; null takes the one that `ami_id` brings: see module host."
  type = object({
    gib              = optional(number, 100)
    iops             = optional(number, 3000)
    throughput_mibps = optional(number, 125)
  })
  default = {}
}

variable "use_instance_store" {
  description = "Keeps sandboxes on the instance's own NVMe disks where it has any: see module host."
  type        = bool
  default     = true
}

variable "kms_key_arn" {
  description = "Encrypts disks and logs; null leaves it to the services' own keys."
  type        = string
  default     = null
}

variable "ssm_access" {
  description = "Lets Session Manager open a shell on hosts, for debugging."
  type        = bool
  default     = false
}

variable "log_retention_days" {
  description = "How long logs of agents are kept."
  type        = number
  default     = 30

  validation {
    condition     = contains([1, 3, 5, 7, 14, 30, 60, 90, 120, 150, 180, 365, 400, 545, 731], var.log_retention_days)
    error_message = "A retention that CloudWatch Logs knows, in days (1, 3, 5, 7, 14, 30, 60, 90, ...)."
  }
}
