variable "region" {
  description = "Region of everything."
  type        = string
  default     = "us-east-1"
}

variable "name" {
  description = "Begins the name of everything that is made, so that several installations fit into one account."
  type        = string
  default     = "shoal"

  validation {
    condition     = can(regex("^[a-z][a-z0-9-]{0,19}$", var.name))
    error_message = "A name is 1 to 20 lower-case letters, digits and hyphens, beginning with a letter."
  }
}

variable "environment" {
  description = "What this installation is for; a tag."
  type        = string
  default     = "production"
}

variable "tenant" {
  description = "Who pays for it; a cost allocation tag."
  type        = string
  default     = "shared"
}

variable "tags" {
  description = "Further tags."
  type        = map(string)
  default     = {}
}

variable "bundle_path" {
  description = "The zip that `make bundle` built."
  type        = string
  default     = "../../../dist/shoal-lambda-arm64.zip"
}

variable "bundle_architecture" {
  description = "What it was built for: `arm64` or `x86_64`."
  type        = string
  default     = "arm64"
}

variable "agent_image_tag" {
  description = "Tag of the images of agent and router in the registry that is made here; they are pushed after the first apply."
  type        = string
}

variable "max_hosts" {
  description = "The most hosts of the default pool at once."
  type        = number
  default     = 200
}

variable "cidr" {
  description = "IPv4 range of the VPC."
  type        = string
  default     = "10.71.0.0/16"
}

variable "availability_zones" {
  description = "Zones to spread over; null takes the first three."
  type        = list(string)
  default     = null
}

variable "ami_id" {
  description = "Image of the hosts, baked with sandbox images (infra/ami), whose volume is then the disk of sandboxes: bake it with `layers_gib` of 500 or so. Null takes the newest ECS-optimised one and a blank disk of 500 GiB."
  type        = string
  default     = null
}

variable "data_plane" {
  description = "How actions reach agents: `router`, `alb` or `lambda` (docs/data-path.md)."
  type        = string
  default     = "router"

  validation {
    condition     = contains(["lambda", "router", "alb"], var.data_plane)
    error_message = "One of lambda, router, alb."
  }
}

variable "agents_reserved_concurrency" {
  description = "Lambda executions kept for heartbeats, about 100 for 300 hosts; -1 where the account has not 200 yet (a new one has 10), which lets long polls use up what heartbeats need."
  type        = number
  default     = 100
}

variable "certificate_arn" {
  description = "ACM certificate of `domain_name`; needed when `data_plane` is `alb`."
  type        = string
  default     = null

  validation {
    condition     = var.data_plane != "alb" || var.certificate_arn != null
    error_message = "data_plane alb needs certificate_arn."
  }
}

variable "domain_name" {
  description = "Name that trainers use; needed when `data_plane` is `alb`. Point it at output `alb_dns_name`."
  type        = string
  default     = null

  validation {
    condition     = var.data_plane != "alb" || var.domain_name != null
    error_message = "data_plane alb needs domain_name."
  }
}

variable "execution_enabled" {
  description = "False freezes spending: no host is started and no session taken; what runs may end."
  type        = bool
  default     = true
}

variable "trainer_cidrs" {
  description = "IPv4 ranges from which trainers may go straight to agents; empty: through the API only."
  type        = list(string)
  default     = []
}

variable "alarm_topic_arns" {
  description = "SNS topics that alarms are sent to."
  type        = list(string)
  default     = []
}

variable "deletion_protection" {
  description = "Refuses `terraform destroy` while there is a table or a bucket with objects."
  type        = bool
  default     = true
}
