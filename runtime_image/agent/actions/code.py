"""`run_code`: a program given as text, in a fresh process or in a Python context that lives on."""

from __future__ import annotations

import posixpath
from collections.abc import Sequence
from typing import Any, Final

from runtime_image.agent.actions.context import Bench
from runtime_image.agent.actions.files import operate
from runtime_image.agent.actions.processes import Ended, fill, process_id, start_and_wait
from runtime_image.agent.actions.run import ActionRun
from runtime_image.agent.link import CodeSpec, LinkError, ProcessSpec
from shoal.contract.actions import CompileStep, FileError, RunCode, RunCodeObservation
from shoal.contract.text import to_bytes

#: Where programs are put, one directory a step, removed after it.
_SCRATCH: Final = "/tmp"
_SOURCES: Final = {"python": "main.py", "bash": "main.sh", "sh": "main.sh", "c": "main.c", "c++": "main.cc"}
_COMPILERS: Final[dict[str, tuple[str, ...]]] = {
    "c": ("gcc", "cc", "clang"),
    "c++": ("g++", "c++", "clang++"),
}
_INTERPRETERS: Final[dict[str, tuple[str, ...]]] = {
    "python": ("python3", "python"),
    "bash": ("bash",),
    "sh": ("sh",),
}
_COMPILE_OUTPUT_BYTES: Final = 65_536


class _Program:
    """One program on its way: its directory, what has been spent of its time."""

    def __init__(self, bench: Bench, run: ActionRun, action: RunCode) -> None:
        assert run.entry is not None
        self.bench = bench
        self.run = run
        self.action = action
        self.cwd = action.cwd or bench.workdir
        self.user = action.user or bench.user
        self.directory = f"{_SCRATCH}/.run-{run.entry.seq}-{run.sha[:8]}"
        self.source = posixpath.join(self.directory, _SOURCES[action.language])
        self.name = process_id(run.entry.seq)

    async def place(self, *, with_code: bool = True) -> FileError | None:
        """Write the program and the files that it needs beside it; the reason when one cannot be written."""
        action = self.action
        sources: list[tuple[str, bytes, int]] = []
        if with_code:
            sources.append((self.source, action.code.encode("utf-8", "surrogatepass"), 0o644))
        for file in action.files:
            try:
                content = to_bytes(file.content, file.encoding)
            except ValueError:
                return FileError(errno="EINVAL", message=f"{file.path}: `content` is not base64")
            sources.append((posixpath.join(self.cwd, file.path), content, file.mode))
        for path, content, mode in sources:
            problem = await self._write(path, content, mode)
            if problem is not None:
                return problem
        return None

    async def _write(self, path: str, content: bytes, mode: int) -> FileError | None:
        result = await operate(
            self.bench,
            self.run,
            {
                "op": "write",
                "path": path,
                "content": content,
                "mode": mode,
                "create_parents": True,
                "user": self.user,
            },
        )
        error = result.get("error")
        if error is None:
            return None
        return FileError(errno=str(error["errno"]), message=f"{path}: {error['message']}")

    async def remove(self) -> None:
        """Take the program's directory away; what fails stays for the sandbox's end."""
        try:
            await self.bench.link.file_op(
                {"op": "remove", "path": self.directory, "recursive": True, "missing_ok": True}
            )
        except LinkError:
            pass

    async def start_first(
        self, candidates: Sequence[str], arguments: Sequence[str], name: str, *, timeout_s: float, **spec: Any
    ) -> Ended:
        """Run the first of several programs that exists; the last one's error when none does."""
        for n, program in enumerate(candidates):
            ended = await start_and_wait(
                self.bench,
                self.run,
                ProcessSpec(
                    process_id=name if n == 0 else f"{name}.{n}",
                    argv=(program, *arguments),
                    cwd=self.cwd,
                    env={**self.bench.env, **self.action.env},
                    user=self.user,
                    **spec,
                ),
                timeout_s=timeout_s,
            )
            if ended.error is None or ended.error.errno != "ENOENT":
                break
        return ended


