"""Fixtures that every test may ask for, and what holds for every test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import structlog

from tests.emulators import ministack, moto

__all__ = ["ministack", "moto"]


@pytest.fixture(autouse=True)
def _logging_as_it_was() -> Iterator[None]:
    """What a test runs may set up the process's logging (a command's `main` does): not for the next test."""
    yield
    if structlog.is_configured():
        structlog.reset_defaults()
