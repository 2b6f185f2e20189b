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
  description = "The pool whose hosts these are; part of every name."
  type        = string
  default     = "default"

  validation {
    condition     = can(regex("^[a-z][a-z0-9-]{0,19}$", var.pool))
    error_message = "A pool's name here is 1 to 20 lower-case letters, digits and hyphens, beginning with a letter."
  }
}

variable "cluster" {
  description = "ECS cluster that hosts join at boot: name and ARN. Null where something else lets them join (AWS Batch)."
  type        = object({ name = string, arn = string })
  default     = null
}

variable "architecture" {
  description = "Processor of the hosts: `x86_64` or `arm64`."
  type        = string
  default     = "x86_64"

  validation {
    condition     = contains(["arm64", "x86_64"], var.architecture)
    error_message = "One of arm64, x86_64."
  }
}

variable "instance_type" {
  description = "The type, for those who start hosts of one type; null where whoever starts them names the types."
  type        = string
  default     = null
}

variable "ami_id" {
  description = "Image of the hosts, such as one baked with sandbox images. Null takes the newest ECS-optimised Amazon Linux 2023 at every start."
  type        = string
  default     = null

  validation {
    condition     = var.ami_id == null ? true : can(regex("^ami-[0-9a-f]+$", var.ami_id))
    error_message = "The id of an AMI."
  }
}

variable "security_group_id" {
  description = "Group of the hosts."
  type        = string
}

variable "root_gib" {
  description = "Root disk: the system and the agent's image."
  type        = number
  default     = 30

  validation {
    condition     = var.root_gib >= 30 && var.root_gib <= 1024
    error_message = "30 (the AMI's own size) to 1,024 GiB."
  }
}

variable "home_disk" {
  description = "The disk of sandboxes, layers and journals (/var/lib/shoal): a gp3 volume of its own. `gib`: sizes reserved by sandboxes times what they really write; `iops` 3,000 and `throughput_mibps` 125 cost nothing extra. Null: the volume that `ami_id` brings at /dev/xvdb (infra/ami), layers and all, in the size it was baked with; leave it null for such an image."
  type = object({
    gib              = optional(number, 100)
    iops             = optional(number, 3000)
    throughput_mibps = optional(number, 125)
  })
  default = {}

  validation {
    condition     = var.home_disk != null || var.ami_id != null
    error_message = "Without home_disk the image of ami_id has to bring a volume at /dev/xvdb."
  }

  validation {
    condition     = var.home_disk == null ? true : var.home_disk.gib >= 20 && var.home_disk.gib <= 16384 && var.home_disk.iops >= 3000 && var.home_disk.iops <= 16000 && var.home_disk.throughput_mibps >= 125 && var.home_disk.throughput_mibps <= 1000
    error_message = "gib 20 to 16,384; iops 3,000 to 16,000; throughput_mibps 125 to 1,000 (limits of gp3)."
  }
}

variable "kms_key_arn" {
  description = "Encrypts the disks; null takes the account's key for EBS. The key's policy must let Auto Scaling's service-linked role use it."
  type        = string
  default     = null
}

variable "use_instance_store" {
  description = "Puts /var/lib/shoal on the instance's own NVMe disks where it has any (types with a `d`), striped: faster, no price of its own, and gone with the host as everything there may be."
  type        = bool
  default     = true
}

variable "ssm_access" {
  description = "Lets Session Manager open a shell on hosts, for debugging. Without it nobody gets in: there is no SSH key and no open port."
  type        = bool
  default     = false
}
