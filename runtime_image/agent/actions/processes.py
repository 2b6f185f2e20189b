"""`exec`: one process of a step, its time-out, its kill, and what is observed of it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from runtime_image.agent import crash
from runtime_image.agent.actions.context import Bench
from runtime_image.agent.actions.run import ActionRun
from runtime_image.agent.link import CodeSpec, GuestProcess, OutputTap, ProcessExit, ProcessSpec, SpawnError
from shoal.contract.actions import DEFAULT_TIMEOUT_S, Encoding, Exec, ExecObservation, FileError
from shoal.contract.text import to_bytes, to_text, whole_utf8

#: How long the guest may take to report the end of what was killed; after that the output so far is taken.
_KILL_REPORT_S = 2.0


@dataclass(frozen=True, kw_only=True)
class Ended:
    """How a process ended; `exit` is None when it was killed and its guest did not report in time."""

    exit: ProcessExit | None
    process: GuestProcess | None
    killed: bool
    timed_out: bool
    oom_killed: bool
    error: FileError | None = None


def process_id(seq: int) -> str:
    """The name a step's process has in the guest: how a new agent finds it again."""
    return f"a{seq}"


def group_name(seq: int) -> str:
    """The name of a step's kill group."""
    return f"a{seq}"


async def start_and_wait(
    bench: Bench,
    run: ActionRun,
    spec: ProcessSpec | CodeSpec,
    *,
    timeout_s: float | None,
    started: Callable[[], None] | None = None,
) -> Ended:
    """Start a process in the step's kill group and wait for its end.

    Args:
        bench: Where.
        run: The step; its kill group is made here when it has none.
        spec: What to start.
        timeout_s: From the process's start until the whole tree is killed; None never.
        started: Called once it runs.

    Raises:
        LinkClosedError: The guest is gone; what became of the process is not known.
    """
    if run.kill_reason is not None:
        return Ended(exit=None, process=None, killed=True, timed_out=False, oom_killed=False)
    if run.group is None:
        run.group = bench.group(group_name(run.entry.seq if run.entry else 0))
    ooms = bench.oom_kills()
    try:
        if isinstance(spec, CodeSpec):
            process = await bench.link.run_code_context(spec, procs_fd=run.group.procs_fd)
        else:
            process = await bench.link.spawn(spec, procs_fd=run.group.procs_fd)
    except SpawnError as error:
        if error.stage == "fork" or error.errno_name == "EAGAIN":
            message = f"no process could be started: {error.message} (the sandbox's process limit?)"
        else:
            message = f"{error.stage}: {error.message}"
        failure = FileError(errno=error.errno_name or "EINVAL", message=message)
        return Ended(exit=None, process=None, killed=False, timed_out=False, oom_killed=False, error=failure)
    crash.passing("after_fork")
    run.attach(process)
    if started is not None:
        started()
    return await finish(bench, run, process, timeout_s=timeout_s, ooms_before=ooms)


async def finish(
    bench: Bench, run: ActionRun, process: GuestProcess, *, timeout_s: float | None, ooms_before: int
) -> Ended:
    """Wait for the end of a process that runs, killing its tree after `timeout_s` seconds from now."""
    loop = asyncio.get_running_loop()
    if run.kill_reason is not None and run.group is not None:
        run.group.kill()
    elif timeout_s is not None:
        run.killer = loop.call_later(max(0.0, timeout_s), run.kill, "timeout")
    try:
        exit = await _exit_of(run, process)
    finally:
        if run.killer is not None:
            run.killer.cancel()
            run.killer = None
    # A kill that came after the end changed nothing.
    killed = run.kill_reason is not None and (exit is None or exit.signal == "KILL" or exit.exit_code == 137)
    clean = exit is not None and exit.exit_code == 0
    oom_killed = not killed and not clean and bench.oom_kills() > ooms_before
    return Ended(
        exit=exit,
        process=process,
        killed=killed,
        timed_out=killed and run.kill_reason == "timeout",
        oom_killed=oom_killed,
    )


async def _exit_of(run: ActionRun, process: GuestProcess) -> ProcessExit | None:
    """The process's end; None when it was killed and nothing was heard of it for `_KILL_REPORT_S` seconds."""
    task = asyncio.current_task()
    assert task is not None
    run.give_up_after(_KILL_REPORT_S, task)
    try:
        return await process.wait()
    except asyncio.CancelledError:
        if not run.given_up:
            raise
        task.uncancel()
        return None
    finally:
        run.forget_task()


def kept_bytes(tap: OutputTap) -> bytes:
    """Head and tail halves of what is kept of a stream."""
    head, tail = tap.kept()
    return head + tail if tail else head


