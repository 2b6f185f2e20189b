"""The guest: PID 1 of every sandbox, and the only thing the agent talks to.

Standard library only, and little of it: each sandbox pays for every module imported here. So no
`typing`, `enum`, `re`, `signal`, `socket` or `json` at start (their C cores serve), no dataclasses;
what a file operation needs more is imported by the worker process that runs it, which then ends.

    init.py       the start and the dispatch of requests;  system.py  calls Python lacks
    wire.py       frames;  pack.py  their bodies (a subset of MessagePack);  channel.py  sending in turns
    loop.py       epoll and timers;  feeder.py  writing into what may be full
    reaper.py     the one place that waits for children
    spawn.py      starting an exec;  launch.py  from fork to exec;  accounts.py  users of the sandbox
    process.py    a process of an action: output kept head and tail (tape.py), stdin, exit
    residents.py  what outlives its action: shells.py  named shells, contexts.py and driver.py  Python
    workers.py    forked helpers for file operations: files.py, edit.py, search.py, tar.py

`wire`, `pack`, `tape` and the constants of `workers` are shared with the agent's side of the link.
"""
