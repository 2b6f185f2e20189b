# ruff: noqa: UP031, SIM115, BLE001 - old Pythons; streams that stay open; whatever the code raises is its result
"""Runs inside the sandbox, on the image's own Python (3.6 or later): the other end of a context.

Not part of the guest: it is the user's process from its first line on, and nothing it says is
trusted.
"""

import ast
import json
import linecache
import os
import socket
import struct
import sys
import traceback
import types

# Of the result's text and its JSON, each.
RESULT_LIMIT = 256 << 10


def main() -> None:
    """Take code from descriptor 3 until it closes."""
    control = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM, 0, 3)
    control.set_inheritable(False)
    # The code's module is __main__, as if it were a script; this one hides.
    module = types.ModuleType("__main__")
    hidden = sys.modules["__main__"]
    sys.modules["__main__"] = module
    sys.argv = [""]
    sys.path[0] = ""
    pid, number = os.getpid(), 0
    while True:
        _, ancillary, _, _ = control.recvmsg(1, socket.CMSG_SPACE(5 * 4), socket.MSG_CMSG_CLOEXEC)
        if not ancillary:
            break
        fds = struct.unpack("5i", ancillary[0][2][:20])
        number += 1
        with open(fds[4], "rb") as file:
            code = file.read()
        for place in (0, 1, 2):
            os.dup2(fds[place], place)
            os.close(fds[place])
        open_streams()
        status = run(code, "<context:%d>" % number, module.__dict__, fds[3])
        close_streams()
        if os.getpid() != pid:
            # A fork that came back out of the code: one of us must go.
            os._exit(status)
        os.close(fds[3])
        control.sendall(struct.pack("<i", status))
    del hidden


def open_streams() -> None:
    """Fresh objects over the new descriptors: the old ones have seen their end."""
    sys.stdin = open(0, closefd=False)
    sys.stdout = open(1, "w", buffering=1, closefd=False)
    sys.stderr = open(2, "w", buffering=1, closefd=False, errors="backslashreplace")


def close_streams() -> None:
    """Send out what is held, and let go of the descriptors."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except Exception:
            pass
    null = os.open(os.devnull, os.O_RDWR)
    for place in (0, 1, 2):
        os.dup2(null, place)
    os.close(null)


def run(code: bytes, name: str, namespace: "dict[str, object]", result_fd: int) -> int:
    """Execute, show the last expression's value to the agent; the exit status."""
    value: object = None
    try:
        tree = ast.parse(code, name)
        text = code.decode("utf-8", "replace")
        linecache.cache[name] = (len(text), None, text.splitlines(True), name)
        final = tree.body[-1] if tree.body else None
        last = None
        if isinstance(final, ast.Expr):
            tree.body.pop()
            last = ast.Expression(final.value)
        exec(compile(tree, name, "exec"), namespace)
        if last is not None:
            value = eval(compile(last, name, "eval"), namespace)
            namespace["_"] = value
    except SystemExit as leave:
        if leave.code is None:
            return 0
        if isinstance(leave.code, int):
            return leave.code & 255
        show(leave.code)
        return 1
    except BaseException as error:
        # From the code's own first line on; of what does not even compile there is none.
        trace = error.__traceback__
        while trace is not None and trace.tb_frame.f_code.co_filename != name:
            trace = trace.tb_next
        try:
            traceback.print_exception(type(error), error, trace)
        except BaseException:
            show(type(error).__name__)
        return 1
    if value is not None:
        try:
            send(value, result_fd)
        except BaseException:
            traceback.print_exc()
            return 1
    return 0


def show(text: object) -> None:
    """A line on stderr, whatever became of it."""
    try:
        print(text, file=sys.stderr)
    except Exception:
        pass


def send(value: object, fd: int) -> None:
    """The value as text, and as JSON where it is plain data."""
    text = repr(value).encode("utf-8", "replace")[:RESULT_LIMIT]
    data = b""
    if isinstance(value, (dict, list, tuple, str, int, float, bool)):
        try:
            data = json.dumps(value, allow_nan=False).encode()
        except (TypeError, ValueError, RecursionError):
            pass
    if len(data) > RESULT_LIMIT:
        data = b""
    data = struct.pack("<I", len(text)) + text + data
    while data:
        data = data[os.write(fd, data) :]


if __name__ == "__main__":
    main()
