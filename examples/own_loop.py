"""A rollout loop of one's own around slimefsdp: sample, score, train, send the new weights back.

python examples/own_loop.py configs/sort_digits_grpo.yaml run.steps=20
"""

from __future__ import annotations

import sys
from difflib import SequenceMatcher

from slimefsdp import EnginePool, PromptStream, RolloutBatch, Sample, WorkerGroup, connect, load_config, read_records

if len(sys.argv) < 2 or sys.argv[1].startswith("-"):
    print("usage: python examples/own_loop.py CONFIG.yaml [SETTING=VALUE ...]", file=sys.stderr)
    sys.exit(2)
config = load_config(sys.argv[1], sys.argv[2:])
assert config.data.train and config.run.steps, "set data.train and run.steps"
connect(config)  # a local Ray cluster, or the one at cluster.address
group = WorkerGroup.launch(config)  # one process a rank, the model loaded and sharded
engines = EnginePool.launch(config)
weights = engines.update_from(group)  # their version; engines refuse to sample before this
prompts = PromptStream(read_records(config.data, "train"), config.run.seed)

for step in range(config.run.steps):
    records = prompts.take(config.rollout.prompts_per_step)
    version, responses = engines.generate(
        [record["prompt"] for record in records], samples_per_prompt=config.rollout.samples_per_prompt, seed=(0, step)
    )
    rewards = [SequenceMatcher(None, reply.text, records[reply.prompt]["answer"]).ratio() for reply in responses]
    samples = [
        Sample(reply.tokens, reply.response_length, reward, group_id=reply.prompt, rollout_log_probs=reply.log_probs)
        for reply, reward in zip(responses, rewards, strict=True)
    ]
    batch = RolloutBatch.from_samples(samples, temperature=config.rollout.temperature, weight_version=version)
    metrics = group.train_step(batch)
    weights = engines.update_from(group)
    mean = sum(rewards) / len(rewards)
    print(f"step {step + 1}: reward {mean:.3f}, {metrics['updates']:.0f} updates, weights {weights}")

engines.shutdown()
group.shutdown()