async def run_code(bench: Bench, run: ActionRun, action: RunCode) -> RunCodeObservation:
    """Perform a `run_code`."""
    if action.context is not None:
        return await _in_context(bench, run, action)
    program = _Program(bench, run, action)
    try:
        problem = await program.place()
        if problem is not None:
            return RunCodeObservation(
                error=problem, encoding=action.encoding, killed=run.kill_reason is not None
            )
        return await _run_program(program)
    finally:
        await program.remove()


async def _run_program(program: _Program) -> RunCodeObservation:
    action = program.action
    try:
        stdin = b"" if action.stdin is None else to_bytes(action.stdin, action.stdin_encoding)
    except ValueError:
        problem = FileError(errno="EINVAL", message="`stdin` is not base64")
        return RunCodeObservation(error=problem, encoding=action.encoding)
    observation = RunCodeObservation(encoding=action.encoding)
    candidates: Sequence[str] = _INTERPRETERS.get(action.language, ())
    arguments: tuple[str, ...] = (program.source, *action.args)
    left_s = action.timeout_s
    if action.language in _COMPILERS:
        binary = posixpath.join(program.directory, "main")
        ended = await program.start_first(
            _COMPILERS[action.language],
            ("-O1", "-o", binary, program.source, *(("-lm",) if action.language == "c" else ())),
            f"{program.name}c",
            timeout_s=left_s,
            output_limit_bytes=_COMPILE_OUTPUT_BYTES,
        )
        compiled = _compiled(ended)
        observation = observation.model_copy(update={"compile": compiled})
        if compiled is None or compiled.exit_code != 0:
            # The compiler's own end is the observation: what it printed, its code, or that there is none.
            return _as_run_code(observation, ended, action)
        await _forget(program, f"{program.name}c")
        left_s = max(0.01, left_s - compiled.duration_ms / 1000)
        candidates, arguments = (binary,), tuple(action.args)
    ended = await program.start_first(
        candidates,
        arguments,
        program.name,
        timeout_s=left_s,
        stdin=stdin if action.stdin is not None else "empty",
        output_limit_bytes=action.output_limit_bytes,
    )
    return _as_run_code(observation, ended, action)


async def _forget(program: _Program, name: str) -> None:
    process = program.run.process
    if process is not None:
        await program.bench.link.forget(process.process_id)


def _compiled(ended: Ended) -> CompileStep | None:
    if ended.process is None:
        return None
    head, tail = ended.process.stderr.kept()
    return CompileStep(
        exit_code=ended.exit.exit_code if ended.exit is not None else None,
        output=(head + tail).decode("utf-8", "replace"),
        duration_ms=ended.exit.duration_ms if ended.exit is not None else 0.0,
    )


def _as_run_code(observation: RunCodeObservation, ended: Ended, action: RunCode) -> RunCodeObservation:
    filled = fill(observation, ended, action.encoding)
    assert isinstance(filled, RunCodeObservation)
    return filled


async def _in_context(bench: Bench, run: ActionRun, action: RunCode) -> RunCodeObservation:
    """Run a cell in a Python context. The interpreter joins the step's kill group for as long as it runs the cell."""
    assert run.entry is not None
    assert action.context is not None
    program = _Program(bench, run, action)
    if action.files:
        problem = await program.place(with_code=False)
        if problem is not None:
            return RunCodeObservation(error=problem, encoding=action.encoding)
    spec = CodeSpec(
        process_id=program.name,
        context=action.context,
        code=action.code,
        cwd=program.cwd,
        env={**bench.env, **action.env},
        user=program.user,
        output_limit_bytes=action.output_limit_bytes,
    )
    ended = await start_and_wait(bench, run, spec, timeout_s=action.timeout_s)
    observation = _as_run_code(RunCodeObservation(), ended, action)
    if ended.process is None or ended.exit is None:
        return observation
    text, value = ended.process.result_value()
    return observation.model_copy(
        update={
            "result": value if value is not None else text,
            "result_repr": text,
            "context_restarted": ended.exit.context_restarted,
        }
    )
