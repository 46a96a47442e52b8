"""`python -m stepfloor`."""

from stepfloor.cli import main

if __name__ == "__main__":
    main()
