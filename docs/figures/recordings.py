"""What the real scheduler and the real prefix cache do with a scenario, step by step, in plain values for JSON.

What the figures' modules decide is held to this by tests. Tokens are characters here as there: `prompt` and outputs are
strings.
"""

from __future__ import annotations

import random
from typing import Any

from mini_sglang.config import ResolvedConfig
from mini_sglang.request import Request, RequestStatus
from mini_sglang.sampling_params import SamplingParams
from mini_sglang.scheduling.batch import ScheduledBatch, StepResult
from mini_sglang.scheduling.kv_cache import KVCacheManager
from mini_sglang.scheduling.radix_cache import Node
from mini_sglang.scheduling.scheduler import Scheduler

Json = dict[str, Any]


def record_schedule(scenario: Json) -> list[Json]:
    """`scenario`: budget, numPages, pageSize, slots, expectedOutput, and arrivals of step, name, prompt, maxTokens."""
    scheduler = Scheduler(
        ResolvedConfig(
            page_size=scenario["pageSize"],
            num_pages=scenario["numPages"],
            max_prefill_tokens=scenario["budget"],
            max_running_requests=scenario["slots"],
            context_length=1 << 20,
        )
    )
    scheduler.expected_output = scenario["expectedOutput"]
    requests: dict[str, Request] = {}
    steps: list[Json] = []
    while len(steps) < 1000:
        for arrival in scenario["arrivals"]:
            if arrival["step"] == len(steps):
                prompt = [ord(token) for token in arrival["prompt"]]
                request = Request(arrival["name"], prompt, SamplingParams(max_tokens=arrival["maxTokens"]))
                scheduler.add(request)
                requests[request.request_id] = request
        if not scheduler.has_work and all(arrival["step"] < len(steps) for arrival in scenario["arrivals"]):
            return steps
        batch = scheduler.schedule()
        steps.append(_take_step(scheduler, requests, batch))
        scheduler.check()
    raise RuntimeError("the scenario does not end")


def _take_step(scheduler: Scheduler, requests: dict[str, Request], batch: ScheduledBatch | None) -> Json:
    step: Json = {"rows": [], "preempted": [], "copies": [], "ended": []}
    if batch is not None:
        slots = {request.slot: request for request in requests.values() if request.slot is not None}
        sampling = [slots[row.slot] for row in batch.rows if row.samples]
        token_ids = [97 + request.num_known_tokens % 26 for request in sampling]
        step["rows"] = [[slots[row.slot].request_id, row.start, row.count, row.samples] for row in batch.rows]
        step["copies"] = [list(copy) for copy in batch.page_copies]
        step["preempted"] = scheduler.latest_step.preempted
        scheduler.update(batch, StepResult(token_ids, [None] * len(token_ids)))
        step["ended"] = [r.request_id for r in sampling if r.status is RequestStatus.FINISHED]
    waiting = [request for request in requests.values() if request.status is RequestStatus.WAITING]
    step["waiting"] = [request.request_id for request in sorted(waiting, key=lambda request: request.arrival)]
    step["pages"] = {name: request.page_ids.copy() for name, request in requests.items() if request.page_ids}
    step["outputs"] = {name: "".join(map(chr, request.output_ids)) for name, request in requests.items()}
    return step | pool(scheduler.kv)


def record_cache(scenario: Json) -> list[Json]:
    """`scenario`: numPages, pageSize, and moves of name, and prompt where a request comes; it leaves without one."""
    kv = KVCacheManager(scenario["numPages"], scenario["pageSize"])
    running: dict[str, Request] = {}
    seen: list[Json] = []
    for step, move in enumerate(scenario["moves"]):
        entry: Json = {"admitted": True, "found": 0, "copies": []}
        if "prompt" in move:
            prompt = [ord(token) for token in move["prompt"]]
            request = Request(move["name"], prompt, SamplingParams(), slot=0)
            match = kv.match(request)
            entry["found"], entry["admitted"] = match.num_tokens, kv.admit(request, match, len(prompt))
            if entry["admitted"]:
                request.num_computed_tokens = len(prompt)
                kv.commit(request, step, tail=True)
                kv.steps_read(step)
                running[move["name"]] = request
                entry["copies"] = [list(copy) for copy in kv.take_changes()[1]]
            else:
                kv.forget(request)
        elif move["name"] in running:
            kv.release(running.pop(move["name"]))
        kv.check()
        entry["pages"] = {name: request.page_ids.copy() for name, request in running.items()}
        seen.append(entry | pool(kv))
    return seen


def pool(kv: KVCacheManager) -> Json:
    """Counts of pages, and the tree, its children sorted."""
    tops = [child for node in kv._tree.nodes() if node.parent is None for child in node.children.values()]
    return {"free": kv.num_free_pages, "cached": kv.num_cached_pages, "tree": _described(tops)}


def _described(nodes: list[Node]) -> list[list[Any]]:
    described = [
        ["".join(map(chr, node.tokens)), node.page_ids.copy(), node.locks, _described(list(node.children.values()))]
        for node in nodes
    ]
    return sorted(described, key=lambda node: str(node[0]))


def random_schedule(seed: int) -> Json:
    """Few tokens and few pages: shared beginnings, chunks, preemption and eviction are common."""
    draw = random.Random(seed)
    page_size = draw.choice([1, 2, 4])
    num_pages = draw.randint(24 // page_size, 64 // page_size)
    arrivals, step = [], 0
    for index in range(draw.randint(2, 9)):
        step += draw.choice([0, 0, 1, 2, 5])
        prompt = "s" * draw.choice([0, 0, 5, 9]) + "".join(draw.choices("AB", k=draw.randint(1, 10)))
        arrivals.append({"step": step, "name": f"r{index}", "prompt": prompt, "maxTokens": draw.randint(1, 14)})
    return {
        "budget": draw.choice([1, 3, 8, 64]),
        "numPages": num_pages,
        "pageSize": page_size,
        "slots": draw.choice([2, 4, 16]),
        "expectedOutput": draw.choice([0.0, 4.0, 16.0]),
        "arrivals": arrivals,
    }


def random_cache(seed: int) -> Json:
    draw = random.Random(seed)
    page_size = draw.choice([1, 2, 4])
    moves: list[Json] = []
    names: list[str] = []
    for index in range(40):
        if names and draw.random() < 0.45:
            moves.append({"name": names.pop(draw.randrange(len(names)))})
        else:
            names.append(f"r{index}")
            prompt = "s" * draw.choice([0, 4, 7]) + "".join(draw.choices("AB", k=draw.randint(1, 9)))
            moves.append({"name": f"r{index}", "prompt": prompt})
    return {"numPages": draw.randint(40, 100) // page_size, "pageSize": page_size, "moves": moves}
