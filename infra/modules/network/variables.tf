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

variable "cidr" {
  description = "IPv4 range of the VPC, /16 to /20. Every host takes one address of it."
  type        = string
  default     = "10.71.0.0/16"

  validation {
    condition     = can(cidrhost(var.cidr, 0)) && try(tonumber(split("/", var.cidr)[1]), 0) >= 16 && try(tonumber(split("/", var.cidr)[1]), 99) <= 20
    error_message = "The range is an IPv4 CIDR block from /16 to /20."
  }
}

variable "availability_zones" {
  description = "Zones to spread over; null takes the first three of the Region. More zones mean more Spot pools to take hosts from."
  type        = list(string)
  default     = null

  validation {
    condition     = var.availability_zones == null ? true : length(var.availability_zones) >= 2 && length(var.availability_zones) <= 6 && length(distinct(var.availability_zones)) == length(var.availability_zones)
    error_message = "Two to six different zones."
  }
}

variable "data_plane" {
  description = "How actions reach the agents: by the API's function (`lambda`), by routers behind a VPC link (`router`) or behind a load balancer (`alb`). Decides which security groups there are."
  type        = string
  default     = "lambda"

  validation {
    condition     = contains(["lambda", "router", "alb"], var.data_plane)
    error_message = "One of lambda, router, alb."
  }
}

variable "agent_port" {
  description = "TCP port on which an agent listens on its host."
  type        = number
  default     = 8701

  validation {
    condition     = var.agent_port >= 1024 && var.agent_port <= 65535 && floor(var.agent_port) == var.agent_port
    error_message = "A port from 1024 to 65535."
  }
}

variable "router_port" {
  description = "TCP port on which a router listens on its host."
  type        = number
  default     = 8700

  validation {
    condition     = var.router_port >= 1024 && var.router_port <= 65535 && floor(var.router_port) == var.router_port
    error_message = "A port from 1024 to 65535."
  }
}

variable "trainer_cidrs" {
  description = "IPv4 ranges from which trainers may go straight to the agents (route tokens are checked there). Empty: nobody but the API and the routers."
  type        = list(string)
  default     = []

  validation {
    condition     = alltrue([for cidr in var.trainer_cidrs : can(cidrhost(cidr, 0)) && !endswith(cidr, "/0")])
    error_message = "IPv4 CIDR blocks, none of them the whole internet."
  }
}

variable "alb_ingress_cidrs" {
  description = "IPv4 ranges that may reach the load balancer when `data_plane` is `alb`."
  type        = list(string)
  default     = ["0.0.0.0/0"]

  validation {
    condition     = alltrue([for cidr in var.alb_ingress_cidrs : can(cidrhost(cidr, 0))])
    error_message = "IPv4 CIDR blocks."
  }
}

variable "flow_logs_retention_days" {
  description = "Keeps VPC flow logs in CloudWatch for so many days; null keeps none. They are billed by the GB."
  type        = number
  default     = null

  validation {
    condition     = var.flow_logs_retention_days == null ? true : contains([1, 3, 5, 7, 14, 30, 60, 90, 120, 150, 180, 365, 400, 545, 731], var.flow_logs_retention_days)
    error_message = "A retention that CloudWatch Logs knows, in days (1, 3, 5, 7, 14, 30, 60, 90, ...)."
  }
}

variable "kms_key_arn" {
  description = "Encrypts the flow logs; null leaves it to the service's own key."
  type        = string
  default     = null
}
