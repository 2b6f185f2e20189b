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

variable "bucket_name" {
  description = "Name of the bucket; null makes one of `name`, account and Region."
  type        = string
  default     = null

  validation {
    condition     = var.bucket_name == null ? true : can(regex("^[a-z0-9][a-z0-9-]{1,61}[a-z0-9]$", var.bucket_name))
    error_message = "3 to 63 lower-case letters, digits and hyphens (dots break TLS to the bucket's own host name)."
  }
}

variable "kms_key_arn" {
  description = "Customer-managed key for table and bucket. Null: DynamoDB's own key and SSE-S3, which cost nothing."
  type        = string
  default     = null

  validation {
    condition     = var.kms_key_arn == null ? true : can(regex("^arn:[a-z-]+:kms:[a-z0-9-]+:[0-9]{12}:key/", var.kms_key_arn))
    error_message = "The ARN of a KMS key."
  }
}

variable "deletion_protection" {
  description = "Refuses to delete the table, and a bucket that holds objects, until it is set to false and applied."
  type        = bool
  default     = true
}

variable "point_in_time_recovery" {
  description = "Keeps 35 days of the table's past, billed by its size."
  type        = bool
  default     = true
}

variable "max_request_units" {
  description = "The most read and write units a second that the table serves: a ceiling of spending. Null: what the account allows."
  type        = object({ read = number, write = number })
  default     = null

  validation {
    condition     = var.max_request_units == null ? true : min(var.max_request_units.read, var.max_request_units.write) >= 1
    error_message = "At least one unit of each."
  }
}

variable "object_lock" {
  description = "Makes the bucket able to lock objects below `audit/`, as `SHOAL_AWS_AUDIT_LOCK_DAYS` then says. Nothing writes audit records yet: until then it locks nothing. Terraform makes a new bucket when it changes; turns versioning on."
  type        = bool
  default     = false
}

variable "expire_days" {
  description = "Deletes objects so many days after they were written, by name prefix, such as `{ \"journals/\" = 180 }`. Snapshots and layers refer to each other: never expire those."
  type        = map(number)
  default     = {}

  validation {
    condition     = alltrue([for prefix, days in var.expire_days : startswith(prefix, "journals/") && days >= 8 && floor(days) == days])
    error_message = "Only prefixes beginning with journals/, after at least 8 days: sessions stay readable for 7."
  }
}
