# The API as a function in the VPC: there it reaches agents by their private addresses, and table and bucket by gateway
# endpoints. It has no other way out, and needs none: it wakes the reconciler by writing to the table. What agents call has
# a function of its own (agents.tf).

locals {
  function_name        = "${var.name}-api"
  agents_function_name = "${local.function_name}-agents"
  # HTTP APIs answer for 30 s at the most; the function gives up before that, and long polls end at 25 s.
  timeout_s = 29
  routed    = var.data_plane == "router"

  # A load balancer passes 1 MB to a function and back, base64 included (Elastic Load Balancing guide, read 2026-11); what
  # is larger is refused with a name, or goes by the bucket.
  limits = var.data_plane == "alb" ? { SHOAL_API_ANSWER_LIMIT_BYTES = "700000" } : {}

  environment = merge(var.environment, { SHOAL_AWS_EXECUTION_ENABLED = tostring(var.execution_enabled) })
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
  #checkov:skip=CKV_AWS_115:reserved_concurrency sets a limit; small accounts have too little to reserve any
  #checkov:skip=CKV_AWS_116:Called synchronously: there is no event to keep for later
  #checkov:skip=CKV_AWS_272:The bundle is built reproducibly from the release; its digest is in the plan
  #checkov:skip=CKV_AWS_50:One event a request is logged with ids and durations; traces are billed by the request
  #checkov:skip=CKV_AWS_173:No setting is a secret; kms_key_arn sets a key
  function_name                  = local.function_name
  description                    = "Shoal: the API"
  role                           = aws_iam_role.function.arn
  filename                       = var.bundle_path
  source_code_hash               = fileexists(var.bundle_path) ? filebase64sha256(var.bundle_path) : null
  handler                        = "api.lambda_handler.handler"
  runtime                        = var.runtime
  architectures                  = [var.architecture]
  memory_size                    = var.memory_mib
  timeout                        = local.timeout_s
  reserved_concurrent_executions = var.reserved_concurrency
  kms_key_arn                    = var.kms_key_arn
  tags                           = var.tags

  environment {
    variables = merge(local.environment, local.limits)
  }

  vpc_config {
    subnet_ids         = var.subnet_ids
    security_group_ids = [var.security_group_id]
  }

  logging_config {
    log_format = "Text"
    log_group  = aws_cloudwatch_log_group.function.name
  }

  # The role must be able to make network interfaces before the function is, and until after it is gone.
  depends_on = [aws_iam_role_policy.network]

  lifecycle {
    precondition {
      condition     = fileexists(var.bundle_path)
      error_message = "There is no file ${var.bundle_path}; run: make bundle"
    }
  }
}
