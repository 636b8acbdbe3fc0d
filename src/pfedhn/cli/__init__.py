"""The command line."""


def main() -> None:
    from pfedhn.cli.app import app

    app()
