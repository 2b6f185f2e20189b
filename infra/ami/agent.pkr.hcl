# A machine image for hosts: the ECS-optimised Amazon Linux 2023 with the agent's image in Docker, and a second volume
# with unpacked layers. What every host needs at boot is done by module host's user data, not here. docs/agent-image.md

packer {
  required_version = ">= 1.11"

  required_plugins {
    amazon = {
      source  = "github.com/hashicorp/amazon"
      version = "~> 1.3"
    }
  }
}

variable "region" {
  type        = string
  description = "Where the image is made; copy it to others afterwards."
  default     = "us-east-1"
}

variable "architecture" {
  type        = string
  description = "x86_64 or arm64, as the agent's image."
  default     = "x86_64"

  validation {
    condition     = contains(["x86_64", "arm64"], var.architecture)
    error_message = "One of x86_64, arm64."
  }
}

variable "agent_image" {
  type        = string
  description = "The agent's image in ECR, by tag or digest: what the pool's agent_image names."
}

variable "layers" {
  type        = list(string)
  description = "Blobs of sandbox layers on this machine, <sha256>.tar.zst; none bakes the agent alone."
  default     = []
}

variable "layers_gib" {
  type        = number
  description = "Size of the volume with the layers, which is the whole disk of sandboxes on hosts of this image (home_disk = null). A snapshot holds what is written alone, so that room costs nothing here."
  default     = 40
}

variable "name" {
  type        = string
  description = "Begins the image's name."
  default     = "shoal-host"
}

variable "tags" {
  type        = map(string)
  description = "Of image and snapshots."
  default     = {}
}

variable "subnet_id" {
  type        = string
  description = "Where the building instance runs; null takes the default VPC."
  default     = null
}

variable "instance_profile" {
  type        = string
  description = "Lets the building instance pull the agent's image and be reached by Session Manager: no port is opened."
}

locals {
  # The ECS-optimised images' public parameters (Amazon ECS developer guide, read 2026-11).
  parameter = {
    x86_64 = "/aws/service/ecs/optimized-ami/amazon-linux-2023/recommended/image_id"
    arm64  = "/aws/service/ecs/optimized-ami/amazon-linux-2023/arm64/recommended/image_id"
  }
  built = formatdate("YYYYMMDD-hhmmss", timestamp())
  tags  = merge(var.tags, { "shoal:agent-image" = var.agent_image })
}

data "amazon-parameterstore" "base" {
  region = var.region
  name   = local.parameter[var.architecture]
}

source "amazon-ebs" "host" {
  region               = var.region
  source_ami           = data.amazon-parameterstore.base.value
  instance_type        = var.architecture == "arm64" ? "m7g.large" : "m7i.large"
  subnet_id            = var.subnet_id
  iam_instance_profile = var.instance_profile
  ssh_username         = "ec2-user"
  communicator         = "ssh"
  ssh_interface        = "session_manager"
  ami_name             = "${var.name}-${var.architecture}-${local.built}"
  ami_description      = "Shoal host with ${var.agent_image}"
  encrypt_boot         = true
  imds_support         = "v2.0"
  tags                 = local.tags
  snapshot_tags        = local.tags

  metadata_options {
    http_endpoint               = "enabled"
    http_tokens                 = "required"
    http_put_response_hop_limit = 1
  }

  launch_block_device_mappings {
    device_name           = "/dev/xvda"
    volume_type           = "gp3"
    volume_size           = 30
    encrypted             = true
    delete_on_termination = true
  }

  # Becomes part of the image: hosts find a file system on it and mount it as it is.
  launch_block_device_mappings {
    device_name           = "/dev/xvdb"
    volume_type           = "gp3"
    volume_size           = var.layers_gib
    encrypted             = true
    delete_on_termination = true
  }
}

build {
  sources = ["source.amazon-ebs.host"]

  provisioner "shell" {
    inline = ["sudo install -d -o ec2-user -m 0755 /tmp/layers"]
  }

  provisioner "file" {
    # Never empty: the script is used from where it lies.
    sources     = concat(["${path.root}/bake.sh"], var.layers)
    destination = "/tmp/layers/"
  }

  provisioner "shell" {
    script           = "${path.root}/bake.sh"
    execute_command  = "sudo env {{ .Vars }} bash {{ .Path }}"
    environment_vars = ["AGENT_IMAGE=${var.agent_image}", "REGION=${var.region}"]
  }
}
