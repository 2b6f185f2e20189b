# data_plane = "router": what talks to agents goes by a VPC link to routers on the hosts, found by Cloud Map, and never
# waits inside a function. All else stays with the function, which answers while there is no host; so do the same paths below
# /via/function, where clients ask when there is no router (api/by_function.py).

locals {
  routed_paths = local.routed ? [
    "ANY /v1/sessions/{session}/actions",
    "ANY /v1/sessions/{session}/actions/{proxy+}",
    "ANY /v1/sessions/{session}/files",
    "ANY /v1/sessions/{session}/ports/{proxy+}",
    "POST /v1/actions:wait",
  ] : []
}

resource "aws_apigatewayv2_vpc_link" "routers" {
  count              = local.routed ? 1 : 0
  name               = "${var.name}-routers"
  subnet_ids         = var.subnet_ids
  security_group_ids = [var.entrance_security_group_id]
  tags               = var.tags
}

resource "aws_apigatewayv2_integration" "routers" {
  count                  = local.routed ? 1 : 0
  api_id                 = aws_apigatewayv2_api.this.id
  integration_type       = "HTTP_PROXY"
  integration_method     = "ANY"
  integration_uri        = var.router_service_arn
  connection_type        = "VPC_LINK"
  connection_id          = aws_apigatewayv2_vpc_link.routers[0].id
  payload_format_version = "1.0"
  timeout_milliseconds   = 30000
}

resource "aws_apigatewayv2_route" "routers" {
  #checkov:skip=CKV_AWS_309:The API checks its own keys; tenants, scopes and revocation are in the table
  for_each           = toset(local.routed_paths)
  api_id             = aws_apigatewayv2_api.this.id
  route_key          = each.value
  authorization_type = "NONE"
  target             = "integrations/${aws_apigatewayv2_integration.routers[0].id}"
}
