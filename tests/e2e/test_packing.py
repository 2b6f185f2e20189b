"""What a session made as an image, without what nobody wants to start from."""

from __future__ import annotations

import uuid

import pytest

from shoal.client import Shoal

pytestmark = pytest.mark.root

MAKE = """
set -e
mkdir -p /w/keep/deep /w/cache/sub /w/tmp; cd /w
echo kept > keep/file; echo kept > keep/deep/note; chmod 640 keep/file; chown 12:34 keep/deep
echo junk > keep/deep/x.o; echo junk > x.o; echo junk > cache/sub/big; echo junk > tmp/.hidden
echo bytes > cache/first; ln cache/first linked; ln cache/first linked-too
ln -s cache/sub alias; ln -s /etc/passwd keep/out; mkfifo keep/fifo
echo '# changed' >> /etc/passwd; echo '# changed' >> /etc/group; rm /usr/bin/yes /usr/bin/tac
touch -d @1600000000 keep/file keep/deep/note; touch -h -d @1600000001 alias keep/out
touch -d @1600000002 keep/deep keep
"""
AGAIN = """
set -e
cd /w; rm keep/deep/note; echo more > keep/more; echo junk > keep/y.o; echo more > tmp/more
"""
LOOK = """
cd /
find w | while read -r path; do
    sum=-; if [ -f "$path" ] && [ ! -h "$path" ]; then sum=$(sha256sum < "$path"); fi
    echo "$path|$(stat -c '%F %a %u:%g %Y %N' "$path")|$(stat -c %h "$path")|$sum"
done
"""
BASE = "cat /etc/passwd; test -e /usr/bin/yes; echo yes $?"
KEPT = "tail -n 1 /etc/group; test -e /usr/bin/tac; echo tac $?"
EXCLUDE = ["/w/cache", "w/tmp/*", "**/*.o", "etc/passwd", "usr/bin/y*", "w/alias/*"]
GONE = {
    "w/cache", "w/cache/first", "w/cache/sub", "w/cache/sub/big", "w/keep/deep/x.o", "w/keep/y.o", "w/tmp/.hidden",
    "w/tmp/more", "w/x.o",
}  # fmt: skip


def tree(shoal: Shoal, image: str) -> tuple[dict[str, list[str]], str, str]:
    """What a session of the image sees: of each path below /w all that is to stay the same, and of the base."""
    with shoal.session(image) as box:
        looked = box.exec(LOOK)
        assert (looked.exit_code, looked.stderr) == (0, "")
        lines = [line.split("|") for line in looked.stdout.splitlines()]
        return {path: about for path, *about in lines}, box.exec(BASE).stdout, box.exec(KEPT).stdout


def test_an_image_is_packed_without_what_was_excluded(shoal: Shoal) -> None:
    """Excluded paths are absent, or as the base has them; all others are those of the image packed whole, over two
    snapshots. Nothing of the base is written anew."""
    name = f"packed-{uuid.uuid4().hex[:12]}"
    with shoal.session("minimal:1") as box:
        untouched = box.exec(BASE).stdout
        made = box.exec(MAKE)
        assert made.exit_code == 0, made.stderr
        first = box.snapshot()
    with shoal.session(snapshot=first) as box:
        assert box.exec(AGAIN).exit_code == 0
        second = box.snapshot()
    whole = shoal.images.pack(f"{name}:whole", second)
    image = shoal.images.pack(f"{name}:without", second, exclude=EXCLUDE)
    assert [layer.role for layer in image.layers] == ["base", "snapshot", "snapshot"]
    assert image.layers[0] == whole.layers[0]
    before, base_before, kept_before = tree(shoal, f"{name}:whole")
    after, base_after, kept_after = tree(shoal, f"{name}:without")
    assert before.keys() - after.keys() == GONE
    linked = {path: before[path][1:2] for path in ("w/linked", "w/linked-too")}
    assert linked == {"w/linked": ["3"], "w/linked-too": ["3"]}
    for path in linked:
        before[path][1] = "2"
    assert after == {path: about for path, about in before.items() if path not in GONE}
    assert "w/keep/deep/note" not in after
    assert base_after == untouched != base_before
    assert kept_after == kept_before == "# changed\ntac 1\n"
    assert shoal.images.pack(f"{name}:same", second, exclude=["nothing/**"]).digest == whole.digest
    for made_image in ("whole", "without", "same"):
        shoal.images.delete(f"{name}:{made_image}")
