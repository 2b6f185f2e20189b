"""Real sandboxes on one machine: runc, an id range each, idmapped layers, hard limits."""

from runtime_image.agent.sandboxes.cgroups import KillGroup, OomCounter
from runtime_image.agent.sandboxes.doctor import Check, doctor
from runtime_image.agent.sandboxes.model import (
    Defences,
    Limits,
    LimitsHit,
    NoIdRange,
    NotSupported,
    RuntimeSettings,
    Sandbox,
    SandboxGone,
    SandboxRuntimeError,
    SandboxSpec,
    StartFailed,
    Usage,
)
from runtime_image.agent.sandboxes.runtime import SandboxRuntime

__all__ = [
    "Check",
    "Defences",
    "KillGroup",
    "Limits",
    "LimitsHit",
    "NoIdRange",
    "NotSupported",
    "OomCounter",
    "RuntimeSettings",
    "Sandbox",
    "SandboxGone",
    "SandboxRuntime",
    "SandboxRuntimeError",
    "SandboxSpec",
    "StartFailed",
    "Usage",
    "doctor",
]
