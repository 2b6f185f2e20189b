mock_provider "aws" {
  source = "../../mocks"
}

run "defaults" {
  command = plan

  assert {
    condition     = keys(aws_ecr_repository.this) == ["agent"] && aws_ecr_repository.this["agent"].name == "shoal/agent"
    error_message = "One repository, of the agent."
  }

  assert {
    condition     = aws_ecr_repository.this["agent"].image_tag_mutability == "IMMUTABLE" && aws_ecr_repository.this["agent"].image_scanning_configuration[0].scan_on_push && !aws_ecr_repository.this["agent"].force_delete
    error_message = "A tag names one image for ever; images are scanned; none is deleted by accident."
  }

  assert {
    condition     = [for rule in jsondecode(aws_ecr_lifecycle_policy.this["agent"].policy).rules : rule.selection.countNumber] == [1, 10]
    error_message = "Untagged images go after a day, the newest ten stay."
  }
}

run "with_routers" {
  command = plan

  variables {
    repositories = ["agent", "router"]
  }

  assert {
    condition     = keys(aws_ecr_repository.this) == ["agent", "router"]
    error_message = "A repository for routers as well."
  }
}

run "refused" {
  command = plan

  variables {
    repositories = ["router", "sandbox"]
    keep_images  = 1
  }

  expect_failures = [var.repositories, var.keep_images]
}
