"""Which replica gets a request: `mini_sglang.routing`'s policies as a request router of Ray Serve.

It knows what a prompt is in the bodies of the APIs, and counts what it has sent to each replica. Ray copies this module
to where it routes, by value, so it holds no state.
"""

from __future__ import annotations

import json
from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from mini_sglang.ray_serve.in_process import HttpRequest
from mini_sglang.routing import POLICIES, PrefixAffinity, Prompt

# What a prompt is made of, in the order in which a chat template puts it there. A salt keeps caches apart.
_PROMPT_FIELDS = (
    "cache_salt", "tools", "system", "instructions", "messages", "input", "prompt", "text", "input_ids",
)  # fmt: skip


class PolicyRouter(RequestRouter):  # type: ignore[misc]
    """Has a policy choose among the replicas that Ray says are alive."""

    def initialize_state(self, policy: str) -> None:
        """Ray calls it once, before the first request. `policy`: a key of POLICIES."""
        self._policy = POLICIES[policy]()
        self._under_way: dict[str, ReplicaID] = {}  # by request, from when it has been given to a replica

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """The policy's choice first, then the others, the least loaded first, should that one not accept it."""
        if pending_request is None or not candidate_replicas:
            return [candidate_replicas]
        key = pending_request.metadata.internal_request_id
        self._under_way.pop(key, None)
        loads = self._loads(candidate_replicas)
        chosen = self._policy.choose(prompt_of(pending_request.args), loads)
        self._under_way[key] = chosen  # at once, so that the next choice counts it
        pending_request.future.add_done_callback(
            lambda future: self.on_request_completed(chosen, key) if future.cancelled() else None
        )
        by_load = sorted(candidate_replicas, key=lambda replica: loads[replica.replica_id])
        first = [replica for replica in by_load if replica.replica_id == chosen]
        return [first, [replica for replica in by_load if replica.replica_id != chosen]]

    def _loads(self, replicas: list[RunningReplica]) -> dict[ReplicaID, int]:
        """Requests under way: what this router has sent, or more where a replica has told of more."""
        sent = {replica.replica_id: 0 for replica in replicas}
        for replica_id in self._under_way.values():
            if replica_id in sent:
                sent[replica_id] += 1
        cache = self.replica_queue_len_cache
        for replica_id, count in sent.items():
            if cache.get(replica_id) is None:
                cache.update(replica_id, count)  # else Ray asks the replica, and passes over it if it is slow to tell
            sent[replica_id] = max(count, cache.get(replica_id) or 0)
        return sent

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any) -> None:
        self._under_way[pending_request.metadata.internal_request_id] = replica_id

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        if self._under_way.get(internal_request_id) == replica_id:
            del self._under_way[internal_request_id]

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        before = set(self.curr_replicas)
        super().update_replicas(replicas)
        for replica_id in before - set(self.curr_replicas):
            self._forget(replica_id)

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        super().on_replica_actor_died(replica_id)
        self._forget(replica_id)

    def _forget(self, replica_id: ReplicaID) -> None:
        if isinstance(self._policy, PrefixAffinity):
            self._policy.forget(replica_id)
        for key in [key for key, other in self._under_way.items() if other == replica_id]:
            del self._under_way[key]


def prompt_of(arguments: list[Any]) -> Prompt:
    """What requests with a common beginning have in common at their beginning; empty where a body has no prompt."""
    [request] = arguments
    if not isinstance(request, HttpRequest) or request.method != "POST":
        return ""
    try:
        body = json.loads(request.body)
    except (ValueError, RecursionError):  # which the replica will tell the client
        return ""
    if not isinstance(body, dict):
        return ""
    return "\n".join(json.dumps(body[field], ensure_ascii=False) for field in _PROMPT_FIELDS if field in body)
