"""Events of AWS's own services, which the emulators do not send: given to the rules that wait for them.

EventBridge refuses events of `aws.` from anybody but AWS, and so does the emulator; so a rule's pattern is tried by
TestEventPattern and its functions are invoked as EventBridge would.
"""

from __future__ import annotations

import json
import logging
import uuid
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from botocore.exceptions import BotoCoreError, ClientError

from scripts.localstack.places import REGION

_log = logging.getLogger("events")


class Events:
    """The default bus.

    Args:
        clients: By the SDK's name of the service: `events`, `lambda`.
    """

    def __init__(self, clients: Mapping[str, Any]) -> None:
        self._events, self._functions = clients["events"], clients["lambda"]

    def send(self, source: str, detail_type: str, detail: Mapping[str, Any]) -> int:
        """Give an event to all whom it concerns; how many functions that were. A failure is logged: events may be
        lost on AWS, too."""
        event = json.dumps(
            {
                "version": "0",
                "id": str(uuid.uuid4()),
                "detail-type": detail_type,
                "source": source,
                "account": "000000000000",
                "time": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
                "region": REGION,
                "resources": [],
                "detail": dict(detail),
            }
        )
        try:
            targets = {target for rule in self._rules(source) for target in self._targets(rule, event)}
            for arn in sorted(targets):
                self._functions.invoke(FunctionName=arn, InvocationType="Event", Payload=event.encode())
        except (BotoCoreError, ClientError) as error:
            _log.error("%s: %s", detail_type, error)
            return 0
        return len(targets)

    def _rules(self, source: str) -> list[dict[str, Any]]:
        rules = self._events.list_rules()["Rules"]
        return [rule for rule in rules if source in rule.get("EventPattern", "")]

    def _targets(self, rule: Mapping[str, Any], event: str) -> list[str]:
        if not self._events.test_event_pattern(EventPattern=rule["EventPattern"], Event=event)["Result"]:
            return []
        return [target["Arn"] for target in self._events.list_targets_by_rule(Rule=rule["Name"])["Targets"]]
