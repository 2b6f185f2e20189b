"""Where the client finds the service and the key."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from shoal import ConfigError
from shoal.client.config import resolve


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    for name in ("SHOAL_URL", "SHOAL_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    path = tmp_path / "credentials.json"
    monkeypatch.setenv("SHOAL_CREDENTIALS", str(path))
    return path


def test_arguments_come_before_the_environment_and_that_before_the_file(
    clean: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In this order."""
    clean.write_text(json.dumps({"url": "http://file", "api_key": "file-key"}))
    assert resolve().url == "http://file"
    monkeypatch.setenv("SHOAL_URL", "http://env/")
    monkeypatch.setenv("SHOAL_API_KEY", "env-key")
    assert (resolve().url, resolve().api_key) == ("http://env", "env-key")
    assert resolve("https://given", "given-key").url == "https://given"


def test_the_files_key_goes_to_the_files_service_only(clean: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A key is not sent to another service than its own."""
    clean.write_text(json.dumps({"url": "http://file", "api_key": "file-key"}))
    monkeypatch.setenv("SHOAL_URL", "http://elsewhere")
    with pytest.raises(ConfigError, match="no API key for http://elsewhere"):
        resolve()
    monkeypatch.setenv("SHOAL_URL", "http://file/")
    assert resolve().api_key == "file-key"


@pytest.mark.parametrize("content", ["{", "[]", '{"url": 3}'])
def test_a_bad_file_is_told(clean: Path, content: str) -> None:
    """Not a traceback of JSON."""
    clean.write_text(content)
    with pytest.raises(ConfigError):
        resolve()


def test_the_key_is_not_printed() -> None:
    """Configurations end in logs."""
    assert "secret" not in repr(resolve("http://x", "secret"))


def test_only_http_urls() -> None:
    """A wrong scheme is told at once."""
    with pytest.raises(ConfigError, match="http"):
        resolve("ftp://x", "k")
