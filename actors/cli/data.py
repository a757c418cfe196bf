"""`slimefsdp data`: prompt files of tasks, with problems to train on and problems to hold out."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence

from actors.environments import reasoning_gym
from slimefsdp.config.loader import apply_override
from slimefsdp.errors import ConfigError
from slimefsdp.io.atomic_dir import new_folder, require_free_folder
from slimefsdp.io.user_files import path_argument


def add_data_arguments(parser: argparse.ArgumentParser) -> Sequence[argparse.ArgumentParser]:
    """The sources of tasks, each with its own arguments; returns their parsers."""
    sources = parser.add_subparsers(required=True, metavar="SOURCE")
    gym = sources.add_parser("reasoning-gym", help="a data set of reasoning_gym, scored by its own functions")
    gym.add_argument("name", nargs="?", metavar="NAME", help="of the data set, e.g. chain_sum")
    gym.add_argument(
        "target", nargs="?", type=path_argument, metavar="DIR", help="new folder for train.jsonl and heldout.jsonl"
    )
    gym.add_argument("overrides", nargs="*", metavar="SETTING=VALUE", help="of the data set, e.g. max_terms=3")
    gym.add_argument("--train", type=int, default=1000, help="distinct problems to train on (default 1000)")
    gym.add_argument("--heldout", type=int, default=200, help="others, to hold out (default 200)")
    gym.add_argument("--seed", type=int, default=0, help="of the problems (default 0)")
    gym.add_argument("--instruction", default="", metavar="TEXT", help="a last line of each prompt")
    gym.add_argument("--list", action="store_true", help="print the names of all data sets, and nothing else")
    gym.add_argument("--settings", action="store_true", help="print what NAME can be set to, and nothing else")
    return [gym]


def data_command(options: argparse.Namespace) -> int:
    """Writes the two files, and prints what they hold; or prints what there is to choose from.

    Raises:
        ConfigError: as `actors.environments.reasoning_gym.distinct_problems`, or a number is out of range.
        CheckpointError: the folder is taken or cannot be written.
    """
    if options.list:
        print("\n".join(reasoning_gym.data_set_names()))
        return 0
    needed = {"NAME": options.name} | ({} if options.settings else {"DIR": options.target})
    for name, value in needed.items():
        if value is None:
            hint = "give NAME and DIR, or --list for the names, or NAME --settings"
            raise ConfigError(f"{name} is missing", field=name, hint=hint)
    if options.settings:
        print(
            "\n".join(f"{name}: {kind} = {default}" for name, kind, default in reasoning_gym.settings_of(options.name))
        )
        return 0
    for field in ("train", "heldout"):
        if (count := getattr(options, field)) < 1:
            raise ConfigError(f"--{field}={count} is no number of problems", field=f"--{field}", hint="give 1 or more")
    require_free_folder(options.target, field="DIR")
    settings: dict[str, object] = {}
    for override in options.overrides:
        apply_override(settings, override)
    train, heldout = reasoning_gym.distinct_problems(
        options.name,
        settings,
        train=options.train,
        heldout=options.heldout,
        seed=options.seed,
        instruction=options.instruction,
    )
    with new_folder(options.target) as folder:
        for name, records in (("train", train), ("heldout", heldout)):
            lines = "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records)
            (folder / f"{name}.jsonl").write_text(lines, encoding="utf-8")
    print(f"{options.target}: {len(train):,} problems to train on, {len(heldout):,} to hold out; no question twice")
    return 0
