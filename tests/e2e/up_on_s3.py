"""`python tests/e2e/up_on_s3.py up ...`: the service of one machine, with its blobs in the bucket `SHOAL_TEST_BUCKET`
instead of a directory. Where that is, and who we are, is the SDK's own environment."""

from __future__ import annotations

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import api.local
from api.__main__ import main
from provisioner.aws.clients import AwsClients
from provisioner.blobs.s3 import S3Blobs


class Blobs(S3Blobs):
    """Closes its clients with it."""

    def __init__(self, root: Path) -> None:
        self._own = AwsClients(endpoint=os.environ["AWS_ENDPOINT_URL"])
        super().__init__(self._own, os.environ["SHOAL_TEST_BUCKET"])

    async def close(self) -> None:
        """All of it."""
        await self._own.close()


vars(api.local)["LocalBlobs"] = Blobs
raise SystemExit(main())
