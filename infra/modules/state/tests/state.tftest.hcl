mock_provider "aws" {
  source = "../../mocks"
}

run "defaults" {
  command = apply

  assert {
    condition     = aws_dynamodb_table.this.billing_mode == "PAY_PER_REQUEST" && aws_dynamodb_table.this.deletion_protection_enabled && aws_dynamodb_table.this.point_in_time_recovery[0].enabled
    error_message = "On demand, protected, recoverable."
  }

  assert {
    condition     = aws_dynamodb_table.this.stream_enabled && aws_dynamodb_table.this.ttl[0].attribute_name == "expires"
    error_message = "A stream that wakes, a TTL that cleans."
  }

  assert {
    condition     = aws_s3_bucket.this.bucket == "shoal-123456789012-us-east-1" && !aws_s3_bucket.this.force_destroy
    error_message = "A name of account and Region; not destroyed while it holds objects."
  }

  assert {
    condition     = aws_s3_bucket_public_access_block.this.block_public_acls && aws_s3_bucket_public_access_block.this.block_public_policy && aws_s3_bucket_public_access_block.this.ignore_public_acls && aws_s3_bucket_public_access_block.this.restrict_public_buckets
    error_message = "Nothing public."
  }

  assert {
    condition     = one([for rule in aws_s3_bucket_server_side_encryption_configuration.this.rule : rule.apply_server_side_encryption_by_default[0].sse_algorithm]) == "AES256"
    error_message = "SSE-S3 without a key of one's own."
  }

  assert {
    condition     = jsondecode(aws_s3_bucket_policy.this.policy).Statement[0].Effect == "Deny" && jsondecode(aws_s3_bucket_policy.this.policy).Statement[0].Condition.Bool["aws:SecureTransport"] == "false"
    error_message = "TLS only."
  }

  assert {
    condition     = [for rule in aws_s3_bucket_lifecycle_configuration.this.rule : rule.id] == ["unfinished-uploads", "transfers"]
    error_message = "Only garbage is taken away by itself."
  }

  assert {
    condition     = length(aws_s3_bucket_versioning.this) == 0
    error_message = "No versions: objects are written once."
  }

  assert {
    condition     = output.environment == { SHOAL_AWS_TABLE = "shoal", SHOAL_AWS_BUCKET = aws_s3_bucket.this.id }
    error_message = "Processes are told table and bucket."
  }

  assert {
    condition     = !contains(flatten(jsondecode(output.access_policy).Statement[*].Action), "s3:PutObjectRetention") && !contains(flatten(jsondecode(output.access_policy).Statement[*].Action), "dynamodb:BatchWriteItem")
    error_message = "Nothing is allowed that no code calls."
  }
}

run "own_key" {
  command = apply

  variables {
    kms_key_arn = "arn:aws:kms:us-east-1:123456789012:key/11111111-2222-3333-4444-555555555555"
  }

  assert {
    condition     = aws_dynamodb_table.this.server_side_encryption[0].enabled && one([for rule in aws_s3_bucket_server_side_encryption_configuration.this.rule : rule.apply_server_side_encryption_by_default[0].sse_algorithm]) == "aws:kms"
    error_message = "Table and bucket take the key."
  }

  assert {
    condition     = output.environment.SHOAL_AWS_KMS_KEY_ID == var.kms_key_arn && one([for statement in jsondecode(output.access_policy).Statement : statement.Resource if statement.Sid == "Key"]) == [var.kms_key_arn]
    error_message = "Who may use the state may use that key, and no other."
  }
}

run "object_lock" {
  command = apply

  variables {
    object_lock = true
    expire_days = { "journals/" = 180 }
  }

  assert {
    condition     = aws_s3_bucket.this.object_lock_enabled && aws_s3_bucket_versioning.this[0].versioning_configuration[0].status == "Enabled"
    error_message = "Object Lock needs versions."
  }

  assert {
    condition     = [for rule in aws_s3_bucket_lifecycle_configuration.this.rule : rule.id] == ["unfinished-uploads", "transfers", "old-versions", "expire-journals"]
    error_message = "Old versions go, journals when it was said."
  }

  assert {
    condition     = one([for rule in aws_s3_bucket_lifecycle_configuration.this.rule : rule.noncurrent_version_expiration[0].noncurrent_days if rule.id == "old-versions"]) == 1
    error_message = "Old versions go after a day."
  }

  assert {
    condition     = contains(flatten(jsondecode(output.access_policy).Statement[*].Action), "s3:PutObjectRetention")
    error_message = "Who writes may lock."
  }
}

run "ceiling" {
  command = plan

  variables {
    max_request_units = { read = 10000, write = 5000 }
  }

  assert {
    condition     = aws_dynamodb_table.this.on_demand_throughput[0].max_write_request_units == 5000
    error_message = "A ceiling of spending."
  }
}

run "refused" {
  command = plan

  variables {
    bucket_name       = "My.Bucket"
    kms_key_arn       = "alias/mine"
    max_request_units = { read = 0, write = 1 }
    expire_days       = { "layers/" = 30 }
  }

  expect_failures = [var.bucket_name, var.kms_key_arn, var.max_request_units, var.expire_days]
}

run "journals_stay_readable" {
  command = plan

  variables {
    expire_days = { "journals/" = 2 }
  }

  expect_failures = [var.expire_days]
}
