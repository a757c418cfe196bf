"""Reads the records that a run trains on and evaluates with; refuses or leaves out records that are too long.

Importing this module imports neither torch nor transformers; tokens are counted in a side process.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from actors.model_folders import DOWNLOADED, NotHere, recorded_settings
from actors.rollout.data_sets import DataSource, fetched
from actors.rollout.demonstrations import Demonstration, encoded_demonstrations, prompt_lengths
from actors.rollout.prompts import PromptStream, digest_of
from actors.rollout.records import (
    Record,
    check_answers,
    demonstrations,
    form_of,
    place_of,
    read_demonstrations,
    read_pairs,
    read_records,
)
from actors.rollout.rewards import READ_ANSWERS
from actors.run_dir import RunFolder
from actors.startup import stage
from slimefsdp.config import RunConfig
from slimefsdp.config.data import heldout_field
from slimefsdp.errors import ConfigError
from slimefsdp.io.hub import HubId, is_out_of_reach
from slimefsdp.models.hf_folder import made_by, read_model_folder
from slimefsdp.rpc import ROLES


@dataclass(frozen=True, slots=True)
class Skipped:
    place: str  # file:line, or the place of a row
    reason: str


@dataclass(frozen=True, slots=True)
class Prompts:
    """Holds the records of data.train and of each held-out set in file order, without those in `skipped`."""

    train: list[Record]
    heldout: dict[str, list[Record]]  # by name, as in `DataSettings.heldout_sets`
    skipped: list[Skipped] = field(default_factory=list)
    # if tokens were counted: the tokens of the longest prompt of train, of the longest prompt of the evaluated held-out
    # sets, and of each prompt of train
    longest: int = 0
    longest_heldout: int = 0
    train_lengths: list[int] = field(default_factory=list)
    # with sft and dpo, the encoded records; sft may split a record, and dpo encodes a pair as two demonstrations, the
    # chosen response first
    demonstrations: list[Demonstration] = field(default_factory=list)
    heldout_demonstrations: dict[str, list[Demonstration]] = field(default_factory=dict)


def with_data_commits(config: RunConfig) -> RunConfig:
    """Downloads the data sets of the hub, and returns the settings with a commit in the id of each data set.

    An id without a revision gets the newest commit, or in a resumed run the commit with which the run began.

    Raises:
        ConfigError, ResourceError: as in `actors.rollout.data_sets.fetched`.
    """
    recorded, resolved = _recorded_sources(config), dict[str, Path]()
    for name, written in config.data.sources.items():
        source = DataSource.of(written)
        if source.hub_id is None:
            continue
        begun_with = DataSource.of(recorded[name]).hub_id if name in recorded else None
        hub_id = source.hub_id
        if hub_id.revision is None and begun_with is not None and begun_with.name == hub_id.name:
            hub_id = begun_with
        commit = HubId(hub_id.name, fetched(hub_id, name).name)
        resolved[name] = Path(str(replace(source, hub_id=commit)))
    return config.model_copy(update={"data": config.data.with_sources(resolved)}) if resolved else config


def data_to_look_at(config: RunConfig) -> tuple[RunConfig, list[NotHere]]:
    """Resolves the commits of data sets like `with_data_commits`, but does not fail if sources are missing.

    Returns:
        The settings and the missing sources; if there are any, the settings are unchanged.

    Raises:
        As `with_data_commits`, except for a hub that cannot be reached.
    """
    absent: list[NotHere] = []
    for name, written in config.data.sources.items():
        source = DataSource.of(written)
        if source.is_table and find_spec("datasets") is None:
            needs = "read by the package datasets, which is not installed; the `data` extra brings it"
            absent.append(NotHere(name, str(written), needs))
        elif source.hub_id is not None:
            try:
                fetched(source.hub_id, name)
            except ConfigError as error:
                if not is_out_of_reach(error):
                    raise
                absent.append(NotHere(name, str(written), DOWNLOADED))
        elif (command := made_by(written)) is not None:
            absent.append(NotHere(name, str(written), f"`{command}` makes it"))
    return (config, absent) if absent else (with_data_commits(config), absent)


def _recorded_sources(config: RunConfig) -> dict[str, str]:
    """Returns setting -> data source, as recorded when the run to be resumed was last started."""
    data = recorded_settings(config).get("data")
    if not isinstance(data, dict):
        return {}
    heldout = data.get("heldout")
    sets = heldout if isinstance(heldout, dict) else {"": heldout}
    named = {"data.train": data.get("train"), **{heldout_field(name): written for name, written in sets.items()}}
    return {name: written for name, written in named.items() if isinstance(written, str)}


def read_prompts(config: RunConfig) -> Prompts:
    """Reads the records of data.train and of all held-out sets, of any length.

    Raises:
        ConfigError: a record or file is invalid; the message names file and line, or data set and row.
    """
    train = read_set(config, "data.train")
    if _reads_answers(config):
        check_answers(train, field="data.train")
    return Prompts(train, _read_heldout(config))


def read_set(config: RunConfig, field: str) -> list[Record]:
    """Reads the records that one setting names, such as data.train, in the form that the algorithm needs.

    Raises:
        ConfigError: as in `read_prompts`.
    """
    read = {"sft": read_demonstrations, "dpo": read_pairs}.get(config.algorithm, read_records)
    return read(config.data, field.removeprefix("data."))


def read_heldout(config: RunConfig) -> Prompts:
    """Reads the held-out records that are short enough; `train` of the result has the same records.

    Raises:
        As `read_prompts` and `without_overlong`.
    """
    heldout, skipped = _read_heldout(config), list[Skipped]()
    counts = _sampled_counts(config, [], _all(heldout))
    heldout = _short_heldout(config, heldout, counts, skipped)
    longest = _longest(_all(heldout), counts)
    return Prompts(_all(heldout), heldout, skipped, longest, longest)


def _read_heldout(config: RunConfig) -> dict[str, list[Record]]:
    records_of = {name: read_set(config, heldout_field(name)) for name in config.data.heldout_sets}
    if _reads_answers(config) and config.evaluation.interval_steps is not None:
        for name, records in records_of.items():
            check_answers(records, field=heldout_field(name))
    return records_of


def _reads_answers(config: RunConfig) -> bool:
    """Returns whether the reward is a function of this project, all of which read the record's `answer`."""
    return config.rollout.reward in READ_ANSWERS


