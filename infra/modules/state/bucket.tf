# Objects are written once under names of their own (layers and manifests under their digest), so that old versions are
# only ever garbage: no versioning, unless Object Lock demands it; then old versions go after a day.

resource "aws_s3_bucket" "this" {
  #checkov:skip=CKV_AWS_18:Access logs cost requests and storage at every call; CloudTrail data events can be turned on for an audit
  #checkov:skip=CKV_AWS_144:Sandboxes are made again elsewhere; a copy in another Region doubles the cost of storage
  #checkov:skip=CKV_AWS_145:kms_key_arn sets a key; SSE-S3 encrypts otherwise, at no cost
  #checkov:skip=CKV_AWS_21:Objects are written once under names of their own; versions would only keep garbage
  #checkov:skip=CKV2_AWS_62:Nothing listens to the bucket; the table says what there is
  bucket              = local.bucket_name
  force_destroy       = !var.deletion_protection
  object_lock_enabled = var.object_lock
  tags                = var.tags
}

resource "aws_s3_bucket_public_access_block" "this" {
  bucket                  = aws_s3_bucket.this.id
  block_public_acls       = true
  block_public_policy     = true
  ignore_public_acls      = true
  restrict_public_buckets = true
}

resource "aws_s3_bucket_ownership_controls" "this" {
  bucket = aws_s3_bucket.this.id

  rule {
    object_ownership = "BucketOwnerEnforced"
  }
}

resource "aws_s3_bucket_server_side_encryption_configuration" "this" {
  bucket = aws_s3_bucket.this.id

  rule {
    # A bucket key makes one call to KMS serve many objects.
    bucket_key_enabled = var.kms_key_arn != null

    apply_server_side_encryption_by_default {
      sse_algorithm     = var.kms_key_arn == null ? "AES256" : "aws:kms"
      kms_master_key_id = var.kms_key_arn
    }
  }
}

resource "aws_s3_bucket_versioning" "this" {
  count  = var.object_lock ? 1 : 0
  bucket = aws_s3_bucket.this.id

  versioning_configuration {
    status = "Enabled"
  }
}

resource "aws_s3_bucket_lifecycle_configuration" "this" {
  #checkov:skip=CKV_AWS_300:Rule unfinished-uploads aborts them after a day; the check does not see it beside dynamic rules
  bucket     = aws_s3_bucket.this.id
  depends_on = [aws_s3_bucket_versioning.this]

  # provisioner/blobs/s3_lifecycle.py says what and why; a test compares.
  rule {
    id     = "unfinished-uploads"
    status = "Enabled"

    filter {
      prefix = ""
    }

    abort_incomplete_multipart_upload {
      days_after_initiation = 1
    }
  }

  rule {
    id     = "transfers"
    status = "Enabled"

    filter {
      prefix = "transfers/"
    }

    expiration {
      days = 1
    }
  }

  dynamic "rule" {
    for_each = var.object_lock ? [1] : []

    content {
      id     = "old-versions"
      status = "Enabled"

      filter {
        prefix = ""
      }

      noncurrent_version_expiration {
        noncurrent_days = 1
      }

      expiration {
        expired_object_delete_marker = true
      }
    }
  }

  dynamic "rule" {
    for_each = var.expire_days

    content {
      id     = "expire-${trimsuffix(rule.key, "/")}"
      status = "Enabled"

      filter {
        prefix = rule.key
      }

      expiration {
        days = rule.value
      }
    }
  }
}

resource "aws_s3_bucket_policy" "this" {
  bucket     = aws_s3_bucket.this.id
  depends_on = [aws_s3_bucket_public_access_block.this]

  policy = jsonencode({
    Version = "2012-10-17"
    Statement = [{
      Sid       = "TlsOnly"
      Effect    = "Deny"
      Principal = "*"
      Action    = "s3:*"
      Resource  = [aws_s3_bucket.this.arn, "${aws_s3_bucket.this.arn}/*"]
      Condition = { Bool = { "aws:SecureTransport" = "false" } }
    }]
  })
}
