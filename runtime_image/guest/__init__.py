"""The guest: PID 1 of every sandbox, and the only thing the agent talks to.

Standard library only, and little of it: each sandbox pays for every module imported here. So no
`typing`, `enum`, `re`, `signal`, `socket` or `json` at start (their C cores serve), no dataclasses;
what a file operation needs more is imported by the worker process that runs it, which then ends.

    init.py      the start: hardening, hello, dispatch of requests
    wire.py      frames;  pack.py  their bodies (a subset of MessagePack);  channel.py  sending in turns
    loop.py      epoll and timers;  reaper.py  the one place that waits for children
    launch.py    from fork to exec;  accounts.py  users of the sandbox;  system.py  calls Python lacks
    process.py   a process of an action: output kept head and tail (tape.py), stdin, exit
    shells.py    named shells;  contexts.py, driver.py  Python contexts
    workers.py   forked helpers for file operations: files.py, edit.py, search.py, tar.py

`wire`, `pack` and `tape` are shared with the agent's side of the link.
"""
