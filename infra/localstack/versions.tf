terraform {
  required_version = ">= 1.9"

  required_providers {
    aws = {
      source  = "hashicorp/aws"
      version = "~> 5.100"
    }
  }
}

# No account, no credentials: two emulators on this machine answer, each for what it serves well (docs/localstack.md).
provider "aws" {
  region                      = "us-east-1"
  access_key                  = "test"
  secret_key                  = "test"
  skip_credentials_validation = true
  skip_metadata_api_check     = true
  skip_requesting_account_id  = true
  skip_region_validation      = true
  s3_use_path_style           = true

  endpoints {
    apigatewayv2     = var.ministack_url
    cloudwatch       = var.ministack_url
    dynamodb         = var.ministack_url
    events           = var.ministack_url
    kms              = var.ministack_url
    lambda           = var.ministack_url
    logs             = var.ministack_url
    s3               = var.ministack_url
    servicediscovery = var.ministack_url
    sns              = var.ministack_url
    sts              = var.ministack_url

    autoscaling = var.moto_url
    ec2         = var.moto_url
    ecs         = var.moto_url
    iam         = var.moto_url
    ssm         = var.moto_url
  }
}
