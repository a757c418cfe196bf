"""Supervised training by the ranks of torchrun: what it computes, how it ends, and that Ray's ranks do the same."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoTokenizer

from actors.cli.preflight import Checked
from actors.cli.torchrun import train_as_rank
from actors.loop import train
from actors.rollout.demonstrations import Demonstration
from actors.rollout.prompt_files import Prompts, read_prompts, with_steps_left, without_overlong
from actors.rollout.prompts import PromptStream
from actors.rollout.records import Record
from actors.run_dir import RunFolder
from actors.signals import Interrupts
from actors.supervised_loops import DpoLoop, SftLoop
from actors.torchrun import TorchrunGroup, follow
from slimefsdp.checkpoint.store import CheckpointStore
from slimefsdp.config import RunConfig, config_from_dict, load_config
from slimefsdp.data.rollout_batch import RolloutBatch
from slimefsdp.errors import CheckpointError, SlimeError
from tests.support.float64 import KeepFloat64
from tests.support.rank_pool import RankPool
from tests.support.runs import bits, rows_of
from tests.support.tiny_models import plain_model

ROOT = Path(__file__).parents[2]
RECORDS, EPOCHS, SAMPLES = 7, 2, 4  # four updates, the last with two records


def chats(example: Path, folder: Path) -> Path:
    """Some of the example's chats, of one to three turns."""
    path = folder / "chats.jsonl"
    path.write_text("".join((example / "chats.jsonl").read_text().splitlines(keepends=True)[:RECORDS]))
    return path


def preset(example: Path, folder: Path, *more: str) -> RunConfig:
    overrides = [f"model.path={example / 'model'}", f"data.train={chats(example, folder)}"]
    overrides += [f"data.heldout={example / 'heldout.jsonl'}#[:5]", f"run.dir={folder / 'run'}", "mesh.dp=auto"]
    overrides += [f"run.export_dir={folder / 'run' / 'model'}", f"batch.samples_per_update={SAMPLES}"]
    overrides += ["optim.schedule=constant", "optim.warmup_updates=0", "evaluation.interval_steps=3", *more]
    tree_without_floor = (ROOT / "configs" / "sft_messages.yaml").read_text().replace("  min_lr_ratio: 0.05\n", "")
    file = folder / "preset.yaml"
    file.write_text(tree_without_floor)
    return load_config(file, overrides)


def run_as_rank(rank: int, config: RunConfig) -> str | None:
    """The closing line, of rank 0."""
    with KeepFloat64():
        return follow() if rank else train(config, launch=TorchrunGroup.launch)  # type: ignore[func-returns-value]


def trained(tokenizer: Any, tokens: list[int]) -> list[bool]:
    """Which tokens of a chat the assistant wrote, told by the words before and behind them."""
    opening = tokenizer.encode("<|im_start|>assistant\n", add_special_tokens=False)
    (end,) = tokenizer.encode("<|im_end|>", add_special_tokens=False)
    found, is_inside = [], False
    for place in range(len(tokens)):
        is_inside = is_inside or (place >= len(opening) and tokens[place - len(opening) : place] == opening)
        found.append(is_inside)
        is_inside = is_inside and not (place and tokens[place - 1] == end)  # the line's end is the turn's last token
    return found


def plain_run(config: RunConfig, records: list[dict[str, Any]]) -> tuple[list[float], dict[str, torch.Tensor]]:
    """The losses of each update and the weights, by one plain process that takes one chat after the other."""
    tokenizer = AutoTokenizer.from_pretrained(config.model.path)
    model = plain_model(config.model.path, torch.float64)
    optim = config.optim
    optimizer = torch.optim.SGD(model.parameters(), optim.lr, momentum=optim.momentum)
    order = PromptStream(records, config.run.seed).take(EPOCHS * RECORDS)
    losses = []
    with KeepFloat64():
        for start in range(0, len(order), SAMPLES):
            encoded: list[Any] = [
                tokenizer.apply_chat_template(one["messages"], return_dict=False)
                for one in order[start : start + SAMPLES]
            ]
            masks = [trained(tokenizer, tokens) for tokens in encoded]
            count = sum(map(sum, masks))
            for tokens, mask in zip(encoded, masks, strict=True):
                log_probs = model(torch.tensor([tokens])).logits[0, :-1].log_softmax(-1)
                taken = log_probs.gather(-1, torch.tensor(tokens[1:])[:, None])[:, 0]
                (-taken[torch.tensor(mask[1:])].sum() / count).backward()
                losses.append((start, -taken[torch.tensor(mask[1:])].sum().item() / count))
            optimizer.step()
            optimizer.zero_grad()
    by_update = [sum(loss for place, loss in losses if place == start) for start in range(0, len(order), SAMPLES)]
    return by_update, {name: value.detach() for name, value in model.named_parameters()}


