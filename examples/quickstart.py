"""A session, a few steps, a fork: run it with `shoal up` running and the `code` image built."""

from __future__ import annotations

from shoal import Shoal

PROGRAM = "def add(a, b):\n    return a - b\n"
TEST = "from app import add\n\n\ndef test_add():\n    assert add(2, 3) == 5\n"


def main(image: str = "code:1.0.0") -> None:
    """Break a program, see its test fail, mend it, and try two more mends in forks."""
    with Shoal() as shoal, shoal.session(image, run="quickstart") as box:
        box.write_file("app.py", PROGRAM).check()
        box.write_file("test_app.py", TEST).check()
        print("before:", box.exec("python3 -m pytest -q").stdout.splitlines()[-1])
        with box.fork(2) as group:
            tries = ["return a * b", "return a + b"]
            for fork, text in zip(group, tries, strict=True):
                fork.edit("app.py", old="return a - b", new=text).check()
            for text, result in zip(tries, group.exec("python3 -m pytest -q"), strict=True):
                print(f"{text}:", "green" if result.ok else "red")


if __name__ == "__main__":
    main()
