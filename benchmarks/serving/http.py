"""forward_backward through HTTP and directly, on the same settings: by turns, with the same batches.

A server has a rank of its own; this process has another one, and is the client. A round is a forward_backward through
each, in an order that is swapped from round to round; an update follows untimed, so that each begins without gradients.
The time of HTTP is from datums to their log-probs as arrays, that of the group from a batch to its log-probs.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks.rpc_overhead import interval_of_median
from benchmarks.serving.server import KEY, NAME, RANK, serving, settings, write_model

SHAPES: dict[str, dict[str, int]] = {
    "tiny": {
        "vocab_size": 320, "hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 2048,
    },
    "small": {
        "vocab_size": 32_000, "hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 4,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "max_position_embeddings": 2048,
    },
}  # fmt: skip
LENGTH = 512  # of a datum, its last target included
PACK = 4096
LEAST, ENOUGH = 0.9, 8192  # of the group's rate, for batches of so many tokens
Pass = Callable[[], npt.NDArray[np.float32]]


def through_http(folder: Path, shape: str, sizes: list[int], rounds: int) -> dict[str, Any]:
    """By tokens of a batch: seconds of both, and the group's over HTTP's, which is HTTP's rate over the group's."""
    import tinker
    from tinker import types

    from actors.fault_tolerance.supervisor import SupervisedGroup
    from slimefsdp.config import config_from_dict
    from slimefsdp.data.rollout_batch import RolloutBatch
    from slimefsdp.rpc import UpdateSettings

    os.environ["TINKER_TELEMETRY"] = "0"
    write_model(folder / "model", SHAPES[shape])
    tree = settings(folder / "model", folder, batch={"max_tokens_per_rank": PACK})
    adam = types.AdamParams(learning_rate=0.0, eps=1e-8)
    still = UpdateSettings(lr=0.0, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0, max_grad_norm=0.0)
    found: dict[str, Any] = {}
    with serving(tree, folder) as server:
        group = SupervisedGroup.launch(config_from_dict({**tree, "run": {"dir": str(folder / "own")}}))
        try:
            client = tinker.ServiceClient(base_url=server.url, api_key=KEY)
            training = client.create_lora_training_client(base_model=NAME, rank=RANK, seed=1).result()
            group.create_adapter("own", rank=RANK, alpha=group.config.lora.alpha, seed=1)
            calls = group.adapter("own")

            def update() -> None:
                training.optim_step(adam).result()
                calls.optimizer_step(still)

            for size in sizes:
                rows = np.random.default_rng(size).integers(3, SHAPES[shape]["vocab_size"], (size // LENGTH, LENGTH))
                lengths = np.full(len(rows), LENGTH)
                weights = np.ones(len(rows) * (LENGTH - 1))
                batch = RolloutBatch(rows.ravel(), lengths, lengths - 1, loss_weights=weights)
                data = [
                    types.Datum(
                        model_input=types.ModelInput.from_ints(row[:-1]), loss_fn_inputs={"target_tokens": row[1:]}
                    )
                    for row in rows.tolist()
                ]

                def by_http(data: Any = data) -> npt.NDArray[np.float32]:
                    said = training.forward_backward(data, "cross_entropy").result()
                    return np.concatenate([one["logprobs"].to_numpy() for one in said.loss_fn_outputs])

                def by_group(batch: RolloutBatch = batch) -> npt.NDArray[np.float32]:
                    given = {"reduction": "token_mean"}
                    return calls.forward_backward(batch, "sft", 1.0, given, with_log_probs=True).log_probs.log_probs

                found[str(size)] = compared(by_http, by_group, update, rounds)
                print(f"{shape}, {size} tokens: {found[str(size)]}", flush=True)
            client.close("success").result()
        finally:
            group.shutdown()
    return found


def compared(by_http: Pass, by_group: Pass, update: Callable[[], None], rounds: int) -> dict[str, Any]:
    """Seconds of both in rounds behind one that warms up, and whether both had the same bits each time."""
    seconds: list[dict[str, float]] = []
    is_equal = True
    for number in range(rounds + 1):
        took: dict[str, float] = {}
        answers = []
        turns: list[tuple[str, Pass]] = [("http", by_http), ("group", by_group)]
        for name, one in turns if number % 2 else reversed(turns):
            start = time.perf_counter()
            answers.append(one())
            took[name] = time.perf_counter() - start
        is_equal &= np.array_equal(*answers)
        update()
        seconds.append(took)
    ratios = np.array([took["group"] / took["http"] for took in seconds[1:]])
    return {
        "rate_of_http": round(float(np.median(ratios)), 4),
        "rate_of_http_95": [round(edge, 4) for edge in interval_of_median(ratios)],
        "http_s": round(statistics.median(took["http"] for took in seconds[1:]), 4),
        "group_s": round(statistics.median(took["group"] for took in seconds[1:]), 4),
        "is_equal": is_equal,
        "rounds": [{name: round(value, 4) for name, value in took.items()} for took in seconds[1:]],
    }