def fill(observation: ExecObservation, ended: Ended, encoding: Encoding) -> ExecObservation:
    """The observation with what `ended` tells of the process."""
    exit, process = ended.exit, ended.process
    changes: dict[str, object] = {
        "encoding": encoding,
        "error": ended.error,
        "killed": ended.killed,
        "timed_out": ended.timed_out,
        "oom_killed": ended.oom_killed,
    }
    if process is not None:
        stdout, stdout_lossy = to_text(kept_bytes(process.stdout), encoding)
        stderr, stderr_lossy = to_text(kept_bytes(process.stderr), encoding)
        changes |= {
            "stdout": stdout,
            "stderr": stderr,
            "stdout_lossy": stdout_lossy,
            "stderr_lossy": stderr_lossy,
            "stdout_bytes": process.stdout.total_bytes,
            "stderr_bytes": process.stderr.total_bytes,
            "stdout_dropped_bytes": process.stdout.total_bytes - process.stdout.kept_bytes,
            "stderr_dropped_bytes": process.stderr.total_bytes - process.stderr.kept_bytes,
            "truncated": process.stdout.truncated or process.stderr.truncated,
        }
    if exit is not None:
        changes |= {
            "exit_code": exit.exit_code,
            "signal": exit.signal,
            "shell_restarted": exit.shell_restarted,
            "duration_ms": exit.duration_ms,
            "cpu_ms": exit.cpu_ms or 0.0,
            "peak_memory_mib": round(exit.max_rss_mib or 0.0, 3),
        }
    if ended.killed:
        changes |= {"exit_code": None, "signal": "KILL"}
    return observation.model_copy(update=changes)


def spec_of(bench: Bench, run_id: str, action: Exec) -> ProcessSpec:
    """What to start for an `exec`.

    Raises:
        ValueError: Its stdin says base64 and is not.
    """
    stdin: bytes | str = "empty"
    if action.stdin is not None:
        stdin = to_bytes(action.stdin, action.stdin_encoding)
    if action.stdin_open:
        stdin = "open"
    return ProcessSpec(
        process_id=run_id,
        argv=tuple(action.command) if isinstance(action.command, list) else None,
        command=action.command if isinstance(action.command, str) else None,
        cwd=action.cwd or bench.workdir,
        env={**bench.env, **action.env},
        user=action.user or bench.user,
        stdin=stdin,  # type: ignore[arg-type]
        output_limit_bytes=action.output_limit_bytes,
        login=action.login,
        tty=(action.tty.rows, action.tty.cols) if action.tty else None,
        shell=action.shell,
    )


def timeout_of(action: Exec) -> float | None:
    """Seconds the command may run; a background command has a limit only when it asks for one."""
    if action.background and "timeout_s" not in action.model_fields_set:
        return None
    return action.timeout_s if action.timeout_s is not None else DEFAULT_TIMEOUT_S


async def run_exec(
    bench: Bench, run: ActionRun, action: Exec, started: Callable[[], None]
) -> ExecObservation:
    """Perform an `exec`. `started` is called once the process runs."""
    assert run.entry is not None
    spec = spec_of(bench, process_id(run.entry.seq), action)

    def begun() -> None:
        if action.stdin_open and action.stdin is not None and run.process is not None:
            # Fed before anything that POST .../stdin sends: writes are taken in order.
            feed = asyncio.ensure_future(
                run.process.write_stdin(to_bytes(action.stdin, action.stdin_encoding))
            )
            feed.add_done_callback(lambda done: done.cancelled() or done.exception())
        started()

    if action.shell is not None:
        # The shell was started into its own group, by whichever step came first.
        run.group, run.owns_group = bench.lasting_group("shell", action.shell), False
    ended = await start_and_wait(bench, run, spec, timeout_s=timeout_of(action), started=begun)
    return fill(ExecObservation(), ended, action.encoding)


@dataclass(frozen=True, kw_only=True)
class ExecSoFar:
    """What a running process has printed from two offsets on, and the offsets to ask on from."""

    observation: ExecObservation
    stdout: int
    stderr: int

    @classmethod
    def of(cls, run: ActionRun, stdout: int, stderr: int) -> ExecSoFar:
        """For a step whose process runs. Text ends with a whole character: the rest comes with the next."""
        assert run.process is not None
        encoding: Encoding = getattr(run.action, "encoding", "utf-8")
        out, out_lossy, out_next, out_dropped = _from(run.process.stdout, stdout, encoding)
        err, err_lossy, err_next, err_dropped = _from(run.process.stderr, stderr, encoding)
        observation = ExecObservation(
            stdout=out,
            stderr=err,
            stdout_lossy=out_lossy,
            stderr_lossy=err_lossy,
            stdout_bytes=run.process.stdout.total_bytes,
            stderr_bytes=run.process.stderr.total_bytes,
            stdout_dropped_bytes=out_dropped,
            stderr_dropped_bytes=err_dropped,
            truncated=bool(out_dropped or err_dropped),
            encoding=encoding,
        )
        return cls(observation=observation, stdout=out_next, stderr=err_next)


def _from(tap: OutputTap, offset: int, encoding: Encoding) -> tuple[str, bool, int, int]:
    head = tap.snapshot(offset)
    tail = tap.snapshot(head.next_offset)
    data, end = head.data + tail.data, tail.next_offset if tail.data else head.next_offset
    if encoding == "utf-8":
        whole = whole_utf8(data)
        end -= len(data) - whole
        data = data[:whole]
    text, lossy = to_text(data, encoding)
    return text, lossy, end, head.dropped + tail.dropped
