"""The command line: a file per command, and what they share."""


def main() -> None:
    """Run the command that was typed."""
    from pfedhn.cli.interrupt import leaving_at_once, stop_in_one_line

    stop_in_one_line()  # first: what follows takes seconds, and a person may have thought better of it
    from pfedhn.system.process import set_up_process
    from pfedhn.system.screen import never_fail_to_write

    set_up_process()  # before anything imports PyTorch
    never_fail_to_write()
    from pfedhn.cli.app import app

    with leaving_at_once():
        app()
