"""The command line against a service in memory."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest
from typer.testing import CliRunner, Result

from shoal import Shoal, __version__
from shoal.cli import asking, server
from shoal.cli.app import app
from shoal.cli.execute import exit_code
from shoal.client.results import ExecResult
from shoal.contract.errors import ErrorCode
from tests.unit.client.fake_service import NOW, FakeService, Fault, error, refuse

SSE = "event: {kind}\nid: {n}-0\ndata: {data}\n\n"


@pytest.fixture
def service(monkeypatch: pytest.MonkeyPatch) -> FakeService:
    fake = FakeService()

    def client() -> Shoal:
        policy = asking.POLICY.__class__(retry_for_s=0.05, wait_for_s=0.05, base_s=0.001, cap_s=0.01)
        return Shoal("http://127.0.0.1:1", "key", transport=fake.transport, policy=policy)

    monkeypatch.setattr(asking, "make_client", client)
    return fake


def run(*arguments: str, input: str | None = None) -> Result:
    return CliRunner().invoke(app, list(arguments), input=input)


def test_a_new_session_prints_its_id(service: FakeService) -> None:
    """Only the id goes to stdout, so that scripts can take it."""
    result = run("session", "new", "code:1.0.0", "--name", "a", "--cpu", "0.5", "--label", "k=v")
    assert result.exit_code == 0, result.output
    assert result.stdout == "ses_1\n"
    body = json.loads(service.requests[0].content)
    assert body["resources"] == {"cpu_millis": 500}
    assert body["labels"] == {"k": "v"}


def test_json_prints_the_whole_session(service: FakeService) -> None:
    """--json is the wire's own form."""
    result = run("session", "new", "code:1.0.0", "--json")
    assert json.loads(result.stdout)["id"] == "ses_1"


