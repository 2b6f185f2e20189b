# The reconciler: observe, plan, execute. Outside the VPC, so that it reaches the APIs of AWS without a NAT gateway or
# interface endpoints; it never talks to an agent. A lease in the table lets one of several at once act, so nothing here
# keeps two from running.

locals {
  function_name = "${var.name}-reconciler"
}

resource "aws_cloudwatch_log_group" "function" {
  #checkov:skip=CKV_AWS_338:How long logs are kept is the operator's choice
  #checkov:skip=CKV_AWS_158:kms_key_arn sets a key; CloudWatch encrypts with its own otherwise
  name              = "/aws/lambda/${local.function_name}"
  retention_in_days = var.log_retention_days
  kms_key_id        = var.kms_key_arn
  tags              = var.tags
}

resource "aws_lambda_function" "this" {
  #checkov:skip=CKV_AWS_115:Small accounts have too little concurrency to reserve any; a lease keeps two from acting at once
  #checkov:skip=CKV_AWS_116:A lost event is made good by the next look; keeping it for later would only act on old news
  #checkov:skip=CKV_AWS_117:It calls APIs of AWS and no agent; in the VPC it would need a NAT gateway
  #checkov:skip=CKV_AWS_272:The bundle is built reproducibly from the release; its digest is in the plan
  #checkov:skip=CKV_AWS_50:One event a decision is logged with its reason; traces are billed by the request
  #checkov:skip=CKV_AWS_173:No setting is a secret; kms_key_arn sets a key
  function_name                  = local.function_name
  description                    = "Shoal: starts and ends hosts"
  role                           = aws_iam_role.function.arn
  filename                       = var.bundle_path
  source_code_hash               = fileexists(var.bundle_path) ? filebase64sha256(var.bundle_path) : null
  handler                        = "provisioner.handlers.reconcile"
  runtime                        = var.runtime
  architectures                  = [var.architecture]
  memory_size                    = var.memory_mib
  timeout                        = var.timeout_s
  reserved_concurrent_executions = -1
  kms_key_arn                    = var.kms_key_arn
  tags                           = var.tags

  environment {
    variables = merge(var.environment, {
      SHOAL_AWS_POOLS             = jsonencode(concat(var.ecs_pools[*].driver, var.batch_pools[*].driver))
      SHOAL_AWS_EXECUTION_ENABLED = tostring(var.execution_enabled)
    })
  }

  logging_config {
    log_format = "Text"
    log_group  = aws_cloudwatch_log_group.function.name
  }

  lifecycle {
    precondition {
      condition     = fileexists(var.bundle_path)
      error_message = "There is no file ${var.bundle_path}; run: make bundle"
    }
  }
}

# Events are only reasons to look: none is retried, since the schedule looks anyway.
resource "aws_lambda_function_event_invoke_config" "this" {
  function_name                = aws_lambda_function.this.function_name
  maximum_retry_attempts       = 0
  maximum_event_age_in_seconds = 60
}

# The API wakes it by writing an item of partition WAKE; the filter is applied before anything is invoked or billed.
resource "aws_lambda_event_source_mapping" "wake" {
  event_source_arn                   = var.stream_arn
  function_name                      = aws_lambda_function.this.arn
  starting_position                  = "LATEST"
  batch_size                         = 100
  maximum_batching_window_in_seconds = 0
  maximum_retry_attempts             = 1
  maximum_record_age_in_seconds      = 60
  function_response_types            = ["ReportBatchItemFailures"]
  tags                               = var.tags

  filter_criteria {
    filter {
      pattern = jsonencode({
        eventName = ["INSERT", "MODIFY"]
        dynamodb  = { Keys = { pk = { S = ["WAKE"] } } }
      })
    }
  }
}
