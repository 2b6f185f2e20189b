output "table_name" {
  description = "The table (`SHOAL_AWS_TABLE`)."
  value       = aws_dynamodb_table.this.name
}

output "table_arn" {
  description = "ARN of the table."
  value       = aws_dynamodb_table.this.arn
}

output "stream_arn" {
  description = "ARN of the table's stream, which wakes the reconciler."
  value       = aws_dynamodb_table.this.stream_arn
}

output "bucket_name" {
  description = "The bucket (`SHOAL_AWS_BUCKET`)."
  value       = aws_s3_bucket.this.id
}

output "bucket_arn" {
  description = "ARN of the bucket."
  value       = aws_s3_bucket.this.arn
}

output "environment" {
  description = "Settings that tell a process where the state is (`SHOAL_AWS_*`)."
  value = merge(
    {
      SHOAL_AWS_TABLE  = aws_dynamodb_table.this.name
      SHOAL_AWS_BUCKET = aws_s3_bucket.this.id
    },
    { for name, value in { SHOAL_AWS_KMS_KEY_ID = var.kms_key_arn } : name => value if value != null },
  )
}

output "access_policy" {
  description = "IAM policy (JSON) to read and write table and bucket, for the API, routers and the reconciler. Hosts never have it: they use presigned URLs."
  value = jsonencode({
    Version = "2012-10-17"
    Statement = concat(
      [
        {
          Sid    = "Items"
          Effect = "Allow"
          Action = [
            "dynamodb:BatchGetItem",
            "dynamodb:ConditionCheckItem",
            "dynamodb:DeleteItem",
            "dynamodb:GetItem",
            "dynamodb:PutItem",
            "dynamodb:Query",
            "dynamodb:UpdateItem",
          ]
          Resource = [aws_dynamodb_table.this.arn]
        },
        {
          Sid    = "Objects"
          Effect = "Allow"
          Action = concat(
            [
              "s3:AbortMultipartUpload",
              "s3:DeleteObject",
              "s3:GetObject",
              "s3:PutObject",
            ],
            var.object_lock ? ["s3:PutObjectRetention"] : [],
          )
          Resource = ["${aws_s3_bucket.this.arn}/*"]
        },
        {
          Sid      = "ObjectNames"
          Effect   = "Allow"
          Action   = ["s3:ListBucket"]
          Resource = [aws_s3_bucket.this.arn]
        },
      ],
      [for key in var.kms_key_arn[*] : {
        Sid      = "Key"
        Effect   = "Allow"
        Action   = ["kms:Decrypt", "kms:DescribeKey", "kms:GenerateDataKey"]
        Resource = [key]
      }],
    )
  })
}
