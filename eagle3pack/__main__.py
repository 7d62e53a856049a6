"""`python -m eagle3pack`."""

from eagle3pack.cli import main

if __name__ == "__main__":
    main()
