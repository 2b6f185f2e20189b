# data_plane = "alb": a load balancer in front of both. What talks to agents goes to routers, without the limits of an
# HTTP API (30 s, 10 MB, no streams); all else to the function. Agents go on using the HTTP API. It has an hourly price.

resource "aws_lb" "this" {
  #checkov:skip=CKV_AWS_91:alb.access_logs_bucket turns access logs on
  #checkov:skip=CKV2_AWS_28:A web firewall judges browsers' requests; here are JSON bodies with code, and keys are checked behind it
  #checkov:skip=CKV_AWS_150:Holds no state: nothing is lost when it is deleted
  count                      = var.data_plane == "alb" ? 1 : 0
  name                       = var.name
  load_balancer_type         = "application"
  internal                   = false
  subnets                    = var.alb.subnet_ids
  security_groups            = [var.entrance_security_group_id]
  drop_invalid_header_fields = true
  # Streams send something every 15 s; a long poll ends at 25 s.
  idle_timeout = 120
  tags         = var.tags

  dynamic "access_logs" {
    for_each = var.alb.access_logs_bucket[*]

    content {
      bucket  = access_logs.value
      prefix  = var.name
      enabled = true
    }
  }
}

resource "aws_lb_listener" "https" {
  count             = length(aws_lb.this)
  load_balancer_arn = aws_lb.this[0].arn
  port              = 443
  protocol          = "HTTPS"
  ssl_policy        = "ELBSecurityPolicy-TLS13-1-2-2021-06"
  certificate_arn   = var.alb.certificate_arn
  tags              = var.tags

  default_action {
    type             = "forward"
    target_group_arn = aws_lb_target_group.function[0].arn
  }
}

resource "aws_lb_target_group" "routers" {
  #checkov:skip=CKV_AWS_378:Plain HTTP inside the VPC, between two security groups that name each other
  count                = length(aws_lb.this)
  name                 = "${var.name}-routers"
  vpc_id               = var.alb.vpc_id
  target_type          = "instance"
  protocol             = "HTTP"
  port                 = var.alb.router_port
  deregistration_delay = 60
  tags                 = var.tags

  health_check {
    path                = "/readyz"
    interval            = 10
    timeout             = 5
    healthy_threshold   = 2
    unhealthy_threshold = 2
  }
}

resource "aws_lb_listener_rule" "routers" {
  count        = length(aws_lb.this)
  listener_arn = aws_lb_listener.https[0].arn
  priority     = 10
  tags         = var.tags

  action {
    type             = "forward"
    target_group_arn = aws_lb_target_group.routers[0].arn
  }

  condition {
    path_pattern {
      values = ["/v1/sessions/*/actions*", "/v1/sessions/*/files*", "/v1/sessions/*/ports/*", "/v1/actions:wait"]
    }
  }
}

resource "aws_lb_target_group" "function" {
  count       = length(aws_lb.this)
  name        = "${var.name}-api"
  target_type = "lambda"
  # Two values of one header or query key stay two.
  lambda_multi_value_headers_enabled = true
  tags                               = var.tags
}

resource "aws_lb_target_group_attachment" "function" {
  count            = length(aws_lb.this)
  target_group_arn = aws_lb_target_group.function[0].arn
  target_id        = aws_lambda_function.this.arn
  depends_on       = [aws_lambda_permission.alb]
}

resource "aws_lambda_permission" "alb" {
  count         = length(aws_lb.this)
  statement_id  = "alb"
  action        = "lambda:InvokeFunction"
  function_name = aws_lambda_function.this.function_name
  principal     = "elasticloadbalancing.amazonaws.com"
  source_arn    = aws_lb_target_group.function[0].arn
}
