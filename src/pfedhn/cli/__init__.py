"""The command line: a file per command, and what they share."""


def main() -> None:
    """Run the command that was typed."""
    from pfedhn.process import set_up_process

    set_up_process()  # before anything imports PyTorch
    from pfedhn.cli.app import app

    app()