def _all(sets: Mapping[str, list[Record]]) -> list[Record]:
    return [record for records in sets.values() for record in records]


def without_overlong(config: RunConfig, prompts: Prompts) -> Prompts:
    """Returns the records that are short enough; with rollouts, the longest possible response counts as well.

    Raises:
        ConfigError: a record is too long with data.overlong_prompts=error; all records of a set are too long; a record
            cannot be encoded; a stage of rollout.curriculum admits no prompt.
        ModelError: the model folder has no usable tokenizer.
        ResourceError: counting took too long.
    """
    if not config.has_rollouts:
        return _demonstrations_of(config, prompts)
    evaluates = config.evaluation.interval_steps is not None
    evaluated = _all(prompts.heldout) if evaluates else []
    counts = _sampled_counts(config, prompts.train, evaluated)
    skipped: list[Skipped] = []
    train = _short_enough(config, "data.train", prompts.train, counts, _limits(config), skipped)
    heldout = _short_heldout(config, prompts.heldout, counts, skipped) if evaluates else prompts.heldout
    evaluated = _all(heldout) if evaluates else []
    train_lengths = [counts[id(record)][0] for record in train]
    _check_stages(config, min(train_lengths))
    longest, longest_heldout = _longest(train, counts), _longest(evaluated, counts)
    return Prompts(train, heldout, skipped, longest, longest_heldout, train_lengths)


def with_steps_left(config: RunConfig, prompts: Prompts) -> RunConfig:
    """Returns settings with the number of steps that follows from run.epochs and the records.

    For a resumed run this accounts for the records that were used up to the newest checkpoint.

    Raises:
        ConfigError: as in `RunConfig.with_steps_of`.
        CheckpointError: the checkpoint is of a run with other records, as in `PromptStream.restore`.
    """
    count, state = len(prompts.demonstrations), dict[str, Any]()
    if config.run.dir is not None and config.checkpoint.resume:
        state = RunFolder(config.run.dir).newest_loop_state
    if type(state.get("step")) is not int or type(state.get("prompts")) is not dict:
        return config.with_steps_of(count)  # loading the checkpoint refuses such a state
    each = 2 if config.algorithm == "dpo" else 1
    num_records = len(prompts.train) if config.has_rollouts else count // each
    stream = PromptStream(range(num_records), config.run.seed, digest=digest_of(prompts.train))
    stream.restore(state["prompts"], allow_changed=config.data.allow_changed)
    return config.with_steps_of(count, step=state["step"], passed=stream.records_passed * each)


def _demonstrations_of(config: RunConfig, prompts: Prompts) -> Prompts:
    """Encodes the records of sft or dpo, and applies data.overlong_prompts to records that are too long.

    Raises:
        As `without_overlong`.
    """
    evaluated = prompts.heldout if config.evaluation.interval_steps is not None else {}
    sets = {"data.train": prompts.train} | {heldout_field(name): items for name, items in evaluated.items()}
    records = [record for items in sets.values() for record in items]
    with stage(f"encoding {len(records)} records", is_short=True):
        shown = demonstrations(records) if config.algorithm == "dpo" else records
        timeout_s = config.cluster.call_timeout_s
        encoded = encoded_demonstrations(config.model.path, shown, data=config.data, timeout_s=timeout_s)
    each = len(shown) // len(records)
    known = {id(record): encoded[each * index : each * (index + 1)] for index, record in enumerate(records)}
    skipped: list[Skipped] = []
    fitted = {name: _fitted(config, name, items, known, skipped) for name, items in sets.items()}
    train, trained = fitted["data.train"]
    heldout = {name: fitted[heldout_field(name)] for name in evaluated}
    return Prompts(
        train,
        prompts.heldout | {name: kept for name, (kept, _) in heldout.items()},
        skipped,
        demonstrations=trained,
        heldout_demonstrations={name: items for name, (_, items) in heldout.items()},
    )


