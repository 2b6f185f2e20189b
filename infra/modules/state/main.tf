# Everything that must survive: one table and one bucket. The table is the one of provisioner/store/table.py; a test
# compares the two.

data "aws_caller_identity" "current" {}

data "aws_region" "current" {}

locals {
  bucket_name = var.bucket_name == null ? "${var.name}-${data.aws_caller_identity.current.account_id}-${data.aws_region.current.name}" : var.bucket_name
}

resource "aws_dynamodb_table" "this" {
  #checkov:skip=CKV_AWS_119:kms_key_arn sets a key; the table is encrypted with DynamoDB's own otherwise, at no cost
  #checkov:skip=CKV2_AWS_16:On-demand: there is no capacity to scale
  name                        = var.name
  billing_mode                = "PAY_PER_REQUEST"
  hash_key                    = "pk"
  range_key                   = "sk"
  stream_enabled              = true
  stream_view_type            = "KEYS_ONLY"
  deletion_protection_enabled = var.deletion_protection
  tags                        = var.tags

  attribute {
    name = "pk"
    type = "S"
  }

  attribute {
    name = "sk"
    type = "S"
  }

  # Only cleans: nothing depends on when, which may be days late.
  ttl {
    attribute_name = "expires"
    enabled        = true
  }

  point_in_time_recovery {
    enabled = var.point_in_time_recovery
  }

  server_side_encryption {
    enabled     = var.kms_key_arn != null
    kms_key_arn = var.kms_key_arn
  }

  dynamic "on_demand_throughput" {
    for_each = var.max_request_units[*]

    content {
      max_read_request_units  = on_demand_throughput.value.read
      max_write_request_units = on_demand_throughput.value.write
    }
  }
}
