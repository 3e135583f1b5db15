"""L10 in the terminal: how SmolLM2 is dealt out, one sum over two ranks by hand, and a model in two real processes."""

from __future__ import annotations

import json
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch.distributed import FileStore  # type: ignore[attr-defined]

from mini_sglang.config import EngineConfig
from mini_sglang.engine import Engine
from mini_sglang.parallel.sharding import Shard, shard_evenly, shard_heads
from mini_sglang.parallel.tensor_parallel import TensorParallel, connect_cpus
from mini_sglang.sampling_params import SamplingParams

SHAPE: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 323,
    "hidden_size": 72,
    "intermediate_size": 100,
    "num_hidden_layers": 2,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "max_position_embeddings": 64,
}


def main() -> None:
    console = Console(highlight=False)
    show_shards(console)
    show_sum(console)
    show_processes(console)


def show_shards(console: Console) -> None:
    """SmolLM2-135M: 9 query heads, 3 KV heads, 1,536 features, 49,152 tokens."""
    table = Table("ranks", "rank", "query heads", "KV heads", "MLP features", "vocabulary", "KV bytes a token")
    for ranks in (1, 2, 3, 4):
        for rank in range(ranks):
            heads = shard_heads(9, 3, rank, ranks)
            kv_bytes = 2 * 30 * heads.kv.size * 64 * 2
            table.add_row(
                str(ranks) if rank == 0 else "",
                str(rank),
                shown(heads.queries),
                shown(heads.kv),
                shown(shard_evenly(1536, rank, ranks, 16)),
                shown(shard_evenly(49152, rank, ranks, 16)),
                f"{kv_bytes:,}",
                end_section=rank == ranks - 1,
            )
    console.print("[bold]1. Who holds what of SmolLM2-135M[/] (in brackets: room that is filled up with zeros)")
    console.print(table)


def shown(shard: Shard) -> str:
    spare = shard.size - (shard.stop - shard.start)
    span = f"{shard.start}-{shard.stop - 1}" if shard.stop > shard.start else "none"
    return f"{span} (+{spare})" if spare else span


def show_sum(console: Console) -> None:
    """A product of 4 inputs, two of them on each rank: both hold the whole only after the sum."""
    x, weight = torch.tensor([[1.0, 2.0, 3.0, 4.0]]), torch.tensor([[1.0, 0.0, 1.0, 0.0], [0.0, 10.0, 0.0, 10.0]])

    def work(parallel: TensorParallel) -> tuple[list[list[float]], list[list[float]]]:
        mine = slice(2 * parallel.rank, 2 * parallel.rank + 2)
        part = x[:, mine] @ weight[:, mine].T
        return part.tolist(), parallel.all_reduce(part.clone()).tolist()

    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(2) as pool:
        store = str(Path(folder, "store"))
        found = list(pool.map(lambda rank: work(connect_cpus(FileStore(store, 2), rank, 2, "127.0.0.1")), range(2)))
    console.print("\n[bold]2. x W^T with half of the inputs on each rank[/], summed by gloo")
    for rank, (part, total) in enumerate(found):
        console.print(f"   rank {rank}: own part {part[0]}, after the sum {total[0]}")
    console.print(f"   on one rank: {(x @ weight.T)[0].tolist()}")


def show_processes(console: Console) -> None:
    """A random model of odd sizes, by one process and by two: the same tokens."""
    console.print("\n[bold]3. A random model of odd sizes[/] (9 heads, 100 features, 323 tokens)")
    answers = {}
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(SHAPE))
        for tp in (1, 2):
            config = EngineConfig(
                model=folder,
                load_format="dummy",
                device="cpu",
                dtype="float32",
                attention_backend="reference",
                num_pages=16,
                max_running_requests=2,
                num_threads=1,
                tp=tp,
            )
            answers[tp] = generate(config)
            console.print(f"   tp {tp}, {tp} process{'es' if tp > 1 else ''}: {answers[tp]}")
    console.print("   [green]equal[/]" if answers[1] == answers[2] else "   [red]not equal[/]")


def generate(config: EngineConfig) -> list[int]:
    engine = Engine(config)
    params = SamplingParams(temperature=1.0, seed=7, max_tokens=12, ignore_eos=True)
    engine.add_request("a", [5, 300, 7, 8], params)
    token_ids: list[int] = []
    while engine.has_work:
        outputs = engine.step()
        token_ids += [*outputs.token_ids, *(token for output in outputs.others for token in output.token_ids)]
    engine.close()
    return token_ids


if __name__ == "__main__":
    main()
