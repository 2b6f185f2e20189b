# `terraform test` without AWS: the provider is mocked (infra/mocks). tests/infra looks at the whole of run "whole":
# cost at rest, policies, settings.

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
    condition     = output.endpoint == "https://a1b2c3d4e5.execute-api.us-east-1.amazonaws.com"
    error_message = "The endpoint is the HTTP API's."
  }

  assert {
    condition     = strcontains(output.next_steps, "shoal admin bootstrap") && strcontains(output.next_steps, "shoal image push") && strcontains(output.next_steps, "\nshoal run")
    error_message = "The next steps lead to a first command."
  }

  assert {
    condition     = toset(module.observability.alarm_names) == toset(["shoal-reconciler-errors", "shoal-reconciler-silent"])
    error_message = "Two alarms: what keeps hosts from going costs money."
  }
}

run "frozen" {
  command = plan

  variables {
    execution_enabled = false
  }

  assert {
    condition     = output.endpoint != ""
    error_message = "The installation stays, whole."
  }
}

run "refused" {
  command = plan

  variables {
    name = "SHOAL"
  }

  expect_failures = [var.name]
}
