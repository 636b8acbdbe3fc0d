"""How a command ends: what a person can fix is one sentence and an exit code; a defect says how to see where."""

import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import typer
import typer.core
from rich.markup import escape

from pfedhn.cli.interrupt import STOPPED, unwinding
from pfedhn.errors import UserError, first_line, place_in_own_code
from pfedhn.system.screen import Screen, say

LEARNED_NOTHING, BAD_INPUT, FAILED = 3, 2, 1  # exit codes

# What a wrong word on the command line raises. Typer has no public name for it: it may be click's own, or Typer's copy.
UsageError: Any = typer.BadParameter.__mro__[1]


class Stopped(Exception):
    """Ctrl-C came, and the runs in a directory stand in their checkpoints."""


class Commands(typer.core.TyperGroup):
    """A group of commands whose errors end as this module says, and whose flags are shown without a value."""

    def get_params(self, ctx: Any) -> Any:
        return list(map(_without_value, super().get_params(ctx)))

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        command: Any = super().get_command(ctx, cmd_name)
        for part in () if command is None else (command, *getattr(command, "commands", {}).values()):
            for option in (*part.params, part.get_help_option(ctx)):
                _without_value(option)
        return command

    def make_context(self, *arguments: Any, **more: Any) -> Any:
        with _one_sentence("pfedhn"):
            return super().make_context(*arguments, **more)

    def invoke(self, ctx: Any) -> Any:
        with _one_sentence(ctx.command_path, is_debugged=ctx.params["debug"]):
            return super().invoke(ctx)


def _without_value(option: Any) -> Any:
    """Some versions of Typer call a flag <bool> in its help, as if it took a word."""
    if getattr(option, "is_flag", False):
        option.metavar = ""
    return option


@contextmanager
def _one_sentence(command: str, is_debugged: bool = False) -> Iterator[None]:
    try:
        with unwinding():
            yield
    except UsageError as error:
        if type(error).__name__ == "NoArgsIsHelpError":  # `pfedhn data` alone: the help is the answer
            raise
        command = error.ctx.command_path if error.ctx else command
        # Both Typer and click may say what was meant.
        sentence = re.sub(r"( Did you mean [^?]*\?)(?=.*\1)", "", error.format_message())
        complain(f"{sentence} (`{command} --help` says more.)")
        raise typer.Exit(BAD_INPUT) from None
    except (typer.Exit, typer.Abort):
        raise
    except BrokenPipeError:  # the reader of `pfedhn list | head` has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise typer.Exit(0) from None
    except (Exception, KeyboardInterrupt, SystemExit) as error:
        if is_debugged or (isinstance(error, SystemExit) and place_in_own_code(error) is None):
            raise
        raise typer.Exit(_say_why(error)) from None


def _say_why(error: BaseException) -> int:
    """Say why a command did not finish; the exit code that goes with it."""
    if isinstance(error, KeyboardInterrupt | Stopped):
        say(str(error) or "stopped.", is_error=True)
        return STOPPED
    if isinstance(error, UserError):
        complain(str(error))
        return error.exit_code
    if (place := place_in_own_code(error)) is not None:
        complain(f"{first_line(error)} ({place}; `pfedhn --debug ...` shows the way there).")
        return BAD_INPUT
    complain(f"{first_line(error)} (an error inside pfedhn; `pfedhn --debug ...` shows where).")
    return FAILED


def complain(sentence: str) -> None:
    """Print an error, in one line however long."""
    Screen(stderr=True).print(f"[red]error:[/] {escape(sentence)}", highlight=False, soft_wrap=True)
