variable "ministack_url" {
  description = "MiniStack: DynamoDB, S3, Lambda, HTTP APIs, events, logs."
  type        = string
  default     = "http://127.0.0.1:4566"
}

variable "moto_url" {
  description = "A moto server: EC2, Auto Scaling, ECS, IAM."
  type        = string
  default     = "http://127.0.0.1:5555"
}

variable "agent_image" {
  description = "The agent's image, in the Docker daemon of the profile."
  type        = string
  default     = "shoal-agent:dev"
}

variable "bundle_path" {
  description = "The zip of the functions, with wheels for the Python that MiniStack runs on."
  type        = string
}

variable "runtime" {
  description = "Lambda runtime of that Python."
  type        = string
  default     = "python3.11"
}

variable "ami_id" {
  description = "An image that the emulator knows; nothing is started from it."
  type        = string
}
