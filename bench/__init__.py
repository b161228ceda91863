"""Side-by-side runs of Tenure and its peers. Start at README.md; run with ``python -m bench run``."""
