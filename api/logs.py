"""Structured logs, as `provisioner.logs` sets them up."""

from __future__ import annotations

from provisioner.logs import LogFormat, configure

__all__ = ["LogFormat", "configure"]
