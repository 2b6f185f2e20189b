"""The start, and the dispatch of what the agent asks."""

from __future__ import annotations

import _socket
import fcntl
import gc
import os
import resource
from errno import EEXIST, EINVAL, ENOSYS, ESRCH

from . import wire
from .accounts import Accounts
from .channel import Channel
from .launch import DEFAULT_PATH
from .loop import Loop, complain
from .pack import dumps, loads
from .process import Process
from .reaper import Reaper
from .spawn import failure, start_exec
from .system import harden
from .workers import READING, start_worker

TYPE_CHECKING = False
if TYPE_CHECKING:
    import signal as _signal
    from collections.abc import Callable
    from resource import struct_rusage
    from typing import Any

    from .residents import Residents

    Reply = Callable[[dict[str, Any]], None]
else:
    import _signal

# A page of `list`: its reply must fit one frame.
_PAGE = 64


class Guest:
    """All of the guest's state: processes, helpers, and the link they answer on."""

    def __init__(self, sock: _socket.socket, devnull: int) -> None:
        self.devnull = devnull
        self.loop = Loop()
        self.reaper = Reaper(self.loop)
        self.accounts = Accounts()
        self.channel = Channel(self.loop, sock, self._frame, self._closed)
        self.processes: dict[str, Process] = {}
        self._handles: dict[int, Process] = {}
        self._pieces: dict[int, tuple[bytearray, list[int]]] = {}
        self._greeted = 0
        self._residents: dict[str, Residents] = {}
        # Helpers at work: request id -> pid, operation.
        self._workers: dict[int, tuple[int, str]] = {}

    def drop(self, process: Process) -> None:
        """Know nothing of `process` any more."""
        if self.processes.get(process.process_id) is process:
            del self.processes[process.process_id]
        for handle in [h for h, known in self._handles.items() if known is process]:
            del self._handles[handle]

    def _closed(self) -> None:
        # Neither an agent nor whoever keeps the socket for the next one: nobody will ever ask.
        self.loop.running = False

    def _frame(self, kind: int, stream: int, ident: int, body: memoryview, fds: list[int]) -> None:
        if kind == wire.REQUEST:
            self._piece(stream, ident, body, fds)
            return
        for fd in fds:
            os.close(fd)
        if kind == wire.HELLO:
            self._hello(body)
            return
        process = self._handles.get(ident)
        if process is None:
            # Ended or forgotten while the frame was on its way.
            return
        if kind == wire.DATA and process.stdin is not None:
            process.stdin.feed(body[wire.OFFSET.size :])
        elif kind == wire.END and process.stdin is not None:
            process.stdin.end()
        elif kind == wire.CREDIT and stream in process.outputs:
            process.outputs[stream].allow(wire.number(body))

    def _hello(self, body: memoryview) -> None:
        asked = loads(body)
        assert isinstance(asked, dict)
        self.channel.reset()
        for _, fds in self._pieces.values():
            for fd in fds:
                os.close(fd)
        self._pieces.clear()
        for process in self.processes.values():
            process.detach()
        self._handles.clear()
        # Their pipes led to the agent that is gone.
        for pid, operation in self._workers.values():
            if operation in READING:
                os.kill(pid, _signal.SIGKILL)
        self._workers.clear()
        self._greeted += 1
        shells = [
            name
            for name in ("bash", "sh")
            if any(os.access(f"{directory}/{name}", os.X_OK) for directory in DEFAULT_PATH.split(":"))
        ]
        answer = {
            "version": wire.VERSION,
            "nonce": asked.get("nonce"),
            "pid": os.getpid(),
            "shells": shells,
            "greeted": self._greeted,
            "processes": len(self.processes),
        }
        self.channel.post(wire.frame(wire.HELLO, 0, 0, dumps(answer)))

    def _piece(self, stream: int, ident: int, body: memoryview, fds: list[int]) -> None:
        data, held = self._pieces.pop(ident, (bytearray(), []))
        data += body
        held += fds
        if stream & wire.MORE:
            self._pieces[ident] = (data, held)
            return
        reply = self._replier(ident)
        try:
            request = loads(data)
            assert isinstance(request, dict)
            names = dict(zip(request.get("fds", ()), held, strict=False))
            self._request(ident, request, names, reply)
        except Exception as err:  # noqa: BLE001 - every request is answered
            complain(f"request {ident}: {err!r}")
            reply(failure(getattr(err, "errno", None) or EINVAL, f"{err!r:.1000}", "request"))
        finally:
            for fd in held:
                os.close(fd)

    def _replier(self, ident: int) -> Reply:
        """Answers request `ident` once, and only the agent that asked."""
        greeted, replied = self._greeted, False

        def reply(body: dict[str, Any]) -> None:
            nonlocal replied
            if not replied and self._greeted == greeted:
                replied = True
                self.channel.post(wire.frame(wire.RESPONSE, 0, ident, dumps(body)))

        return reply

    def _request(self, ident: int, request: dict[str, Any], fds: dict[str, int], reply: Reply) -> None:
        op = request["op"]
        if op == "spawn":
            self._spawn(request, fds.get("procs"), reply)
        elif op == "forget":
            for name in request["ids"]:
                self._forget(name)
            reply({})
        elif op == "list":
            after = request.get("after") or ""
            names = sorted(name for name in self.processes if name > after)[:_PAGE]
            reply({"processes": [self.processes[name].describe() for name in names]})
        elif op == "attach":
            process = self.processes.get(request["id"])
            if process is None:
                reply(failure(ESRCH, f"no process {request['id']}", "request"))
                return
            self._handles[request["handle"]] = process
            reply(process.describe())
            process.attach(request["handle"])
        elif op == "file":
            self._file(ident, request, fds, reply)
        elif op == "cancel":
            pid, operation = self._workers.get(request["request"], (0, ""))
            if operation in READING:
                os.kill(pid, _signal.SIGKILL)
            reply({})
        elif op == "resize":
            self.processes[request["id"]].resize(*request["size"])
            reply({})
        else:
            reply(failure(ENOSYS, f"no operation {op!r}", "request"))

    def _file(self, ident: int, request: dict[str, Any], fds: dict[str, int], reply: Reply) -> None:
        stage = "user"
        try:
            account = self.accounts.find(request.get("user"))
            stage = "fork"
            pid = start_worker(request, account, self.devnull, fds)
        except OSError as err:
            reply(failure(err.errno or 0, err.strerror or str(err), stage))
            return
        self._workers[ident] = (pid, request["do"])
        greeted = self._greeted

        def ended(status: int, usage: struct_rusage) -> None:
            if self._greeted == greeted:
                del self._workers[ident]
            code = os.waitstatus_to_exitcode(status)
            reply({"signal": -code if code < 0 else None})

        self.reaper.expect(pid, ended)

    def _forget(self, name: str) -> None:
        process = self.processes.get(name)
        if process is not None:
            process.forget()
            self.drop(process)

    def _spawn(self, spec: dict[str, Any], procs_fd: int | None, answer: Reply) -> None:
        for done in spec.get("forget", ()):
            self._forget(done)
        name, handle = spec["id"], spec["handle"]
        if name in self.processes:
            answer(failure(EEXIST, f"process {name} exists", "request"))
            return
        process = Process(self.loop, self.channel, name, handle)
        self.processes[name] = process
        self._handles[handle] = process

        def reply(body: dict[str, Any]) -> None:
            if "errno" in body:
                self.drop(process)
            answer(body)

        if spec.get("shell") is not None:
            self._named("shell").run(spec["shell"], spec, process, procs_fd, reply)
        elif spec.get("context") is not None:
            self._named("context").run(spec["context"], spec, process, procs_fd, reply)
        else:
            start_exec(self, spec, process, procs_fd, reply)

    def _named(self, kind: str) -> Residents:
        # Loaded when first used: most sandboxes have none.
        if kind not in self._residents:
            from .residents import Residents

            if kind == "shell":
                from .shells import Shell

                self._residents[kind] = Residents(self, Shell)
            else:
                from .contexts import Context

                self._residents[kind] = Residents(self, Context)
        return self._residents[kind]


def take_link() -> _socket.socket:
    """The socket the guest was started with, moved away from descriptor 0."""
    fd = fcntl.fcntl(0, fcntl.F_DUPFD_CLOEXEC, 10)
    return _socket.socket(_socket.AF_UNIX, _socket.SOCK_SEQPACKET, 0, fd)


def main() -> None:
    """Run the guest until the link closes."""
    # Not Python's exception: as PID 1 the guest then cannot be sent it at all.
    _signal.signal(_signal.SIGINT, _signal.SIG_DFL)
    # Children inherit the mask.
    _signal.pthread_sigmask(_signal.SIG_SETMASK, ())
    sock = take_link()
    devnull = os.open("/dev/null", os.O_RDWR | os.O_CLOEXEC)
    os.dup2(devnull, 0)
    harden()
    # Many processes at once mean many pipes; what the guest starts gets its own limit.
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    guest = Guest(sock, devnull)
    gc.collect()
    gc.freeze()
    guest.loop.run()
