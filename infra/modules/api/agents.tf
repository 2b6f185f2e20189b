# What agents call has a function, a throttle and, where it is asked for, concurrency of its own: long polls of trainers
# hold executions for 25 s each, and a host whose heartbeats find none freezes its sandboxes and is taken for lost.

resource "aws_cloudwatch_log_group" "agents" {
  #checkov:skip=CKV_AWS_338:How long logs are kept is the operator's choice
  #checkov:skip=CKV_AWS_158:kms_key_arn sets a key; CloudWatch encrypts with its own otherwise
  name              = "/aws/lambda/${local.agents_function_name}"
  retention_in_days = var.log_retention_days
  kms_key_id        = var.kms_key_arn
  tags              = var.tags
}

# The same program as the other function, with the same role and settings, but for the limits of a load balancer.
resource "aws_lambda_function" "agents" {
  #checkov:skip=CKV_AWS_115:agents_reserved_concurrency sets a limit; small accounts have too little to reserve any
  #checkov:skip=CKV_AWS_116:Called synchronously: there is no event to keep for later
  #checkov:skip=CKV_AWS_272:The bundle is built reproducibly from the release; its digest is in the plan
  #checkov:skip=CKV_AWS_50:One event a request is logged with ids and durations; traces are billed by the request
  #checkov:skip=CKV_AWS_173:No setting is a secret; kms_key_arn sets a key
  function_name                  = local.agents_function_name
  description                    = "Shoal: the API, for agents"
  role                           = aws_iam_role.function.arn
  filename                       = var.bundle_path
  source_code_hash               = fileexists(var.bundle_path) ? filebase64sha256(var.bundle_path) : null
  handler                        = aws_lambda_function.this.handler
  runtime                        = var.runtime
  architectures                  = [var.architecture]
  memory_size                    = var.memory_mib
  timeout                        = local.timeout_s
  reserved_concurrent_executions = var.agents_reserved_concurrency
  kms_key_arn                    = var.kms_key_arn
  tags                           = var.tags

  environment {
    variables = local.environment
  }

  vpc_config {
    subnet_ids         = var.subnet_ids
    security_group_ids = [var.security_group_id]
  }

  logging_config {
    log_format = "Text"
    log_group  = aws_cloudwatch_log_group.agents.name
  }

  depends_on = [aws_iam_role_policy.network]
}

resource "aws_apigatewayv2_integration" "agents" {
  api_id                 = aws_apigatewayv2_api.this.id
  integration_type       = "AWS_PROXY"
  integration_uri        = aws_lambda_function.agents.invoke_arn
  payload_format_version = "2.0"
  timeout_milliseconds   = 30000
}

resource "aws_apigatewayv2_route" "agents" {
  #checkov:skip=CKV_AWS_309:The API checks tokens of hosts itself; which are good is in the table
  api_id             = aws_apigatewayv2_api.this.id
  route_key          = "ANY /internal/v1/{proxy+}"
  authorization_type = "NONE"
  target             = "integrations/${aws_apigatewayv2_integration.agents.id}"
}

resource "aws_lambda_permission" "agents" {
  statement_id  = "http-api"
  action        = "lambda:InvokeFunction"
  function_name = aws_lambda_function.agents.function_name
  principal     = "apigateway.amazonaws.com"
  source_arn    = "${aws_apigatewayv2_api.this.execution_arn}/*/*"
}
