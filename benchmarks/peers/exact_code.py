"""The same parallel code as same_code's in exact mode: what its steps take longer is the price of exactness."""

from __future__ import annotations

from .same_code import main

if __name__ == "__main__":
    main(exact=True)
