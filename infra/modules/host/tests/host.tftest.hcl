mock_provider "aws" {
  source = "../../mocks"
}

variables {
  security_group_id = "sg-1"
  cluster           = { name = "shoal-default", arn = "arn:aws:ecs:us-east-1:123456789012:cluster/shoal-default" }
}

run "safe" {
  command = apply

  assert {
    condition     = aws_launch_template.this.metadata_options[0].http_tokens == "required" && aws_launch_template.this.metadata_options[0].http_put_response_hop_limit == 1
    error_message = "Instance metadata by version 2 alone, one hop."
  }

  assert {
    condition     = alltrue([for mapping in aws_launch_template.this.block_device_mappings : mapping.ebs[0].encrypted == "true" && mapping.ebs[0].volume_type == "gp3"])
    error_message = "Disks are gp3 and encrypted."
  }

  assert {
    condition     = startswith(aws_launch_template.this.image_id, "resolve:ssm:") && strcontains(aws_launch_template.this.image_id, "amazon-linux-2023")
    error_message = "The newest image at every start."
  }

  assert {
    condition     = aws_launch_template.this.key_name == null
    error_message = "No SSH key."
  }

  assert {
    condition     = length(aws_iam_role_policy_attachment.ssm) == 0 && length(aws_iam_role_policy_attachment.batch) == 0
    error_message = "No managed policy."
  }

  assert {
    condition     = flatten([for statement in jsondecode(aws_iam_role_policy.ecs[0].policy).Statement : statement.Action if contains(statement.Resource, "*")]) == ["ecs:DiscoverPollEndpoint"]
    error_message = "Everything else names the cluster."
  }

  assert {
    condition     = alltrue([for spec in aws_launch_template.this.tag_specifications : spec.tags["shoal:pool"] == "default"]) && length(aws_launch_template.this.tag_specifications) == 3
    error_message = "Instances, disks and interfaces carry the pool's tag."
  }
}

run "first_boot" {
  command = plan

  assert {
    condition     = alltrue([for line in ["ECS_CLUSTER=shoal-default", "ECS_WARM_POOLS_CHECK=true", "ECS_ENABLE_SPOT_INSTANCE_DRAINING=true", "ECS_CONTAINER_STOP_TIMEOUT=120s", "prjquota", "cgroup2fs", "swapoff --all", "\"default-cgroupns-mode\": \"host\"", "ECS_INSTANCE_ATTRIBUTES={\"shoal.pool\":\"default\"}"] : strcontains(output.user_data, line)])
    error_message = "A host joins its cluster, drains on Spot notices, has a disk with quotas, cgroups v2 and no swap."
  }

  assert {
    condition     = alltrue([for line in ["\nRequiredBy=docker.service ecs.service\n", "\nBefore=docker.service ecs.service\n", "\nsystemctl enable shoal-boot.service\n", "\nxfs_growfs /var/lib/shoal "] : strcontains(output.user_data, line)])
    error_message = "The disk is mounted, and grown, at every boot: instances of a warm pool are stopped in between."
  }

  assert {
    condition     = length(output.user_data) < 12000
    error_message = "User data fits (16 KB, base64)."
  }
}

run "for_batch" {
  command = apply

  variables {
    cluster = null
    ami_id  = "ami-0123456789abcdef0"
  }

  assert {
    condition     = !strcontains(output.user_data, "ECS_CLUSTER") && strcontains(output.user_data, "\nECS_CONTAINER_STOP_TIMEOUT=120s\n") && length(aws_iam_role_policy.ecs) == 0 && length(aws_iam_role_policy_attachment.batch) == 1
    error_message = "Batch says which cluster, and not how long agents get to end."
  }

  assert {
    condition     = aws_launch_template.this.image_id == "ami-0123456789abcdef0"
    error_message = "A baked image is taken as it is."
  }
}

run "baked" {
  command = plan

  variables {
    ami_id             = "ami-0123456789abcdef0"
    home_disk          = null
    use_instance_store = false
  }

  assert {
    condition     = [for mapping in aws_launch_template.this.block_device_mappings : mapping.device_name] == ["/dev/xvda"]
    error_message = "The image's own volume is taken, with the layers on it."
  }
}

run "no_volume_at_all" {
  command = plan

  variables {
    home_disk = null
  }

  expect_failures = [var.home_disk]
}

run "arm" {
  command = plan

  variables {
    architecture       = "arm64"
    use_instance_store = false
  }

  assert {
    condition     = strcontains(aws_launch_template.this.image_id, "/arm64/") && !strcontains(output.user_data, "Instance Storage")
    error_message = "The image of that processor; the disks that were asked for."
  }
}

run "refused" {
  command = plan

  variables {
    pool         = "GPU"
    architecture = "riscv"
    ami_id       = "latest"
    root_gib     = 8
  }

  expect_failures = [var.pool, var.architecture, var.ami_id, var.root_gib]
}

run "no_such_disk" {
  command = plan

  variables {
    home_disk = { gib = 10 }
  }

  expect_failures = [var.home_disk]
}