def test_paths_and_references_are_told_apart(
    service: FakeService, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tarball, a directory that the builder wrote and any absolute path are archives; the rest are references."""
    (tmp_path / "built").mkdir()
    (tmp_path / "built" / "image.json").write_text("{}")
    (tmp_path / "debian").mkdir()
    (tmp_path / "root.tar").write_bytes(b"")
    monkeypatch.chdir(tmp_path)
    sent = []
    for source in ("built", "root.tar", "/elsewhere/built", "debian", "oci:built"):
        run("image", "add", "code:1.0.0", source, "--no-wait")
        sent.append(json.loads(service.requests[-1].content)["source"])
    assert sent == [
        {"archive": str(tmp_path / "built")},
        {"archive": str(tmp_path / "root.tar")},
        {"archive": "/elsewhere/built"},
        {"ref": "debian"},
        {"ref": "oci:built"},
    ]


def test_a_snapshot_is_packed_without_some_paths(service: FakeService) -> None:
    """`--exclude` is repeatable, and refused where it would be passed over."""
    globs = ["--exclude", "tmp/*", "--exclude", "**/x"]
    run("image", "add", "code:1.0.0", "snp_1", *globs, "--no-wait")
    source = json.loads(service.requests[-1].content)["source"]
    assert source == {"snapshot": "snp_1", "exclude": ["tmp/*", "**/x"]}
    asked = len(service.requests)
    assert run("image", "add", "code:1.0.0", "oci:x", *globs).exit_code == 2
    assert len(service.requests) == asked


def test_errors_are_sentences_with_the_next_step_and_125(service: FakeService) -> None:
    """No traceback: what happened, what to do, exit code 125."""
    service.fail("POST", error(ErrorCode.IMAGE_NOT_FOUND, status=404))
    result = run("session", "new", "nope:1")
    assert result.exit_code == 125
    assert "scripted image_not_found" in result.stderr
    assert "change the request" in result.stderr
    assert "Traceback" not in result.output


def test_errors_as_json(service: FakeService) -> None:
    """With --json an error is the contract's body on stdout."""
    service.fail("POST", error(ErrorCode.SANDBOX_LOST, status=409))
    result = run("session", "new", "nope:1", "--json")
    assert result.exit_code == 125
    assert json.loads(result.stdout)["error"]["next"] == "replace"


def test_a_service_that_is_not_there_is_told(service: FakeService) -> None:
    """Connection refused ends soon, with a sentence."""
    service.fail("GET", *[refuse] * 1000)
    result = run("session", "list")
    assert result.exit_code == 125
    assert "no answer from the service" in result.stderr


def test_no_credentials_are_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Nothing configured: how to configure it."""
    monkeypatch.setenv("SHOAL_CREDENTIALS", str(tmp_path / "none.json"))
    monkeypatch.delenv("SHOAL_URL", raising=False)
    monkeypatch.delenv("SHOAL_API_KEY", raising=False)
    result = run("session", "list")
    assert result.exit_code == 125
    assert "SHOAL_URL" in result.stderr


def test_exec_json_exits_with_the_commands_code(service: FakeService) -> None:
    """The observation on stdout, the command's own exit code."""
    service.session()

    def failed(request: httpx.Request, act: object) -> httpx.Response:
        body = json.loads(request.content)
        seen = {"type": "exec", "exit_code": 7, "stdout": "o", "stderr": "e"}
        record = {
            "id": body["id"],
            "epoch": 1,
            "status": "done",
            "action": body["action"],
            "observation": seen,
        }
        return httpx.Response(200, json=record)

    service.fail("POST .*/actions", failed)
    result = run("exec", "--json", "ses_1", "--", "pytest", "-q")
    assert result.exit_code == 7, result.output
    assert json.loads(result.stdout)["stderr"] == "e"
    body = json.loads(service.requests[-1].content)
    assert body["action"]["command"] == ["pytest", "-q"]
    assert re.fullmatch(r"cli-[0-9a-f]{12}-1", body["id"]), (
        "steps of a command line never repeat earlier ones"
    )


def test_exec_streams_output_and_ends_with_the_code(
    service: FakeService, capfd: pytest.CaptureFixture[str]
) -> None:
    """Output appears as bytes on the right stream; exit code from the last event."""
    service.session()
    service.running_reads = 1_000_000
    record = {
        "id": "x",
        "epoch": 1,
        "status": "done",
        "action": {"type": "exec", "command": "x"},
        "observation": {"type": "exec", "exit_code": 3},
    }
    events = (
        SSE.format(kind="stdout", n=3, data=json.dumps({"data": "out", "encoding": "utf-8"}))
        + SSE.format(kind="stderr", n=3, data=json.dumps({"data": "ZXJy/w==", "encoding": "base64"}))
        + SSE.format(kind="exit", n=3, data=json.dumps(record))
    )
    service.fail("GET .*/stream", lambda request, act: httpx.Response(200, text=events))
    with pytest.raises(SystemExit) as ended:
        app(["exec", "ses_1", "x"])
    assert ended.value.code == 3
    seen = capfd.readouterr()
    assert seen.out.endswith("out")
    assert "err" in seen.err


@pytest.mark.parametrize(
    ("fields", "code"),
    [
        ({"exit_code": 0}, 0),
        ({"exit_code": 42}, 42),
        ({"signal": "KILL"}, 137),
        ({"signal": "TERM"}, 143),
        ({"signal": "KILL", "timed_out": True}, 124),
        ({"error": {"errno": "ENOENT", "message": "m"}}, 127),
        ({"error": {"errno": "EACCES", "message": "m"}}, 126),
    ],
)
def test_exit_codes(fields: dict[str, object], code: int) -> None:
    """As shells, docker and GNU timeout have them."""
    assert exit_code(ExecResult.model_validate(fields)) == code


def test_sessions_are_found_by_name(service: FakeService) -> None:
    """A name resolves through the list; an unknown one says so."""
    info = service.session(name="worker", run="r")
    service.fail("GET /v1/sessions$", lambda request, act: httpx.Response(200, json={"sessions": [info]}))
    assert run("session", "show", "worker", "--json").exit_code == 0
    service.fail("GET /v1/sessions$", lambda request, act: httpx.Response(200, json={"sessions": []}))
    result = run("session", "show", "worker")
    assert result.exit_code == 125
    assert "no living session is named" in result.stderr


def test_rm_all_needs_a_run(service: FakeService) -> None:
    """Nothing is removed by a half-said command."""
    result = run("session", "rm", "--all")
    assert result.exit_code == 2
    assert service.requests == []


def test_cp_up_and_down(service: FakeService, tmp_path: Path) -> None:
    """A file goes in with its mode and comes out whole."""
    service.session()
    local = tmp_path / "a.bin"
    local.write_bytes(b"\x00\xffdata")
    local.chmod(0o755)
    assert run("cp", str(local), "ses_1:/w/").exit_code == 0
    assert service.files == {"/w/a.bin": b"\x00\xffdata"}
    assert service.requests[-1].url.params["mode"] == "0755"
    assert run("cp", "ses_1:/w/a.bin", str(tmp_path / "b.bin")).exit_code == 0
    assert (tmp_path / "b.bin").read_bytes() == b"\x00\xffdata"
    assert run("cp", "a", "b").exit_code == 125


def test_snapshot_and_fork(service: FakeService) -> None:
    """snapshot prints the id; fork of a snapshot prints the sessions."""
    service.session()
    assert run("snapshot", "ses_1").stdout == "snp_1\n"
    result = run("fork", "snp_1", "-n", "3", "--no-wait")
    assert result.stdout.split() == ["ses_2", "ses_3", "ses_4"]


def test_without_the_server_up_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """The wheel is the SDK alone."""
    monkeypatch.setattr(server, "_is_installed", lambda package: False)
    result = run("up")
    assert result.exit_code == 125
    assert "the server is not installed here" in result.stderr


def test_up_becomes_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """up replaces itself, and passes options that it does not know."""
    seen: list[list[str]] = []
    monkeypatch.setattr(server.os, "execv", lambda path, argv: seen.append(argv))
    monkeypatch.setattr(server, "_checked", lambda home: {"ok": True, "checks": []})
    assert run("up", "--port", "0", "--warm", "3").exit_code == 0
    assert seen == [[sys.executable, "-m", "api", "up", "--port", "0", "--warm", "3"]]


ROOT = {"name": "root", "ok": False, "found": "uid 1000", "remedy": "run it as root"}
CGROUP = {
    "name": "cgroup",
    "ok": False,
    "found": "[Errno 13] Permission denied: '/sys'",
    "remedy": "mount it",
}
LOOP = {"name": "loop", "ok": False, "found": "no /dev/loop-control", "remedy": "run: modprobe loop"}


def test_up_without_root_does_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server whose hosts cannot start would let callers wait without a word; it is not started."""
    seen: list[list[str]] = []
    monkeypatch.setattr(server.os, "execv", lambda path, argv: seen.append(argv))
    monkeypatch.setattr(server, "_checked", lambda home: {"ok": False, "checks": [ROOT, CGROUP]})
    result = run("up")
    assert (result.exit_code, seen) == (125, [])
    assert "sudo shoal up" in result.stderr


def test_up_says_what_else_is_missing_and_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    """As root a gap is told with its remedy; it may be mended while the server runs."""
    seen: list[list[str]] = []
    monkeypatch.setattr(server.os, "execv", lambda path, argv: seen.append(argv))
    monkeypatch.setattr(server, "_checked", lambda home: {"ok": False, "checks": [LOOP]})
    result = run("up")
    assert (result.exit_code, len(seen)) == (0, 1)
    assert "run: modprobe loop" in result.stderr


def test_doctor_without_root_gives_no_remedy_for_what_only_root_can_try(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A refused try says nothing about the machine; what is missing to anybody is told as ever."""
    monkeypatch.setattr(server, "_checked", lambda home: {"ok": False, "checks": [ROOT, CGROUP, LOOP]})
    result = run("doctor")
    assert result.exit_code == 125
    assert "mount it" not in result.stdout
    assert "run it as root" in result.stdout
    assert "run: modprobe loop" in result.stdout


def test_doctor_shows_remedies(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What is missing comes with what to run; exit code 125."""
    told = {
        "ok": False,
        "checks": [{"name": "runc", "ok": False, "found": "none", "remedy": "run: apt-get [x]"}],
    }
    script = tmp_path / "fake.py"
    script.write_text(f"print({json.dumps(json.dumps(told))})")
    monkeypatch.setattr(server, "server_python", lambda module: [sys.executable, str(script)])
    result = run("doctor")
    assert result.exit_code == 125
    assert "run: apt-get [x]" in result.stdout
    assert json.loads(run("doctor", "--json").stdout) == told


def test_version(service: FakeService) -> None:
    """The package's own."""
    assert run("version").stdout.strip() == __version__
    assert json.loads(run("version", "--json").stdout) == {"version": __version__}


def all_commands() -> list[list[str]]:
    import typer

    found: list[list[str]] = []

    def walk(command: object, path: list[str]) -> None:
        below = getattr(command, "commands", None)
        if below is None:
            found.append(path)
            return
        for name, one in below.items():
            walk(one, [*path, name])

    walk(typer.main.get_command(app), [])
    return found


@pytest.mark.parametrize("path", all_commands(), ids=" ".join)
def test_every_command_has_help_and_json(path: list[str]) -> None:
    """--json everywhere (but where the terminal is handed over)."""
    result = run(*path, "--help")
    assert result.exit_code == 0
    if path != ["up"]:
        assert "--json" in result.stdout


@pytest.mark.parametrize("path", all_commands(), ids=" ".join)
def test_every_command_is_documented(path: list[str]) -> None:
    """docs/cli.md names each command."""
    text = (Path(server.__file__).parents[2] / "docs" / "cli.md").read_text(encoding="utf-8")
    assert f"`shoal {' '.join(path)}" in text


def test_who_waits_for_a_host_is_told_why(service: FakeService) -> None:
    """`shoal run` and `shoal logs` of a session that waits say why no host comes, once, and not on stdout."""
    service.session(state="pending", phase="waiting_for_host", waiting_for="no capacity in any zone")
    service.pending_reads = 100
    service.fail("GET .*/events", lambda request, go: httpx.Response(200, json={"events": []}))
    logs = run("logs", "ses_1")
    assert logs.exit_code == 0, logs.output
    assert "no capacity in any zone" in logs.stderr
    assert logs.stdout == ""
    service.pending_reads = 3
    service._named = lambda body: service.sessions["ses_1"]  # type: ignore[method-assign]
    ran = run("run", "code:1.0.0", "--", "true")
    assert ran.stderr.count("no capacity in any zone") == 1
    assert "no capacity" not in ran.stdout


def test_releasing_what_is_not_there_says_so(service: FakeService) -> None:
    """The service takes any release; a person who mistyped is told, by message and exit code."""
    prepare = {
        "id": "prp_1", "pool": "default", "sandboxes": 2, "ready": 2, "hosts": 1, "substrate": "container",
        "expires_at": NOW, "done": True,
    }  # fmt: skip
    service.fail("GET /v1/pools/default/prepare", *[answer({"prepared": [prepare]})] * 2)
    service.fail("DELETE /v1/pools/default/prepare", *[answer({})] * 2)
    assert run("pool", "release", "prp_1").exit_code == 0
    mistyped = run("pool", "release", "prp_2")
    assert mistyped.exit_code == 1
    assert "no prepare prp_2" in mistyped.stderr


def test_pushing_what_the_builder_did_not_write_says_so(service: FakeService, tmp_path: Path) -> None:
    """Nothing is asked of the service then."""
    for wrong in (tmp_path, tmp_path / "file"):
        (tmp_path / "file").write_text("x")
        result = run("image", "push", str(wrong), "pushed:1")
        assert result.exit_code == 125
        assert "what the builder wrote" in result.stderr
    assert service.requests == []


def answer(body: Any) -> Fault:
    """A scripted answer."""
    return lambda request, act: httpx.Response(200, json=body)
