"""`python -m pfedhn`: the command line without its script."""

from pfedhn.cli import main

if __name__ == "__main__":  # worker processes import this module again
    main()
