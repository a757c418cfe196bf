"""The records that a run trains on and evaluates with: read, and those that are too long refused or left out.

Importing this file costs no torch and no transformers; tokens are counted in a process of its own.
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
from actors.rollout.demonstrations import Demonstration, encoded_demonstrations, form_of
from actors.rollout.prompts import PromptStream, Record, check_answers, digest_of, place_of, read_records
from actors.rollout.rewards import READ_ANSWERS
from actors.rollout.supervised_records import demonstrations, read_demonstrations, read_pairs
from actors.rollout.tokenizer import count_tokens
from actors.run_dir import RunFolder
from actors.startup import stage
from slimefsdp.config import RunConfig
from slimefsdp.config.rollout import heldout_field
from slimefsdp.errors import CheckpointError, ConfigError
from slimefsdp.io.hub import HubId, is_out_of_reach
from slimefsdp.models.hf_folder import read_model_folder
from slimefsdp.models.named_shapes import made_by
from slimefsdp.rpc import ROLES


@dataclass(frozen=True, slots=True)
class Skipped:
    """A record that was left out."""

    place: str  # file:line, or that of a row
    reason: str


@dataclass(frozen=True, slots=True)
class Prompts:
    """The records of data.train and of each held-out set in file order, and those that were left out of them."""

    train: list[Record]
    heldout: dict[str, list[Record]]  # by name, as `DataSettings.heldout_sets`
    skipped: list[Skipped] = field(default_factory=list)
    # tokens of a prompt of train, and of the held-out sets that are evaluated with, where they were counted
    longest: int = 0
    longest_heldout: int = 0
    train_lengths: list[int] = field(default_factory=list)  # tokens of each prompt of train, where they were counted
    # under sft and dpo: what the records of train, and of each held-out set, come to in tokens; one record may make
    # several, and a pair makes two, the chosen response first
    demonstrations: list[Demonstration] = field(default_factory=list)
    heldout_demonstrations: dict[str, list[Demonstration]] = field(default_factory=dict)


def with_data_commits(config: RunConfig) -> RunConfig:
    """The settings with a commit behind each id of a data set: the newest, or that which a resumed run began with.

    Its files are fetched.

    Raises:
        ConfigError, ResourceError: as `actors.rollout.data_sets.read_rows`.
    """
    recorded, found = _recorded_sources(config), dict[str, Path]()
    for name, written in config.data.sources.items():
        source = DataSource.of(written)
        if source.hub_id is None:
            continue
        begun_with = DataSource.of(recorded[name]).hub_id if name in recorded else None
        asked = source.hub_id
        if asked.revision is None and begun_with is not None and begun_with.name == asked.name:
            asked = begun_with
        commit = HubId(asked.name, fetched(asked, name).name)
        found[name] = Path(str(replace(source, hub_id=commit)))
    return config.model_copy(update={"data": config.data.with_sources(found)}) if found else config


def data_to_look_at(config: RunConfig) -> tuple[RunConfig, list[NotHere]]:
    """Resolves commits of data sets without downloads: sources of records that are not here yet are listed, and left as
    they are.

    Raises:
        As `with_data_commits`, but for a hub that is out of reach.
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
    """Returns the data sources that the newest start of a run to be resumed has recorded."""
    data = recorded_settings(config).get("data")
    if not isinstance(data, dict):
        return {}
    heldout = data.get("heldout")
    sets = heldout if isinstance(heldout, dict) else {"": heldout}
    found = {"data.train": data.get("train"), **{heldout_field(name): written for name, written in sets.items()}}
    return {name: written for name, written in found.items() if isinstance(written, str)}


def read_prompts(config: RunConfig) -> Prompts:
    """The records of data.train and of all held-out sets, of any length.

    Raises:
        ConfigError: naming file and line, or data set and row.
    """
    train = read_set(config, "data.train")
    if _reads_answers(config):
        check_answers(train, field="data.train")
    return Prompts(train, _read_heldout(config))


