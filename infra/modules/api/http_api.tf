resource "aws_apigatewayv2_api" "this" {
  name          = var.name
  description   = "Shoal: HTTPS entrance"
  protocol_type = "HTTP"
  tags          = var.tags
}

resource "aws_cloudwatch_log_group" "access" {
  #checkov:skip=CKV_AWS_338:How long logs are kept is the operator's choice
  #checkov:skip=CKV_AWS_158:kms_key_arn sets a key; CloudWatch encrypts with its own otherwise
  count             = var.access_logs ? 1 : 0
  name              = "/${var.name}/access"
  retention_in_days = var.log_retention_days
  kms_key_id        = var.kms_key_arn
  tags              = var.tags
}

resource "aws_apigatewayv2_stage" "default" {
  #checkov:skip=CKV_AWS_76:access_logs turns them on; they are billed by the GB
  api_id      = aws_apigatewayv2_api.this.id
  name        = "$default"
  auto_deploy = true
  tags        = var.tags

  default_route_settings {
    throttling_rate_limit    = var.throttle.rate
    throttling_burst_limit   = var.throttle.burst
    detailed_metrics_enabled = false
  }

  route_settings {
    route_key                = aws_apigatewayv2_route.agents.route_key
    throttling_rate_limit    = var.agents_throttle.rate
    throttling_burst_limit   = var.agents_throttle.burst
    detailed_metrics_enabled = false
  }

  dynamic "access_log_settings" {
    for_each = aws_cloudwatch_log_group.access

    content {
      destination_arn = access_log_settings.value.arn
      # No header is logged: keys and route tokens are there.
      format = jsonencode({
        request_id  = "$context.requestId"
        time        = "$context.requestTimeEpoch"
        method      = "$context.httpMethod"
        route       = "$context.routeKey"
        path        = "$context.path"
        status      = "$context.status"
        bytes       = "$context.responseLength"
        duration_ms = "$context.responseLatency"
        source_ip   = "$context.identity.sourceIp"
        error       = "$context.integrationErrorMessage"
      })
    }
  }
}

resource "aws_apigatewayv2_integration" "function" {
  api_id                 = aws_apigatewayv2_api.this.id
  integration_type       = "AWS_PROXY"
  integration_uri        = aws_lambda_function.this.invoke_arn
  payload_format_version = "2.0"
  timeout_milliseconds   = 30000
}

resource "aws_apigatewayv2_route" "default" {
  #checkov:skip=CKV_AWS_309:The API checks its own keys; tenants, scopes and revocation are in the table
  api_id             = aws_apigatewayv2_api.this.id
  route_key          = "$default"
  authorization_type = "NONE"
  target             = "integrations/${aws_apigatewayv2_integration.function.id}"
}

resource "aws_lambda_permission" "http_api" {
  statement_id  = "http-api"
  action        = "lambda:InvokeFunction"
  function_name = aws_lambda_function.this.function_name
  principal     = "apigateway.amazonaws.com"
  source_arn    = "${aws_apigatewayv2_api.this.execution_arn}/*/*"
}
