"""One GPU as a server: Poisson arrivals up to the highest rate with good answers, and prompts that share most.

    python benchmarks/gpu_serving.py [--shape benchmarks/shapes/qwen3-8b] [--rates 8,16,24] [--out benchmarks/results]

Starts this project's server with random weights of the shape and loads it with `mini-sglang bench serving`. Requests
are token ids and answers are counted in token ids (/generate), so a tokenizer that knows only bytes will do. Writes
serving-online.json, serving-online.png (the curves) and serving-prefix.json.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from mini_sglang.cli import main as mini_sglang

ROOT = Path(__file__).parents[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", type=Path, default=ROOT / "benchmarks" / "shapes" / "qwen3-8b")
    parser.add_argument("--rates", default="8,16,24,32,48", help="requests per second that the search starts from")
    parser.add_argument(
        "--requests", help="of each run; default: 20 s of each rate, and 240 that share their beginning"
    )
    parser.add_argument("--input", default="256:1792", help="prompt tokens of the online runs")
    parser.add_argument("--output", default="128:384", help="tokens of their answers")
    parser.add_argument(
        "--prefix", type=int, default=3072, help="shared tokens of the prefix-heavy run, and an eighth own"
    )
    parser.add_argument("--slo", default="ttft=500,itl_p99=50", help="limits of a good request, in ms")
    parser.add_argument("--good", default="0.95", help="share of good requests at the highest rate")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results")
    parser.add_argument("--port", type=int, default=8379)
    parser.add_argument("server", nargs="*", help="after --: more options of the server")
    args = parser.parse_args()
    url = f"http://127.0.0.1:{args.port}"
    vocab_size = json.loads((args.shape / "config.json").read_text())["vocab_size"]
    load = ["bench", "serving", "--url", url, "--vocab", f"100:{vocab_size - 1}", "--api", "generate", "--warmup", "8",
            "--slo", args.slo]  # fmt: skip
    requests = ["--num-requests", args.requests] if args.requests else []
    online = [*requests, "--sweep", args.rates, "--good", args.good, "--input-length", args.input,
              "--output-length", args.output, "--json", str(args.out / "serving-online.json")]  # fmt: skip
    prefix = ["--num-requests", args.requests or "240", "--concurrency", "32",
              "--input-length", str(args.prefix * 9 // 8), "--shared-prefix", str(args.prefix), "--prefix-groups", "8",
              "--output-length", args.output, "--json", str(args.out / "serving-prefix.json")]  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        write_model(args.shape, Path(folder))
        command = [sys.executable, "-m", "mini_sglang.server", "--model", folder, "--load-format", "dummy"]
        with subprocess.Popen([*command, "--port", str(args.port), "--no-access-log", *args.server]) as server:
            try:
                until_healthy(url, server)
                statuses = [
                    mini_sglang([*load, *online, "--plot", str(args.out / "serving-online.png")]),
                    mini_sglang([*load, *prefix]),
                ]
            finally:
                server.terminate()
    if any(statuses):
        sys.exit("a run failed")


def until_healthy(url: str, server: subprocess.Popen[bytes]) -> None:
    """Return once the server answers. Raises RuntimeError if it ends before."""
    while server.poll() is None:
        try:
            urllib.request.urlopen(f"{url}/health", timeout=10)
            return
        except OSError:
            time.sleep(1)
    raise RuntimeError("the server ended before it answered")


def write_model(shape: Path, folder: Path) -> None:
    """A checkpoint without weights: the shape's config, and a tokenizer of single bytes."""
    shutil.copy(shape / "config.json", folder)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE({letter: index for index, letter in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=backend).save_pretrained(folder)


if __name__ == "__main__":
    main()