def read_set(config: RunConfig, field: str) -> list[Record]:
    """The records that one setting names, such as data.train, in a form of the algorithm.

    Raises:
        ConfigError: naming file and line, or data set and row.
    """
    read = {"sft": read_demonstrations, "dpo": read_pairs}.get(config.algorithm, read_records)
    return read(config.data, field.removeprefix("data."))


def read_heldout(config: RunConfig) -> Prompts:
    """The records of all held-out sets that can be evaluated with, for who evaluates alone; `train` has them too.

    Raises:
        As `read_prompts` and `without_overlong`.
    """
    heldout, skipped = _read_heldout(config), list[Skipped]()
    counts = _sampled_counts(config, [], _all(heldout))
    heldout = _short_heldout(config, heldout, counts, skipped)
    longest = _longest(_all(heldout), counts)
    return Prompts(_all(heldout), heldout, skipped, longest, longest)


def _read_heldout(config: RunConfig) -> dict[str, list[Record]]:
    found = {name: read_set(config, heldout_field(name)) for name in config.data.heldout_sets}
    if _reads_answers(config) and config.evaluation.interval_steps is not None:
        for name, records in found.items():
            check_answers(records, field=heldout_field(name))
    return found


def _reads_answers(config: RunConfig) -> bool:
    """Returns whether the reward is one of ours that compares with the record's `answer`."""
    return config.rollout.reward in READ_ANSWERS


def _all(sets: Mapping[str, list[Record]]) -> list[Record]:
    return [record for records in sets.values() for record in records]


def without_overlong(config: RunConfig, prompts: Prompts) -> Prompts:
    """The records that can be trained on, or evaluated with, whatever is sampled.

    Raises:
        ConfigError: one is too long and data.overlong_prompts is error, or all of a set are; it cannot be encoded; a
            stage of rollout.curriculum admits none.
        ModelError: the model folder has no tokenizer that can be used. ResourceError: counting took too long.
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
    """Resolves the number of steps from the records; a resumed run has what its newest checkpoint leaves.

    Raises:
        ConfigError: as `RunConfig.with_steps_of`.
    """
    count, state = len(prompts.demonstrations), dict[str, Any]()
    if config.run.epochs is not None and config.run.dir is not None and config.checkpoint.resume:
        state = RunFolder(config.run.dir).newest_loop_state
    if type(state.get("step")) is not int:
        return config.with_steps_of(count)
    each = 2 if config.algorithm == "dpo" else 1
    stream = PromptStream(range(count // each), config.run.seed, digest=digest_of(prompts.train))
    try:
        stream.restore(state.get("prompts", {}), allow_changed=config.data.allow_changed)
    except CheckpointError:  # which the run raises, too, once it has loaded the checkpoint
        return config.with_steps_of(count)
    return config.with_steps_of(count, step=state["step"], passed=stream.records_passed * each)


def _demonstrations_of(config: RunConfig, prompts: Prompts) -> Prompts:
    """The records in tokens, those that are too long treated as data.overlong_prompts says.

    Raises:
        As `without_overlong`.
    """
    evaluated = prompts.heldout if config.evaluation.interval_steps is not None else {}
    sets = {"data.train": prompts.train} | {heldout_field(name): found for name, found in evaluated.items()}
    records = [record for found in sets.values() for record in found]
    with stage(f"encoding {len(records)} records", is_short=True):
        shown = demonstrations(records) if config.algorithm == "dpo" else records
        timeout_s = config.cluster.call_timeout_s
        encoded = encoded_demonstrations(config.model.path, shown, data=config.data, timeout_s=timeout_s)
    each = len(shown) // len(records)
    known = {id(record): encoded[each * place : each * (place + 1)] for place, record in enumerate(records)}
    skipped: list[Skipped] = []
    fitted = {name: _fitted(config, name, found, known, skipped) for name, found in sets.items()}
    train, trained = fitted["data.train"]
    heldout = {name: fitted[heldout_field(name)] for name in evaluated}
    return Prompts(
        train,
        prompts.heldout | {name: kept for name, (kept, _) in heldout.items()},
        skipped,
        demonstrations=trained,
        heldout_demonstrations={name: found for name, (_, found) in heldout.items()},
    )


def _fitted(
    config: RunConfig,
    name: str,
    records: Sequence[Record],
    known: Mapping[int, Sequence[Demonstration]],
    skipped: list[Skipped],
) -> tuple[list[Record], list[Demonstration]]:
    """Returns the records of a set that are short enough, and their demonstrations.

    Under sft a record that is too long may be cut or split (data.overlong_prompts). Under dpo each response has to fit
    into a sample, and both together into a pack.
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
    for limits_here, adds_up in passes:
        counts = {}
        for record in kept:
            longest = max(pieces[id(record)], key=lambda one: len(one.tokens))
            whole = sum(len(one.tokens) for one in pieces[id(record)]) if adds_up else len(longest.tokens)
            counts[id(record)] = (longest.prompt_length, whole - longest.prompt_length)
        kept = _short_enough(config, name, kept, counts, limits_here, skipped)
    return kept, [piece for record in kept for piece in pieces[id(record)]]


