# What every host is, whoever starts it: launch template, first boot, and a role that can do next to nothing.

locals {
  prefix = "${var.name}-${var.pool}"
  tags   = merge(var.tags, { "shoal:pool" = var.pool })
  # Resolved by EC2 at every start, so that no plan reads it and hosts never start from an image with known holes.
  ami_parameter = {
    x86_64 = "/aws/service/ecs/optimized-ami/amazon-linux-2023/recommended/image_id"
    arm64  = "/aws/service/ecs/optimized-ami/amazon-linux-2023/arm64/recommended/image_id"
  }
  # AWS Batch picks an image by itself, unless it is told one.
  newest_image = var.cluster == null ? null : "resolve:ssm:${local.ami_parameter[var.architecture]}"
  image_id     = var.ami_id == null ? local.newest_image : var.ami_id
  user_data = templatefile("${path.module}/user_data.mime.tftpl", {
    cluster            = try(var.cluster.name, "")
    pool               = var.pool
    use_instance_store = var.use_instance_store
  })
}

resource "aws_launch_template" "this" {
  name                   = "${local.prefix}-host"
  description            = "Hosts of pool ${var.pool}"
  image_id               = local.image_id
  instance_type          = var.instance_type
  user_data              = base64encode(local.user_data)
  update_default_version = true
  ebs_optimized          = true
  tags                   = local.tags

  iam_instance_profile {
    arn = aws_iam_instance_profile.this.arn
  }

  network_interfaces {
    #checkov:skip=CKV_AWS_88:Hosts reach the internet by an address of their own instead of a NAT gateway; nothing gets in
    device_index                = 0
    associate_public_ip_address = true
    delete_on_termination       = true
    security_groups             = [var.security_group_id]
  }

  # Version 2 alone, one hop: answers reach processes of the host and containers on its network (the ECS agent, ours),
  # no bridge. Sandboxes have no network at all.
  metadata_options {
    http_endpoint               = "enabled"
    http_tokens                 = "required"
    http_put_response_hop_limit = 1
    instance_metadata_tags      = "disabled"
  }

  monitoring {
    enabled = false
  }

  block_device_mappings {
    device_name = "/dev/xvda"

    ebs {
      volume_type           = "gp3"
      volume_size           = var.root_gib
      encrypted             = true
      kms_key_id            = var.kms_key_arn
      delete_on_termination = true
    }
  }

  dynamic "block_device_mappings" {
    for_each = var.home_disk[*]

    content {
      device_name = "/dev/xvdb"

      ebs {
        volume_type           = "gp3"
        volume_size           = block_device_mappings.value.gib
        iops                  = block_device_mappings.value.iops
        throughput            = block_device_mappings.value.throughput_mibps
        encrypted             = true
        kms_key_id            = var.kms_key_arn
        delete_on_termination = true
      }
    }
  }

  dynamic "tag_specifications" {
    for_each = toset(["instance", "volume", "network-interface"])

    content {
      resource_type = tag_specifications.value
      tags          = merge(local.tags, { Name = "${local.prefix}-host" })
    }
  }
}

# The agent is privileged and shares the host's network: whoever takes it over has this role. It can register this
# instance and report on its tasks, in this cluster, and nothing else.
resource "aws_iam_role" "instance" {
  name = "${local.prefix}-instance"
  tags = local.tags

  assume_role_policy = jsonencode({
    Version = "2012-10-17"
    Statement = [{
      Effect    = "Allow"
      Principal = { Service = "ec2.amazonaws.com" }
      Action    = "sts:AssumeRole"
    }]
  })
}

resource "aws_iam_instance_profile" "this" {
  name = "${local.prefix}-instance"
  role = aws_iam_role.instance.name
  tags = local.tags
}

resource "aws_iam_role_policy" "ecs" {
  #checkov:skip=CKV_AWS_355:ecs:DiscoverPollEndpoint knows no resource
  #checkov:skip=CKV_AWS_290:ecs:DiscoverPollEndpoint knows no resource
  count = var.cluster == null ? 0 : 1
  name  = "join-cluster"
  role  = aws_iam_role.instance.id

  policy = jsonencode({
    Version = "2012-10-17"
    Statement = [
      {
        Sid      = "Endpoint"
        Effect   = "Allow"
        Action   = ["ecs:DiscoverPollEndpoint"]
        Resource = ["*"]
      },
      {
        Sid    = "Cluster"
        Effect = "Allow"
        Action = [
          "ecs:DeregisterContainerInstance",
          "ecs:RegisterContainerInstance",
          "ecs:SubmitAttachmentStateChanges",
          "ecs:SubmitContainerStateChange",
          "ecs:SubmitTaskStateChange",
        ]
        Resource = [var.cluster.arn]
      },
      {
        Sid    = "Instances"
        Effect = "Allow"
        Action = [
          "ecs:Poll",
          "ecs:StartTelemetrySession",
          "ecs:UpdateContainerInstancesState",
        ]
        Resource = ["${replace(var.cluster.arn, ":cluster/", ":container-instance/")}/*"]
      },
    ]
  })
}

# AWS Batch makes a cluster of its own whose name is not known before.
resource "aws_iam_role_policy_attachment" "batch" {
  count      = var.cluster == null ? 1 : 0
  role       = aws_iam_role.instance.name
  policy_arn = "arn:${data.aws_partition.current.partition}:iam::aws:policy/service-role/AmazonEC2ContainerServiceforEC2Role"
}

resource "aws_iam_role_policy_attachment" "ssm" {
  count      = var.ssm_access ? 1 : 0
  role       = aws_iam_role.instance.name
  policy_arn = "arn:${data.aws_partition.current.partition}:iam::aws:policy/AmazonSSMManagedInstanceCore"
}

data "aws_partition" "current" {}
