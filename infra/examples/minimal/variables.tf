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
  default     = "dev"
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
  description = "Tag of the agent's image in the registry that is made here; it is pushed after the first apply."
  type        = string
}

variable "instance_types" {
  description = "Types that hosts may be; all of one size."
  type        = list(string)
  default     = ["m7i.xlarge", "m7a.xlarge", "m6i.xlarge", "m6a.xlarge"]
}

variable "max_hosts" {
  description = "The most hosts at once: the ceiling of what this can cost."
  type        = number
  default     = 4
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
