"""The `aws` and `localstack` profiles: their settings, their clients and how their parts are put together."""
