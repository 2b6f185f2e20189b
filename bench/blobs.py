"""`python -m bench.blobs`: how fast objects go into S3 and out of it through the adapter, beside boto3 on its own.

Both speak to MiniStack on this machine, which has to do its work on the same cores: only the two beside one another say
something, never the figures by themselves. boto3's transfers run with the adapter's part size and number of parts.
"""

from __future__ import annotations

import argparse
import asyncio
import io
import json
import os
import resource
import statistics
import time
from collections.abc import AsyncIterator
from typing import Any

import boto3
from boto3.s3.transfer import TransferConfig

from provisioner.blobs.s3 import S3Blobs
from provisioner.blobs.s3_writes import PART_BYTES, PARTS_IN_FLIGHT
from tests.emulators import CREDENTIALS, REGION, aws_clients, emulator

MIB = 1 << 20
BUCKET = "bench"


def peak_mib() -> float:
    """The most memory this process has had."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def told(puts: list[float], gets: list[float], cpu_s: float) -> dict[str, float]:
    """The medians, and the CPU seconds of this process (not of the emulator) for one put and one get."""
    return {"put_mib_s": statistics.median(puts), "get_mib_s": statistics.median(gets), "cpu_s": cpu_s}


async def ours(url: str, size: int, rounds: int) -> dict[str, float]:
    """MiB a second of put and get, the median of the rounds; from and to memory that is thrown away."""
    clients = aws_clients(url)
    blobs = S3Blobs(clients, BUCKET)
    block = os.urandom(MIB)

    async def source() -> AsyncIterator[bytes]:
        for _ in range(size // MIB):
            yield block

    puts, gets = [], []
    cpu_s = time.process_time()
    for _ in range(rounds):
        begun = time.perf_counter()
        await blobs.put("ours", source())
        puts.append(size / MIB / (time.perf_counter() - begun))
        begun = time.perf_counter()
        async for _ in blobs.get("ours"):
            pass
        gets.append(size / MIB / (time.perf_counter() - begun))
    cpu_s = (time.process_time() - cpu_s) / rounds
    await clients.close()
    return told(puts, gets, cpu_s)


class Source(io.RawIOBase):
    """A file of `size` bytes that takes no memory."""

    def __init__(self, size: int) -> None:
        self._size, self._at, self._block = size, 0, os.urandom(MIB)

    def readable(self) -> bool:
        """It can be read."""
        return True

    def read(self, count: int = -1) -> bytes:
        """The next bytes."""
        count = min(count if count >= 0 else self._size, self._size - self._at)
        self._at += count
        return (self._block * (count // MIB + 1))[:count]


class Nowhere(io.RawIOBase):
    """A file that forgets."""

    def writable(self) -> bool:
        """It can be written."""
        return True

    def write(self, data: Any) -> int:
        """Take them."""
        return len(data)


def theirs(url: str, size: int, rounds: int) -> dict[str, float]:
    """The same by boto3's managed transfers (threads, multipart)."""
    client = boto3.client("s3", endpoint_url=url, region_name=REGION, **CREDENTIALS)
    how = TransferConfig(
        multipart_threshold=PART_BYTES, multipart_chunksize=PART_BYTES, max_concurrency=PARTS_IN_FLIGHT
    )
    puts, gets = [], []
    cpu_s = time.process_time()
    for _ in range(rounds):
        begun = time.perf_counter()
        client.upload_fileobj(Source(size), BUCKET, "theirs", Config=how)
        puts.append(size / MIB / (time.perf_counter() - begun))
        begun = time.perf_counter()
        client.download_fileobj(BUCKET, "theirs", Nowhere(), Config=how)
        gets.append(size / MIB / (time.perf_counter() - begun))
    cpu_s = (time.process_time() - cpu_s) / rounds
    client.close()
    return told(puts, gets, cpu_s)


def main() -> None:
    """Measure and print JSON."""
    parser = argparse.ArgumentParser(prog="python -m bench.blobs", description=__doc__)
    parser.add_argument("--size-mib", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    size = options.size_mib * MIB
    with emulator("ministack", SERVICES="s3") as url:
        client = boto3.client("s3", endpoint_url=url, region_name=REGION, **CREDENTIALS)
        client.create_bucket(Bucket=BUCKET)
        adapter = asyncio.run(ours(url, size, options.rounds))
        after_ours = peak_mib()
        plain = theirs(url, size, options.rounds)
    figures = {
        "size_mib": options.size_mib,
        "rounds": options.rounds,
        "s3_blobs": {**adapter, "peak_memory_mib": after_ours},
        "boto3": {**plain, "peak_memory_mib_of_both": peak_mib()},
    }
    print(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