def _cut(one: Demonstration, most: int, how: str, form: str | None) -> list[Demonstration]:
    """A demonstration in pieces of at most so many tokens; as it is, where it fits or is not to be cut.

    Args:
        how: as data.overlong_prompts.
    """
    if len(one.tokens) <= most:
        return [one]
    if how == "split" and form == "text":
        return one.split(most)
    beginning = one.truncated(most) if how == "truncate" else None
    return [one if beginning is None else beginning]


def _limits_of_demonstrations(config: RunConfig) -> list[_Limit]:
    limits, most = _limits(config), config.data.max_tokens
    own = [] if most is None else [_Limit(most, f"data.max_tokens={most}", "raise data.max_tokens")]
    return [*own, *limits]


def _check_stages(config: RunConfig, shortest: int) -> None:
    """Every stage of the curriculum has prompts to draw."""
    for one in config.rollout.curriculum:
        if one.max_prompt_tokens is not None and one.max_prompt_tokens < shortest:
            raise ConfigError(
                f"rollout.curriculum admits prompts of max_prompt_tokens={one.max_prompt_tokens} from step "
                f"{one.from_step} on, and the shortest of {config.data.train} has {shortest} tokens",
                field="rollout.curriculum",
                hint=f"raise it to {shortest} or more, or give data.train shorter prompts",
            )


_Counts = Mapping[int, tuple[int, int]]
"""id of a record -> tokens of its prompt, and of its answer or, at most, of what is sampled."""


def _longest(records: Sequence[Record], counts: _Counts) -> int:
    return max((counts[id(record)][0] for record in records), default=0)


def _counts(config: RunConfig, records: Sequence[Record]) -> _Counts:
    """Counts the tokens of prompts."""
    with stage(f"loading the tokenizer and counting the tokens of {len(records)} records", is_short=True):
        found = count_tokens(
            config.model.path,
            records,
            with_answers=False,
            timeout_s=config.cluster.call_timeout_s,
            template_kwargs=config.data.chat_template_kwargs,
        )
    return dict(zip(map(id, records), found, strict=True))


def _sampled_counts(config: RunConfig, train: Sequence[Record], evaluated: Sequence[Record]) -> _Counts:
    """Counts the tokens of prompts with the longest responses that may be sampled."""
    found = _counts(config, [*train, *evaluated])
    most = {id(record): config.sampling(evaluates=False).max_new_tokens for record in train}
    most |= {id(record): config.sampling(evaluates=True).max_new_tokens for record in evaluated}
    return {record: (prompt, most[record]) for record, (prompt, _) in found.items()}


@dataclass(frozen=True, slots=True)
class _Limit:
    """A limit on the tokens of a whole sample."""

    tokens: int
    source: str
    hint: str
    is_of_packs: bool = False


def most_sample_tokens(config: RunConfig) -> int:
    """The most tokens of a sample that can be trained on, prompt included."""
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
    """Its records are in no pack; but an episode is never longer than one."""
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
    """The records that keep within all limits; the others are refused, or added to `skipped`."""
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
    """Why a record is too long, and the way out besides making it shorter.

    Args:
        setting: which says how long a response may be.
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