@pytest.mark.parametrize("world", [1, 2])
def test_losses_and_weights_on_chats_equal_plain_pytorch_in_float64(
    example: Path, tmp_path: Path, ranks: RankPool, world: int
) -> None:
    sgd = ("optim.name=sgd", "optim.lr=0.01", "optim.max_grad_norm=0")
    config = preset(example, tmp_path, "precision.compute_dtype=float64", *sgd)
    records = [json.loads(line) for line in chats(example, tmp_path).read_text().splitlines()]
    assert {len(one["messages"]) for one in records} > {2}, "several turns"
    closing, *others = ranks.run(world, run_as_rank, config)
    assert closing is not None and f"{world} FSDP2 rank" in closing and others == [None] * (world - 1)
    losses, weights = plain_run(config, records)
    rows = rows_of(config)
    assert [row["epoch"] for row in rows[1:]] == [4 / 7, 8 / 7, 12 / 7, 2]
    assert [row["loss"] for row in rows[1:]] == pytest.approx(losses, rel=1e-12)
    assert config.run.export_dir is not None
    found = load_file(config.run.export_dir / "model.safetensors")
    assert max((found[name] - weights[name]).abs().max().item() for name in found) < 1e-12
    assert {name for name, value in found.items() if value.dtype != torch.float64} == set()


def test_the_loss_of_held_out_records_is_logged_when_it_is_due(example: Path, tmp_path: Path, ranks: RankPool) -> None:
    config = preset(example, tmp_path, "run.steps=4")
    ranks.run(1, run_as_rank, config)
    rows = rows_of(config)
    assert ["eval/loss" in row for row in rows] == [True, False, False, True, True]
    tokenizer = AutoTokenizer.from_pretrained(config.model.path)
    total, count = 0.0, 0
    for line in (example / "heldout.jsonl").read_text().splitlines()[:5]:
        record = json.loads(line)
        asked = [{"role": "user", "content": record["prompt"]}]
        prompt = tokenizer.apply_chat_template(asked, add_generation_prompt=True, return_dict=False)
        answer = [*tokenizer.encode(record["answer"]), tokenizer.eos_token_id]
        logits = plain_model(config.model.path, torch.float32)(torch.tensor([[*prompt, *answer]])).logits[0]
        log_probs = logits[len(prompt) - 1 : -1].log_softmax(-1)
        total -= log_probs.gather(-1, torch.tensor(answer)[:, None]).sum().item()
        count += len(answer)
    assert rows[0]["eval/loss"] == pytest.approx(total / count, rel=1e-6)
    assert rows[-1]["eval/loss"] < rows[0]["eval/loss"]


def refused_as_rank(rank: int, config: RunConfig) -> str | None:
    """The field of the error on this rank."""
    with pytest.raises(CheckpointError) as caught:
        if rank:
            follow()
        else:
            group = TorchrunGroup.launch(config)
            try:
                group.load("latest")
            finally:
                group.shutdown()  # in which no other rank takes part any more
    return caught.value.field


def test_an_error_of_a_call_is_raised_by_every_rank_which_then_ends(
    example: Path, tmp_path: Path, ranks: RankPool
) -> None:
    first, second = ranks.run(2, refused_as_rank, preset(example, tmp_path))
    assert first == second is not None


class Counting:
    """A group that trains nothing and counts."""

    def __init__(self) -> None:
        self.sizes: list[int] = []

    def train_step(self, batch: RolloutBatch) -> dict[str, float]:
        self.sizes.append(batch.num_samples)
        return {"loss": 0.0}


def sizes_of_a_run(folder: Path, epochs: int, records: int, *, algorithm: str = "sft", stop: int = 99) -> list[int]:
    """The samples of each update of a run, or of one that is resumed, which leaves a checkpoint at step `stop`."""
    each = 2 if algorithm == "dpo" else 1
    train = [Record({"text": str(number)}, f"file:{number}") for number in range(records)]
    prompts = Prompts(train, {}, demonstrations=[Demonstration(np.arange(5), 4) for _ in range(each * records)])
    state = RunFolder(folder).newest_loop_state
    tree: dict[str, Any] = {"algorithm": algorithm, "run": {"dir": str(folder), "epochs": epochs}}
    tree |= {"model": {"path": "x"}, "batch": {"samples_per_update": SAMPLES * each}}
    tree |= {"data": {"train": "x", "allow_changed": True}, "checkpoint": {"resume": bool(state)}}
    config, group = with_steps_left(config_from_dict(tree), prompts), Counting()
    loop = (DpoLoop if each == 2 else SftLoop)(config, group, prompts)
    if state:
        loop.prompts.restore(state["prompts"], allow_changed=True)
    assert config.run.steps is not None and config.total_updates == config.run.steps
    end = min(stop, config.run.steps)
    for step in range(state.get("step", 0), end):
        loop.step(step)
    store = CheckpointStore.of_run(folder)
    store.begin(end)
    store.commit(end, {"loop_state": {"step": end, "prompts": loop.prompts_state()}}, [])
    return group.sizes


