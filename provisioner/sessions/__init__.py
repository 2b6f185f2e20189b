"""Sessions: making, placing, ending, changing and telling of them."""

from provisioner.sessions.service import Created, Location, Sessions

__all__ = ["Created", "Location", "Sessions"]
