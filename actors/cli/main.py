"""The command line `slimefsdp`: nine commands, their arguments, and how an error is printed.

A command's module is imported when the command runs, so that `--help` and shell completion are quick. An error prints
as a few lines on stderr and sets the exit status of its class; `--debug` shows the traceback instead.
"""

from __future__ import annotations

import errno
import os
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

import slimefsdp
from actors.cli.arguments import (
    Address,
    AllowWithoutToken,
    AsJson,
    Config,
    Overrides,
    WrongValue,
    one_of,
    path,
    path_as_written,
)
from slimefsdp.errors import ConfigError, ResourceError, SlimeError, printable
from slimefsdp.estimate.hardware import DEVICES

_FULL_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_LONGEST = 1000  # characters that are printed of one text
# the base of all errors of the parser, which typer has no public name for
_USAGE_ERROR: type[Exception] = typer.BadParameter.__mro__[1]
_DTYPES = ("bfloat16", "float16", "float32", "float64")

app = typer.Typer(no_args_is_help=True, pretty_exceptions_enable=False, subcommand_metavar="COMMAND")
groups = typer.Typer(help="List or stop the named groups of a Ray cluster.")
convert = typer.Typer(
    help="Convert models between Hugging Face, torch.distributed.checkpoint and checkpoint folders, offline.",
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command; returns the exit status."""
    return run_typer(app, "slimefsdp", arguments)


def run_typer(commands: typer.Typer, name: str, arguments: Sequence[str] | None = None) -> int:
    """Runs a typer program whose commands return exit statuses and raise typed errors; returns the exit status.

    Args:
        name: of the program, in its help.
        arguments: the words of the command line; None: those of this process.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    shows_tracebacks = "--debug" in words
    words = [word for word in words if word != "--debug"]  # any command takes it, at any place
    command = typer.main.get_command(commands)
    if f"_{name.upper()}_COMPLETE" in os.environ:
        command.main(prog_name=name)  # answers the shell, and ends this process
    try:
        # without `main`, which turns Ctrl-C and a closed pipe into exit statuses of its own
        with command.make_context(name, words or ["--help"]) as context:
            return int(command.invoke(context) or 0)
    except typer.Exit as end:
        return end.exit_code
    except SlimeError as error:
        if shows_tracebacks:
            raise
        return report(error)
    except _USAGE_ERROR as error:
        if shows_tracebacks:
            raise _as_config_error(error, words) from error
        return report(_as_config_error(error, words))
    except (KeyboardInterrupt, typer.Abort):
        print("interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # whoever read the output has seen enough; nothing may be flushed at exit either
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:
        if shows_tracebacks or error.errno not in _FULL_DISK:
            raise
        problem = f"{error.filename or 'a file'}: {error.strerror}"
        return report(ResourceError(problem, field="run.dir", hint="make room there, or name another folder"))


def report(error: SlimeError) -> int:
    """Prints an error on a few lines of stderr; returns the exit status of its class."""
    print(f"error [{error.code}]: {_one_line(error.message)}", file=sys.stderr)
    if error.rank is not None or error.call is not None:
        place = f"rank {error.rank}" if error.rank is not None else "driver"
        print(f"  where: {place}{f', in {error.call}' if error.call else ''}", file=sys.stderr)
    if error.field:
        print(f"  field: {_one_line(error.field)}", file=sys.stderr)
    if error.hint:
        print(f"  hint:  {_one_line(error.hint)}", file=sys.stderr)
    for other in error.others:
        print(f"  also:  {_one_line(other)}", file=sys.stderr)
    return error.exit_code


def _one_line(text: str) -> str:
    """Returns a text on one line of bounded length: other libraries' messages have many, and values may be endless."""
    text = printable(text)  # another library's may have been added to an error of ours
    line = textwrap.shorten(text, _LONGEST, placeholder=" .. (all of it: --debug)") if "\n" in text else text
    return line if len(line) <= _LONGEST else f"{line[: _LONGEST // 2]} .. {line[-_LONGEST // 4 :]}"


def _as_config_error(error: Exception, words: Sequence[str]) -> ConfigError:
    """Returns the typed error for what the parser refuses; it names the argument or option, and its value."""
    context, parameter = getattr(error, "ctx", None), getattr(error, "param", None)
    option, command = getattr(error, "option_name", None), getattr(context, "command", None)
    message: str = error.message  # type: ignore[attr-defined]
    hint = (
        getattr(error, "hint", None) or f"`{getattr(context, 'command_path', 'slimefsdp')} --help` says what it takes"
    )
    if parameter is not None:
        is_option = parameter.param_type_name == "option"
        field = parameter.opts[0] if is_option else parameter.metavar or parameter.name
        if not message:
            message = f"{field} is missing"
        elif isinstance(error, WrongValue):
            message = f"{field}: {message}"
        else:
            message = f"{field}={_value_of(field, words)}: {message}"
        return ConfigError(message, field=field, hint=hint)
    if option is None:  # a word too many, or the name of a command that is missing or unknown
        return ConfigError(message, field=getattr(command, "subcommand_metavar", None), hint=hint)
    if near := [name for name in getattr(error, "possibilities", None) or () if name != "--help"]:
        hint = f"did you mean {near[0]}?"
    if any(one.name == "overrides" for one in getattr(command, "params", ())):
        meant = _settings_like(option, words)
        hint = f"settings are written without dashes: write {' or '.join(meant)}" if meant else hint
    return ConfigError(message, field=option, hint=hint)


def _value_of(option: str, words: Sequence[str]) -> str:
    """Returns what follows an option on a command line, after a `=` or as the next word; ".." where nothing does."""
    place = next((index for index, word in enumerate(words) if word.partition("=")[0] == option), len(words))
    value = words[place].partition("=")[2] if place < len(words) else ""
    return value or next((word for word in words[place + 1 : place + 2] if not word.startswith("--")), "..")


def _settings_like(option: str, words: Sequence[str]) -> list[str]:
    """Returns the settings that `--steps 3`, `--run.steps=3` or the like may mean, with their values."""
    from slimefsdp.config import RunConfig

    name = option.lstrip("-").replace("-", "_")
    known = [
        f"{section}.{field}"
        for section, info in RunConfig.model_fields.items()
        for field in getattr(info.annotation, "model_fields", ())
    ]
    return [f"{one}={_value_of(option, words)}" for one in known if name in (one, one.partition(".")[2])]


def _examples(*lines: str) -> str:
    return "\n\n".join(["Examples:", *(f"  {line}" for line in lines)])


def _print_version(is_asked: bool) -> None:
    if is_asked:
        print(f"slimefsdp {slimefsdp.__version__}")
        raise typer.Exit


@app.callback(epilog="Every command takes --debug, which shows the traceback of an error.")
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Train language models with reinforcement learning: FSDP2 on Ray."""


@app.command(
    epilog=_examples(
        "slimefsdp train configs/sort_digits_grpo.yaml",
        "slimefsdp train run.yaml optim.lr=1e-6 mesh.dp=2 --dry-run",
    )
)
def train(
    config: Config,
    overrides: Overrides = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check all that a start checks, say what would start, and start nothing.")
    ] = False,
) -> int:
    """Run the training loop of a YAML file."""
    from actors.cli.train import dry_run_command, train_command

    return (dry_run_command if dry_run else train_command)(config, overrides or ())


@app.command(epilog=_examples("slimefsdp serve configs/serve.yaml service.port=8000 lora.rank=32"))
def serve(config: Config, overrides: Overrides = None) -> int:
    """Serve the Tinker API over HTTP, for clients that train and sample."""
    from actors.cli.serve import serve_command

    return serve_command(config, overrides or ())


@app.command(
    name="eval",
    epilog=_examples(
        "slimefsdp eval runs/first/model --config run.yaml",
        "slimefsdp eval Qwen/Qwen3-0.6B data.heldout=held.jsonl rollout.reward=rewards.py:score --output results",
    ),
)
def evaluate(
    model: Annotated[
        str,
        typer.Argument(
            parser=path_as_written, metavar="MODEL", help="Hugging Face folder, such as a run's export, or a hub id."
        ),
    ],
    overrides: Overrides = None,
    config: Annotated[
        Path | None, typer.Option(parser=path, metavar="YAML", help="Settings of a run, to evaluate as that run does.")
    ] = None,
    output: Annotated[
        Path | None, typer.Option(parser=path, metavar="DIR", help="New folder for metrics.json and the responses.")
    ] = None,
    as_json: AsJson = False,
) -> int:
    """Say how a model answers held-out prompts: data.heldout, and rollout.reward or rollout.environment, are needed."""
    from actors.cli.evaluate import eval_command

    return eval_command(model, overrides or (), config, output, as_json=as_json)


@app.command(epilog=_examples("slimefsdp check", "slimefsdp check run.yaml loss.policy=gspo"))
def check(
    config: Annotated[Path | None, typer.Argument(parser=path, metavar="CONFIG", help="YAML file of settings.")] = None,
    overrides: Overrides = None,
    as_json: AsJson = False,
) -> int:
    """Say what this machine can run, what settings can choose, and everything that is wrong with a YAML file."""
    from actors.cli.check import check_command

    return check_command(config, overrides or (), as_json=as_json)


@app.command(
    epilog=_examples(
        "slimefsdp plan run.yaml --ranks 8 --device H100",
        "slimefsdp plan run.yaml --calibrate rates.json",
        "slimefsdp plan run.yaml --calibration rates.json --longest-context",
    )
)
def plan(
    config: Config,
    overrides: Overrides = None,
    lengths: Annotated[
        str | None,
        typer.Option(
            metavar="SPEC",
            help="Tokens per sample: fixed(n), uniform(min, max), lognormal(mean, sigma, min, max), a JSON list, or a "
            "file of RolloutBatch.save, which is planned as it would be trained. Default: a guess from the settings.",
        ),
    ] = None,
    longest_context: Annotated[
        bool,
        typer.Option("--longest-context", help="Instead: the longest sample that fits a rank's memory, term by term."),
    ] = False,
    ranks: Annotated[
        int | None, typer.Option(metavar="N", help="Processes to be started; needed where mesh.dp is auto.")
    ] = None,
    counted: Annotated[
        float | None,
        typer.Option(metavar="SHARE", help="Share of tokens that are trained. Default: as a batch trains, else 1."),
    ] = None,
    device: Annotated[
        str | None,
        typer.Option(
            parser=one_of(DEVICES),
            metavar="|".join(DEVICES),
            help="Device whose stated rates and memory are taken. Default: by mesh.device.",
        ),
    ] = None,
    calibrate: Annotated[
        Path | None,
        typer.Option(
            parser=path,
            metavar="FILE",
            help="First measure this machine's rates with the mesh's ranks, or as many as it has GPUs; write them to "
            "FILE, for --calibration and batch.cost_model, and plan with them.",
        ),
    ] = None,
    calibration: Annotated[
        Path | None,
        typer.Option(
            parser=path, metavar="FILE", help="Rates that --calibrate has measured. Default: batch.cost_model."
        ),
    ] = None,
    memory_gb: Annotated[
        float | None, typer.Option(metavar="GB", help="Memory of a rank's device, in 10^9 bytes.")
    ] = None,
    tflops: Annotated[
        float | None, typer.Option(metavar="RATE", help="Of matrix products, instead of the device's.")
    ] = None,
    gbps: Annotated[float | None, typer.Option(metavar="RATE", help="Sent by a rank, in 10^9 bytes a second.")] = None,
    as_json: AsJson = False,
) -> int:
    """Estimate schedule, balance, traffic, memory and time of a YAML file without running it."""
    from argparse import Namespace

    from actors.cli.plan import plan_command

    return plan_command(
        Namespace(
            config=config,
            overrides=overrides or [],
            lengths=lengths,
            longest_context=longest_context,
            ranks=ranks,
            counted=counted,
            device=device,
            calibrate=calibrate,
            calibration=calibration,
            memory_gb=memory_gb,
            tflops=tflops,
            gbps=gbps,
            json=as_json,
        )
    )


@app.command(
    epilog=_examples("slimefsdp replay run.yaml --batch runs/first/batches/step_00000005/batch.safetensors mesh.dp=2")
)
def replay(
    config: Config,
    batch: Annotated[Path, typer.Option(parser=path, metavar="FILE", help="File that RolloutBatch.save wrote.")],
    overrides: Overrides = None,
    export: Annotated[
        Path | None,
        typer.Option(parser=path, metavar="DIR", help="New Hugging Face folder for the weights after the step."),
    ] = None,
) -> int:
    """Run one recorded batch through train_step on Ray workers; print its metrics as JSON."""
    from actors.cli.replay import replay_command

    return replay_command(config, overrides or (), batch, export)


@app.command(epilog=_examples("slimefsdp curves runs/first"))
def curves(
    run_dir: Annotated[
        Path, typer.Argument(parser=path, metavar="RUN_DIR", help="run.dir of a run, at work or ended.")
    ],
) -> int:
    """Draw a run's curves.png from the metrics that it has written so far."""
    from actors.cli.curves import curves_command

    return curves_command(run_dir)


@groups.command(name="list", epilog=_examples("slimefsdp groups list --address 10.0.0.1:6379"))
def list_groups(
    name: Annotated[str | None, typer.Argument(metavar="NAME", help="Of one group. Default: all of them.")] = None,
    as_json: AsJson = False,
    address: Address = "auto",
    allow_without_token: AllowWithoutToken = False,
) -> int:
    """Say what named groups there are, how far they are, and who is attached."""
    from actors.cli.groups import list_command

    return list_command(name, address, allow_without_token=allow_without_token, as_json=as_json)


@groups.command(name="stop", epilog=_examples("slimefsdp groups stop policy --address 10.0.0.1:6379"))
def stop_group(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Of the group.")],
    force: Annotated[
        bool,
        typer.Option(
            "--force", help="Also while a program writes to it, and at once; a save in the background is lost."
        ),
    ] = False,
    address: Address = "auto",
    allow_without_token: AllowWithoutToken = False,
) -> int:
    """End a named group and its processes."""
    from actors.cli.groups import stop_command

    return stop_command(name, address, allow_without_token=allow_without_token, force=force)


_Source = Annotated[Path, typer.Argument(parser=path, metavar="SRC", help="Folder to read.")]
_Target = Annotated[
    Path, typer.Argument(parser=path, metavar="DST", help="New folder, which appears whole or not at all.")
]
_Dtype = Annotated[
    str | None,
    typer.Option(
        parser=one_of(_DTYPES), metavar="|".join(_DTYPES), help="Of the tensors written. Default: each its own."
    ),
]
_LIKE = "Folder with config.json and the tokenizer; weights are not looked at."


@convert.command(name="hf-to-dcp", epilog=_examples("slimefsdp convert hf-to-dcp model dcp"))
def hf_to_dcp(source: _Source, target: _Target) -> int:
    """Write a Hugging Face folder as torch.distributed.checkpoint."""
    from actors.cli.convert import hf_to_dcp_command

    return hf_to_dcp_command(source, target)


@convert.command(name="dcp-to-hf", epilog=_examples("slimefsdp convert dcp-to-hf dcp model --like Qwen3-0.6B"))
def dcp_to_hf(
    source: _Source,
    target: _Target,
    like: Annotated[Path, typer.Option(parser=path, metavar="FOLDER", help=_LIKE)],
    dtype: _Dtype = None,
) -> int:
    """Write a torch.distributed.checkpoint folder as a Hugging Face folder."""
    from actors.cli.convert import dcp_to_hf_command

    return dcp_to_hf_command(source, target, like, dtype)


@convert.command(name="checkpoint-to-hf", epilog=_examples("slimefsdp convert checkpoint-to-hf runs/first model"))
def checkpoint_to_hf(
    source: Annotated[
        Path, typer.Argument(parser=path, metavar="SRC", help="Folder of a step, or run.dir: its newest whole one.")
    ],
    target: _Target,
    like: Annotated[
        Path | None, typer.Option(parser=path, metavar="FOLDER", help=f"{_LIKE} Default: the run's model.path.")
    ] = None,
    dtype: _Dtype = None,
) -> int:
    """Write a run's checkpoint as a Hugging Face folder, or its adapters as a PEFT folder."""
    from actors.cli.convert import checkpoint_to_hf_command

    return checkpoint_to_hf_command(source, target, like, dtype)


app.add_typer(groups, name="groups", subcommand_metavar="COMMAND")
app.add_typer(convert, name="convert", subcommand_metavar="KIND")

if __name__ == "__main__":
    sys.exit(main())