def _fitted(
    config: RunConfig,
    name: str,
    records: Sequence[Record],
    known: Mapping[int, Sequence[Demonstration]],
    skipped: list[Skipped],
) -> tuple[list[Record], list[Demonstration]]:
    """Returns the records of a set that are short enough, and their demonstrations.

    With sft a record that is too long may be cut or split (data.overlong_prompts). With dpo each response with its
    prompt must fit into a sample, and both samples of a pair into a pack.
    """
    limits = _limits_of_demonstrations(config)
    pieces = {id(record): known[id(record)] for record in records}
    passes = [(limits, False)]
    if config.algorithm == "sft":
        most, overlong = min(limit.tokens for limit in limits), config.data.overlong_prompts
        pieces = {id(record): _cut(known[id(record)][0], most, overlong, form_of(record)) for record in records}
    else:
        passes = [([limit for limit in limits if limit.is_of_packs == packs], packs) for packs in (False, True)]
    kept = list(records)
    for limits_of_pass, adds_up in passes:
        counts = {}
        for record in kept:
            longest = max(pieces[id(record)], key=lambda demonstration: len(demonstration.tokens))
            whole = sum(len(piece.tokens) for piece in pieces[id(record)]) if adds_up else len(longest.tokens)
            counts[id(record)] = (longest.prompt_length, whole - longest.prompt_length)
        kept = _short_enough(config, name, kept, counts, limits_of_pass, skipped)
    return kept, [piece for record in kept for piece in pieces[id(record)]]


def _cut(demonstration: Demonstration, most: int, option: str, form: str | None) -> list[Demonstration]:
    """Returns a demonstration in pieces of at most `most` tokens, or unchanged if it fits or may not be cut.

    Args:
        option: the value of data.overlong_prompts.
        form: the form of the record; only the form `text` can be split.
    """
    if len(demonstration.tokens) <= most:
        return [demonstration]
    if option == "split" and form == "text":
        return demonstration.split(most)
    beginning = demonstration.truncated(most) if option == "truncate" else None
    return [demonstration if beginning is None else beginning]


def _limits_of_demonstrations(config: RunConfig) -> list[_Limit]:
    limits, most = _limits(config), config.data.max_tokens
    own = [] if most is None else [_Limit(most, f"data.max_tokens={most}", "raise data.max_tokens")]
    return [*own, *limits]


def _check_stages(config: RunConfig, shortest: int) -> None:
    """Checks that every stage of the curriculum admits a prompt; `shortest` is the shortest prompt's tokens."""
    for limits in config.rollout.curriculum:
        if limits.max_prompt_tokens is not None and limits.max_prompt_tokens < shortest:
            raise ConfigError(
                f"rollout.curriculum admits prompts of max_prompt_tokens={limits.max_prompt_tokens} from step "
                f"{limits.from_step} on, and the shortest of {config.data.train} has {shortest} tokens",
                field="rollout.curriculum",
                hint=f"raise it to {shortest} or more, or give data.train shorter prompts",
            )


_Counts = Mapping[int, tuple[int, int]]
"""id() of a record -> tokens of its prompt, and tokens of its answer or (with rollouts) of the longest response."""


def _longest(records: Sequence[Record], counts: _Counts) -> int:
    return max((counts[id(record)][0] for record in records), default=0)


def _sampled_counts(config: RunConfig, train: Sequence[Record], evaluated: Sequence[Record]) -> _Counts:
    records = [*train, *evaluated]
    with stage(f"loading the tokenizer and counting the tokens of {len(records)} records", is_short=True):
        timeout_s = config.cluster.call_timeout_s
        lengths = prompt_lengths(config.model.path, records, data=config.data, timeout_s=timeout_s)
    most = [config.sampling(evaluates=False).max_new_tokens] * len(train)
    most += [config.sampling(evaluates=True).max_new_tokens] * len(evaluated)
    return dict(zip(map(id, records), zip(lengths, most, strict=True), strict=True))


@dataclass(frozen=True, slots=True)
class _Limit:
    tokens: int
    source: str
    hint: str
    is_of_packs: bool = False