@pytest.mark.parametrize("algorithm", ["sft", "dpo"])
def test_a_resumed_run_trains_on_what_its_epochs_leave(tmp_path: Path, algorithm: str) -> None:
    each = 2 if algorithm == "dpo" else 1

    def sizes(name: str, epochs: int, records: int, stop: int = 99) -> list[int]:
        found = sizes_of_a_run(tmp_path / name, epochs, records, algorithm=algorithm, stop=stop)
        return [size // each for size in found]

    whole = sizes("whole", 2, 10)
    assert whole == [4, 4, 4, 4, 4] == sizes("stopped", 2, 10, stop=3) + sizes("stopped", 2, 10)
    assert sizes("more epochs", 1, 10) == [4, 4, 2] and sizes("more epochs", 2, 10) == [4, 4, 2]
    assert sizes("fewer epochs", 3, 10, stop=4) == [4] * 4 and sizes("fewer epochs", 1, 10) == []
    assert sizes("more records", 3, 40, stop=15) == [4] * 15 and sizes("more records", 3, 80) == [4] * 20
    assert sizes("fewer records", 3, 40, stop=15) == [4] * 15 and sizes("fewer records", 3, 8) == [4, 4]


class Asked(Interrupts):
    """Somebody has asked for an end before the first step was done."""

    def step_done(self, step: int) -> bool:
        return True


def command_as_rank(rank: int, config: RunConfig, prompts: Prompts) -> int | str:
    """What the command under torchrun returns on this rank, or the error that it raises."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    checked = Checked(config.with_ranks(2), prompts, [], [])
    with (
        mock.patch.dict(os.environ, RANK=str(rank), WORLD_SIZE="2"),
        mock.patch("actors.cli.torchrun.check_before_launch", lambda *_, **__: checked),
        mock.patch("actors.cli.torchrun.Interrupts", Asked),
        mock.patch("slimefsdp.distributed.mesh.start_process_group_from_environment"),  # the pool has started it,
        mock.patch("torch.distributed.destroy_process_group"),  # and ends it
    ):
        try:
            return train_as_rank(config)
        except SlimeError as error:
            return type(error).__name__
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)


def test_all_ranks_of_torchrun_end_when_rank_0_raises_between_calls(
    example: Path, tmp_path: Path, ranks: RankPool
) -> None:
    config = preset(example, tmp_path, "checkpoint.interval_steps=4")
    prompts = without_overlong(config, read_prompts(config))
    assert ranks.run(2, command_as_rank, config, prompts) == ["Interrupted", 0]


def test_the_command_under_torchrun_leaves_what_the_ranks_of_ray_leave(
    cluster: None, example: Path, tmp_path: Path
) -> None:
    for name in ("ray", "torchrun"):
        (tmp_path / name).mkdir()
    of_ray = preset(example, tmp_path / "ray", "mesh.dp=2")
    train(of_ray)
    under = preset(example, tmp_path / "torchrun")  # whose mesh is that of its ranks
    overrides = [f"data.train={under.data.train}", f"data.heldout={under.data.heldout}", f"run.dir={under.run.dir}"]
    overrides += [f"model.path={example / 'model'}", f"run.export_dir={under.run.export_dir}", "mesh.dp=auto"]
    overrides += [f"batch.samples_per_update={SAMPLES}", "optim.schedule=constant", "optim.warmup_updates=0"]
    launcher: list[Any] = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [*launcher, "-m", "actors.cli", "train", tmp_path / "torchrun" / "preset.yaml", *overrides]
    command += ["evaluation.interval_steps=3"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "SFT on 2 FSDP2 ranks" in done.stdout and "curves.png" in done.stdout and "Ray" not in done.stderr
    assert [bits(row) for row in rows_of(under)] == [bits(row) for row in rows_of(of_ray)]
    exported = [config.run.export_dir for config in (of_ray, under)]
    first, second = (
        hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest() for folder in exported if folder
    )
    assert first == second
