data "aws_caller_identity" "current" {}

data "aws_partition" "current" {}

data "aws_region" "current" {}

locals {
  functions_arn = "arn:${data.aws_partition.current.partition}:lambda:${data.aws_region.current.name}:${data.aws_caller_identity.current.account_id}:function"
  function_arns = [for name in [local.function_name, local.agents_function_name] : "${local.functions_arn}:${name}"]
}

resource "aws_iam_role" "function" {
  name = local.function_name
  tags = var.tags

  assume_role_policy = jsonencode({
    Version = "2012-10-17"
    Statement = [{
      Effect    = "Allow"
      Principal = { Service = "lambda.amazonaws.com" }
      Action    = "sts:AssumeRole"
    }]
  })
}

resource "aws_iam_role_policy" "state" {
  name   = "state"
  role   = aws_iam_role.function.id
  policy = var.access_policy
}

resource "aws_iam_role_policy" "logs" {
  name = "logs"
  role = aws_iam_role.function.id

  policy = jsonencode({
    Version = "2012-10-17"
    Statement = concat(
      [{
        Sid      = "Logs"
        Effect   = "Allow"
        Action   = ["logs:CreateLogStream", "logs:PutLogEvents"]
        Resource = ["${aws_cloudwatch_log_group.function.arn}:*", "${aws_cloudwatch_log_group.agents.arn}:*"]
      }],
      # Lambda decrypts the function's settings with its role.
      [for key in var.kms_key_arn[*] : {
        Sid      = "Settings"
        Effect   = "Allow"
        Action   = ["kms:Decrypt"]
        Resource = [key]
      }],
    )
  })
}

# Lambda makes the function's network interfaces with the function's role; EC2 cannot scope these calls to a resource.
# The code itself is refused them.
resource "aws_iam_role_policy" "network" {
  #checkov:skip=CKV_AWS_290:EC2 does not scope these calls to a resource; the second statement denies them to the code
  #checkov:skip=CKV_AWS_355:EC2 does not scope these calls to a resource; the second statement denies them to the code
  name = "network-interfaces"
  role = aws_iam_role.function.id

  policy = jsonencode({
    Version = "2012-10-17"
    Statement = [
      {
        Sid    = "ByLambda"
        Effect = "Allow"
        Action = [
          "ec2:AssignPrivateIpAddresses",
          "ec2:CreateNetworkInterface",
          "ec2:DeleteNetworkInterface",
          "ec2:DescribeNetworkInterfaces",
          "ec2:DescribeSubnets",
          "ec2:UnassignPrivateIpAddresses",
        ]
        Resource = ["*"]
      },
      {
        Sid    = "NotByTheCode"
        Effect = "Deny"
        Action = [
          "ec2:AssignPrivateIpAddresses",
          "ec2:CreateNetworkInterface",
          "ec2:DeleteNetworkInterface",
          "ec2:DescribeNetworkInterfaces",
          "ec2:DescribeSubnets",
          "ec2:UnassignPrivateIpAddresses",
        ]
        Resource  = ["*"]
        Condition = { ArnEquals = { "lambda:SourceFunctionArn" = local.function_arns } }
      },
    ]
  })
}