def most_sample_tokens(config: RunConfig) -> int:
    """Returns the most tokens of a sample that can be trained on, prompt included."""
    return min(limit.tokens for limit in _limits(config))


def _limits(config: RunConfig) -> list[_Limit]:
    most, cp = config.max_pack_tokens, config.mesh.cp
    source = f"batch.max_tokens_per_rank={config.batch.max_tokens_per_rank}" + (f" x mesh.cp={cp}" if cp > 1 else "")
    if config.has_rollouts and config.loss.policy == "dpo":
        most, source = most // 2, f"half of {source}, as loss.policy=dpo packs pairs"
    limits = [_Limit(most, source, "raise batch.max_tokens_per_rank", is_of_packs=True)]
    for path, name in dict.fromkeys(config.folder_of(role) for role in ROLES):
        positions = read_model_folder(path, field=name, with_weights=False).max_sample_tokens
        if positions is not None:
            limits.append(_Limit(positions, f"the positions that {path} learned", "use a model with more"))
    return limits


def _limits_of_heldout(config: RunConfig) -> list[_Limit]:
    """Returns the limits on held-out samples. These are not packed, but no episode may be longer than a pack."""
    if config.rollout.environment is not None:
        return _limits(config)
    limits = [limit for limit in _limits(config) if not limit.is_of_packs]
    if config.rollout.engine_python is not None:
        source = f"the length of a pack ({config.max_pack_tokens}), for which engines' servers are started"
        limits.append(_Limit(config.max_pack_tokens, source, "raise batch.max_tokens_per_rank"))
    return limits


def _short_heldout(
    config: RunConfig, sets: Mapping[str, list[Record]], counts: _Counts, skipped: list[Skipped]
) -> dict[str, list[Record]]:
    limits = _limits_of_heldout(config)
    return {
        name: _short_enough(config, heldout_field(name), records, counts, limits, skipped)
        for name, records in sets.items()
    }


def _short_enough(
    config: RunConfig,
    name: str,
    records: Sequence[Record],
    counts: _Counts,
    limits: Sequence[_Limit],
    skipped: list[Skipped],
) -> list[Record]:
    """Returns the records within all limits; raises a ConfigError for the other records, or adds them to `skipped`."""
    kept: list[Record] = []
    too_long: list[tuple[Record, str, str]] = []
    setting = config.sampling(evaluates=name != "data.train").length_setting
    for record in records:
        fault = _fault(config, *counts[id(record)], limits, setting)
        if fault is None:
            kept.append(record)
        else:
            too_long.append((record, *fault))
    if not too_long:
        return kept
    (first, reason, hint), file = too_long[0], config.data.sources[name]
    if config.data.overlong_prompts in ("error", "split"):
        more = f"; so are {len(too_long) - 1} more of {len(records)} records" if len(too_long) > 1 else ""
        raise ConfigError(
            f"{place_of(first)}: too long: {reason}{more}",
            field=name,
            hint=f"shorten or remove it, {hint}, or leave such records out: data.overlong_prompts=skip"
            + (", or cut off their ends: truncate" if config.algorithm == "sft" else ""),
        )
    if not kept:
        raise ConfigError(
            f"{file}: all {len(records)} records are too long, the first with {reason}", field=name, hint=hint
        )
    print(
        f"{name}: {len(too_long)} of {len(records)} records are too long and left out, the first at "
        f"{place_of(first)}: {reason}",
        file=sys.stderr,
    )
    skipped += [Skipped(place_of(record), reason) for record, reason, _ in too_long]
    return kept


def _fault(
    config: RunConfig, prompt: int, response: int, limits: Sequence[_Limit], setting: str
) -> tuple[str, str] | None:
    """Returns why a record is too long, and a hint on how to admit it; None means that it is not too long.

    Args:
        prompt, response: numbers of tokens.
        setting: the setting that limits the length of a response.
    """
    longest = config.data.max_prompt_tokens
    if longest is not None and prompt > longest:
        return f"{prompt} tokens of prompt, and data.max_prompt_tokens={longest}", "raise data.max_prompt_tokens"
    of_episode = None if config.rollout.environment is None else config.environment.max_tokens
    if of_episode is not None and prompt >= of_episode:
        return f"{prompt} tokens of prompt, and environment.max_tokens={of_episode}", "raise environment.max_tokens"
    tightest = min(limits, key=lambda limit: limit.tokens, default=None)
    if tightest is None or prompt + response <= tightest.tokens:
        return None
    what = f"{setting}={response}" if config.has_rollouts else f"{response} of answer"
    if config.algorithm == "dpo":
        what = f"{response} of " + ("a response and the other sample" if tightest.is_of_packs else "a response")
    hint = tightest.hint + (f" or lower {setting}" if config.has_rollouts else "")
    return f"{prompt} tokens of prompt and {what} are more than {tightest.tokens}, {tightest.source}", hint
