# `terraform test` without AWS: the provider is mocked (infra/mocks).

mock_provider "aws" {
  source = "../../mocks"
}

variables {
  agent_image_tag = "0.1.0"
  bundle_path     = "../../mocks/bundle.zip"
}

run "whole" {
  command = apply

  assert {
    condition     = [for pool in jsondecode(local.settings.SHOAL_PROVISIONER_POOLS) : pool.name] == ["default", "steady", "bulk"]
    error_message = "Three pools, the Spot one first."
  }
}
