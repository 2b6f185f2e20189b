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

variable "keep_images" {
  description = "The newest images of each repository that are kept; older ones are deleted."
  type        = number
  default     = 10

  validation {
    condition     = var.keep_images >= 2 && floor(var.keep_images) == var.keep_images
    error_message = "At least 2: the one in use and the one before."
  }
}

variable "kms_key_arn" {
  description = "Encrypts the images; null leaves it to AES-256 of the service."
  type        = string
  default     = null
}

variable "force_delete" {
  description = "Whether `terraform destroy` may delete a repository that holds images."
  type        = bool
  default     = false
}

variable "repositories" {
  description = "Which images there are: `agent`, and `router` where data goes by routers."
  type        = set(string)
  default     = ["agent"]

  validation {
    condition     = contains(var.repositories, "agent") && length(setsubtract(var.repositories, ["agent", "router"])) == 0
    error_message = "agent, and router where there are any."
  }
}
