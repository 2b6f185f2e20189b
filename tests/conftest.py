"""Fixtures that every test may ask for."""

from tests.emulators import ministack, moto

__all__ = ["ministack", "moto"]
